"""What a train line says of time: against sleeps that were planted."""

import io
import json
import math
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import cross_entropy

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import TrainingError
from multigpu_cli.monitor.meters import NoiseScale, StepTimer
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.run import open, train_log
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.train_log import combine_ranks, peak_memory
from tests.monitor.test_tensorboard import read_board
from tests.run.test_lifecycle import prepare_run
from tests.run.test_profile_micro_batch import plain
from tests.support import user_code
from tests.support.run_training import run_training
from tests.support.user_code import sentences, tensors

NAN = math.nan


def last_line(folder: Path) -> dict[str, Any]:
    events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    found: dict[str, Any] = [event for event in events if event["event"] == "train"][-1]
    return found


def test_waits_are_told_apart() -> None:
    """Ten steps of 100 ms; rank 0 waits 30 ms of each for the others, rank 1 10 ms."""
    rows = [(100.0, 0.1, 0.03, NAN, 0.7, 60.0, 80.0), (200.0, 0.3, 0.01, NAN, 0.9, 15.0, 20.0)]
    fields = combine_ranks(rows, {"step_ms": 100.0}, 10)
    assert fields == {
        "data_wait_share": pytest.approx(0.2),
        "data_wait_ms": [pytest.approx(10), pytest.approx(30)],
        "comm_share": pytest.approx(0.1),
        "straggler_share": pytest.approx(0.1),
        "own_ms": [pytest.approx(70), pytest.approx(90)],
        "memory": [100, 200],
        "cpu_utilisation": [pytest.approx(70), pytest.approx(90)],
        "all_tokens_per_second": pytest.approx(75),
        "padding_share": pytest.approx(0.25),
    }


def test_a_worker_that_waits_for_nobody_has_no_such_share() -> None:
    fields = combine_ranks([(100.0, 0.0, NAN, NAN, 0.0, 0.0, 0.0)], {"step_ms": 5.0}, 2)
    assert fields == {
        "data_wait_share": 0.0,
        "data_wait_ms": [0.0],
        "comm_share": None,
        "memory": [100],
        "cpu_utilisation": [0.0],
    }


def test_where_one_worker_does_not_know_its_wait_nobody_has_a_share() -> None:
    rows = [(100.0, 0.0, wait, NAN, 0.0, 0.0, 0.0) for wait in (0.001, NAN)]
    fields = combine_ranks(rows, {"step_ms": 5.0}, 2)
    assert fields["comm_share"] is None
    assert fields.keys().isdisjoint({"straggler_share", "own_ms"})


def test_a_worker_tells_what_it_measured_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(
        strategy=SimpleNamespace(read_comm_wait=lambda: None),
        observer=SimpleNamespace(
            timer=SimpleNamespace(data_wait=SimpleNamespace(read=lambda: (0.5, 3)), cpu_seconds=lambda: 6.0),
            noise=SimpleNamespace(take_small_norm=lambda: 2.5),
            take_tokens=lambda: (30, 40),
        ),
        plan=SimpleNamespace(threads=4),
        world=World(torch.device("cpu")),
    )
    told = train_log.measure_rank(run, 1000)
    assert told.dtype == torch.float64
    assert told.tolist() == pytest.approx([1000, 0.5, NAN, 2.5, 6 / 4, 30, 40], nan_ok=True)
    run.world, run.strategy.read_comm_wait = World(torch.device("cuda")), lambda: 0.25
    monkeypatch.setattr(torch, "tensor", lambda values, **_: values)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2000)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3})
    for sampler, read in ((None, [NAN] * 4), (SimpleNamespace(read=lambda: [1.0, 2.0, 3.0, 4.0]), [1, 2, 3, 4])):
        run.log = SimpleNamespace(gpu_monitor=sampler)
        wanted = [1000, 0.5, 0.25, 2.5, 6 / 4, 30, 40, 2000, *read, 3]
        assert train_log.measure_rank(run, 1000) == pytest.approx(wanted, nan_ok=True)


