"""--multi-gpu fsdp is one more speed knob: the curve, the folder and the resumes are those of one process."""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from multigpu_cli import engine
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.data.loader import Batch
from multigpu_cli.monitor import journal
from multigpu_cli.planning.batch import StepLayout
from multigpu_cli.run import open, train_log
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.request import checks
from multigpu_cli.run.run import Run
from multigpu_cli.runtime import precision
from multigpu_cli.runtime.precision import PrecisionChoice
from multigpu_cli.tasks.base import Evaluation
from multigpu_cli.tasks.supervised import Classification
from tests.support.run_training import Ended, run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
FSDP: dict[str, Any] = {"multi_gpu": "fsdp"}
CUT: dict[str, Any] = {
    "global_batch_size": 26, "batch_size": 4, "epochs": 2, "log_interval": 1, "lr": 0.01, "schedule": "constant",
    "warmup_epochs": 0, "save_dir": "run",
}  # fmt: skip
DOUBLE: dict[str, Any] = {"model": "tests.support.user_code:Double"}
GPT: dict[str, Any] = {"data": "tests.support.user_code:sentences", "model": "gpt", "task": "language-model"}
SIZES = ["model.args.depth=2", "model.args.heads=2", "model.args.width=16", "model.args.dropout=0.2"]
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "sets": ["model.args.width=16"], "ema": 0.9},
    "bf16": {"model": "mlp", "sets": ["model.args.width=16"], "amp": "bf16", "optimizer": "sgd"},
    "batchnorm": DOUBLE
    | {"sets": ["model.args.network=convnet", "data.args.shape=[2, 8, 8]"], "optimizer": "sgd", "freeze": "*ures.0*"},
    "gpt": GPT | {"sets": SIZES, "grad_checkpointing": True},
    "idle": DOUBLE
    | {"sets": ["model.args.network=own"], "global_batch_size": 12, "batch_size": 6, "reshard": "step"}
    | {"ema": 0.9, "checkpoint_every": "1000", "max_steps": 7},
}
WRITTEN = {"OWN_AFTER": "run/checkpoints/step_*"}  # the kill comes after the first checkpoint


class OwnEvaluation(Classification):
    def evaluate(self, *args: Any, **named: Any) -> Evaluation:
        found = super().evaluate(*args, **named)
        return found._replace(metrics=found.metrics | {"own": 1.0})


class EqualEvaluation(OwnEvaluation):
    supports_equal_passes = True


