"""selftest: everything holds for what is right, and each planted fault is named."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked worker
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import main_multi_gpu
from multigpu_cli.commands.selftest import selftest
from multigpu_cli.commands.selftest.checks import CheckResult, Measurements, run_checks
from multigpu_cli.commands.selftest.process import (
    compute_checksums,
    hash_state,
    is_close,
    record_outputs,
    relative_distance,
)
from multigpu_cli.commands.selftest.selftest import Report, format_report, measure_as_worker, run_selftest
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.monitor.journal import dump_json
from tests.support import tiny_datasets
from tests.support.fork import exit_code
from tests.support.ranks import run_on_each_rank
from tests.support.tiny_language_models import make_model_folder

ROOT = Path(main_multi_gpu.__file__).parent
HERE = f"{__name__}"
SMALL = {"batch_size": 4, "base_lr": 0.01}
Finding = dict[str, CheckResult]


class Noise(nn.Module):
    """A model's own randomness: from a stream that torch's seed does not reach, or from its rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stream = kind, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "stream":
            return x + 0.1 * torch.randn(x.shape, generator=self.stream)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return x + 0.1 * rank * torch.randn_like(x)


class Branches(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.main, self.branch = nn.Linear(features, classes), nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.main(x.flatten(1))
        return result


def noisy(input_shape: tuple[int, ...], num_classes: int, kind: str = "rank") -> nn.Module:
    features = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), Noise(kind), nn.Linear(8, num_classes))


