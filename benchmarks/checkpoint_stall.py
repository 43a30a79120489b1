"""What a checkpoint costs the loop: the stall of an asynchronous one against a synchronous torch.save with fsync.

    python -m benchmarks.checkpoint_stall --megabytes 100 --pairs 9 --folder .

Both save the same state (a perceptron and its AdamW) in turn, in the same process, so that a noisy machine disturbs
both alike. Prints medians: of the stall (for which the loop stands still), of the synchronous save, of their ratio in
each pair, of a training step alone and while the writer is at work (it takes CPU, and now and then the interpreter's
lock); and by how much memory grows at the most, in units of the state.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multigpu_cli.checkpoint.snapshot import Progress, TrainState, Writer
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.optimizers.build import build_optimizer
from multigpu_cli.runtime.precision import Precision

_LAYERS = 8

Step = Callable[[Writer], None]


def learner(megabytes: float, device: torch.device) -> tuple[TrainState, Step]:
    """Something whose state has this size, and its training step, which waits for a writer before weights move."""
    width = round((megabytes * 1e6 / 3 / 4 / _LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS))).to(device)
    kept = TrainState(model, build_optimizer(model, OptimizerConfig()), Precision("off", device), None, Progress())
    inputs = torch.randn(64, width, device=device)

    def step(writer: Writer) -> None:
        model(inputs).square().mean().backward()
        writer.wait_for_staging()
        kept.optimizer.step()
        kept.optimizer.zero_grad(set_to_none=True)

    with Writer() as writer:
        step(writer)
    return kept, step


def seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def synchronous(kept: TrainState, file: Path) -> None:
    """What a loop without all this does."""
    state = {"model": kept.model.state_dict(), "optimizer": kept.optimizer.state_dict()}
    with open(file, "wb") as target:
        torch.save(state, target)
        target.flush()
        os.fsync(target.fileno())


def save(store: Store, number: int, state: dict[str, Any]) -> None:
    store.save(number, state, {})


def measure_stall(kept: TrainState, step: Step, folder: Path, pairs: int) -> dict[str, float]:
    device = next(kept.model.parameters()).device
    store, state = Store(folder / "checkpoints", 1), kept.capture()  # a run's first checkpoint gets its memory
    stalls, saves, alone, beside, written = [], [], [], [], []
    with Writer() as writer:
        for number in range(pairs):
            alone.append(statistics.median(seconds(lambda: step(writer), device) for _ in range(5)))
            saves.append(seconds(lambda: synchronous(kept, folder / "plain.pt"), device))
            began = time.perf_counter()
            snapshot = kept.begin_capture(state)
            state = snapshot.state
            writer.submit(snapshot.finish, partial(save, store, number, state))
            stalled = time.perf_counter() - began
            during = [seconds(lambda: step(writer), device)]
            stalls.append(stalled + writer.waited)
            while not writer.is_done:
                during.append(seconds(lambda: step(writer), device))
            written.append(time.perf_counter() - began)
            assert writer.wait() is None
            beside.append(statistics.mean(during))
    ratios = [stall / save for stall, save in zip(stalls, saves, strict=True)]
    return {
        "state_megabytes": (folder / "plain.pt").stat().st_size / 1e6,
        "stall_ms": 1e3 * statistics.median(stalls),
        "synchronous_ms": 1e3 * statistics.median(saves),
        "stall_share": statistics.median(ratios),
        "stall_share_worst": max(ratios),
        "stall_share_of_minima": min(stalls) / min(saves),
        "written_after_ms": 1e3 * statistics.median(written),
        "step_ms": 1e3 * statistics.median(alone),
        "step_beside_writer_ms": 1e3 * statistics.median(beside),
    }


def peak(kept: TrainState, folder: Path) -> float:
    """Bytes by which the resident memory of a fresh process grows at most for one checkpoint."""
    for parameter in kept.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # or the memory of the last step's would be used again
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Store(folder / "peak", 1).save(1, kept.capture(), {})
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=given.folder, prefix=".checkpoint-stall-") as name:
        kept, step = learner(given.megabytes, torch.device(given.device))
        grown = peak(kept, Path(name))
        found = measure_stall(kept, step, Path(name), given.pairs)
        found["peak_memory_in_states"] = grown / (found["state_megabytes"] * 1e6)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
