"""The names of the Python API, imported from where docs/migration.md says, and used as it says."""

import inspect
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train_multi_gpu
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor import gpu
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.speedup import ASSUMED, Interconnect, StepTimes, buckets, forecast
from tests.support.fake_nvml import Nvml, a100
from tests.support.ranks import run_on_each_rank
from tests.support.user_inputs import Points, loader, network

ROOT = Path(__file__).resolve().parents[1]
NAMES = """MultiGPUConfig, TrainingMode, MultiGPUTrainer, DataParallelTrainer, DistributedDataParallelTrainer,
    MultiGPUTrainingManager, MetricsCollector, PerformanceMonitor, FaultToleranceManager, get_gpu_info, print_gpu_info,
    setup_multi_gpu_training, setup_data_parallel, setup_distributed_data_parallel, train_with_multi_gpu,
    evaluate_with_multi_gpu, get_multi_gpu_status, log_training_metrics, get_multi_gpu_metrics, cleanup_distributed,
    clear_gpu_memory, optimize_batch_size_for_multi_gpu, launch_distributed_training, estimate_training_speedup,
    print_training_speedup_estimates, train"""

OURS = {"drop_last", "num_epochs", "learning_rate", "max_restarts", "save_dir", "seed", "exact", "screen", "settings"}
OURS |= {"batch_size", "global_batch_size"}
"""Fields that earlier documents don't have, or that speak for themselves."""


def test_every_name_is_there_and_says_what_it_does() -> None:
    for name in NAMES.replace("\n", " ").split(","):
        assert getattr(train_multi_gpu, name.strip()).__doc__, name
        assert name.strip() in dir(train_multi_gpu)
        assert "*args" not in str(inspect.signature(getattr(train_multi_gpu, name.strip()))), name
    with pytest.raises(RequestError, match="a MultiGPUConfig is not a Config\n  try: train_with_multi_gpu"):
        train_multi_gpu.train(train_multi_gpu.MultiGPUConfig())  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        train_multi_gpu.__getattr__("trian")


def test_a_star_import_gives_the_api_and_nothing_else() -> None:
    given: dict[str, Any] = {}
    exec("from train_multi_gpu import *", given)
    assert given.keys() - {"__builtins__"} == {*(name.strip() for name in NAMES.split(",")), "multi_gpu_trainer"}
    assert train_multi_gpu.__version__ == version("multigpu-cli")


def test_cublas_gets_its_workspace_before_any_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads it once, at a process's first product on a GPU: a run with --exact that comes later is refused."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    runpy.run_path(str(ROOT / "train_multi_gpu.py"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    runpy.run_path(str(ROOT / "train_multi_gpu.py"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's own"


def test_windows_is_refused_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"needs Linux, .* WSL"):
        runpy.run_path(str(ROOT / "train_multi_gpu.py"))
    with pytest.raises(SystemExit, match=r"error: this program needs Linux.*\n  try: WSL"):
        runpy.run_path(str(ROOT / "main_multi_gpu.py"))


def test_the_migration_page_says_of_every_name_and_field_what_it_does_here() -> None:
    table = (ROOT / "docs/migration.md").read_text()
    told = {word for row in table.splitlines() for word in re.findall(r"\w+", row)}
    asked = {entry.name for entry in fields(train_multi_gpu.MultiGPUConfig)} - OURS
    names = {name.strip() for name in NAMES.split(",")}
    assert not (names | asked) - told


def test_importing_it_loads_nothing_that_only_some_runs_need() -> None:
    code = "import torch, sys; before = {*sys.modules}; import train_multi_gpu; print(*sys.modules.keys() - before)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("multigpu_cli.") for name in result.stdout.split()}
    rooms = {"api", "environments.base", "rl.task", "tasks.own_loss", "language.hugging_face", "language.text"}
    rooms |= {"strategies.ddp", "strategies.exact", "distributed.rendezvous", "data.fetcher", "data.images.mixing"}
    rooms |= {"monitor.tensorboard", "config.yaml_text"}
    assert all(find_spec(f"multigpu_cli.{name}") for name in rooms), "a name is out of date"
    assert not loaded & (rooms | {"yaml", "tqdm", "rich", "tensorboard", "matplotlib", "sklearn", "pynvml"})
    light = {"torch.utils.flop_counter", "torch.utils.module_tracker"}  # two milliseconds, for the base of a class
    assert {name for name in loaded if name.startswith("torch.")} <= light
    assert {"engine", "run.assembly.assemble", "strategies.base"} <= loaded


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs gets")
def test_usage_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train_multi_gpu.MultiGPUTrainer()
    model, success, gpu_info = trainer.setup_multi_gpu_training(network(), strategy="auto")
    assert (success, gpu_info["gpu_count"], trainer.current_strategy) == (False, 0, None)
    assert train_multi_gpu.setup_data_parallel(model) == (model, False)
    with pytest.raises(RequestError, match="device_ids 0,1: there is no GPU 0,1"):
        trainer.setup_data_parallel(model, device_ids=[0, 1])
    trainer.log_training_metrics(
        epoch=0, step=100, loss=0.5, learning_rate=0.001, gpu_utilization={"gpu_0": 0.8, "gpu_1": 0.7}
    )
    assert trainer.get_multi_gpu_metrics()["training_metrics"]["epoch_0"][0]["loss"] == 0.5
    status = train_multi_gpu.get_multi_gpu_status()
    assert (status["multi_gpu_available"], status["gpu_info"]["gpu_count"]) == (False, 0)
    train_multi_gpu.print_gpu_info()
    assert "no GPU is visible" in capsys.readouterr().out
    train_multi_gpu.clear_gpu_memory()
    train_multi_gpu.cleanup_distributed()


