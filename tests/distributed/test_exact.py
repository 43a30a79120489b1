"""--exact end to end: losses, evaluations, weights and optimizer state have the same bits on any number of workers."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import main_multi_gpu
from multigpu_cli.checkpoint.files import is_locked
from multigpu_cli.commands.selftest.process import hash_state
from multigpu_cli.commands.verify import compare_runs
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.engine import fit
from multigpu_cli.engine import run as engine_run
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.finalize import finish_completed
from multigpu_cli.run.open import assemble_run, resolve_request, start_run
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.runtime.arithmetic import compute_checksums
from multigpu_cli.runtime.seeding import enable_determinism
from tests.support import tiny_datasets
from tests.support.ranks import run_on_each_rank
from tests.support.wait_until import wait_until
from tests.support.world import ALONE

SCRIPT = Path(main_multi_gpu.__file__)
WORKERS = (2, 3, 4, 5, 7, 8)
KEPT = ("step", "split", "samples", "loss", "mean_loss", "grad_norm", "lr", "accuracy")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix.

    Attributes:
        global_batch: in micro-batches of 4; 30 makes 8 of them, the last one short.
        samples: of an epoch; its last step is short and leaves workers idle.
    """

    model: str
    data: str = "digits"
    optimizer: str = "adamw"
    amp: str = "off"
    global_batch: int = 30
    samples: int = 73
    steps: int = 4
    more: dict[str, Any] = field(default_factory=dict)

    def settings(self, folder: Path) -> dict[str, Any]:
        wanted = {
            "data": self.data,
            "model": self.model,
            "optimizer": self.optimizer,
            "amp": self.amp,
            "global_batch_size": self.global_batch,
            "batch_size": 4,
            "max_steps": self.steps,
            "warmup_epochs": 0,
            "log_interval": 1,
            "checkpoint_every": "1000",
            "exact": True,
            "trace_samples": True,
            "save_dir": str(folder),
        }
        return wanted | self.more


def shorten(source: DataSource, samples: int) -> DataSource:
    def first(split: Any, count: int) -> TensorDataset:
        return TensorDataset(*(tensor[:count] for tensor in split.tensors))

    return replace(source, train=first(source.train, samples), val=first(source.val, 35), test=first(source.test, 20))


def train(world: World, settings: dict[str, Any], source: DataSource | None = None) -> dict[str, Any]:
    """A whole run by the engine's own parts in this process's world; every line and the bits of its end."""
    config = resolve(settings, [], None)
    choice = Placement("ddp" if world.size > 1 else "single", (world.device,), 0, "a test")
    spec = prepare_spec(config, choice, world, FromConfig(source=source))
    if config.reproducibility.exact:
        enable_determinism()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        components = build_components(spec, world)
        stack.callback(components.loaders.close)
        Path(spec.resume_point.folder).mkdir(parents=True, exist_ok=True)
        watch = Watchdog(world, config.fault.hang_timeout, lambda error: None)
        run = assemble_run(components, Console("silent"), StopRequest(), watch, stack)
        start_run(run, [])
        assert fit(run) == "completed"
        end = hash_state({name: part for name, part in run.state.capture().items() if name != "progress"})
        ending = finish_completed(run)
    return {"end": end, "fingerprint": ending["fingerprint"], "lines": lines(run.folder) if world.is_main else []}


def lines(folder: Path) -> list[dict[str, Any]]:
    """What the journal says of losses and evaluations; of each step, the last line counts."""
    found = {}
    for text in (folder / "journal.jsonl").read_text().splitlines():
        entry = json.loads(text)
        if entry["event"] in ("train", "eval"):
            found[entry["event"], entry["step"], entry.get("split")] = {name: entry.get(name) for name in KEPT}
    return list(found.values())


def several(cells: list[Cell], folder: Path, sources: dict[str, DataSource]) -> Callable[[World], list[dict[str, Any]]]:
    """All cells, one after the other, in one group of workers."""

    def work(world: World) -> list[dict[str, Any]]:
        return [
            train(
                world,
                cell.settings(folder / f"{number}-{world.size}"),
                shorten(sources[cell.data], cell.samples),
            )
            for number, cell in enumerate(cells)
        ]

    return work


def sources(cells: list[Cell]) -> dict[str, DataSource]:
    configs = {cell.data: resolve({"data": cell.data} | cell.more, [], None) for cell in cells}
    return {name: load_data_source(config.data, config.reproducibility.seed) for name, config in configs.items()}