class Direct(nn.Module):
    """Takes the weight of a module without calling it."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, 8), nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(self.body(inputs).tanh(), self.head.weight)


def direct(input_shape: tuple[int], num_classes: int) -> nn.Module:
    return Direct(*input_shape, num_classes)


def run(workers: int, folder: str, case: dict[str, Any] | None = None, **flags: Any) -> Ended:
    where = FSDP if workers > 1 else {}
    return run_training(workers, **CUT | where | (case or {}) | {"save_dir": folder} | flags)


def read_events(folder: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events(f"{folder}/journal.jsonl") if event["event"] == kind]


def read_curve(folder: str) -> list[float]:
    """Loss and gradient norm of each step; after a resume the last line of a step counts."""
    lines = {event["step"]: event for event in read_events(folder, "train")}
    return [lines[step][name] for step in sorted(lines) for name in ("loss", "grad_norm")]


def read_evals(folder: str) -> list[float]:
    return [event["loss"] for event in read_events(folder, "eval") if event["split"] == "val"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("gpt", (3,)), ("idle", (3,))),
        *(pytest.param(name, (2, 3, 4), marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_the_curve_is_that_of_one_process(name: str, sizes: Sequence[int]) -> None:
    """Uneven and idle shares, accumulation, dropout, clipping, and what each case adds."""
    close = 1e-9 if CASES[name]["model"] == DOUBLE["model"] else 2e-5 if name != "bf16" else 1e-3
    assert not run(1, "alone", CASES[name]).error
    weights = torch.load("alone/best.pt", weights_only=True)["model"]
    for workers in sizes:
        ended = run(workers, f"on{workers}", CASES[name])
        assert not ended.error, ended.error
        assert (ended.summary["strategy"], ended.summary["world_size"]) == ("fsdp", workers)
        assert read_curve(f"on{workers}") == pytest.approx(read_curve("alone"), rel=close)
        assert read_evals(f"on{workers}") == pytest.approx(read_evals("alone"), rel=close)
        found = torch.load(f"on{workers}/best.pt", weights_only=True)["model"]
        assert {key: value.shape for key, value in found.items()} == {key: v.shape for key, v in weights.items()}


def compile_cheaply() -> None:
    """torch finds the graphs, which are counted in a file, and nothing is generated for them."""

    def count(graph: Any, _: Any) -> Any:
        with Path(f"graphs_{os.environ['RANK']}").open("a") as file:
            file.write("one\n")
        return graph.forward

    real = torch.compile
    torch.compile = lambda model, **options: real(model, **options | {"backend": count})  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless it is an error
def test_each_block_is_compiled_by_itself() -> None:
    """One graph for all, with their activations computed again; short micro-batches and evaluations have none."""
    import functorch.compile  # type: ignore[import-untyped]  # noqa: F401 - seconds, once rather than in each rank

    case = GPT | {"sets": SIZES, "grad_checkpointing": True, "max_steps": 4}
    run(1, "alone", case)
    ended = run(2, "run", case, compile="default", prepare=compile_cheaply)
    assert not ended.error, ended.error
    assert read_curve("run") == pytest.approx(read_curve("alone"), rel=2e-5)
    assert read_evals("run") == pytest.approx(read_evals("alone"), rel=2e-5)
    weights = [torch.load(f"{folder}/last.pt", weights_only=True)["model"] for folder in ("alone", "run")]
    assert list(weights[0]) == list(weights[1])
    assert [Path(f"graphs_{rank}").read_text() for rank in range(2)] == ["one\n"] * 2


@pytest.mark.slow
def test_a_killed_run_goes_on_with_fewer_workers_and_with_any_strategy() -> None:
    """4 → 2 → 1, and on to ddp: each attempt reads what the one before wrote."""
    case = DOUBLE | {"sets": ["model.args.network=own"], "epochs": 4}
    run(1, "whole", case)
    killed = run(4, "run", case, environ=WRITTEN | {"OWN_DEED": "3:12:SIGKILL"})
    assert 3 in killed.killed
    assert run(2, "run", case, max_steps=9).summary["status"] == "completed"
    shutil.copytree("run", "other")
    assert not run(1, "run", case).error
    assert not run(3, "other", case, multi_gpu="ddp").error
    for folder in ("run", "other"):
        assert [event["from_world_size"] for event in read_events(folder, "resume")] == [4, 2]
        assert read_curve(folder) == pytest.approx(read_curve("whole"), rel=1e-9)
    end = [torch.load(f"{folder}/last.pt", weights_only=True)["model"] for folder in ("run", "whole")]
    assert all(torch.allclose(end[0][name], value, rtol=1e-9, atol=1e-12) for name, value in end[1].items())


@pytest.mark.slow
def test_a_resume_on_as_many_workers_has_the_same_bits() -> None:
    whole = run(2, "whole").summary
    run(2, "run", max_steps=4)
    shutil.rmtree("run/tensorboard")
    resumed = run(2, "run").summary
    assert resumed["resumed_from"]
    assert resumed["fingerprint"] == whole["fingerprint"]


def test_a_ddp_run_goes_on_sharded() -> None:
    case = DOUBLE | {"sets": ["model.args.network=own"], "ema": 0.9}
    run(1, "whole", case)
    run(2, "run", case, multi_gpu="ddp", max_steps=4)
    ended = run(3, "run", case)
    assert not ended.error
    assert read_curve("run") == pytest.approx(read_curve("whole"), rel=1e-9)
    assert read_evals("run")[-1] == pytest.approx(read_evals("whole")[-1], rel=1e-9)


def test_groups_that_replicate_each_other_have_the_curve_of_one_process() -> None:
    """From 4 workers in two groups on to 2, which are one, and to 3 with none."""
    case = DOUBLE | {"sets": ["model.args.network=own"], "ema": 0.9}
    run(1, "whole", case, max_steps=5)
    first = run(4, "run", case, shard_size=2, max_steps=3)
    assert not first.error
    assert " within groups of 2 workers; " in read_events("run", "start")[0]["plan"]["sharding"]
    refused = run(3, "run", case, shard_size=2)
    assert (refused.kind, "3 workers can't be divided into groups of 2" in refused.error) == ("RequestError", True)
    assert not run(2, "run", case, shard_size=2, max_steps=4).error
    assert not run(3, "run", case, max_steps=5).error
    assert read_curve("run") == pytest.approx(read_curve("whole"), rel=1e-9)
    assert read_evals("run")[-1] == pytest.approx(read_evals("whole")[-1], rel=1e-9)


def test_groups_find_the_largest_micro_batch_that_fits_all_of_them() -> None:
    """--batch-size auto: one of four workers has no memory for a step's only pass, which waits for the other group."""
    case: dict[str, Any] = {"model": "tests.support.oom_model:net", "ema": 0.9, "global_batch_size": 32}
    run(1, "whole", case | {"sets": ["model.args.limit=99"]})
    sets = ["model.args.rank=3", "model.args.limit=5", "model.args.backward=true"]
    ended = run(4, "run", case, batch_size="auto", shard_size=2, sets=sets)
    assert (ended.error, ended.killed) == ("", [])
    plan = read_events("run", "start")[0]["plan"]
    assert (plan["batch_size"], plan["grad_accum_steps"]) == (4, 2)
    assert " within groups of 2 workers; " in plan["sharding"], "what is known of the model stays in the plan"
    assert plan["first_weights"]
    assert read_curve("run") == pytest.approx(read_curve("whole"), rel=2e-5)
    assert read_evals("run") == pytest.approx(read_evals("whole"), rel=2e-5)


