"""A loop of the user's own, epoch by epoch and step by step, on the engine."""

import atexit
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor import journal
from multigpu_cli.monitor.meters import StepTimer
from tests.monitor.test_meters import Clock
from tests.support.fork import exit_code
from tests.support.interrupted_evaluation import strike, terminate_self
from tests.support.ranks import run_on_each_rank
from tests.support.user_inputs import Points, network, weights
from train_multi_gpu import (
    MultiGPUConfig,
    MultiGPUTrainer,
    MultiGPUTrainingManager,
    PerformanceMonitor,
    TrainingMode,
)

EPOCHS = 3


def config(folder: Path, **more: Any) -> MultiGPUConfig:
    fields: dict[str, Any] = {"batch_size": 4, "global_batch_size": 16, "num_epochs": EPOCHS} | more
    return MultiGPUConfig(screen="silent", save_dir=str(folder), **fields)


def by_epochs(folder: Path, epochs: int = EPOCHS, *, rank: int = 0, finish: bool = True, **more: Any) -> Any:
    """The basic example; what it printed, and the weights."""
    manager = MultiGPUTrainingManager(config(folder, **more))
    model, train_loader, val_loader = manager.setup_training(network(rank), Points(40), val_dataset=Points(10))
    told = []
    for epoch in range(epochs):
        train_metrics = manager.train_epoch(train_loader, epoch)
        val_metrics = manager.validate_epoch(val_loader)
        told.append(f"Epoch {epoch}: Train Loss = {train_metrics['loss']:.4f}, {val_metrics['accuracy']:.3f}")
    end = weights(model)
    if finish:
        assert manager.finish()["status"] == "completed"
    else:
        manager.trainer.close()
    return told, end


def test_epochs_are_the_same_on_any_number_of_ranks_and_after_a_stop(tmp_path: Path) -> None:
    def on_two(world: World) -> Any:
        return by_epochs(tmp_path / "two", rank=world.rank, training_mode="ddp", exact=True)

    alone = by_epochs(tmp_path / "one", exact=True)
    assert run_on_each_rank(2, on_two) == [alone, alone]
    by_epochs(tmp_path / "parts", 2, finish=False, exact=True)
    told, end = by_epochs(tmp_path / "parts", exact=True)
    assert end == alone[1]
    assert told[2] == alone[0][2]


def test_own_loop_resumes_in_an_evaluation(tmp_path: Path) -> None:
    """A signal ends attempts with 75 in an epoch's evaluation, in `setup`, and in one that the loop asks for."""
    told, end = by_epochs(tmp_path / "whole", exact=True)

    def leave(epoch: int, loop: Callable[[], object]) -> None:
        strike("val", epoch, 0, terminate_self)
        with pytest.raises(SystemExit) as ended:
            loop()
        atexit._run_exitfuncs()
        assert ended.value.code == 75

    def validate_after_a_step() -> None:
        trainer = MultiGPUTrainer(config(tmp_path / "run", exact=True))
        _, train_loader, _ = trainer.setup(network(), Points(40), val_dataset=Points(10))
        trainer.train_step(next(iter(train_loader)))
        trainer.validate_epoch()

    for epoch, loop in (
        (1, lambda: by_epochs(tmp_path / "run", exact=True)),
        (1, validate_after_a_step),
        (2, validate_after_a_step),
    ):
        assert exit_code(partial(leave, epoch, loop)) == 0
    resumed_told, resumed_end = by_epochs(tmp_path / "run", exact=True)
    assert (resumed_told[1:], resumed_end) == (told[1:], end)


def test_the_long_form_trains_as_one_process_does(tmp_path: Path) -> None:
    """static_graph with accumulation, a worker that is idle in an epoch's last step, buckets, half precision."""
    long = {"static_graph": True, "bucket_cap_mb": 25, "reduce_bucket_size": 25 * 1024 * 1024, "recovery_timeout": 300}
    half = {"use_fp16_allreduce": True, "fp16_compression": True, "checkpoint_frequency": 1000}
    cut: dict[str, Any] = {"global_batch_size": 12, "training_mode": "ddp", "persistent_workers": True}
    cut["find_unused_parameters"] = False

    def on_two(more: dict[str, Any]) -> Any:
        return run_on_each_rank(
            2, lambda world: by_epochs(tmp_path / f"{len(more)}", rank=world.rank, **cut, **more)[1]
        )

    alone = by_epochs(tmp_path / "one", global_batch_size=12)[1]
    assert on_two(long) == [pytest.approx(alone, abs=1e-6)] * 2
    assert on_two(long | half) == [pytest.approx(alone, abs=1e-3)] * 2


def open_trainer(folder: Path, **more: Any) -> MultiGPUTrainer:
    manager = MultiGPUTrainingManager(config(folder, **more))
    manager.setup_training(network(), Points(40))
    assert manager.trainer.run is not None
    return manager.trainer


