"""A steady step never makes the host wait for the GPU: torch itself raises an error where it would."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from multigpu_cli import engine
from multigpu_cli.distributed.placement import Placement
from tests.gpu.checks.attention import TOKENS
from tests.gpu.in_process import ONE, ONE_RANK, train

_FIRST = 5  # steps in which libraries choose their kernels
_STEPS = 40
_WAYS = {
    "bf16": (ONE, {"amp": "bf16"}),
    "fp16": (ONE, {"amp": "fp16"}),
    "fp32": (ONE, {"amp": "off"}),
    "no clipping": (ONE, {"max_grad_norm": "off"}),
    "sgd": (ONE, {"optimizer": "sgd"}),
    "ema": (ONE, {"ema": "0.99"}),
    "accumulation": (ONE, {"grad_accum_steps": "2"}),
    "data in host memory": (ONE, {"data_on_device": "off"}),
    "data item by item": (ONE, {"data": "tests.gpu.networks:pictures", "model": "convnet", "num_workers": "0"}),
    "nccl": (ONE_RANK, {}),
    "tokens": (ONE, TOKENS),
}
_EXACT_WAYS = {"exact": (ONE, {"exact": "true"}), "nccl, exact": (ONE_RANK, {"exact": "true"})}


def none_in_steady_steps(folder: Path) -> dict[str, Any]:
    return _watch_ways(folder, _WAYS)


def none_in_exact_steps(folder: Path) -> dict[str, Any]:
    """In a process of its own: what --exact sets holds for all of one."""
    return _watch_ways(folder, _EXACT_WAYS)


def _watch_ways(folder: Path, ways: Mapping[str, tuple[Placement, dict[str, str]]]) -> dict[str, Any]:
    """Train in each way; no epoch, log line or checkpoint ends within the steps that are watched."""
    lasting: dict[str, Any] = {
        "max_steps": str(_STEPS),
        "epochs": "1000",
        "log_interval": "1000",
        "checkpoint_every": "100000",
    }
    failed, watched = {}, {}
    for name, (choice, flags) in ways.items():
        with _watching() as steps:
            try:
                train(folder / name.replace(" ", "-"), choice, **lasting | flags)
            except RuntimeError as error:
                failed[name] = str(error).splitlines()[0]
        watched[name] = len(steps)
    assert not failed, f"the host waited: {failed}"
    few = [name for name, steps in watched.items() if steps < _STEPS - _FIRST]
    assert not few, f"too few steps watched: {few}"
    return {"steps_watched": watched}


@contextmanager
def _watching() -> Iterator[list[int]]:
    """Every step but the first ones, in the mode in which a host sync is an error; yields their numbers."""
    real, seen = engine.train_step, []

    def step(run: Any, layout: Any, work: Any) -> Any:
        if layout.step < _FIRST:
            return real(run, layout, work)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = real(run, layout, work)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(layout.step)
        return found

    engine.train_step = step
    try:
        yield seen
    finally:
        engine.train_step = real
