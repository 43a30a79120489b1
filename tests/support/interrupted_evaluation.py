"""Something that happens to a run in the middle of an evaluation."""

import os
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import nn

from multigpu_cli.data.loader import Loader
from multigpu_cli.faults import stop
from multigpu_cli.run import evaluation
from multigpu_cli.run.run import Run
from multigpu_cli.tasks.base import Evaluation


def strike(where: str, epoch: int, batch: int, act: Callable[[], object], rank: int = 0) -> None:
    """In this process: act before this batch (from 0) of the evaluation of that epoch, and vote after each batch."""
    stop._INTERVAL = 0.0
    inner = evaluation._evaluate_in_batches

    def evaluate(run: Run, model: nn.Module, split: str, loader: Loader) -> Evaluation:
        batches = count()

        def before_forward(*_: Any) -> None:
            if (next(batches), split, run.epoch, run.world.rank) == (batch, where, epoch, rank):
                act()

        with model.register_forward_pre_hook(before_forward):
            return inner(run, model, split, loader)

    evaluation._evaluate_in_batches = evaluate


def terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
