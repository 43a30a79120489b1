"""Each decision of a trial, on parts that note what is asked of them; whole runs are in another file."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.run_folder import read_note, write_note
from multigpu_cli.data.loader import first_batch
from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError
from multigpu_cli.run import batch_size
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.spec import with_micro_batch
from tests.run.test_profile_micro_batch import components

CUDA = torch.device("cuda")
PLAIN = "tests.run.test_profile_micro_batch:plain"


def note_calls(monkeypatch: pytest.MonkeyPatch, *names: str, **returned: Any) -> Mock:
    """Functions of the room in whose place their calls are noted."""
    noted = Mock(**{f"{name}.return_value": value for name, value in returned.items()})
    for name in (*names, *returned):
        monkeypatch.setattr(batch_size, name, getattr(noted, name))
    return noted


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("device", "size", "searches", "connects"),
    [("cuda", 2, True, True), ("cuda", 1, True, False), ("cpu", 2, True, False), ("cuda", 2, False, False)],
)
def test_a_trial_comes_after_what_it_needs(
    device: str, size: int, searches: bool, connects: bool, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of NCCL take memory that --batch-size auto must not count as free."""
    made = Mock(world=Mock(device=torch.device(device), size=size))
    made.strategy.reduces_first = first
    noted = note_calls(
        monkeypatch, "warm_up", "connect_collectives", _searches=searches, _choose_micro_batch=["a"],
        _try_evaluation=["b"],
    )  # fmt: skip
    monkeypatch.setattr(batch_size, "run_in_step", lambda world, work: work())
    assert batch_size.fit_batch_sizes_to_memory(made) == ["a", "b"]
    wanted = [call.connect_collectives(made.world, made.strategy.groups, pairs=ANY)] * connects
    wanted += [call._choose_micro_batch(made), call._try_evaluation(made)]
    warm = [call.warm_up(made)]
    assert [each for each in noted.mock_calls if each[0] != "_searches"] == (warm + wanted if first else wanted + warm)


def test_a_dry_run_tries_two_samples_where_memory_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = note_calls(
        monkeypatch, "_try_shortest_micro_batch", "_fits_in_memory", _try_evaluation=["b"],
        fit_batch_sizes_to_memory=["a"],
    )  # fmt: skip
    made = Mock(world=Mock(device=torch.device("cpu")))
    for micro, size in ((10, 2), (1, 1)):
        made.plan.batches.micro_batch = micro
        assert batch_size.try_micro_batch(made) == (size, ["b"])
        tried = [call._try_shortest_micro_batch(made), call._fits_in_memory(made, size)]
        assert noted.mock_calls == [*tried, call._try_evaluation(made, size)]
        noted.reset_mock()
    made.world.device = CUDA
    assert batch_size.try_micro_batch(made) == (1, ["a"])


@pytest.mark.parametrize(("micro", "size"), [("10", 2), ("1", 1)])
def test_two_samples_warm_a_strategy_up(micro: str, size: int, tmp_path: Path) -> None:
    made, losses = components(tmp_path, "tests.support.user_code:net", batch_size=micro), list[Tensor]()
    made.state.model.eval()  # BatchNorm takes one sample, too
    made.strategy.warm_up = lambda loss: losses.append(loss())  # type: ignore[method-assign]
    made.task.loss_sum = lambda model, batch: model(batch.inputs).sum() + len(batch.inputs)  # type: ignore[method-assign]
    batch_size.warm_up(made)
    assert losses[0].requires_grad
    first = first_batch(made.loaders.train, size)
    assert losses[0] == made.state.model(first.inputs).sum() + size


def test_the_peak_of_a_micro_batch_is_that_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tried = components(tmp_path, PLAIN, batch_size="10"), list[Any]()
    backward = batch_size._run_micro_batch
    monkeypatch.setattr(batch_size, "_run_micro_batch", lambda *given: backward(*given) or tried.append(given))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + len(tried))
    assert batch_size.measure_peak_memory(made) == 101
    assert tried == [(made, 10)]
    assert all(parameter.grad is None for parameter in made.state.model.parameters())


