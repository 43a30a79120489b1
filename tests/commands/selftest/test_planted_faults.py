"""selftest names each of sixteen faults, planted one at a time in a copy of the package, whose workers it starts.

`make test` plants two at once, and forks the workers.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import main_multi_gpu
from tests.support.fork import exit_code

ROOT = Path(main_multi_gpu.__file__).parent
PACKAGE = ROOT / "multigpu_cli"
OWN_CODE = """
import torch
from torch.utils.data import TensorDataset

def images():
    return TensorDataset(torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3)

class Sequences(torch.nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.attend = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attend(x.squeeze(1)).mean(1))

def build(input_shape, num_classes, batch_first):
    return Sequences(batch_first)
"""
COPIED = ("main_multi_gpu", "multigpu_cli", "tests", "train_multi_gpu")
# An epoch ends with two micro-batches, which leave one of the three workers without any.
SETTINGS = ("--data", "own:images", "--batch-size", "4", "--nproc-per-node", "3", "--ema", "0.9", "--json")
CONVNET = ("--model", "convnet", "--set", "model.args={width: 4, stages: 1, dropout: 0.5}")
MIXED = "a sample's output does not depend on the others"
SAME_BITS = "--exact gives the same bits on one worker and on several"
RESUMED = "a resumed run equals the uninterrupted one"
SHARDED = "--multi-gpu fsdp has the loss and gradients of one worker"
SHARDED_BITS = "and together with --exact its bits"


class Plant(NamedTuple):
    """A fault.

    Attributes:
        check: the line of selftest that fails.
        edits: file, its text, and the text in its place.
    """

    check: str
    edits: tuple[tuple[str, str, str], ...]


def plant(check: str, *edits: tuple[str, str, str]) -> Plant:
    return Plant(check, edits)


PLANTS = {
    "a run resumed in the middle of an epoch goes on in another order": plant(
        RESUMED,
        (
            "data/loader.py",
            "        order = self._keyed_order(epoch)\n",
            "        order = self._keyed_order(epoch + (1000 if start else 0))\n",
        ),
    ),
    "fsdp clips by each rank's own rows": plant(
        SHARDED, ("strategies/fsdp/fsdp.py", "norm = total.sqrt().to(local.dtype)", "norm = local")
    ),
    "fsdp leaves BatchNorm's statistics where they are": plant(
        SHARDED,
        (
            "strategies/fsdp/fsdp.py",
            "        self._buffers.apply_mean_change(summed)\n",
            "        if summed is not None:\n            self._buffers.apply_mean_change(summed)\n",
        ),
    ),
    "all epochs have one order": plant(
        "each epoch has each sample once, in its own order",
        ("data/order.py", "shuffle_numbers(count, seed, epoch)", "shuffle_numbers(count, seed, 0)"),
    ),
    "buffers are not shared": plant(
        "replicas are identical after the last step",
        ("strategies/buffers.py", "self._total(torch.cat(sent)).split", "torch.cat(sent).split"),
    ),
    "dropout is seeded by rank": plant(
        "the gradient of the first step is that of one worker",
        (
            "engine.py",
            "seed_micro_batch(seed, layout.step, batch.micro",
            "seed_micro_batch(seed + run.world.rank, layout.step, batch.micro",
        ),
    ),
    "the loss is divided by the worker's own count": plant(
        "and that of an epoch's last short batch",
        (
            "engine.py",
            "divisor(layout.samples)",
            "divisor(run.world.size * sum(stop - start for _, start, stop in layout.passes))",
        ),
    ),
    "an evaluation leaves out a batch": plant(
        "an evaluation counts each sample once",
        (
            "data/loader.py",
            "range(count * rank // workers, count * (rank + 1) // workers)",
            "range(count // workers * rank, count // workers * (rank + 1))",
        ),
    ),
    "the optimizer's state is lost at a resume": plant(
        RESUMED, ("checkpoint/snapshot.py", '        self.optimizer.load_state_dict(state["optimizer"])\n', "")
    ),
    "a padding pass weighs something": plant(
        SHARDED, ("strategies/fsdp/fsdp.py", "(self._padding() * 0)", "(self._padding() * 1e-3)")
    ),
    "the average is not restored": plant(
        RESUMED,
        (
            "checkpoint/snapshot.py",
            '        if self.average:\n            self.average.load_state_dict(state["average"])\n',
            "",
        ),
    ),
    "fsdp does not update the average": plant(
        SHARDED_BITS, ("engine.py", "    if state.average:\n", "    if state.average and not run.strategy.sharded:\n")
    ),
    "an epoch's last step runs on into the next epoch": plant(
        "each epoch has each sample once, in its own order",
        ("planning/batch.py", "min(self.global_batch, self.samples - step * self.global_batch)", "self.global_batch"),
        (
            "data/loader.py",
            "        order = self._keyed_order(epoch)\n",
            "        order = torch.cat([self._keyed_order(epoch)[:], self._keyed_order(epoch + 1)[:]])\n",
        ),
    ),
    "the learning rate's schedule begins anew at a resume": plant(
        RESUMED,
        (
            "engine.py",
            "    run.set_learning_rates(layout.step)\n",
            "    run.__dict__['since'] = run.__dict__.get('since', layout.step * 0 - 1) + 1\n"
            "    run.set_learning_rates(run.__dict__['since'])\n",
        ),
    ),
    "the average moves with each micro-batch": plant(
        SAME_BITS,
        (
            "engine.py",
            "        units.append(run.task.units(batch))\n",
            "        units.append(run.task.units(batch))\n"
            "        if state.average:\n            state.average.update_parameters(state.model)\n",
        ),
    ),
    "fsdp counts what a padding pass changes in BatchNorm": plant(
        SHARDED,
        (
            "strategies/fsdp/fsdp.py",
            "self._buffers.abort_step()  # what this pass alone has",
            "self._buffers.collect()  #",
        ),
    ),
}


def make_copy(home: Path, *plants: Plant) -> None:
    """A copy of the package with these faults, and OWN_CODE."""
    shutil.copytree(PACKAGE, home / "multigpu_cli")
    shutil.copy(ROOT / "main_multi_gpu.py", home)
    (home / "own.py").write_text(OWN_CODE)
    for file, text, wrong in (edit for each in plants for edit in each.edits):
        path = home / "multigpu_cli" / file
        path.write_text(path.read_text().replace(text, wrong))


def run_selftest(home: Path, *plants: Plant, model: Sequence[str] = CONVNET) -> tuple[int, dict[str, Any]]:
    """Exit code and findings of the command, in a copy of the package with these faults."""
    make_copy(home, *plants)
    words = [sys.executable, str(home / "main_multi_gpu.py"), "selftest", *SETTINGS, *model]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(words, cwd=home, env=environ, capture_output=True, text=True, timeout=300)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def run_forked(home: Path) -> None:
    """The command of the copy, in a fork of this process and with forked workers: torch is imported already."""
    os.chdir(home)
    sys.path.insert(0, str(home))
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    door: Any = import_module("main_multi_gpu")
    selftest: Any = import_module("multigpu_cli.commands.selftest.selftest")
    forks = import_module("tests.commands.selftest.test_selftest")
    selftest.run_in_workers = lambda placement, _, config, folder: forks.in_forks(config, placement, folder)
    with open(home / "said.json", "w") as file, redirect_stdout(file):
        code = door.run(["selftest", *SETTINGS, *CONVNET])
    assert (code, Path(door.__file__).parent) == (1, home)


def list_failing(report: dict[str, Any]) -> list[str]:
    return [verdict["check"] for verdict in report["verdicts"] if verdict["holds"] is False]


def test_each_plant_still_has_its_place() -> None:
    for name, each in PLANTS.items():
        for file, text, _ in each.edits:
            assert (PACKAGE / file).read_text().count(text) == 1, f"{name}: {file} has changed"


def test_two_faults_are_found_and_nothing_else(tmp_path: Path) -> None:
    order, clipping, *_ = PLANTS.values()
    make_copy(tmp_path, order, clipping)
    before = {path.name for path in tmp_path.iterdir()}
    assert exit_code(lambda: run_forked(tmp_path)) == 0
    assert list_failing(json.loads((tmp_path / "said.json").read_text())) == [order.check, clipping.check]
    assert {path.name for path in tmp_path.iterdir()} - before - {"__pycache__"} == {"said.json"}


@pytest.mark.slow
def test_without_a_plant_all_holds(tmp_path: Path) -> None:
    code, report = run_selftest(tmp_path)
    assert (code, list_failing(report)) == (0, [])
    assert None not in [verdict["holds"] for verdict in report["verdicts"]]


@pytest.mark.slow
@pytest.mark.parametrize(("batch_first", "failing"), [("false", [MIXED]), ("true", [])])
def test_a_network_that_takes_the_batch_for_time_is_found(batch_first: str, failing: list[str], tmp_path: Path) -> None:
    model = ("--model", "own:build", "--set", f"model.args.batch_first={batch_first}")
    code, report = run_selftest(tmp_path, model=model)
    assert (code, list_failing(report)) == (len(failing), failing)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_is_found(name: str, tmp_path: Path) -> None:
    code, report = run_selftest(tmp_path, PLANTS[name])
    assert code == 1
    assert PLANTS[name].check in list_failing(report)
