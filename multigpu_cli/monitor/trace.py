"""samples.jsonl: which samples each optimizer step really trained on, gathered from the workers that fetched them."""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from multigpu_cli.monitor.journal import ends_whole
from multigpu_cli.runtime.collectives import gathered
from multigpu_cli.runtime.world import World

_NONE = -1


class SampleTrace:
    """Writes {"step", "samples": [indices]} for each step, in order of workers.

    Args:
        path: the file; written by rank 0.
        most: the largest number of samples that a worker can have in a step.
    """

    def __init__(self, path: Path, world: World, most: int) -> None:
        self._world, self._most = world, most
        self._file = open(path, "a+") if world.main else None  # noqa: SIM115 - a context manager itself
        if self._file and not ends_whole(self._file.fileno()):
            self._file.write("\n")

    def write(self, step: int, fetched: list[Tensor]) -> None:
        """Add one step; every rank calls it, with the (n,) int64 indices of its batches."""
        mine = torch.full((self._most,), _NONE, dtype=torch.int64, device=self._world.device)
        if fetched:
            indices = torch.cat(fetched)
            mine[: len(indices)] = indices.to(mine.device)
        everyone = torch.cat(gathered(self._world, mine))
        if self._file:
            samples = [index for index in everyone.tolist() if index != _NONE]
            self._file.write(json.dumps({"step": step, "samples": samples}) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()