def test_a_gpu_adds_its_own() -> None:
    fields = combine_ranks([(1.0, 0.0, NAN, NAN, 0.0, 0.0, 0.0, 7.0, 98.0, 61.5, NAN, 2.0**30)], {"step_ms": 5.0}, 2)
    assert (fields["memory_reserved"], fields["gpu_utilisation"], fields["gpu_temperature"]) == ([7.0], [98.0], [61.5])
    assert (fields["gpu_power"], fields["gpu_memory_used"]) == ([None], [2.0**30])


def test_beyond_64_ranks_a_line_has_no_list_of_them() -> None:
    few, many = ([2.0 * rank + 1 for rank in range(count)] for count in (64, 65))
    assert train_log.summarize_ranks({"own_ms": few, "loss": 1.0}) == {"own_ms": few, "loss": 1.0}
    assert train_log.summarize_ranks({"own_ms": many}) == {
        "own_ms": {"min": 1.0, "mean": 65.0, "max": 129.0, "worst_rank": 64}
    }
    idle = train_log.summarize_ranks({"cpu_utilisation": many})["cpu_utilisation"]
    assert idle["worst_rank"] == 0, "the one that does least"


def test_each_new_retry_of_an_allocator_is_told_once() -> None:
    told: list[str] = []
    run: Any = SimpleNamespace(log=SimpleNamespace(allocator_retries=0), log_fault=lambda kind, _: told.append(kind))
    for exact in (True, False):
        run.config = SimpleNamespace(reproducibility=SimpleNamespace(exact=exact))
        counts = []
        for retries in ([], [0, 0], [1, 0], [1, 0], [1, 2]):
            train_log._warn_of_retries(run, retries)
            counts.append(len(told))
        assert counts == ([0, 0, 1, 1, 2] if exact else [2] * 5)


def test_log_step_journals_a_warning_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    out = io.StringIO()
    with prepare_run(tmp_path, out, compile="default") as run:
        assert run.compiled is not None
        monkeypatch.setattr(run.compiled, "take_warning", Mock(side_effect=["", "--compile: too many shapes"]))
        for step in (1, 2):
            run.complete_step()
            run.observer.loss.add(step, 1, {0: torch.tensor(15.0)}, 10)
            train_log.log_step(run, StepResult(1, {}, torch.tensor(2.0), torch.zeros(())))
    events = map(json.loads, next(tmp_path.rglob("journal.jsonl")).read_text().splitlines())
    faults = [(event["kind"], event["action"]) for event in events if event["event"] == "fault"]
    assert faults == [("compile", "--compile: too many shapes")]
    assert "--compile: too many shapes" in out.getvalue()


def test_what_was_compiled_is_told_with_its_breaks() -> None:
    for breaks, told in (([], "none"), (["a.py:1", "b.py:2"], "a.py:1; b.py:2")):
        run, report = Mock(), {"seconds": 2.0, "graph_breaks": breaks}
        run.compiled.report.return_value = report
        assert train_log.compiler_fields(run) == {"compile": report}
        run.log.console.note.assert_called_once_with(f"compiled in 2.0 s; graph breaks: {told}")


def test_what_nvml_does_not_say_is_told_once() -> None:
    log = SimpleNamespace(unknown_gpu_fields=frozenset(), gpu_monitor=SimpleNamespace(missing="x"))
    run: Any = SimpleNamespace(log=log, world=SimpleNamespace(rank=0))
    usual = {"gpu_utilisation": [1.0, 1.0], "gpu_power": [1.0, 1.0], "loss": None}
    assert train_log.describe_missing_gpu_metrics(run, {"loss": None}) == "", "no GPU, no gap"
    assert train_log.describe_missing_gpu_metrics(run, usual) == ""
    gap = usual | {"gpu_power": [1.0, None], "gpu_utilisation": [1.0, None]}
    assert train_log.describe_missing_gpu_metrics(run, gap) == (
        "gpu_utilisation, gpu_power of the GPU of rank 1: not known, null in the journal"
    )
    assert (
        train_log.describe_missing_gpu_metrics(run, gap)
        == train_log.describe_missing_gpu_metrics(run, usual)
        == train_log.describe_missing_gpu_metrics(run, gap)
        == ""
    )
    assert "gpu_power of the GPU of rank 0: not known (x)" in train_log.describe_missing_gpu_metrics(
        run, gap | {"gpu_power": [None, None]}
    )


