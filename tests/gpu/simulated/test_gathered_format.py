"""FSDP with --amp bf16 gathers weights in bf16: what it saves is counted, and what it does to the numbers is small."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multigpu_cli import engine
from multigpu_cli.checkpoint.manifest import read_manifest
from multigpu_cli.distributed.world import World
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.models.networks.gpt import GPT
from multigpu_cli.monitor import journal
from multigpu_cli.run.request import spec
from multigpu_cli.runtime.precision import Precision
from multigpu_cli.strategies.fsdp import fsdp
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from tests.gpu.in_process import count_gathers
from tests.gpu.simulated.gpus import each_rank, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine

SMALL = ["model.args.depth=1", "model.args.heads=2", "model.args.width=32"]
RUN: dict[str, Any] = {
    "data": "tests.support.user_code:sentences",
    "model": "gpt",
    "task": "language-model",
    "sets": SMALL,
    "amp": "bf16",
    "lr": 0.01,
    "batch_size": 10,
    "global_batch_size": 20,
    "epochs": 9,
    "schedule": "constant",
    "warmup_epochs": 0,
    "log_interval": 1,
    "multi_gpu": "fsdp",
}
STEADY = 2


def record_gathers(file: Path, *, old: bool = False) -> Callable[[Simulated], None]:
    """Write down the bytes that a step gathers; `old`: as a program that knew no other format than the weights'."""

    def prepare(sim: Simulated) -> None:
        real = engine.train_step

        def step(run: Any, layout: Any, work: Any) -> Any:
            with count_gathers() as seen:
                outcome = real(run, layout, work)
            if layout.step == STEADY and run.world.is_main:
                file.write_text(json.dumps(sum(seen)))
            return outcome

        engine.train_step = step
        if old:
            patch.object(fsdp, "choose_param_dtype", lambda *_: "fp32").start()
            patch.multiple(spec, RESOLVED=("bucket_cap_mb",), BEFORE_PINNED={}).start()

    return prepare


def train(folder: Path, steps: int, workers: int = 2, *, old: bool = False) -> tuple[int, list[float], str | None]:
    """Bytes gathered in a step, the loss of each, and the format that the last checkpoint pins."""
    file, flags = folder / "bytes.json", RUN | {"save_dir": str(folder / "run"), "max_steps": steps}
    folder.mkdir(exist_ok=True)
    ended = train_on_gpus(workers, machine=Machine.of(workers), prepare=record_gathers(file, old=old), **flags)
    assert ended.error == ""
    losses = [event["loss"] for event in journal.read_events(folder / "run/journal.jsonl") if event["event"] == "train"]
    pins = read_manifest(folder / f"run/checkpoints/step_{steps:08d}")["pins"]
    return json.loads(file.read_text()) if file.exists() else 0, losses, pins.get("strategy.param_dtype")


def test_a_run_gathers_half_the_bytes_and_an_older_one_goes_on_as_it_was(tmp_path: Path) -> None:
    halved, losses, pinned = train(tmp_path / "new", 3)
    assert pinned == "bf16"
    assert train(tmp_path / "old", 1, old=True)[2] is None
    whole, before, still = train(tmp_path / "old", 3)
    assert still == "fp32"
    assert (whole, len(losses), len(before)) == (2 * halved, 3, 3)
    assert halved > 0
    assert losses == pytest.approx(before, rel=0.02), "norms and embeddings are rounded to eight bits"
    assert train(tmp_path / "three", 3, 3)[1] == pytest.approx(losses, rel=2e-3), "alike on any number of workers"


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    flags = {"sets": ["strategy.param_dtype=bf16"], "exact": True, "data": "digits", "model": "mlp", "task": None}
    ended = train_on_gpus(2, machine=Machine.of(2), **RUN | flags | {"save_dir": str(tmp_path / "run")})
    assert ended.kind == "RequestError"
    assert "strategy.param_dtype bf16: it needs GPUs, --amp bf16 without --exact" in ended.error
    assert not (tmp_path / "run").exists()


def test_no_copies_of_weights_wait_for_the_backward_pass() -> None:
    """Autocast keeps one of each; of gathered blocks nothing is left, nor of any in a pass that has no backward."""
    blocks = 4 * 12 * 256**2

    def work(sim: Simulated, world: World) -> dict[str, int]:
        found, embedded = {}, list[torch.dtype]()
        for name, dtype, learns in (
            ("cast", None, True),
            ("gathered", torch.bfloat16, True),
            ("evaluated", None, False),
        ):
            model = GPT((4,), 8, depth=4, heads=2, width=256).to(world.device)
            strategy = FSDP2(model, world, blocks=find_blocks_to_wrap(model), param_dtype=dtype)
            model.tokens.register_forward_hook(lambda *passed: embedded.append(passed[-1].dtype))
            model.get_submodule("blocks.0").register_forward_pre_hook(lambda _, given: embedded.append(given[0].dtype))
            before = sim.device.memory(world.rank)["allocated"]
            precision = Precision("bf16", world.device)
            precision.keeps_casts = strategy.keeps_casts
            with torch.set_grad_enabled(learns), precision.autocast():
                logits = strategy.callable(torch.arange(4, device=world.device)[None])
                # gloo's thread lets go of what it has sent a moment later
                until = time.monotonic() + (0 if name == "cast" else 30)
                while sim.device.memory(world.rank)["allocated"] - before > blocks / 5 and time.monotonic() < until:
                    time.sleep(0.01)
                found[name] = sim.device.memory(world.rank)["allocated"] - before
            if learns:
                logits.float().sum().backward()
        assert embedded == [torch.float32] * 6, "what the layers add to"
        return found

    for found in each_rank(2, work, Machine.of(2)):
        assert found["cast"] > 2 * blocks
        assert max(found["gathered"], found["evaluated"]) < 2 * blocks / 10


class Sometimes(nn.Module):
    """A block of two layers, of which a pass uses the second one for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.always(inputs)
        return self.sometimes(found) if inputs[0, 0] > 0 else found


def test_sums_of_several_passes_are_of_one_format_whatever_each_used() -> None:
    def add_passes(used: tuple[bool, ...], dtype: torch.dtype | None, world: World) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(Sometimes(), Sometimes()).to(world.device)
        strategy = FSDP2(model, world, blocks=find_blocks_to_wrap(model), param_dtype=dtype)
        inputs = torch.rand(2, 3, 4, device=world.device) + 0.1
        targets = torch.zeros(3, dtype=torch.int64, device=world.device)

        def loss(number: int) -> Tensor:
            with Precision("bf16", world.device).autocast():
                signed = inputs[number] if used[number] else -inputs[number]
                return cross_entropy(strategy.callable(signed).float(), targets)

        strategy.warm_up(lambda: loss(0))
        strategy.begin_step(4)
        for number in range(2):
            with strategy.accumulate(last=number == 1):
                loss(number).backward()
            assert number == 1 or len(strategy.local_gradients()) > 1
        strategy.reduce_gradients(idle=False)
        gradients = [row.grad for row in strategy.local_parameters if row.grad is not None]
        return torch.cat([gradient.flatten() for gradient in gradients]).tolist()

    def work(sim: Simulated, world: World) -> list[tuple[list[float], list[float]]]:
        cases = (True, False), (False, True), (False, False)
        return [(add_passes(used, None, world), add_passes(used, torch.bfloat16, world)) for used in cases]

    for found in each_rank(2, work, Machine.of(2)):
        for expected, gathered in found:
            assert gathered == pytest.approx(expected, rel=0.05, abs=0.02)