def unequal(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Its first weights depend on the rank."""
    torch.manual_seed(torch.distributed.get_rank() + 1 if torch.distributed.is_initialized() else 0)
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))


def branched(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Branches(int(np.prod(input_shape)), num_classes)


class Scaled(Branches):
    """Its scale can't be divided over workers."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * (self.main(x.flatten(1)) + self.branch(x.flatten(1)))
        return result


def build_scaled_model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Scaled(int(np.prod(input_shape)), num_classes)


class Buffered(Branches):
    """Its training uses the mean that it moves, which is also kept in half precision; and it has a flag."""

    mean: Tensor
    rounded: Tensor
    seen: Tensor

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("rounded", torch.zeros(features, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.rounded.mul_(0.9).add_(x.mean(0).bfloat16(), alpha=0.1)
            self.seen = self.seen | (x.sum() > 0)
        result: Tensor = self.main(x - self.mean) + self.branch(x)
        return result


def build_buffered_model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Buffered(int(np.prod(input_shape)), num_classes)


class Drawn(Dataset[tuple[Tensor, int]]):
    """Each item is jittered: from a stream of its own, or from the generator that is seeded for each sample."""

    num_classes = 3

    def __init__(self, own: bool) -> None:
        self.own, self.stream = own, np.random.default_rng(0)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        base = torch.randn(6, generator=torch.Generator().manual_seed(index))
        jitter = self.stream.normal(size=6) if self.own else np.random.normal(size=6)
        return base + 0.1 * torch.from_numpy(jitter).float(), index % 3


def drawn(own: bool = True) -> Drawn:
    return Drawn(own)


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(80, 1, 4, 4, generator=generator), torch.arange(80) % 3)


def in_forks(config: Config, choice: Placement, folder: Path) -> None:
    """As the agent would start the workers, but forked from this test: torch is imported already."""

    def worker(world: World) -> None:
        measure_as_worker(config, folder, Placement("ddp", choice.devices[:1], 0, "a test"), world)

    try:
        run_on_each_rank(choice.num_processes_to_launch, worker)
    except AssertionError as failure:
        raise WorkersFailed(1) from failure


def config(**settings: Any) -> Config:
    return resolve({"data": f"{HERE}:tensors"} | SMALL | settings, [], None)


def outcome(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Finding:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    monkeypatch.setattr(inspect, "getsource", cache(inspect.getsource))  # it parses a whole file each time
    threads = torch.get_num_threads()
    try:
        report = run_selftest(config(**settings), "4", in_forks)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    return {verdict.check: verdict for verdict in report.verdicts}


def failing(found: Finding) -> list[CheckResult]:
    return [verdict for verdict in found.values() if verdict.holds is False]


@pytest.mark.parametrize(
    "settings",
    [
        # test_planted_faults.py has such a one with two faults elsewhere
        pytest.param({"model": "convnet", "model.args": {"stages": 1}, "nproc_per_node": 3}, marks=pytest.mark.slow),
        {"data": f"{HERE}:drawn", "data.args": {"own": False}, "model": "mlp"},
        {"model": f"{HERE}:build_buffered_model", "data.mixup": 0.4, "data.cutmix": 1.0},
        {"model": "mlp", "amp": "bf16", "optimizer": "sgd", "global_batch_size": 14, "ema": 0.9},
        {
            "model": "mlp",
            "optimizer": "tests.support.optimizers:ScheduleFreeSGD",
            "lr": 0.01,
            "schedule": "constant",
            "base_lr": None,
        },
    ],
    ids=["batchnorm-3", "drawn", "buffers-mixed", "bf16-uneven", "schedule-free"],
)
def test_what_is_right_holds(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    found = outcome(monkeypatch, **settings)
    assert failing(found) == []
    assert [verdict.holds for verdict in found.values()] == [True] * 15


def test_fine_tuning_on_conversations_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of unlike lengths, whose batches say how many tokens are learned."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    rows = [{"prompt": f"What is {n}?", "completion": " x" * (n % 5 + 1)} for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = str(make_model_folder(tmp_path / "model", num_hidden_layers=1))
    own = {"data": "chat", "data_dir": str(tmp_path / "chat.jsonl"), "model": "pretrained", "model_dir": folder}
    found = outcome(monkeypatch, **own, packing="off", num_workers=0)
    assert failing(found) == []


def test_a_model_that_depends_on_its_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = failing(outcome(monkeypatch, model=f"{HERE}:noisy"))
    assert wrong[0].check == "the model says the same on every worker"
    assert "rank 1" in wrong[0].figures
    assert "first in 2 (Noise)" in wrong[0].figures
    assert "depends on its rank" in wrong[0].figures
    assert len(wrong) > 3, "and gradients, evaluation and --exact suffer from it"


def test_a_model_with_a_random_stream_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(monkeypatch, model=f"{HERE}:noisy", **{"model.args": {"kind": "stream"}})
    wrong = failing(found)
    assert wrong[0].check == "the model says the same on every worker"
    assert "first in 2 (Noise): the model (--model) has a random stream of its own" in wrong[0].figures
    assert found["a resumed run equals the uninterrupted one"].holds is False


def test_first_weights_that_depend_on_the_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = failing(outcome(monkeypatch, model=f"{HERE}:unequal"))
    assert "rank 0 starts with other weights than one process alone" in wrong[0].figures


def test_an_unused_branch_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    [wrong] = failing(outcome(monkeypatch, model=f"{HERE}:branched"))
    assert wrong.check == "every parameter gets a gradient"
    assert wrong.figures == "2 of 4 get none: branch.bias, branch.weight"
    assert wrong.remedy.startswith("--find-unused-parameters")


def test_a_dataset_with_a_random_stream_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = failing(outcome(monkeypatch, data=f"{HERE}:drawn", model="mlp", num_workers=0))
    assert wrong[0].check == "a sample is the same in any order and process"
    assert "comes out different in another order" in wrong[0].figures
    assert "the dataset (--data) has a random stream" in wrong[0].figures
    assert all(verdict.check != "the model says the same on every worker" for verdict in wrong), "it is not to blame"


def test_workers_that_fail_leave_no_verdict_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise WorkersFailed(1)

    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    report = run_selftest(config(model="mlp"), "2", fail)
    torch.use_deterministic_algorithms(False)
    assert not report.holds
    assert {verdict.figures for verdict in report.verdicts} == {"the workers failed before this check: see their error"}


@pytest.mark.parametrize(
    ("settings", "steps", "said"),
    [
        ({}, "1", "--steps must be a whole number from 2"),
        ({}, "x", "--steps must be a whole number"),
        ({"sync_bn": True}, "4", "--sync-bn"),
        ({"multi_gpu": "dp"}, "4", "--multi-gpu dp"),
        ({"nproc_per_node": 1}, "4", "nothing to compare"),
        ({"global_batch_size": 2, "nproc_per_node": 3}, "4", "--global-batch-size 2 is below the number of workers"),
    ],
)
def test_what_cannot_be_tested_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], steps: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    with pytest.raises(RequestError, match=said):
        run_selftest(config(**settings), steps, in_forks)


def test_an_epoch_of_the_shortened_data_ends_in_a_short_batch() -> None:
    def sized(count: int) -> DataSource:
        data = TensorDataset(torch.zeros(count, 2), torch.zeros(count))
        return DataSource(train=data, val=None, test=None, input_shape=(2,), num_classes=2)

    for count, micro_batch, whole in [(10_000, 32, 128), (128, 32, 128), (40, 8, 40), (7, 1, 4), (30, 32, 64)]:
        short = selftest.shorten_source(sized(count), micro_batch, whole, 2)
        size = len(short.train)  # type: ignore[arg-type]
        assert size % whole, (count, micro_batch, whole)
        assert size <= min(count, 3 * whole)
        assert (size % whole) % micro_batch != 1 or micro_batch == 1, "BatchNorm can't train on one sample"


def evidence(**changes: Any) -> Measurements:
    """A side that agrees with itself, but for some changes on the workers'."""
    gradient = {"w": torch.tensor([3.0, 4.0])}
    step = {"gradient": gradient, "loss": 1.0, "norm": 5.0}
    clipped = {"clipped": step | {"gradient": {"w": torch.tensor([1.5, 2.0])}}, "limit": 2.5}
    steps = {"first": step, "last": step, "buffers": {"b": torch.tensor([0.1])}} | clipped
    defined = step | {"missing": []}
    side: dict[str, Any] = {
        "samples": {"in one order": {5: [1.0, 0.5]}, "in another order": {5: [1.0, 0.5]}},
        "model": {"weights": "w", "outputs": [["loss", "Task", [1.0, 1.0]]], "again": [["loss", "Task", [1.0, 1.0]]]},
        "reference": {"first": defined, "last": defined, "by rows": {"first": defined, "last": defined}},
        "mixing": {"mixes": ""},
        "gradients": steps | {"shares": [4, 2]},
        "evaluation": {"metrics": {"loss": 1.0}, "size": 4, "seen": [0, 1]},
        "resume": {
            "whole": "a",
            "resumed": "a",
            "replica": "r",
            "apart": 0.0,
            "samples": [[0, 1, 2, 3, 4, 5], [6, 7], [5, 3, 1, 0, 2, 6]],
            "in order": True,
            "epoch": 2,
            "shuffled": True,
        },
        "exact": {"end": "e", "losses": [1.0, 0.5], "metrics": {"loss": 1.0}},
        "sharded": steps,
        "sharded exact": {"end": "e", "losses": [1.0, 0.5], "metrics": {"loss": 1.0}},
    }
    shares = ([[0, 1, 2], [6], [5, 3, 1]], [[3, 4, 5], [7], [0, 2, 6]])
    workers = [
        side | {"evaluation": side["evaluation"] | {"seen": seen}, "resume": side["resume"] | {"samples": share}}
        for seen, share in zip(([0, 1], [2, 3]), shares, strict=True)
    ]
    for part, change in changes.items():
        changed = side if part == "mixing" else workers[0]  # it is measured on one worker
        changed[part] = changed[part] | change
    return Measurements(side, workers, resolve({"amp": "off"}, [], None))


def take_step(*gradient: float) -> dict[str, Any]:
    return {"gradient": {"w": torch.tensor(gradient)}, "loss": 1.0, "norm": 5.0}


@pytest.mark.parametrize(
    ("dtype", "gap", "holds"),
    [
        (torch.bfloat16, 0.008, True),
        (torch.bfloat16, 0.1, False),
        (torch.float16, 0.01, True),
        (torch.float32, 0.001, False),
    ],
)
def test_buffers_are_judged_by_their_own_format(dtype: torch.dtype, gap: float, holds: bool) -> None:
    alone, several = ({"b": torch.ones(1), "c": torch.tensor([0.5 + each]).to(dtype)} for each in (0, gap))
    measured = evidence(gradients={"buffers": several}, sharded={"buffers": several})
    measured.alone["gradients"]["buffers"] = alone
    verdicts = {verdict.check: verdict.holds for verdict in run_checks(measured)}
    assert verdicts["BatchNorm's and other buffers move as on one worker"] == holds
    assert verdicts["--multi-gpu fsdp has the loss and gradients of one worker"] == holds


def test_equal_sides_hold_throughout() -> None:
    assert [verdict.holds for verdict in run_checks(evidence())] == [True] * 15


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        ({"mixing": {"mixes": "a (B)"}}, "a sample's output", "first in a (B)"),
        ({"resume": {"samples": [[0, 1, 2], [6], [5, 3, 7]]}}, "each epoch", "step 3 takes other samples"),
        ({"gradients": {"first": take_step(1.5, 2.0)}}, "the gradient of the first step", "5.0e-01"),
        ({"gradients": {"last": take_step(1.5, 2.0)}}, "and that of an epoch's last", "5.0e-01"),
        ({"gradients": {"last": {"gradient": {}}}}, "and that of an epoch's last", "1.0e+00"),
        ({"gradients": {"first": take_step(3.0, torch.nan)}}, "the gradient of the first step", "nan"),
        ({"gradients": {"clipped": take_step(1.5, 2.0) | {"norm": 2.5}}}, "clipping acts", "norm 2.5 of 5"),
        ({"gradients": {"clipped": take_step(3.0, 4.0)}}, "clipping acts", "1.0e+00"),
        ({"gradients": {"buffers": {"b": torch.tensor([0.0])}}}, "BatchNorm's", "1.0e+00"),
        ({"evaluation": {"seen": [0, 1, 1]}}, "an evaluation counts", "4 of 4 samples counted, at most 2×"),
        ({"evaluation": {"seen": [0]}}, "an evaluation counts", "3 of 4 samples counted"),
        ({"evaluation": {"metrics": {"loss": 1.1}}}, "an evaluation counts", "1.0e-01"),
        ({"resume": {"replica": "other"}}, "replicas are identical", "other on rank 0, r on rank 1"),
        ({"resume": {"in order": False}}, "a resumed run equals", "gets other samples"),
        ({"resume": {"resumed": "b", "apart": 0.25}}, "a resumed run equals", "2.5e-01 of the largest, on several"),
        ({"exact": {"end": "f", "losses": [1.0, 0.6]}}, "--exact gives", "the losses first differ at step 2"),
        ({"exact": {"end": "f"}}, "--exact gives", "the losses agree"),
        ({"sharded exact": {"end": "f"}}, "and together with --exact", "e on one worker, f on several"),
        ({"sharded": {"first": {"gradient": {}, "loss": 1.0}}}, "--multi-gpu fsdp has", "1.0e+00"),
        ({"sharded": {"last": take_step(3.0, 4.0) | {"loss": 1.5}}}, "--multi-gpu", "5.0e-01"),
        ({"sharded": {"clipped": take_step(3.0, 4.0)}}, "--multi-gpu", "1.0e+00"),
        ({"sharded": {"clipped": take_step(1.5, 2.0) | {"norm": 2.5}}}, "--multi-gpu", "5.0e-01"),
        ({"sharded": {"buffers": {"b": torch.tensor([0.0])}}}, "--multi-gpu", "1.0e+00"),
    ],
)
def test_each_check_can_fail(changes: dict[str, Any], check: str, said: str) -> None:
    [wrong] = [verdict for verdict in run_checks(evidence(**changes)) if verdict.holds is False]
    assert wrong.check.startswith(check)
    assert said in wrong.figures


def test_what_was_not_tried_is_no_fault_and_says_why() -> None:
    unlike = evidence(mixing={"refused": "its reason"})._replace(
        config=resolve({"amp": "off", "drop_last": True}, [], None), no_exact="--exact can't be used with --x"
    )
    assert [verdict.figures for verdict in run_checks(unlike) if verdict.holds is None] == [
        "not possible here: its reason",
        "left out of training by --drop-last",
        *["not possible here: --exact can't be used with --x"] * 2,
    ]


@pytest.mark.parametrize(
    ("change", "holds", "said"),
    [
        ({"samples": [[0, 1, 2, 3, 4, 5], [6, 0], [5, 3, 1, 0, 2, 6]]}, False, "sample 0 comes more than once"),
        ({"samples": [[0, 1, 2, 3, 4, 5], [6, 7], [0, 1, 2, 3, 4, 5]]}, False, "has the order of the first"),
        ({"samples": [[0, 1, 2, 3, 4, 5], [6, 7], [0, 1, 2, 3, 4]]}, True, "5 of the second"),  # may be by chance
        ({"samples": [[0, 0], [0, 0], [0, 0]], "shuffled": False}, None, "samples are drawn"),
    ],
)
def test_the_order_of_one_worker_is_judged_too(change: dict[str, Any], holds: bool | None, said: str) -> None:
    found = evidence()
    found.alone["resume"] |= change
    workers = [
        worker | {"resume": worker["resume"] | {"samples": share}}
        for worker, share in zip(found.workers, (found.alone["resume"]["samples"], [[], [], []]), strict=True)
    ]
    verdict = {each.check: each for each in run_checks(found._replace(workers=workers))}[
        "each epoch has each sample once, in its own order"
    ]
    assert verdict.holds is holds
    assert said in verdict.figures


def test_what_the_workers_refuse_is_no_fault_either() -> None:
    """One worker has nothing against --exact, where several on unlike GPUs have."""
    several = [worker | {"exact": {"refused": "--exact: other bits"}} for worker in evidence().workers]
    *_, exact, _, _ = run_checks(evidence()._replace(workers=several))
    assert (exact.holds, exact.figures) == (None, "not possible here: --exact: other bits")


def test_a_model_that_cannot_be_sharded_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(monkeypatch, model=f"{HERE}:build_scaled_model")
    sharded = found["--multi-gpu fsdp has the loss and gradients of one worker"]
    assert sharded.holds is None
    assert sharded.figures.startswith("not possible here: --multi-gpu fsdp: scale is a parameter without dimensions")
    assert failing(found) == []


def test_distances_are_relative_to_the_largest_entry() -> None:
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([100.0])}
    assert relative_distance({"a": torch.tensor([2.0]), "b": torch.tensor([100.0])}, one) == pytest.approx(0.01)
    assert not relative_distance({}, {"a": torch.zeros(2)}) <= 1.0, "a gradient of zeros proves nothing"


