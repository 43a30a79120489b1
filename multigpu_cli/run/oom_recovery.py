"""Halves batches after out of memory: a micro-batch, with the same global batch, or the batches of an evaluation."""

import traceback
from typing import NoReturn

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.run_folder import read_note, write_note
from multigpu_cli.errors import TrainingError
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.run import Run
from multigpu_cli.run.spec import with_micro_batch
from multigpu_cli.runtime.out_of_memory import free_memory

REMEDY = (
    "a smaller --batch-size (with the same --global-batch-size), --grad-checkpointing, --amp bf16, or, if the weights "
    "and the optimizer's state are too large for one of several devices, --multi-gpu fsdp"
)


def halve_micro_batch(components: TrainComponents) -> str:
    """Halve the micro-batch; the global batch, and so the gradient, stay as they are.

    Raises:
        TrainingError: it can't be halved, or must not be.
    """
    size = components.plan.batches.micro_batch
    groups = {"whole groups of environments": components.spec.source.fixed_batch_sizes is not None}
    _check_may_halve(components, size, f"with micro-batches of {size}", groups)
    components.spec = with_micro_batch(components.spec, size // 2)
    layers = {type(m).__name__ for m in components.state.model.modules() if isinstance(m, _BatchNorm | _DropoutNd)}
    text = f"out of memory: micro-batches of {size // 2} instead of {size}, the same global batch"
    return text + (f"; smaller micro-batches for {' and '.join(sorted(layers))} too" if layers else "")


def halve_eval_batch(components: TrainComponents) -> str:
    """Halve the batches of evaluations, whose metrics are sums over samples and change by rounding only.

    Raises:
        TrainingError: they can't be halved, or must not be.
    """
    size = components.eval_batch_size
    own = {"the task's own evaluation": not components.evaluates_in_batches}
    _check_may_halve(components, size, f"in an evaluation with batches of {size}", own)
    components.loaders.max_eval_batch_size = size // 2
    return f"out of memory in an evaluation: batches of {size // 2} instead of {size}"


def _check_may_halve(components: TrainComponents, size: int, where: str, reasons: dict[str, bool]) -> None:
    """Raise TrainingError with the first reason that holds."""
    config = components.config
    reasons = {
        "--on-oom stop": config.fault.on_oom == "stop",
        "one sample": size == 1,
        "--exact": config.reproducibility.exact,
    } | reasons
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise TrainingError(f"out of memory {where} ({reason})", remedy=REMEDY)


def recover_from_out_of_memory(run: Run, error: RuntimeError) -> None:
    """Discard a step that ran out of memory, and go on with micro-batches of half the size.

    With several processes the others are in the middle of a reduction, and in the optimizer's phase some weights may
    have moved already. Then the run has to start again: the next attempt reads the note that is left in the folder.

    Args:
        error: its traceback holds the step's tensors, and releases them here.

    Raises:
        TrainingError: the run has to start again, or the micro-batch can't be halved.
    """
    moved = run.observer.watchdog.phase == "optimizer"
    run.strategy.abort_step()
    run.state.optimizer.zero_grad(set_to_none=True)
    traceback.clear_frames(error.__traceback__)
    free_memory(run.world.device)
    text = halve_micro_batch(run)
    if run.world.size == 1 and not moved:
        run.log_fault("out of memory", text)
        return
    batches = run.plan.batches
    smaller = {"batch_size": batches.micro_batch, "global_batch_size": batches.global_batch}
    _end_attempt(run, "in the optimizer " if moved else "", smaller, text)


def end_evaluation_without_memory(run: Run) -> NoReturn:
    """Have the next attempt evaluate in batches of half the size: the other ranks wait in the middle of a pass.

    Raises:
        TrainingError: always.
    """
    text = halve_eval_batch(run)
    _end_attempt(run, "in an evaluation ", {"eval_batch_size": run.eval_batch_size}, text)


def _end_attempt(run: Run, where: str, smaller: dict[str, int], text: str) -> NoReturn:
    """Leave a note of the smaller sizes, which `text` describes, for the next attempt."""
    with fail_on_write_error(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)  # on a node that has no part of it yet
        write_note(run.folder, read_note(run.folder) | smaller)
    who = f"rank {run.world.rank} ran out of memory" if run.world.size > 1 else "out of memory"
    raise TrainingError(
        f"{who} {where}at step {run.progress.step}",
        remedy=f"run the same command again: it goes on from the last checkpoint with {text.split(': ')[1]}",
    )