@pytest.mark.parametrize(
    ("cards", "hidden", "said"),
    [
        (
            [a100(), a100()],
            None,
            "NVML sees 2 GPUs here (NVIDIA A100-SXM4-40GB), torch none: driver 470.82 runs CUDA up",
        ),
        ([a100()], "", ""),
        ([a100()], "NoDevFiles", ""),
        ([], None, ""),
    ],
    ids=["there", "hidden on purpose", "not asked of SLURM", "none"],
)
def test_gpus_that_torch_does_not_see_are_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cards: list[Any],
    hidden: str | None,
    said: str,
) -> None:
    """A driver that is too old for this torch would end as "no GPU found"."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "open_nvml", lambda: Nvml(cards, driver="470.82", cuda=11040))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    train_multi_gpu.train(resolve({"save_dir": str(tmp_path)}, [], None), dry_run=True)
    out = capsys.readouterr().out
    assert "no GPU found" in out
    assert said in out
    assert ("warning" in out) == bool(said)


def test_a_wrapped_model_trains_in_the_group_that_is_there(tmp_path: Path) -> None:
    def work(world: World) -> list[bool]:
        model, success = train_multi_gpu.setup_distributed_data_parallel(network(world.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = train_multi_gpu.train_with_multi_gpu(
            model,
            loader(),
            optimizer,
            nn.CrossEntropyLoss(),
            num_epochs=1,
            strategy="DistributedDataParallel",
            save_dir=str(tmp_path),
            screen="silent",
        )
        return [success, isinstance(model, DistributedDataParallel), results["success"]]

    assert run_on_each_rank(2, work) == [[True, True, True]] * 2


def test_the_functions_share_the_state_of_the_global_trainer() -> None:
    train_multi_gpu.multi_gpu_trainer.log_training_metrics(epoch=7, step=1, loss=0.5, learning_rate=0.1)
    assert train_multi_gpu.get_multi_gpu_status()["training_metrics"]["epoch_7"][0]["loss"] == 0.5


def test_batch_sizes_and_forecasts(capsys: pytest.CaptureFixture[str]) -> None:
    found = train_multi_gpu.optimize_batch_size_for_multi_gpu(32, 4, "DataParallel")
    assert (found["effective_batch_size"], found["batch_per_gpu"], found["scaling_factor"]) == (128, 32, 4)
    measured: dict[str, Any] = {"forward_seconds": 0.01, "backward_seconds": 0.02}
    measured |= {"parameters": 10_000_000, "batch_size": 32}
    rows = train_multi_gpu.estimate_training_speedup(4, **measured)
    assert [row["workers"] for row in rows] == [1, 4]
    assert 3 < rows[1]["speedup"] <= 4
    work = StepTimes(0.0, 0.01, 0.02, 0.0, buckets(40_000_000))
    base = BatchPlan(samples=10**6, micro_batch=32, global_batch=32, workers=1)
    same = forecast([4], [work], Interconnect(ASSUMED["nvlink4"]), base, 1, grows=True)
    assert (rows[1]["step"], rows[1]["waiting"]) == (same[0].step, same[0].waiting), "plan's own arithmetic"
    slow = train_multi_gpu.estimate_training_speedup(4, wire="ethernet-25", **measured)
    assert slow[1]["speedup"] < rows[1]["speedup"]
    with pytest.raises(RequestError, match="num_gpus=0, batch_size=32: at least 1"):
        train_multi_gpu.estimate_training_speedup(0, **measured)
    train_multi_gpu.MultiGPUTrainer().print_training_speedup_estimates((1, 2), **measured)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_speedup_table_shows_costs_if_a_price_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    measured: dict[str, Any] = {
        "forward_seconds": 0.01,
        "backward_seconds": 0.02,
        "parameters": 10**7,
        "batch_size": 32,
    }
    train_multi_gpu.print_training_speedup_estimates((1, 2), price=36.0, **measured)
    heading, *rows = capsys.readouterr().out.splitlines()
    forecast = train_multi_gpu.estimate_training_speedup((1, 2), price=36.0, **measured)
    assert "cost" in heading
    assert [float(row.split()[-1]) for row in rows] == [pytest.approx(row["cost"], abs=0.01) for row in forecast]


def test_copies_that_srun_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train, evaluate, or start processes, alone."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    config, model = train_multi_gpu.MultiGPUConfig(screen="silent"), network()
    for ask in (
        lambda: train_multi_gpu.train_with_multi_gpu(model, loader(), screen="silent"),
        lambda: train_multi_gpu.evaluate_with_multi_gpu(model, loader(), screen="silent"),
        lambda: train_multi_gpu.MultiGPUTrainer(config).setup(model, Points()),
        lambda: train_multi_gpu.setup_multi_gpu_training(model),
        lambda: train_multi_gpu.launch_distributed_training(print, 2),
    ):
        with pytest.raises(RequestError, match="srun started 2 tasks"):
            ask()


@pytest.mark.slow
def test_a_function_is_launched_on_several_processes() -> None:
    assert train_multi_gpu.launch_distributed_training(divmod, 2, 7, 3) == [(2, 1), (2, 1)]