def assert_equal_bits(cells: list[Cell], folder: Path, workers: tuple[int, ...]) -> None:
    opened = sources(cells)
    expected = several(cells, folder, opened)(ALONE)  # here: forked processes then have all modules already
    for size in workers:
        ranks = run_on_each_rank(size, several(cells, folder, opened))
        for number, cell in enumerate(cells):
            where = f"{cell} on {size} workers"
            assert {found[number]["end"] for found in ranks} == {expected[number]["end"]}, where
            assert ranks[0][number] == expected[number], where
            assert len(expected[number]["lines"]) > cell.steps, "losses and evaluations were compared"
            assert trace(folder / f"{number}-{size}") == trace(folder / f"{number}-1"), where


def trace(folder: Path) -> dict[int, list[int]]:
    """step → samples trained, of the last line of each step."""
    found = {}
    for text in (folder / "samples.jsonl").read_text().splitlines():
        with suppress(json.JSONDecodeError):  # torn by a kill
            entry = json.loads(text)
            found[entry["step"]] = entry["samples"]
    return found


def har(folder: Path) -> dict[str, Any]:
    return {"data_dir": str(tiny_datasets.har(folder / "har"))}


def test_equal_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    cells = [
        Cell("mlp", optimizer="sgd", amp="bf16", global_batch=25),  # 7 micro-batches
        Cell("convnet", more={"ema": 0.9, "model.args": {"width": 4}}),
        Cell("har-convnet", data="har", samples=40, global_batch=48, more=har(tmp_path)),
    ]
    assert_equal_bits(cells, tmp_path, (2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["mlp", "convnet", "har-convnet"])
def test_every_model_optimizer_and_format(model: str, optimizer: str, amp: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {"data": "har", "samples": 40, "more": har(tmp_path)} if model == "har-convnet" else {}
    cells = [
        Cell(model, optimizer=optimizer, amp=amp, global_batch=batch, steps=8, **data)
        for batch in (30, 25, 48)  # 8, 7 and 12 micro-batches
    ]
    assert_equal_bits(cells, tmp_path, WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resnet18(optimizer: str, amp: str, tmp_path: Path) -> None:
    cells = [Cell("resnet18", optimizer=optimizer, amp=amp, steps=3)]
    assert_equal_bits(cells, tmp_path, WORKERS)


def test_without_it_three_workers_have_other_bits(tmp_path: Path) -> None:
    """The control: or the tests above could not fail."""
    plain: dict[str, Any] = {"exact": False}
    cells = [Cell("mlp", steps=2, more=plain), Cell("convnet", steps=2, more=plain | {"model.args": {"width": 4}})]
    opened = sources(cells)
    ends = {1: [found["end"] for found in several(cells, tmp_path / "1", opened)(ALONE)]}
    for size in (3, 4):
        first, *others = run_on_each_rank(size, several(cells, tmp_path / str(size), opened))
        assert all(found == [part | {"lines": []} for part in first] for found in others), "replicas are identical"
        ends[size] = [part["end"] for part in first]
    for number in range(len(cells)):
        assert ends[1][number] != ends[3][number]
        assert ends[1][number] != ends[4][number]


LONG = {"model": "mlp", "epochs": 2, "batch_size": 6, "global_batch_size": 30, "checkpoint_every": "7", "exact": True}
LONG |= {"trace_samples": True, "log_interval": 1, "optimizer": "adamw", "lr": 1e-3}
TOTAL = 2 * 42  # optimizer steps: 1,258 samples


@contextmanager
def working(size: int, config: Config) -> Iterator[list[Any]]:
    """The engine in so many forked processes, as a launcher would start it; whoever is left is killed at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    fork, device = get_context("fork"), torch.device("cpu")

    def rank(number: int) -> None:
        launch_env = None
        if size > 1:
            place: dict[str, Any] = {"rank": number, "size": size, "local_rank": number, "local_size": size}
            launch_env = LaunchEnv(**place, address="localhost", port=port, attempt=0, agent_store=False)
        choice = Placement("ddp" if launch_env else "single", (device,), 0, "a test")
        opening = resolve_request(config, choice, launch_env, Console("silent"), lambda error: None, FromConfig())
        with opening as request:
            engine_run(request)
        os._exit(0)

    processes = [fork.Process(target=rank, args=(number,), daemon=True) for number in range(size)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def steps_done(folder: Path) -> int:
    file = folder / "samples.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at(step: int, size: int, config: Config, folder: Path) -> None:
    """Train until some step, and then all ranks are gone at once."""
    before = steps_done(folder)
    with working(size, config) as processes:
        wait_until(
            lambda: steps_done(folder) - before >= step, f"{step} steps on {size} workers", seconds=120, every=0.002
        )
        assert all(process.is_alive() for process in processes), "it was over before it could be killed"
    assert not (folder / "summary.json").exists()


def finish_run(size: int, config: Config, folder: Path) -> dict[str, Any]:
    with working(size, config) as processes:
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * size
    return dict(json.loads((folder / "summary.json").read_text()))


def assert_same_run(disturbed: Path, undisturbed: Path) -> None:
    """The same samples in every step, each as often as it should be, and the same bits at the end."""
    assert trace(disturbed) == trace(undisturbed)
    assert set(trace(disturbed)) == set(range(1, TOTAL + 1))
    times = Counter(sample for samples in trace(disturbed).values() for sample in samples)
    assert times == dict.fromkeys(range(1258), 2)
    found = compare_runs(str(disturbed), str(undisturbed))
    assert (found.same, found.parting) == (True, None), found
    assert found.lines > TOTAL


def test_another_machine_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    cell = Cell("mlp", steps=1).settings(folder)
    train(ALONE, cell, shorten(load_data_source(Config().data, 42), 30))
    journal = (folder / "journal.jsonl").read_bytes()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    with pytest.raises(RequestError, match=r"started with device cpu with .*, here it is cpu with ANOTHER"):
        train(ALONE, cell | {"max_steps": 2}, shorten(load_data_source(Config().data, 42), 30))
    monkeypatch.undo()
    # the name is the same, and the arithmetic is not
    compute = functional.conv2d
    monkeypatch.setattr(functional, "conv2d", lambda *inputs, **more: compute(*inputs, **more) * (1 + 2**-22))
    compute_checksums.cache_clear()
    with pytest.raises(RequestError, match=r"checksum of convolutions \w{12}, here it is \w{12}") as refused:
        train(ALONE, cell | {"max_steps": 2}, shorten(load_data_source(Config().data, 42), 30))
    assert "products" not in str(refused.value)
    monkeypatch.undo()
    compute_checksums.cache_clear()
    assert (folder / "journal.jsonl").read_bytes() == journal
    train(ALONE, cell | {"max_steps": 2}, shorten(load_data_source(Config().data, 42), 30))


@pytest.mark.parametrize(
    "chain", [(4, 2, 1), *(pytest.param(chain, marks=pytest.mark.slow) for chain in ((2, 1), (3, 8, 5)))], ids=str
)
def test_killed_and_finished_on_other_workers_is_the_undisturbed_run(chain: tuple[int, ...], tmp_path: Path) -> None:
    draws = random.Random(sum(chain))
    configs = [resolve(LONG | {"save_dir": str(tmp_path / name)}, [], None) for name in ("alone", "chain")]
    finish_run(1, configs[0], tmp_path / "alone")
    for size in chain[:-1]:
        kill_at(draws.randrange(10, 30), size, configs[1], tmp_path / "chain")
    summary = finish_run(chain[-1], configs[1], tmp_path / "chain")
    assert summary["resumed_from"] is not None
    assert_same_run(tmp_path / "chain", tmp_path / "alone")


@pytest.mark.slow
def test_a_chain_of_kills_through_the_front_door(tmp_path: Path) -> None:
    """4 workers, then 2, then 1; it is the agent that is killed, and its workers must go with it."""
    draws, folder = random.Random(1), tmp_path / "chain"
    flags = [word for key, value in LONG.items() for word in (f"--{key.replace('_', '-')}", *words(value))]

    def command(size: int, home: Path) -> subprocess.Popen[bytes]:
        launch = ["--multi-gpu", "ddp", "--nproc-per-node", str(size), "--quiet", "--save-dir", str(home)]
        return subprocess.Popen([sys.executable, str(SCRIPT), *flags, *launch], cwd=tmp_path)

    for size in (4, 2):
        before = steps_done(folder)
        with command(size, folder) as process:
            least = draws.randrange(10, 25)
            wait_until(
                partial(has_grown, folder, before + least), f"{least} steps on {size} workers", seconds=120, every=0.002
            )
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_locked(folder), "the workers have outlived their agent", seconds=120)
        assert not (folder / "summary.json").exists()
    assert [command(1, home).wait(300) for home in (folder, tmp_path / "alone")] == [0, 0]
    assert_same_run(folder, tmp_path / "alone")


def has_grown(folder: Path, least: int) -> bool:
    return steps_done(folder) >= least


def words(value: object) -> list[str]:
    return [] if value is True else [str(value)]