def test_a_language_model_on_a_known_device_tells_tokens_and_its_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (train_log, open):
        monkeypatch.setattr(room, "peak_flops", lambda device, precision: 1e9)
    flags: dict[str, Any] = {"data": "tests.support.user_code:sentences", "model": "gpt", "task": "language-model"}
    flags |= {"epochs": 2, "batch_size": 10, "log_interval": 3}  # an epoch
    sets = ["model.depth=1", "model.width=16", "model.heads=2"]
    assert not run_training(2, save_dir=str(tmp_path), num_workers=0, **flags, sets=sets).error
    line = last_line(tmp_path)
    flops = 9 * 6 * (12 * 16 * 16 + 5 * 16)  # a sample's tokens, forward and backward, by the weights that they meet
    assert line["mfu"] == pytest.approx(flops * line["samples_per_second"] / (2 * 1e9))
    tokens = int((sentences("train", 42).tensors[1] != -100).sum())
    assert tokens < 9 * 60, "not all of them count"
    assert line["tokens_per_second"] == pytest.approx(line["samples_per_second"] * tokens / 60)


def test_a_slow_rank_is_a_straggler(tmp_path: Path) -> None:
    """0.3 s in each of rank 1's passes, so that it shows on a busy machine, and nothing on the wire."""
    flags: dict[str, Any] = {"save_dir": str(tmp_path / "a"), "max_steps": "8", "log_interval": "4"}
    flags |= {"model": "tests.support.user_code:slow_rank", "sets": ["model.seconds=0.3"]}
    run_training(2, batch_size="10", **flags)
    line = last_line(tmp_path / "a")
    fast, slow = line["own_ms"]
    assert 100 < slow - fast < 1500
    assert 2 * line["straggler_share"] * line["step_ms"] == pytest.approx(slow - fast, rel=0.01)
    assert line["straggler_share"] > line["comm_share"]
    assert max(line["cpu_utilisation"]) < 60, "asleep, or waiting for the one that is"
    assert line["step_p50_ms"] > 300


def pass_time_by_sleep() -> None:
    """In this process nothing but the sleeps of user_code.py takes time, as far as steps are timed."""
    now = [0.0]
    user_code.time = SimpleNamespace(sleep=lambda seconds: now.append(now[-1] + seconds))  # type: ignore[assignment]
    StepTimer.__init__.__kwdefaults__["clock"] = lambda: now[-1]  # type: ignore[index]


def test_slow_samples_are_data_wait(tmp_path: Path) -> None:
    """Ten samples of a millisecond each in every step."""
    flags: dict[str, Any] = {"save_dir": str(tmp_path / "a"), "max_steps": "9", "log_interval": "3", "batch_size": "10"}
    flags |= {"data": "tests.support.user_code:SlowItems", "num_workers": "0"}
    assert not run_training(1, prepare=pass_time_by_sleep, **flags).error
    line = last_line(tmp_path / "a")
    assert (line["step_ms"], line["data_wait_share"]) == (pytest.approx(10), pytest.approx(1))
    assert line["comm_share"] is None


@pytest.mark.parametrize(
    ("workers", "global_batch"),
    [pytest.param(1, 10, marks=pytest.mark.slow), (1, 25), pytest.param(2, 20, marks=pytest.mark.slow), (2, 15)],
)
def test_samples_that_are_all_alike_have_no_gradient_noise(tmp_path: Path, workers: int, global_batch: int) -> None:
    """Micro-batch and global batch of a step then have the same mean gradient, whatever losses were multiplied by.

    Of the three micro-batches that make 15, rank 0 has one and nothing to compare, and rank 1 has two. With 25 in
    a step the last one of an epoch has 10.
    """
    flags: dict[str, Any] = {"model": "tests.run.test_profile_micro_batch:plain", "lr": 1e-2}
    flags |= {"batch_size": 5, "global_batch_size": global_batch, "max_steps": 12, "log_interval": 2}
    run_training(workers, save_dir=str(tmp_path / "a"), **flags | {"data": "tests.support.user_code:OneSample"})
    line = last_line(tmp_path / "a")
    assert line["noise_scale"] < 1e-4
    assert line["noise_scale_spread"] < 1e-4
    run_training(workers, save_dir=str(tmp_path / "b"), **flags)
    assert last_line(tmp_path / "b")["noise_scale"] > 0.1, "and others have some"