def test_a_run_that_begins_with_the_weights_of_another_averages_them_from_the_start() -> None:
    """--init-from with --ema: the average is the first weights before it has seen a step; from any kind of file."""
    case = DOUBLE | {"sets": ["model.args.network=own"], "ema": 0.9}
    run(1, "before", case, max_steps=2)
    case |= {"init_from": "before", "max_steps": 4}
    assert not run(1, "one", case).error
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (("two", 2, {}), ("grouped", 4, {"shard_size": 2}))
    for folder, workers, flags in cases:
        ended = run(workers, folder, case, **flags)
        assert (ended.error, ended.killed) == ("", [])
        assert read_curve(folder) == pytest.approx(read_curve("one"), rel=1e-9)
        assert read_evals(folder) == pytest.approx(read_evals("one"), rel=1e-9)
    states = [torch.load(f"{folder}/best.pt", weights_only=True)["model"] for folder in ("one", "two", "grouped")]
    assert all(torch.allclose(each[name], value, rtol=1e-9) for name, value in states[0].items() for each in states)


def test_a_signal_to_one_rank_stops_all_and_a_checkpoint_is_there() -> None:
    ended = run(3, "run", epochs=400, log_interval=1000, environ={"OWN_DEED": "1:8:SIGTERM"})
    assert (ended.summary["status"], ended.error, ended.killed) == ("stopped", "", [])
    newest, _ = Store(Path("run/checkpoints"), 3).find_newest()
    assert newest is not None
    assert newest.step == ended.summary["steps"] < 400


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    case = {"model": "tests.support.user_code:explosive", "sets": ["model.args.at=4"], "nonfinite": "stop"}
    ended = run(3, "run", case)
    assert (ended.kind, ended.killed) == ("TrainingError", [])
    assert "NaN or infinite" in ended.error


def watch_the_average() -> None:
    """From here on in this process a step that moves its average although it was skipped is an error, or leaves it."""
    real, counts = engine.train_step, [0]

    def step(run: Run, layout: StepLayout, work: Iterator[Batch]) -> StepResult:
        assert run.state.average
        tensors = [*run.state.average.parameters(), *run.state.average.buffers()]
        own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        before = [tensor.clone() for tensor in own]
        outcome = real(run, layout, work)
        counts[0] += not outcome.skipped
        assert all(map(torch.equal, own, before)) == bool(outcome.skipped), f"step {layout.step}"
        assert int(run.state.average.n_averaged) == counts[0]
        return outcome

    engine.train_step = step


def test_a_skipped_step_leaves_the_average_alone_on_all_ranks() -> None:
    """One sample of an epoch has a NaN: weights, BatchNorm's statistics and the count stay as they were."""
    model = {"model": "tests.support.user_code:Spoilt", "sets": ["model.args.limit=2.75"], "ema": 0.9}
    flags: dict[str, Any] = {"nonfinite": "skip", "prepare": watch_the_average}
    for workers, strategy in ((1, "none"), (2, "ddp"), (2, "fsdp")):
        ended = run(workers, strategy, model, multi_gpu=strategy, **flags)
        assert not ended.error, ended.error
        assert [fault["kind"] for fault in ended.summary["faults"]] == 2 * ["nonfinite"]
        assert read_evals(strategy) == pytest.approx(read_evals("none"), rel=2e-5)


