"""samples.jsonl: the samples that each optimizer step was trained on, from the workers that fetched them."""

import json
import warnings
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from multigpu_cli.distributed.collectives import all_gather
from multigpu_cli.distributed.world import World
from multigpu_cli.monitor.journal import AppendFile, Warn

_NONE = -1


class SampleTrace:
    """Writes {"step", "samples": [indices]} for each step, in order of workers.

    Args:
        path: the file; written by rank 0.
        most: the largest number of samples that a worker can have in a step.
        warn: called when no lines can be written.
    """

    def __init__(self, path: Path, world: World, most: int, warn: Warn = warnings.warn) -> None:
        self._world, self._most = world, most
        self._lines = AppendFile(path, warn) if world.is_main else None

    def write(self, step: int, fetched: list[Tensor]) -> None:
        """Add one step; every rank calls it, with the (n,) int64 indices of its batches."""
        mine = torch.full((self._most,), _NONE, dtype=torch.int64, device=self._world.device)
        if fetched:
            indices = torch.cat(fetched)
            mine[: len(indices)] = indices.to(mine.device)
        everyone = torch.cat(all_gather(self._world, mine))
        if self._lines:
            samples = [index for index in everyone.tolist() if index != _NONE]
            self._lines.add(json.dumps({"step": step, "samples": samples}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines:
            self._lines.close()