def test_tokens_that_do_not_count_do_not_hide_the_noise(tmp_path: Path) -> None:
    """Half of the tokens count: the loss is divided by all of them at first, and the gradient set right afterwards."""
    flags: dict[str, Any] = {"data": "tests.support.user_code:sentences", "model": "gpt", "task": "language-model"}
    flags |= {"batch_size": 5, "grad_accum_steps": 2, "max_steps": 6, "log_interval": 1, "save_dir": str(tmp_path)}
    run_training(1, **flags, lr=1e-4, sets=["model.depth=1", "model.width=16", "model.heads=2"])
    assert last_line(tmp_path)["noise_scale"] > 0.1


def test_the_numbers_of_learning_are_those_of_plain_torch(tmp_path: Path) -> None:
    """One step on all 60 samples, at a rate that leaves the weights where they were; TensorBoard has the same."""
    flags: dict[str, Any] = {"batch_size": "30", "max_steps": "1", "log_interval": "1", "lr": "1e-30"}
    flags |= {
        "model": "tests.run.test_profile_micro_batch:plain",
        "warmup_epochs": "0",
        "schedule": "constant",
    }
    ended = run_training(2, save_dir=str(tmp_path), weight_decay="0", **flags)
    assert not ended.error
    line = last_line(tmp_path)
    model = plain((6,), 3)
    model.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True)["model"])
    inputs, targets = tensors("train", 42).tensors
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert (line["lr"], line["samples"], line["epoch"]) == (1e-30, 60, 1)
    assert line["samples_per_second"] == pytest.approx(60 / (line["step_ms"] / 1e3))
    assert all(0 < now <= peak for now, peak in zip(line["memory"], ended.summary["peak_memory_bytes"], strict=True))
    board = read_board(tmp_path / "tensorboard")
    tags = board.Tags()
    for tag in ("train/loss", "system/memory/0", "system/memory/1", "system/cpu_utilisation/1", "final/test_loss"):
        assert tag in tags["scalars"]
    assert "custom_scalars__config__" in tags["tensors"]
    files = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert b"_hparams_/session_start_info" in files, "the settings beside the final metrics"
    assert board.Scalars("train/loss")[0].value == pytest.approx(line["loss"])
    assert b"per device" in board.Tensors("plan/text_summary")[0].tensor_proto.string_val[0]


def test_memory_of_a_process_is_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert peak_memory(torch.device("cpu")) == pytest.approx(1024 * int(status["VmHWM"].split()[0]), rel=0.02)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3))
    assert peak_memory(torch.device("cpu")) == 3 * 1024
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    assert peak_memory(torch.device("cuda")) == 5


def test_a_line_is_logged_with_all_that_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, retries = Mock(), Mock()
    monkeypatch.setattr(train_log, "report_skipped_steps", report)
    monkeypatch.setattr(train_log, "_warn_of_retries", retries)
    with prepare_run(tmp_path, log_interval="100") as run:
        run.task.log_fields = fields = Mock(return_value={"more": 7})  # type: ignore[method-assign]
        run.log.console.note = note = Mock()  # type: ignore[method-assign]
        for step, gap, done in ((2, "a gap", False), (4, "", True)):
            run.complete_step()
            run.complete_step()
            run.observer.loss.add(step - 1, 1, {0: torch.tensor(15.0 * step)}, 10)
            run.checkpointer.writer = Mock(is_done=done)
            monkeypatch.setattr(train_log, "describe_missing_gpu_metrics", lambda *_, gap=gap: gap)
            monkeypatch.setattr(train_log, "finish_pending_checkpoint", finish := Mock())
            train_log.log_step(run, StepResult(1, {}, torch.tensor(2.0), torch.zeros(())))
            line = last_line(tmp_path)
            numbers = [line[name] for name in ("step", "epoch", "samples", "loss", "mean_loss", "grad_norm", "more")]
            assert numbers == [step, 1, 10 * step, 1.5 * step, 1.5 * step, 2.0, 7]
            assert finish.called == done
            assert run.observer.watchdog.own.phase == "logging"
            assert fields.call_args.args == (pytest.approx(2 * line["step_ms"] / 1e3),), "seconds since the last line"
        note.assert_called_once_with("a gap")
        assert report.call_count == retries.call_count == 2
        report.assert_called_with(run)
        retries.assert_called_with(run, [])