def fake(tmp_path: Path, size: str | int, **resumed: Any) -> TrainComponents:
    """Parts with --batch-size so large, and what the attempt before has left."""
    made = components(tmp_path, PLAIN, batch_size=str(size))
    made.spec = replace(made.spec, resume_point=replace(made.spec.resume_point, **resumed))
    return made


def test_a_micro_batch_is_searched_in_a_new_run_alone(tmp_path: Path) -> None:
    wanted = {("auto", False): True, ("auto", True): False, ("4", False): False, ("4", True): False}
    for (size, resumed), searches in wanted.items():
        made = fake(tmp_path, size, manifest={"format": 1} if resumed else None)
        assert batch_size._searches(made) is searches


def test_micro_batches_are_halved_until_one_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tried, limit = fake(tmp_path, 10, micro_batch_after_oom=8), list[Any](), 2
    monkeypatch.setattr(batch_size, "_try_shortest_micro_batch", lambda _: tried.append("shortest"))
    monkeypatch.setattr(batch_size, "_fits_in_memory", lambda _, size: tried.append(size) or size <= limit)
    refused = note_calls(monkeypatch, "refuse_single_samples").refuse_single_samples
    halved = ["out of memory: micro-batches of 4 instead of 8, the same global batch"]
    halved += ["out of memory: micro-batches of 2 instead of 4, the same global batch"]
    assert list(batch_size._choose_micro_batch(made)) == halved
    assert (tried, made.plan.batches.micro_batch, refused.called) == (["shortest", 8, 4, 2], 2, False)
    limit = 0
    with pytest.raises(TrainingError, match=r"micro-batches of 1 \(one sample\)"):
        list(batch_size._choose_micro_batch(fake(tmp_path, 2)))
    assert (tried[4:], refused.call_count) == (["shortest", 2, 1], 1)


