"""Out of memory: noticed before the first step on all ranks, survived, and without effect on the gradient."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multigpu_cli.monitor import journal
from multigpu_cli.run import batch_size, evaluation
from tests.run.test_profile_micro_batch import components
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {"save_dir": "run", "batch_size": 10, "global_batch_size": 20, "epochs": 2, "log_interval": 1}
GREEDY = {"model": "tests.support.oom_model:net", "data": "tests.support.user_code:tensors"}


def losses(folder: str) -> list[float]:
    return [event["loss"] for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == "train"]


def faults(folder: str = "run") -> list[str]:
    return [event["action"] for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == "fault"]


@pytest.fixture(scope="module")
def with_plenty(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run with enough memory."""
    folder = str(tmp_path_factory.mktemp("plenty"))
    assert run_training(**RUN | GREEDY | {"save_dir": folder}, sets=["model.args.limit=99"]).error == ""
    return losses(folder)


def for_inference() -> nn.Module:
    class ForInference(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("for inference only")
            return super().forward(x)

    return ForInference(6, 3)


@pytest.mark.parametrize(
    ("workers", "only", "mode"), [(1, "null", "auto"), (2, "null", "auto"), (2, "1", "auto"), (2, "1", "fsdp")]
)
def test_micro_batches_shrink_until_they_fit(workers: int, only: str, mode: str, with_plenty: list[float]) -> None:
    """Alike on all ranks, also where it strikes one of them only."""
    shrunk = run_training(workers, **RUN | GREEDY | {"multi_gpu": mode}, sets=[f"model.args.rank={only}"])
    assert shrunk.error == ""
    assert shrunk.summary["global_batch_size"] == 20
    assert losses("run") == pytest.approx(with_plenty, rel=1e-5)
    assert [action.split(", the same")[0] for action in faults()] == [
        "out of memory: micro-batches of 5 instead of 10",
        "out of memory: micro-batches of 2 instead of 5",
    ]


@pytest.mark.parametrize("said", ["", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"], ids=["torch", "cuDNN"])
def test_one_process_survives_it_in_the_middle(said: str, with_plenty: list[float]) -> None:
    shrunk = run_training(**RUN | GREEDY, sets=["model.args.after=6", f"model.args.said={said!r}"])
    assert shrunk.error == ""
    assert losses("run") == pytest.approx(with_plenty, rel=1e-5)
    assert shrunk.summary["steps"] == 6
    assert len(faults()) == 2


def test_what_ran_out_of_memory_leaves_no_trace_in_the_statistics() -> None:
    ended = run_training(**RUN | GREEDY, sets=["model.args.after=6", "model.args.norm=true"])
    assert (ended.error, len(faults())) == ("", 2)
    [seen] = [
        int(value)
        for name, value in torch.load("run/last.pt", weights_only=True)["model"].items()
        if name.endswith("num_batches_tracked")
    ]
    assert seen == ended.summary["steps"] == 6, "one change a step: neither the rehearsal's nor that of the lost step"


@pytest.mark.parametrize(
    ("every", "mode"),
    [("1", "auto"), pytest.param("1000", "auto", marks=pytest.mark.slow), ("1", "fsdp")],
    ids=["after a checkpoint", "before the first", "sharded"],
)
def test_of_several_processes_the_next_attempt_goes_on_smaller(every: str, mode: str) -> None:
    late: dict[str, Any] = {"sets": ["model.args.after=6", "model.args.limit=7", "model.args.rank=1"]}
    late |= {"multi_gpu": mode}
    first = run_training(2, **RUN | GREEDY, checkpoint_every=every, **late)
    assert "rank 1 ran out of memory at step" in first.error
    again = run_training(2, **RUN | GREEDY, checkpoint_every=every, **late, attempt=1)
    assert again.error == ""
    assert (again.summary["steps"], again.summary["global_batch_size"]) == (6, 20)
    assert any("earlier attempt: micro-batches of 5" in action for action in faults())


@pytest.mark.parametrize("flags", [{"on_oom": "stop"}, {"exact": True}], ids=["stop", "exact"])
def test_it_stops_where_shrinking_is_not_wanted(flags: dict[str, Any]) -> None:
    ended = run_training(**RUN | GREEDY | flags)
    assert "out of memory with micro-batches of 10" in ended.error
    assert "--batch-size" in ended.error
    assert not Path("run").exists()


def test_a_single_sample_that_does_not_fit() -> None:
    assert "micro-batches of 1 (one sample)" in run_training(**RUN | GREEDY, sets=["model.args.limit=0"]).error


def read_evaluations(folder: str) -> list[float]:
    return [event["loss"] for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == "eval"]


EVALUATED = {"model": "tests.support.awkward_models:greedy", "data": "tests.support.user_code:tensors"}


@pytest.mark.parametrize(
    ("workers", "data"),
    [
        (1, "tests.support.user_code:tensors"),
        (2, "tests.support.user_code:tensors"),
        (2, "tests.support.user_code:no_validation"),
    ],
    ids=["alone", "on one of two ranks", "at the end"],
)
def test_an_evaluation_that_runs_out_of_memory_later_goes_on_in_smaller_batches(workers: int, data: str) -> None:
    """Before the first step a batch is evaluated in the trial, and two of each split. Rank 1 has one short batch."""
    flags, after = RUN | EVALUATED | {"data": data}, 2 if "no_validation" in data else 4
    plenty = run_training(workers, **flags | {"save_dir": "plenty"})
    shrunk = run_training(workers, **flags, sets=["model.args.evaluation=7", f"model.args.after={after}"])
    assert shrunk.error == plenty.error == ""
    assert losses("run") == losses("plenty"), "the micro-batch stays"
    assert read_evaluations("run") == pytest.approx(read_evaluations("plenty"), rel=1e-6)
    assert faults() == [
        "out of memory in an evaluation: batches of 10 instead of 20",
        "out of memory in an evaluation: batches of 5 instead of 10",
    ]


def test_a_sharded_evaluation_that_runs_out_of_memory_later_is_smaller_in_the_next_attempt() -> None:
    """Others wait in a pass for the rank that ran out, so none can evaluate again; the folder's note says how."""
    flags = RUN | EVALUATED | {"multi_gpu": "fsdp"}
    plenty = run_training(2, **flags | {"save_dir": "plenty"})
    sets = ["model.args.evaluation=10", "model.args.after=4"]
    ended = run_training(2, **flags, sets=sets)
    assert ended.kind == "TrainingError"
    assert "ran out of memory in an evaluation at step 3" in ended.error
    assert "from the last checkpoint with batches of 10 instead of 20" in ended.error
    again = run_training(2, **flags, sets=sets)
    assert plenty.error == again.error == ""
    assert read_evaluations("run") == pytest.approx(read_evaluations("plenty"), rel=1e-6)


@pytest.mark.parametrize("after", [0, 4], ids=["before the first step", "later"])
@pytest.mark.parametrize(("flags", "why"), [({"on_oom": "stop"}, "--on-oom stop"), ({"exact": True}, "--exact")])
def test_an_evaluation_stops_where_smaller_batches_are_not_wanted(flags: dict[str, Any], why: str, after: int) -> None:
    sets = ["model.args.evaluation=7", f"model.args.after={after}"]
    ended = run_training(2, **RUN | EVALUATED | flags, sets=sets)
    assert ended.kind == "TrainingError"
    assert f"out of memory in an evaluation with batches of 20 ({why})" in ended.error
    assert "--batch-size" in ended.error
    assert Path("run").exists() == bool(after)


@pytest.mark.parametrize(
    ("limit", "workers", "share", "found", "because"),
    [
        (1, 1, 20, 1, "measured: 2 does not fit"),
        (3, 1, 20, 2, "measured: 4 does not fit"),
        (8, 1, 16, 8, "measured: 16 does not fit"),
        (20, 1, 20, 16, "the largest that is of use here"),
        (99, 2, 15, 8, "the largest that is of use here"),
        (3, "fsdp", 20, 2, "measured: 4 does not fit"),
    ],
)
def test_auto_finds_the_largest_that_fits(
    limit: int, workers: int | str, share: int, found: int, because: str, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = RUN | GREEDY | {"batch_size": "auto", "global_batch_size": share, "screen": "verbose"}
    sets = [f"model.args.limit={limit}"]
    if workers == "fsdp":  # two, of which one runs out of memory in the backward pass
        workers, flags = 2, flags | {"multi_gpu": "fsdp"}
        sets += ["model.args.rank=1", "model.args.backward=true"]
    ended = run_training(int(workers), **flags, sets=sets, max_steps=1)
    assert ended.error == ""
    [start] = [event for event in journal.read_events("run/journal.jsonl") if event["event"] == "start"]
    assert start["plan"]["batch_size"] == found
    assert f"({because})" in " ".join(capfd.readouterr().out.split())
    assert ended.summary["faults"] == []


def test_auto_says_when_nothing_fits() -> None:
    ended = run_training(**RUN | GREEDY | {"batch_size": "auto"}, sets=["model.args.limit=0"])
    assert "--batch-size auto: out of memory with a single sample" in ended.error
    assert not Path("run").exists()


def test_auto_begins_with_two_where_batch_norm_cannot_train_on_one() -> None:
    ended = run_training(**RUN | {"model": "tests.support.user_code:net", "batch_size": "auto"}, max_steps=1)
    assert ended.error == ""
    [start] = [event for event in journal.read_events("run/journal.jsonl") if event["event"] == "start"]
    assert start["plan"]["batch_size"] == 16


def test_what_auto_found_is_pinned() -> None:
    flags = RUN | GREEDY | {"batch_size": "auto"}
    run_training(**flags, max_steps=2)
    again = run_training(**flags)
    assert again.error == ""
    assert again.summary["steps"] == 6


def test_a_parameter_that_takes_no_part_is_found_before_ddp_waits_for_it() -> None:
    ended = run_training(2, **RUN | {"model": "tests.support.failing_model:forgetful"}, sets=["model.args.at=1"])
    assert ended.kind == "RequestError"
    assert "1.bias took no part in the loss" in ended.error
    assert "--find-unused-parameters" in ended.error
    assert not Path("run").exists()


def test_batches_of_one_sample_are_refused_where_the_model_cannot_train_on_one() -> None:
    own = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net"}
    ended = run_training(**RUN | own | {"batch_size": 1}, max_steps=1)
    assert ended.kind == "RequestError"
    assert "a batch is one sample" in ended.error
    assert "a larger --batch-size" in ended.error
    assert not Path("run").exists()


def test_a_model_that_fails_in_training_alone_is_refused() -> None:
    ended = run_training(**RUN | {"model": f"{__name__}:for_inference"})
    assert ended.kind == "RequestError"
    assert "ValueError in test_fit_batch_sizes_to_memory.py" in ended.error
    assert "for inference only" in ended.error
    assert not Path("run").exists()


def test_a_last_micro_batch_of_one_sample_is_found_before_the_first_step() -> None:
    """BatchNorm over single features can't train on one; without it there is nothing to refuse."""
    alone = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net"}
    for dry in (True, False):
        ended = run_training(**RUN | alone, sets=["data.args.train=61"], dry_run=dry)
        assert ended.kind == "RequestError"
        assert "--drop-last" in ended.error
        assert not Path("run").exists()
    assert run_training(**RUN | alone, sets=["data.args.train=61", "model.args.norm=false"]).error == ""
    assert (
        run_training(**RUN | alone | {"save_dir": "dropped", "drop_last": True}, sets=["data.args.train=61"]).error
        == ""
    )


def other_test(split: str) -> TensorDataset:
    """Whose test split has one number more in each sample."""
    return TensorDataset(torch.ones(24, 7 if split == "test" else 6), torch.arange(24) % 3)


def only_test(split: str) -> TensorDataset | None:
    return None if split == "val" else other_test(split)


def linear() -> nn.Module:
    return nn.Linear(6, 3)


@pytest.mark.parametrize("data", ["other_test", "only_test"])
@pytest.mark.parametrize("dry", [True, False])
def test_a_test_split_that_the_model_does_not_take_is_told_before_training(data: str, dry: bool) -> None:
    own = {"data": f"{__name__}:{data}", "model": f"{__name__}:linear"}
    ended = run_training(**RUN | own, dry_run=dry)
    assert ended.kind == "RequestError"
    assert "does not take the first test batch" in ended.error
    assert not Path("run").exists()


# -- global batch and total steps change after step 1 by explicit length flags alone


AUTO: dict[str, Any] = {"save_dir": "run", "batch_size": "auto", "epochs": 3, "log_interval": 1} | GREEDY


def plans(folder: str = "run") -> list[tuple[int, int, float]]:
    """Global batch, total steps and learning rate, as each attempt has planned them."""
    starts = [event["plan"] for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == "start"]
    return [(plan["global_batch_size"], plan["total_steps"], plan["learning_rate"]) for plan in starts]


@pytest.mark.parametrize(
    ("passes", "limit", "halved"),
    [(8, 3, "2 instead of 4"), (9, 31, "16 instead of 32")],
    ids=["in an epoch's last step", "in its first, and the last would fit"],
)
def test_out_of_memory_after_the_first_step_leaves_a_measured_global_batch_as_it_is(
    passes: int, limit: int, halved: str
) -> None:
    """Seven passes find 32, the eighth is step 1."""
    plenty = run_training(**AUTO | {"save_dir": "plenty"}, sets=["model.args.limit=99"])
    shrunk = run_training(**AUTO, sets=[f"model.args.after={passes}", f"model.args.limit={limit}"])
    assert shrunk.error == ""
    assert plans() == plans("plenty")
    assert [shrunk.summary[name] for name in ("global_batch_size", "steps", "epochs")] == [32, 6, 3]
    assert losses("run") == pytest.approx(losses("plenty"), rel=1e-5)
    assert shrunk.summary["final"] == pytest.approx(plenty.summary["final"], rel=1e-5)
    assert faults()[-1].split(", the same")[0] == f"out of memory: micro-batches of {halved}"


@pytest.mark.parametrize(
    ("workers", "every"),
    [(2, "1"), (1, "1000"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "1"), (2, "1000")))],
)
def test_neither_does_the_attempt_that_follows(every: str, workers: int) -> None:
    """On as many workers and on fewer, with and without a checkpoint to go on from."""
    sets = ["model.args.after=7", "model.args.limit=8", "model.args.rank=1"]
    late: dict[str, Any] = {"sets": sets, "checkpoint_every": every}
    assert "rank 1 ran out of memory at step 1" in run_training(2, **AUTO, **late).error
    assert run_training(workers, **AUTO, **late, attempt=1).error == ""
    assert run_training(1, **AUTO | {"max_steps": 7, "epochs": 4}, **late).error == ""
    *same, longer = plans()
    assert same[0][:2] == (32, 6)
    assert same == [same[0]] * len(same)
    assert longer == (32, 7, same[0][2]), "by --epochs and --max-steps"


def test_what_did_not_fit_is_gone_when_the_peak_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's traceback holds what the step had in memory."""
    seen: list[Any] = []

    def step() -> None:
        activations = torch.zeros(3)
        seen.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory (played)")

    monkeypatch.setattr(batch_size, "free_memory", lambda device: seen.append(seen[0]()))
    monkeypatch.setattr(batch_size, "halve_micro_batch", lambda run: "")
    try:
        step()
    except torch.OutOfMemoryError as error:
        batch_size.recover_from_out_of_memory(Mock(world=Mock(size=1)), error)
    assert seen[1:] == [None]


def test_after_an_evaluation_that_did_not_fit_the_peak_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "free_memory", lambda device: Path("freed").write_text(str(device)))
    assert run_training(**RUN | EVALUATED, sets=["model.args.evaluation=7", "model.args.after=4"]).error == ""
    assert Path("freed").read_text() == "cpu"


def test_what_was_only_tried_is_not_the_peak_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--batch-size auto fills the GPU to find out what fits. The world is told that it has one.

    It holds as much as the optimizer will meanwhile.
    """
    made = components(tmp_path, "tests.run.test_profile_micro_batch:plain")
    made.world = replace(made.world, device=torch.device("cuda"))
    done: list[str] = []
    held, allocate = weakref.WeakSet[Any](), torch.empty_like

    def hold(parameter: torch.Tensor) -> torch.Tensor:
        held.add(mine := allocate(parameter))
        return mine

    monkeypatch.setattr(torch, "empty_like", hold)
    monkeypatch.setattr(batch_size, "_run_micro_batch", lambda *_: done.append(f"tried beside {len(held)} tensors"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: done.append(f"{device} counted anew"))
    monkeypatch.setattr(torch.cuda, "reset_accumulated_memory_stats", lambda device: None)
    assert batch_size._fits_in_memory(made, 10)
    count = 2 * len(made.strategy.local_parameters)
    assert done == [f"tried beside {count} tensors", "emptied", "cuda counted anew"]
    assert len(held) == 0
    made.state.optimizer.state[made.strategy.local_parameters[0]] = {"resumed": torch.ones(())}
    assert batch_size._fits_in_memory(made, 10)
    assert done[3] == "tried beside 0 tensors", "a resumed run has its state already"


@pytest.mark.parametrize(
    ("flags", "size", "accumulates"),
    [
        ({"batch_size": "10", "grad_accum_steps": "2"}, 10, True),
        ({"batch_size": "10", "grad_accum_steps": "2"}, 20, False),
        ({"batch_size": "auto", "global_batch_size": "20"}, 10, True),
        ({"batch_size": "auto"}, 10, False),
    ],
)
def test_the_trial_has_as_many_passes_as_a_step(
    flags: dict[str, str], size: int, accumulates: bool, tmp_path: Path
) -> None:
    """What a micro-batch leaves of the global batch is another pass, during which gradients are held."""
    made, probed = components(tmp_path, "tests.run.test_profile_micro_batch:plain", **flags), list[Any]()

    def probe(work: Any, **probing: bool) -> None:
        probed.append(probing)
        work()

    made.strategy.probe_memory = probe  # type: ignore[method-assign]
    assert batch_size._fits_in_memory(made, size)
    assert probed == [{"accumulates": accumulates}]


def test_two_samples_show_what_takes_no_part_where_the_probe_leaves_no_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tried = components(tmp_path, "tests.run.test_profile_micro_batch:plain"), list[int]()
    made.strategy.sharded = True
    monkeypatch.setattr(batch_size, "_run_micro_batch", lambda _, size: tried.append(size))
    assert all(batch_size._fits_in_memory(made, size) for size in (10, 1))
    assert tried == [10, 2, 1, 1]


@pytest.mark.parametrize(
    ("sharded", "draws", "state", "rehearsed"),
    [(False, False, {}, True), (True, False, {}, False), (False, True, {}, False), (False, False, {0: {}}, False)],
)
def test_after_the_passes_a_twelfth_of_the_gpu_stays_free(
    sharded: bool, draws: bool, state: dict[int, Any], rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's step is part of it where it can be undone."""
    made, done = Mock(optimizer_draws=draws), list[Any]()
    made.strategy.sharded, made.state.optimizer.state = sharded, state
    monkeypatch.setattr(batch_size, "rehearse_step", done.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 92)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8, 1000))
    batch_size._take_rest_of_step(made)
    assert done == [made.state.optimizer] * rehearsed
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7, 1000))
    with pytest.raises(torch.OutOfMemoryError, match="less than 8% of the GPU's memory would be left"):
        batch_size._take_rest_of_step(made)