def test_marks_tell_values_and_places_apart() -> None:
    assert compute_checksums(torch.tensor([1.0, 2.0])) != compute_checksums(torch.tensor([2.0, 1.0]))
    assert is_close(
        compute_checksums([torch.ones(9), torch.arange(3)]),
        compute_checksums([torch.ones(9) + 1e-7, torch.arange(3)]),
        1e-5,
    )
    assert not is_close(compute_checksums(torch.ones(9)), compute_checksums(torch.ones(9) + 1e-3), 1e-5)
    assert not is_close(
        compute_checksums(torch.tensor([torch.nan])), compute_checksums(torch.tensor([torch.nan])), 1e-5
    )
    assert not is_close(compute_checksums([torch.ones(2)]), compute_checksums([torch.ones(2), torch.ones(2)]), 1e-5)


def test_bits_are_of_tensors_and_numbers_and_leave_clocks_out() -> None:
    state = {"a": [torch.ones(2), 1.5], "seconds": 1.0}
    assert hash_state(state) == hash_state(state | {"seconds": 2.0})
    assert hash_state(state) != hash_state(state | {"a": [torch.ones(2), 1.6]})
    assert hash_state({"x": torch.zeros(1)}) != hash_state({"x": -torch.zeros(1)})


def test_hooks_do_not_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with record_outputs(model) as heard:
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert [name for name, _, _ in heard] == ["0", "the model"]


