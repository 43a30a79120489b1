"""What our loop adds to a step of a small MLP, against the same steps written by hand.

    python -m benchmarks.step_overhead

A whole run at its defaults (journal, progress, TensorBoard, non-finite check, signal check, checkpoints), and our bare
step, each against a hand-written loop on the same tensors with the same optimizer.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paired_timing import STRETCH, Row, Seconds, alternate, program
from benchmarks.workloads import MAX_NORM, MLP, Arena, Rivals, against, hand_written
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.engine import finish_step, train_step
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.run.assembly.assemble import build_components
from multigpu_cli.run.open import assemble_run
from multigpu_cli.run.part import load_parts
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.run import Run


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    turns = 16 if tiny else 704
    return [*_bare(turns), *_at_defaults(turns)]


def _at_defaults(turns: int) -> list[Row]:
    rivals: dict[str, Callable[[], object]] = {
        "same job": hand_written(fused=True, max_norm=MAX_NORM),
        "control": hand_written(fused=True, max_norm=MAX_NORM),
        "unclipped": hand_written(fused=True),
        "out of the box": hand_written(fused=False),
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = MLP | {"epochs": "1000", "max_steps": str(turns * STRETCH)}
        found = against(rivals, flags, Path(folder), Seconds())
    return [
        found.micro("hand-written step, fused AdamW", "unclipped"),
        found.micro("our step at defaults", "ours"),
        found.ratio("control: hand-written / itself", "control", "same job"),
        found.ratio("defaults / hand-written, both fused and clipped", "ours", "same job", aim=0.95),
        found.over("defaults over hand-written, both fused and clipped", "ours", "same job"),
        found.ratio("defaults / hand-written, fused, ours alone clips", "ours", "unclipped"),
        found.ratio("defaults / hand-written out of the box", "ours", "out of the box", aim=0.68),
    ]


def _bare(turns: int) -> list[Row]:
    """The step alone, no clipping on either side; and with the check for gradients that are not finite, which stays."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, ExitStack() as stack:
        runs = [
            assemble_training({**MLP, "epochs": "1000", "max_grad_norm": "off", "save_dir": folder}, stack)
            for folder in (first, second)
        ]
        runs[0].state.precision.clip_and_step = _unchecked  # type: ignore[method-assign, assignment]
        bare, checked = map(_steps, runs)
        sides = {
            "bare": lambda: next(bare),
            "checked": lambda: next(checked),
            "theirs": hand_written(fused=True),
            "control": hand_written(fused=True),
        }
        found = alternate(sides, turns)
    return [
        found.ratio("control of the bare step", "control", "theirs"),
        found.ratio("bare / hand-written, both fused", "bare", "theirs", aim=0.97),
        found.over("bare over hand-written, both fused", "bare", "theirs"),
        found.ratio("bare with the check of the gradient / hand-written", "checked", "theirs"),
        found.over("bare with the check of the gradient over hand-written", "checked", "theirs"),
    ]


def _unchecked(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float | None, *more: object
) -> tuple[Tensor, Tensor]:
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    return _NONE, _NONE


_NONE = torch.zeros(())


def _steps(run: Run) -> Iterator[None]:
    number = 0
    while True:
        epoch = number // run.plan.batches.steps_per_epoch
        for layout, work in run.loaders.train.epoch(run.plan.batches, epoch, 0, 0, 1):
            train_step(run, layout, work)
            number += 1
            yield


def assemble_training(flags: dict[str, Any], stack: ExitStack, sets: Sequence[str] = ()) -> Run:
    config = resolve(flags, sets, None)
    choice, world = Placement("single", (torch.device("cpu"),), 0, "benchmark"), World(torch.device("cpu"))
    spec = prepare_spec(config, choice, world, FromConfig())
    parts = load_parts(spec, world)
    components = build_components(spec, world, parts)
    for part in parts:
        part.fitted(components)
    stack.callback(components.loaders.close)
    stack.enter_context(lock_folder(Path(flags["save_dir"])))
    watch = stack.enter_context(Watchdog(world, config.fault.hang_timeout, lambda error: None))
    stop = stack.enter_context(StopRequest())
    return assemble_run(components, Arena(Rivals({}, Seconds())), stop, watch, stack, parts)


def iterate_steps(run: Run) -> Iterator[None]:
    """Our loop, a step for each `next`, epoch after epoch."""
    while True:
        batches = run.plan.batches
        start = divmod(run.progress.step, batches.steps_per_epoch)
        for layout, work in run.loaders.train.epoch(batches, *start, 0, 1):
            finish_step(run, train_step(run, layout, work))
            yield


if __name__ == "__main__":
    program(measure, __doc__)