@pytest.mark.parametrize(
    ("share", "workers", "after_oom", "device", "fits", "found", "because"),
    [
        (20, 4, None, "cpu", 99, 4, "the largest that is of use here"),
        (17, 4, None, "cuda", 99, 4, "the largest that is of use here"),
        (32, 4, None, "cpu", 99, 8, "the largest that is of use here"),
        (32, 4, None, "cpu", 4, 4, "measured: 8 does not fit"),
        (32, 4, 3, "cpu", 99, 2, "the largest that is of use here"),
        (4000, 2, None, "cpu", 9999, 256, "the largest that is of use here"),
        (4000, 2, None, "cuda", 9999, 1024, "the largest that is of use here"),
        (4000, 2, None, "cuda", 1, 1, "measured: 2 does not fit"),
    ],
)
def test_auto_doubles_up_to_a_workers_share(
    share: int, workers: int, after_oom: int | None, device: str, fits: int, found: int, because: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = Mock(world=Mock(device=torch.device(device)), compiled=None)
    made.plan.batches.workers, made.spec.resume_point.micro_batch_after_oom = workers, after_oom
    noted = note_calls(monkeypatch, "with_measured_batch", "_try_shortest_micro_batch")
    monkeypatch.setattr(batch_size, "_fits_in_memory", lambda _, size: size <= fits)
    for given, held in ((share, 7), (None, share)):
        made.config.batch.global_size, made.loaders.train.size, spec = given, held, made.spec
        made.spec.resume_point.micro_batch_after_oom, made.plan.batches.workers = after_oom, workers
        batch_size._find_largest_micro_batch(made)
        chosen = call.with_measured_batch(spec, found, made.world, because)
        assert noted.mock_calls == [chosen, call._try_shortest_micro_batch(made)]
        noted.reset_mock()


@pytest.mark.parametrize(
    ("fits", "fits_compiled", "tried", "best"),
    [
        (4, 16, [4, 8, 16, 32], 16),
        (16, 16, [16, 32], 16),
        (8, 2, [8, 4, 2, 4], 2),
        (64, 64, [32], 32),
        (8, 0, [8, 4, 2, 1], 0),
    ],
)
def test_auto_continues_compiled_from_what_fits_uncompiled(
    fits: int, fits_compiled: int, tried: list[int], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 60 samples, so 32 is the most that is of use."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    made, sizes = components(tmp_path, PLAIN, batch_size="auto", compile="default"), list[int]()
    made.spec = with_micro_batch(made.spec, 50)  # none of those that are tried uncompiled

    def run(_: Any, size: int) -> None:
        compiled = made.plan.batches.micro_batch == size
        sizes.extend([size] * compiled)
        if size > (fits_compiled if compiled else fits):
            raise OutOfMemory("played")
        made.state.model(torch.ones(1, 6)).sum().backward()

    monkeypatch.setattr(batch_size, "_run_micro_batch", run)
    monkeypatch.setattr(batch_size, "_try_shortest_micro_batch", lambda _: None)
    if best:
        batch_size._find_largest_micro_batch(made)
        assert made.plan.batches.micro_batch == best
    else:
        with pytest.raises(TrainingError, match="out of memory with a single sample"):
            batch_size._find_largest_micro_batch(made)
    assert sizes == tried


def test_a_compiled_model_forgets_its_graphs_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs of a micro-batch that did not fit would keep their memory."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    made, resets = components(tmp_path, PLAIN, batch_size="8", compile="default"), Mock()
    monkeypatch.setattr(made.compiled, "reset", resets)
    for error, expected in ((None, 0), (OutOfMemory("played"), 1)):
        monkeypatch.setattr(batch_size, "_run_micro_batch", Mock(side_effect=error))
        assert batch_size._fits_in_memory(made, 8) is not bool(expected)
        assert len(resets.mock_calls) == expected


def test_an_evaluation_tries_the_first_and_the_last_batch_of_each_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 samples to validate with, 22 to test; and smaller batches where one did not fit, as in the attempt before."""
    made, tried = fake(tmp_path, 10, eval_batch_after_oom=16), list[Any]()

    def measure(spec: Any, task: Any, model: Any, precision: Any, batch: Any, *, which: str) -> None:
        tried.append((which, batch.sample_indices.tolist()))
        if len(batch.sample_indices) > 8:
            raise OutOfMemory("played")

    monkeypatch.setattr(batch_size, "smoke_test_batch", measure)
    assert list(batch_size._try_evaluation(made)) == ["out of memory in an evaluation: batches of 8 instead of 16"]
    batches = {"first val": range(8), "last val": range(16, 21), "first test": range(8), "last test": range(16, 22)}
    named = [(f"{name.replace('val', 'validation')} batch", [*numbers]) for name, numbers in batches.items()]
    assert tried == [("first validation batch", [*range(16)]), *named]
    tried.clear()
    made.loaders.val = None
    assert list(batch_size._try_evaluation(made, 2)) == []
    assert tried == [("first test batch", [0, 1]), ("last test batch", [20, 21])]
    tried.clear()
    made.task = type("Own", (), {"evaluate": None})()  # its evaluation is its own
    assert list(batch_size._try_evaluation(made)) == tried == []
    made = fake(tmp_path, 10)
    made.loaders.val = made.loaders.test = None
    assert list(batch_size._try_evaluation(made)) == tried == []


@pytest.mark.parametrize(("replicas", "smallest", "tried"), [(1, 1, 1), (1, 2, 0), (2, 1, 0), (2, 2, 0)])
def test_the_shortest_micro_batch_is_tried_where_it_has_one_sample(
    replicas: int, smallest: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    made.strategy.replicas_per_process, made.plan.batches.smallest_micro_batch = replicas, smallest
    noted = note_calls(monkeypatch, "_fits_in_memory")
    batch_size._try_shortest_micro_batch(made)
    assert noted.mock_calls == [call._fits_in_memory(made, 1)] * tried


@pytest.mark.parametrize(
    ("size", "searched", "rest"), [("auto", 2, True), ("auto", 1, False), ("10", 2, False), ("10", 1, False)]
)
def test_on_a_gpu_the_search_tries_the_rest_of_a_step_too(
    size: str, searched: int, rest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stood for the optimizer's state is free by then; a single sample may take all there is."""
    made, left = components(tmp_path, PLAIN, batch_size=size), list[int]()
    made.world, held, empty = replace(made.world, device=CUDA), weakref.WeakSet[Any](), torch.empty_like

    def hold(parameter: Tensor) -> Tensor:
        held.add(mine := empty(parameter))
        return mine

    monkeypatch.setattr(torch, "empty_like", hold)
    noted = note_calls(monkeypatch, "free_memory", "_run_micro_batch")
    monkeypatch.setattr(batch_size, "_take_rest_of_step", lambda _: left.append(len(held)))
    assert batch_size._fits_in_memory(made, searched) is True
    assert left == [0] * rest
    assert noted.mock_calls == [call._run_micro_batch(made, searched), call.free_memory(CUDA)]


def test_a_trial_leaves_no_gradients_and_says_whether_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = components(tmp_path, PLAIN), batch_size._run_micro_batch
    passes: list[int] = []

    def refuse(_: Any, size: int) -> None:
        passes.append(size)
        run(made, size)
        if size > 4:
            raise OutOfMemory("played")

    monkeypatch.setattr(batch_size, "_run_micro_batch", refuse)
    for sharded in (False, True):
        made.strategy.sharded = sharded
        assert [batch_size._fits_in_memory(made, size) for size in (4, 8)] == [True, False]
        assert all(parameter.grad is None for parameter in made.state.model.parameters())
    assert passes == [4, 8, 4, 2, 8], "once more where the probe of a sharded model has left no gradients"


FOUR = "spare.0.bias, spare.1.bias, spare.2.bias, spare.3.bias"


@pytest.mark.parametrize(
    ("spare", "strategy", "exact", "find", "named"),
    [
        (0, "ddp", False, False, None),
        (1, "fsdp", False, False, "spare.0.bias"),
        (4, "ddp", False, False, FOUR),
        (5, "ddp", False, False, f"{FOUR} …"),
        (6, "ddp", False, False, f"{FOUR} …"),
        (1, "single", False, False, None),
        (1, "single", True, False, None),
        (1, "ddp", True, False, None),
        (1, "ddp", False, True, None),
    ],
)
def test_what_takes_no_part_is_named_where_it_would_be_waited_for(
    spare: int, strategy: str, exact: bool, find: bool, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model = Mock(), nn.Linear(2, 2)
    model.spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(spare))
    for each in model.spare:
        each.weight.requires_grad_(False)
    made.spec.placement.strategy, made.spec.model, made.state.model = strategy, "own", model
    made.strategy.sharded = False
    made.config.reproducibility.exact, made.config.communication.find_unused_parameters = exact, find
    made.config.batch.size, made.config.batch.global_size, made.plan.batches.accumulation = "auto", None, 1

    def work(*_: Any, **__: Any) -> bool:
        for parameter in (model.weight, model.bias):
            parameter.grad = torch.ones_like(parameter)
        return True

    monkeypatch.setattr(batch_size, "_fits_on_all_ranks", work)
    if not named:
        assert batch_size._fits_in_memory(made, 2)
        return
    with pytest.raises(RequestError) as error:
        batch_size._fits_in_memory(made, 2)
    said = f"--model own: {named} took no part in the loss, and {strategy.upper()} waits for every gradient"
    assert error.value.problem == said


@pytest.mark.parametrize(("device", "passes"), [("cpu", 1), ("cuda", 2)])
def test_a_pass_is_that_of_a_step_whose_gradients_stay(
    device: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(world=Mock(device=torch.device(device)), task=Mock(global_loss=None))
    made.strategy.replicas_per_process = 2
    noted = note_calls(monkeypatch, "forward_backward", "smoke_test_batch", first_batch="batch", is_out_of_memory=False)
    batch_size._run_micro_batch(made, 5)
    assert noted.first_batch.mock_calls == [call(made.loaders.train, 10)]
    assert noted.forward_backward.mock_calls == [call(made, "batch", 1.0, last=False)] * passes
    noted.forward_backward.side_effect = ValueError("mine")
    for shown in (True, False):
        noted.is_out_of_memory.return_value = not shown
        noted.first_batch.reset_mock()
        with pytest.raises(ValueError, match="mine"):
            batch_size._run_micro_batch(made, 5)
        told = [each.args[1] for each in noted.first_batch.mock_calls]
        assert told == [10, *[2] * shown], "two samples are enough to explain it with"
    made.strategy.explain_failure.assert_called_once_with(noted.forward_backward.side_effect, ANY)
    one, two = made.spec, made.state
    noted.smoke_test_batch.assert_called_once_with(one, made.task, two.model, two.precision, "batch", training=True)


def test_a_halved_micro_batch_names_the_layers_that_see_it(tmp_path: Path) -> None:
    made = fake(tmp_path, 10)
    same = "out of memory: micro-batches of 5 instead of 10, the same global batch"
    assert batch_size.halve_micro_batch(made) == same
    assert made.plan.batches.micro_batch == 5
    made.state.model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    text = batch_size.halve_micro_batch(made)
    assert text.endswith(
        "micro-batches of 2 instead of 5, the same global batch; smaller micro-batches for BatchNorm1d and Dropout too"
    )
    made.spec = replace(made.spec, source=replace(made.spec.source, fixed_batch_sizes=(2, 2)))
    with pytest.raises(TrainingError, match=r"with micro-batches of 2 \(whole groups of environments\)"):
        batch_size.halve_micro_batch(made)
    assert batch_size.halve_eval_batch(made) == "out of memory in an evaluation: batches of 2 instead of 4"
    assert made.eval_batch_size == 2
    made.task = type("Own", (), {"evaluate": None})()
    with pytest.raises(TrainingError, match=r"in an evaluation with batches of 2 \(the task's own evaluation\)"):
        batch_size.halve_eval_batch(made)


@pytest.mark.parametrize(
    ("size", "phase", "said"),
    [
        (1, "backward", None),
        (1, "optimizer", "out of memory in the optimizer at step 3"),
        (2, "backward", "rank 1 ran out of memory at step 3"),
        (2, "optimizer", "rank 1 ran out of memory in the optimizer at step 3"),
    ],
)
def test_a_step_is_given_up_alone_where_nothing_has_moved_and_nobody_waits(
    size: int, phase: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(world=Mock(size=size, rank=size - 1), folder=tmp_path / "node" / "run")
    run.observer.watchdog.own.phase, run.progress.step = phase, 3
    run.plan.batches.micro_batch, run.plan.batches.global_batch = 5, 20
    text = "out of memory: micro-batches of 5 instead of 10"
    noted = note_calls(monkeypatch, "free_memory", halve_micro_batch=text)

    def recover() -> None:
        batch_size.recover_from_out_of_memory(run, RuntimeError())

    if said is None:
        recover()
        run.log_fault.assert_called_once_with("out of memory", text)
    for attempt in range(2 * bool(said)):  # the second finds the folder, and another number in its note
        with pytest.raises(TrainingError) as error:
            recover()
        assert (error.value.problem, error.value.remedy) == (
            said,
            "run the same command again: it resumes from the last checkpoint with micro-batches of 5 instead of 10",
        )
        note = {"batch_size": 5, "global_batch_size": 20}
        assert read_note(run.folder) == (note | {"eval_batch_size": 4} if attempt else note)
        write_note(run.folder, note | {"eval_batch_size": 4})
    run.strategy.abort_step.assert_called_with()
    run.state.optimizer.zero_grad.assert_called_with(set_to_none=True)
    noted.free_memory.assert_called_with(run.world.device)