def test_a_task_with_its_own_evaluation_says_that_it_runs_equal_passes() -> None:
    case = {"task": f"{__name__}:EqualEvaluation", "max_steps": 2}
    run(1, "one", case)
    assert not run(3, "three", case).error
    assert read_evals("three") == pytest.approx(read_evals("one"), rel=2e-5)
    assert {event["own"] for event in read_events("three", "eval")} == {1.0}


def test_a_weight_that_only_some_micro_batches_use_has_the_sum_of_these() -> None:
    case = {"model": "tests.support.failing_model:choosy"}
    assert not run(1, "one", case).error
    ended = run(3, "three", case)
    assert (ended.error, ended.killed) == ("", [])
    assert read_curve("three") == pytest.approx(read_curve("one"), rel=2e-5)


def test_a_weight_that_nobody_uses_in_a_step_is_left_alone_where_unused_ones_are_looked_for() -> None:
    """Zeros would let its momentum and the weight decay move it; in one process it has no gradient."""
    case: dict[str, Any] = {"model": "tests.support.failing_model:choosy", "find_unused_parameters": True}
    case |= {"global_batch_size": 4, "batch_size": 2, "weight_decay": 0.1, "max_steps": 10}
    assert not run(1, "one", case).error
    ended = run(3, "three", case)
    assert (ended.error, ended.killed) == ("", [])
    assert read_curve("three") == pytest.approx(read_curve("one"), rel=2e-5)


@pytest.mark.parametrize(
    ("unlike", "exact"), [(True, False), *(pytest.param(False, exact, marks=pytest.mark.slow) for exact in (0, 1))]
)
def test_workers_that_run_different_blocks_are_found_before_anything_is_saved(unlike: bool, exact: bool) -> None:
    """Of one size, each took the weights of the other's block, and nothing else would tell; else gloo aborted."""
    case: dict[str, Any] = {"model": "tests.support.failing_model:dropping", "exact": bool(exact)}
    ended = run(2, "run", case, max_steps=40, epochs=40, sets=[f"model.args.unlike={unlike}".lower()])
    assert ended.summary == {}
    assert len(read_events("run", "train")) < 3, "it does not wait for a checkpoint"
    assert (ended.kind, "ran different blocks of the model" in ended.error) == ("TrainingError", True), ended.error
    assert Store(Path("run/checkpoints"), 3).find_newest()[0] is None
    assert not run(2, "head", case, sets=["strategy.wrap=head"]).error


def test_weights_of_another_run_and_what_modules_hold_beside_tensors() -> None:
    telling: dict[str, Any] = {"model": "tests.support.awkward_models:telling"}
    run(1, "before", telling, max_steps=2)
    telling |= {"init_from": "before/best.pt", "max_steps": 4}
    assert not run(1, "one", telling).error
    assert not run(3, "three", telling | {"max_steps": 3}).error
    assert not run(2, "three", telling).error
    assert read_curve("three") == pytest.approx(read_curve("one"), rel=2e-5)
    kept = torch.load("three/last.pt", weights_only=True)["model"]["layers._extra_state"]
    assert kept["kept"] == ["a", 1.5]


def test_the_table_of_rates_speaks_of_whole_parameters(capfd: pytest.CaptureFixture[str]) -> None:
    ended = run(2, "run", sets=["optimizer.rates={6.*: 10}"], freeze="2.*", screen="normal", max_steps=1)
    assert not ended.error
    shown = capfd.readouterr().out
    assert "2 tensors, 51 parameters: 6.weight, 6.bias\n" in shown
    assert "1 tensor, 96 parameters: 2.weight\n" in shown.split(" frozen ")[1]


def allow_fp16_on_cpu() -> None:
    for module in (precision, checks):
        module.choose_precision = lambda wanted, device: PrecisionChoice("fp16", "a test")  # type: ignore[attr-defined]
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=2.0**23)  # type: ignore[misc, assignment]