def test_the_table_and_its_json() -> None:
    names = "model data task workers device precision steps batch_size global_batch_size"
    lines = [
        CheckResult("a holds", True, "1e-7"),
        CheckResult("b", False, "0.5", "a remedy"),
        CheckResult("c", None, "n/a", "no"),
    ]
    report = Report(dict.fromkeys(names.split(), 2), lines)
    assert list(format_report(report))[1:] == [
        " ok    a holds  1e-7",
        " FAIL  b        0.5",
        "                try: a remedy",
        " -     c        n/a",
        "1 of 3 do not hold",
    ]
    found = json.loads(dump_json(report.as_dict()))
    assert (found["holds"], found["verdicts"][1]["remedy"]) == (False, "a remedy")


@pytest.mark.parametrize("flag", ["--dry-run", "--quiet", "--version"])
def test_an_option_that_does_nothing_here_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["selftest", flag]) == 2
    assert f"selftest does not accept {flag}" in capsys.readouterr().err


def command(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "main_multi_gpu.py"), "selftest", *argv]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.usefixtures("in_tmp_path")
def test_the_command_leaves_nothing_behind_and_its_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real processes: test_planted_faults."""
    monkeypatch.setattr(selftest, "run_selftest", partial(run_selftest, start=in_forks))

    def work() -> None:
        with redirect_stdout(StringIO()) as said:
            words = ["selftest", "--model", "mlp", "--json", "--save-dir", "run", "--steps", "2"]
            assert main_multi_gpu.run(words) == 0
        assert json.loads(said.getvalue())["holds"] is True

    assert exit_code(work) == 0
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_planted_fault_is_exit_code_1(tmp_path: Path) -> None:
    result = command(tmp_path, "--model", f"{HERE}:branched")
    assert (result.returncode, result.stderr) == (1, "")
    assert "2 of 4 get none: branch.bias, branch.weight" in result.stdout
    assert result.stdout.endswith("1 of 15 do not hold\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "data"),
    [("digits", None), ("har", tiny_datasets.har), ("mnist", tiny_datasets.mnist)],
)
def test_recipes_hold(recipe: str, data: Callable[[Path], Path] | None, tmp_path: Path) -> None:
    folder = ["--data-dir", str(data(tmp_path / "data"))] if data else []
    result = command(ROOT, "--config", recipe, *folder, "--batch-size", "8", "--nproc-per-node", "3")
    assert result.returncode == 0, result.stdout + result.stderr
