"""Out of memory for real: a smaller micro-batch with the same global batch, and the largest that fits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu.front_door import ALONE, Run, figures, run, sets
from tests.gpu.machine import is_simulated

_LEFT, _BATCH = (2**28, 128) if is_simulated() else (3 * 2**30, 1024)  # bytes that a run finds free; what does not fit
_WIDE = ("--model", "tests.gpu.networks:wide", "--amp", "off")  # 4 MiB of activations for each sample
_DEED = ("deed=memory", "at=20", "limit=16")


def too_large_a_batch(folder: Path) -> dict[str, Any]:
    """Found out before the first step."""
    with little_memory():
        done = run(folder, *ALONE, *_WIDE, "--max-steps", "5", "--batch-size", str(_BATCH))
    return _shrunk(done, _BATCH)


def in_the_middle(folder: Path) -> dict[str, Any]:
    """A step asks for more than there is: it is taken again in smaller micro-batches."""
    network = ("--model", "tests.gpu.networks:at_pass", *sets(*(f"model.args.{each}" for each in _DEED)))
    done = run(folder, *ALONE, *network, "--max-steps", "60", "--batch-size", "64", "--log-interval", "1")
    assert done.summary["steps"] == 60, done.summary
    return _shrunk(done, 64)


def _shrunk(done: Run, batch: int) -> dict[str, Any]:
    assert done.summary["status"] == "completed", done.summary
    assert done.summary["global_batch_size"] == batch, done.summary
    faults = [fault["action"] for fault in done.summary["faults"] if fault["kind"] == "out of memory"]
    assert any(f"instead of {batch}" in fault for fault in faults), f"faults: {done.summary['faults']}"
    return figures(done) | {"faults": faults}


def measured_batch(folder: Path) -> dict[str, Any]:
    """--batch-size auto ends below what does not fit, and the run goes well with it."""
    with little_memory():
        done = run(folder, *ALONE, *_WIDE, "--max-steps", "5", "--batch-size", "auto")
    plan = done.of("start")[-1]["plan"]
    assert done.summary["status"] == "completed", done.summary
    assert _BATCH / 64 <= plan["batch_size"] < _BATCH, f"--batch-size auto took {plan['batch_size']}"
    assert not done.summary["faults"], done.summary["faults"]
    return figures(done) | {"batch_size": plan["batch_size"]}


def growing_segments(folder: Path) -> dict[str, Any]:
    """The allocator's segments grow unless the user chose: it has read the variable that the program sets."""
    kinds = {}
    for choice in ("", "expandable_segments:False"):
        os.environ.update({"PYTORCH_ALLOC_CONF": choice, "PYTORCH_CUDA_ALLOC_CONF": choice} if choice else {})
        name = choice.partition(":")[2] or "default"
        noted = ("--hook", "tests.gpu.checks.memory:Segments", *sets(f"hook.args.Segments={{file: {folder / name}}}"))
        done = run(folder / f"run_{name}", *ALONE, *noted, "--max-steps", "5")
        assert done.summary["status"] == "completed", done.summary
        kinds[name] = (folder / name).read_text()
    assert is_simulated() or kinds == {"default": "[True]", "False": "[False]"}, f"is_expandable of segments: {kinds}"
    return {"is_expandable": kinds}


class Segments:
    """A hook that notes whether the segments of GPU memory can grow."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def end(self, numbers: object) -> None:
        kinds = {} if is_simulated() else {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
        self.file.write_text(str(sorted(kinds)))


@contextmanager
def little_memory() -> Iterator[None]:
    """Somebody else, this process, holds all of the GPU's memory but a little; a simulated GPU has no more."""
    if is_simulated():
        from tests.gpu.simulated.machine import Machine  # late: on a real GPU it is not needed

        before, machine = dict(os.environ), Machine.from_environment(os.environ) or Machine()
        os.environ |= replace(machine, gpus=tuple(replace(gpu, memory=_LEFT) for gpu in machine.gpus)).environment()
        try:
            yield
        finally:
            os.environ |= before
        return
    free, _ = torch.cuda.mem_get_info(0)
    taken = torch.empty(max(0, free - _LEFT), dtype=torch.uint8, device="cuda:0")
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()