def test_a_loss_scale_that_is_too_high_skips_the_same_steps_as_in_one_process() -> None:
    """All workers skip them, and all halve the scale, also those whose rows have no infinity."""
    case = {"model": "mlp", "sets": ["model.args.width=16"], "amp": "fp16"}
    for workers, folder in ((1, "alone"), (3, "run")):
        ended = run(workers, folder, case, prepare=allow_fp16_on_cpu)
        assert not ended.error, ended.error
    scale, expected = (
        torch.load(f"{folder}/checkpoints/step_00000006/state.pt", weights_only=True)["precision"]
        for folder in ("run", "alone")
    )
    assert scale == expected
    assert scale["scale"] < 2.0**23
    assert read_evals("run") == pytest.approx(read_evals("alone"), rel=1e-2)


def know_the_peak() -> None:
    """Of this CPU, and of nothing else, a peak rate of 1 TFLOP/s."""
    for module in (open, train_log):
        module.peak_flops = lambda device, precision: 1e12  # type: ignore[attr-defined]


def test_the_flops_of_a_sample_are_those_of_one_process() -> None:
    def count_flops(workers: int, folder: str) -> float:
        assert not run(workers, folder, GPT | {"sets": SIZES, "max_steps": 2}, prepare=know_the_peak).error
        line = read_events(folder, "train")[-1]
        assert len(line["memory"]) == workers
        return float(line["mfu"] * workers * 1e12 / line["samples_per_second"])

    assert count_flops(2, "two") == pytest.approx(count_flops(1, "one"))


def test_the_noise_scale_is_that_of_the_same_workers_unsharded() -> None:
    for mode in ("ddp", "fsdp"):
        assert not run(2, mode, multi_gpu=mode, model="mlp", batch_size=2, epochs=4, max_steps=9).error
    lines = {mode: read_events(mode, "train") for mode in ("ddp", "fsdp")}
    expected, found = ([line["noise_scale"] for line in lines[mode] if "noise_scale" in line] for mode in lines)
    assert len(expected) > 3
    assert min(expected) > 0
    assert found == pytest.approx(expected, rel=1e-3)


def test_the_plan_says_what_is_gathered() -> None:
    case = GPT | {"sets": [*SIZES, "strategy.wrap=blocks.1"]}
    plan = run_training(2, **CUT | FSDP | case, dry_run=True).summary
    assert plan["strategy"] == "fsdp"
    assert plan["because"].startswith("fsdp: ")
    assert (
        plan["sharding"] == "by 1 block (Block: blocks.1) and the rest; weights are gathered, and freed after each pass"
    )
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"sets": ["strategy.wrap=layers.*"]}, "strategy.wrap 'layers.*' matches no module"),
        (
            {"model": "tests.support.failing_model:forgetful", "sets": ["model.args.at=1"]},
            "1.bias took no part in the loss, and FSDP waits",
        ),
        (
            {"model": "tests.distributed.test_sharded:direct", "sets": ["strategy.wrap=head"]},
            "the model uses head.weight without a call of head, in which alone it is gathered",
        ),
        ({"sync_bn": True}, "--sync-bn can't be used with --multi-gpu fsdp yet"),
        ({"task": "tests.distributed.test_sharded:OwnEvaluation"}, "has its own `evaluate`: with --multi-gpu fsdp all"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_touched(flags: dict[str, Any], named: str) -> None:
    ended = run_training(2, **CUT | FSDP | flags)
    assert (ended.kind, named in ended.error) == ("RequestError", True), ended.error
    assert not Path("run").exists()


def test_what_the_checkpoint_was_started_with_counts_too() -> None:
    run(2, "run", multi_gpu="ddp", grad_compression="powersgd", max_steps=4)
    before = Path("run/journal.jsonl").read_text()
    ended = run(2, "run")
    assert "--grad-compression powersgd can't be used with --multi-gpu fsdp yet" in ended.error
    assert Path("run/journal.jsonl").read_text() == before


def test_one_process_has_nothing_to_shard() -> None:
    """Nor has a dry run, which starts no others."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environ = torchrun | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    alone, launched = run(1, "alone"), run(1, "run", **FSDP, environ=environ)
    assert (launched.error, launched.summary["strategy"]) == ("", "fsdp")
    assert launched.summary["fingerprint"] == alone.summary["fingerprint"]
    tried = run(1, "other", **FSDP, nproc_per_node=3, dry_run=True).summary
    assert (tried["workers"], tried["sharding"][:11]) == (3, "by 2 blocks")