def test_what_the_long_form_says_of_ddp_and_loading_reaches_torch(tmp_path: Path) -> None:
    def on_two(world: World) -> Any:
        said: dict[str, Any] = {"static_graph": True, "use_gradient_as_bucket_view": False, "bucket_cap_mb": 3}
        with open_trainer(tmp_path / "two", training_mode="ddp", **said) as trainer:
            ddp = trainer.run.strategy._ddp  # type: ignore[union-attr]
            return ddp.static_graph, ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap / 2**20

    assert run_on_each_rank(2, on_two) == [(True, False, 3)] * 2
    with open_trainer(tmp_path / "one", num_workers=1, prefetch_factor=3) as trainer:
        loader = trainer.run.loaders.train._fetch._loader  # type: ignore[union-attr]
        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)


def test_steps_are_those_of_the_epochs(tmp_path: Path) -> None:
    monitor = PerformanceMonitor()
    monitor.start_monitoring()
    losses = []
    with MultiGPUTrainingManager(config(tmp_path / "steps", settings={"log_interval": 1})) as manager:
        model, train_loader, _ = manager.setup_training(network(), Points(40), val_dataset=Points(10))
        for _ in range(EPOCHS):
            for batch in train_loader:
                outputs = manager.trainer.train_step(batch)
                losses.append(float(outputs["loss"]))
                monitor.record_metrics(outputs["loss"], 16, 1)
        end = weights(model)
        with pytest.raises(RequestError, match="not the next batch"):
            manager.trainer.train_step(batch)
    assert end == by_epochs(tmp_path / "epochs")[1]
    lines = [line for line in journal.read_events(tmp_path / "steps" / "journal.jsonl") if line["event"] == "train"]
    assert losses == pytest.approx([line["loss"] for line in lines])
    assert min(losses) > 0
    summary = monitor.get_summary()
    assert summary["steps"] == EPOCHS * len(train_loader) == 9
    assert summary["avg_throughput"] == pytest.approx(9 * 16 / summary["total_time"])
    assert monitor.plot_metrics(tmp_path / "training_metrics.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_frozen_learns_from_its_epoch_on(tmp_path: Path) -> None:
    """By steps and by epochs, and with DDP's static graph, which is another one from then on."""
    later: dict[str, Any] = {"settings": {"freeze": ["0.*"], "model.unfreeze_at": 3}}
    seen = []
    with MultiGPUTrainingManager(config(tmp_path / "steps", **later)) as manager:
        model, train_loader, _ = manager.setup_training(network(), Points(40), val_dataset=Points(10))
        run = manager.trainer.run
        assert run is not None
        assert {label: len(tensors) for label, tensors in run.frozen.items()} == {"frozen until epoch 3": 2}
        for _ in range(EPOCHS):
            for batch in train_loader:
                manager.trainer.train_step(batch)
                seen.append(weights(model))
    moved = [before[0] != after[0] for before, after in pairwise(seen)]
    assert moved == [False] * 5 + [True] * 3, "in steps 7 to 9, of the third epoch"
    [told] = [event for event in journal.read_events(tmp_path / "steps/journal.jsonl") if event["event"] == "unfreeze"]
    assert (told["step"], told["tensors"], told["parameters"]) == (6, 2, 8 * 6 + 6)
    by_epochs(tmp_path / "epochs", 2, finish=False, **later)
    with MultiGPUTrainingManager(config(tmp_path / "epochs", **later)) as manager:
        model, train_loader, _ = manager.setup_training(network(), Points(40), val_dataset=Points(10))
        run = manager.trainer.run
        assert run is not None
        assert run.frozen == {}, "from step 6 on"
        manager.train_epoch(train_loader, 2)
        assert weights(model) == seen[-1]
    more: dict[str, Any] = {"training_mode": "ddp", "static_graph": True, **later}
    ends = run_on_each_rank(2, lambda world: by_epochs(tmp_path / "two", rank=world.rank, **more)[1])
    assert ends == [pytest.approx(seen[-1], abs=1e-6)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_best_is_kept_where_no_checkpoint_was_due(tmp_path: Path, ranks: int) -> None:
    """A loop without an end, finished when its owner has seen enough; the second epoch's score is made the best."""

    def work(world: World | None) -> Any:
        more: dict[str, Any] = {"num_epochs": None, "checkpoint_frequency": 1000}
        manager = MultiGPUTrainingManager(config(tmp_path / "run", **more))
        model, train_loader, _ = manager.setup_training(network(), Points(40), val_dataset=Points(10))
        run, ends = manager.trainer.run, []
        assert run is not None
        for epoch in range(4):
            manager.train_epoch(train_loader, epoch)
            ends.append(weights(model))
            if epoch == 1:
                run.progress.score = [2.0]
        summary = manager.finish()
        return summary["best"]["step"], ends[1] == weights(model), summary["steps"]

    assert (run_on_each_rank(ranks, work) if ranks > 1 else [work(None)]) == [(6, True, 12)] * ranks
    assert torch.load(tmp_path / "run" / "best.pt", weights_only=True)["metrics"]["step"] == 6


def test_there_is_no_step_beyond_the_end(tmp_path: Path) -> None:
    manager = MultiGPUTrainingManager(config(tmp_path, settings={"max_steps": 4, "schedule": "constant"}))
    model, train_loader, _ = manager.setup_training(network(), Points(40))
    for count in (3, 1):
        for batch in islice(train_loader, count):
            manager.trainer.train_step(batch)
    before = weights(model)
    with pytest.raises(RequestError, match="step 4 was the last"):
        manager.trainer.train_step(replace(batch, number=4))
    assert weights(model) == before
    assert list(train_loader) == []
    assert manager.finish()["steps"] == 4


class Slow(Points):
    """A sample takes a second by the clock that it is given, which otherwise stands still."""

    clock: Clock

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.clock.pass_by(1)
        return super().__getitem__(index)


@pytest.mark.parametrize("by", ["steps", "epochs"])
def test_fetching_is_a_wait_for_data_and_the_time_before_is_no_training(tmp_path: Path, by: str) -> None:
    slow = Slow(32)
    slow.clock = Clock()
    with MultiGPUTrainingManager(config(tmp_path, num_workers=0, settings={"log_interval": 2})) as manager:
        _, train_loader, _ = manager.setup_training(network(), slow)
        run = manager.trainer.run
        assert run is not None
        run.observer.timer = StepTimer(clock=slow.clock)
        slow.clock.pass_by(1000)
        if by == "epochs":
            manager.train_epoch(train_loader)
        for batch in train_loader if by == "steps" else ():
            manager.trainer.train_step(batch)
        assert run.observer.timer.seconds == 32
    line = next(line for line in journal.read_events(tmp_path / "journal.jsonl") if line["event"] == "train")
    assert (line["step"], line["step_ms"], line["samples_per_second"], line["data_wait_share"]) == (2, 16e3, 1, 1)


def test_a_loop_without_an_end_goes_on_for_as_long_as_it_is_called(tmp_path: Path) -> None:
    told, _ = by_epochs(tmp_path, 12, num_epochs=None)
    assert len(told) == 12


def test_the_error_of_a_step_is_noted_and_raised(tmp_path: Path) -> None:
    manager = MultiGPUTrainingManager(config(tmp_path))
    manager.setup_training(network(), Points(40))
    try:
        manager.trainer.train_step((torch.zeros(4, 8), torch.zeros(4)))  # type: ignore[arg-type]
    except RequestError as error:
        with pytest.raises(RequestError, match="not the next batch") as raised:
            manager.fault_tolerance.handle_error(error)
        assert str(tmp_path) in raised.value.__notes__[0]
    manager.trainer.close()
    assert manager.fault_tolerance.errors[0]["kind"] == "RequestError"


def test_examples_of_earlier_documents_say_what_is_missing_here() -> None:
    """Four GPUs, or NCCL, on a machine without: one clear message; the long form's fields all reach the settings."""
    basic = MultiGPUConfig(
        training_mode=TrainingMode.DATA_PARALLEL, device_ids=[0, 1, 2, 3], use_mixed_precision=True, batch_size=32
    )
    several = MultiGPUConfig(
        training_mode=TrainingMode.DISTRIBUTED_DATA_PARALLEL, world_size=8, rank=0, local_rank=0, backend="nccl"
    )
    for each, said in ((basic, "device_ids 0,1,2,3: there is no GPU"), (several, "the address of the other")):
        with pytest.raises(RequestError, match=said):
            MultiGPUTrainingManager(each).setup_training(network(), Points())


def test_a_comparison_lists_what_was_measured() -> None:
    one = {"strategy": "single", "devices": 1, "samples_per_second": 100.0, "train_seconds": 9.0}
    two = one | {"devices": 2, "strategy": "ddp", "samples_per_second": 180.0, "peak_memory_bytes": [2**30, 3 * 2**30]}
    lines = MultiGPUTrainingManager().generate_comparison_report({"one": one, "two": two}).splitlines()
    numbered = MultiGPUTrainingManager()._generate_comparison_report([one, two]).splitlines()
    assert [line.split(" | ", 1)[0] for line in numbered[2:]] == ["| 1", "| 2"]
    assert [line.split(" | ", 1)[1] for line in numbered] == [line.split(" | ", 1)[1] for line in lines]
    assert lines[2:] == ["| one | single | 1 | 100 | 9 | – | – | 1 |", "| two | ddp | 2 | 180 | 9 | – | 3 | 1.8 |"]
    with pytest.raises(TypeError, match="result 2 is of type str"):
        MultiGPUTrainingManager().generate_comparison_report([one, "two"])  # type: ignore[list-item]