def test_skipped_steps_are_told_with_the_samples_of_the_last() -> None:
    run = Mock()
    run.plan.batches = BatchPlan(samples=60, micro_batch=5, global_batch=25, workers=1)
    run.loaders.train.sample_order.side_effect = lambda epoch: 100 * epoch + torch.arange(60)
    run.observer.nonfinite.read.return_value = []
    train_log.report_skipped_steps(run)
    assert not run.log_fault.called
    run.observer.nonfinite.read.return_value = [1, 4, 8]
    train_log.report_skipped_steps(run)
    samples, shown = list(range(250, 260)), "of samples 250, 251, 252, 253, 254, 255, 256, 257 …"
    text = f"3 steps skipped: the gradient was NaN or infinite, last in step 9, {shown}"
    run.log_fault.assert_called_once_with("nonfinite", text, samples=samples)
    run.strategy.check_passes.assert_called_once_with()
    run.observer.nonfinite.read.return_value = [7]
    run.observer.nonfinite.check_may_continue.side_effect = TrainingError("too many")
    with pytest.raises(TrainingError) as caught:
        train_log.report_skipped_steps(run)
    assert caught.value.problem == "too many, of samples 225, 226, 227, 228, 229, 230, 231, 232 …"
    assert run.log_fault.call_args.kwargs == {"samples": list(range(225, 250))}
    assert [train_log._first_samples(list(range(count)))[-6:] for count in (8, 9)] == [", 6, 7", "6, 7 …"]


@pytest.mark.parametrize(("units", "real"), [(12, 12), (1, 1), (0, 1)])
def test_the_first_micro_batches_count_by_their_own_samples(units: int, real: int) -> None:
    """Two replicas of two samples begin the last step of an epoch, of 10 samples; three units are expected of each."""
    run = Mock()
    run.plan.batches = BatchPlan(samples=60, micro_batch=2, global_batch=25, workers=1)
    run.progress.step, run.strategy.replicas_per_process = 6, 2
    run.loss_normalizer.divisor, run.loss_normalizer.last = lambda samples: 3 * samples, torch.tensor(units)
    scale = 30 / (real * 4 / 10)
    wanted = ((2 * scale) ** 2 + (4 * scale) ** 2) / 2
    run.observer.noise.value.return_value = None
    rows = [(1.0, 1.0, 1.0, small, 1.0) for small in (2.0, NAN, 4.0)]
    assert train_log.gradient_fields(run, rows, 3.0) == {"grad_norm": 3.0}
    run.observer.noise.add.assert_called_once_with((pytest.approx(wanted), 9.0, 4, 10))
    run.observer.noise.value.return_value = NoiseScale(5.0, 0.5)
    fields = {"grad_norm": 3.0, "noise_scale": 5.0, "noise_scale_spread": 0.5}
    assert train_log.gradient_fields(run, [(1.0, 1.0, 1.0, NAN, 1.0)], 3.0) == fields
    run.observer.noise.add.assert_called_once()


@pytest.mark.parametrize(("peak", "flops", "share"), [(None, 2.0, None), (1e3, None, None), (1e3, 2.0, 2 * 50 / 4e3)])
def test_a_share_of_the_peak_needs_the_peak_and_the_work(
    peak: float | None, flops: float | None, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_log, "peak_flops", lambda *_: peak)
    run = Mock()
    run.observer.timer.step_ms.return_value = {"p50": 3.0, "p95": 4.0}
    run.log.flops_per_sample, run.plan.batches.workers = flops, 4
    wanted = {"step_p50_ms": 3.0, "step_p95_ms": 4.0} | ({"mfu": share} if share else {})
    assert train_log.device_fields(run, 50.0) == wanted
