"""`HookNumbers`: what a hook of the user's is told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class HookNumbers:
    """Where a run stands, as plain values that nobody can change.

    Attributes:
        rank, world_size: of this process.
        folder: the run folder.
        step: optimizer steps done, with the one in progress in after_backward; counted over the whole run.
        total_steps: of the run.
        epoch: that of the step, counted from 1.
        samples: trained on so far, over all workers.
        learning_rate: of the step.
        loss: mean over the global batch of the step; in step_end alone.
        grad_norm: of the global batch's gradient, before it is clipped; in step_end alone.
        skipped: the optimizer skipped the step, since the gradient was not finite; in step_end alone.
        loss_scale: what gradients are multiplied by in after_backward: 1, but with fp16.
        split: val or test, in evaluated.
        metrics: of that evaluation as val_NAME or test_NAME; elsewhere those of the newest evaluations and train_loss.
        checkpoint: its folder, in saved.
        status: completed or stopped, in end; failed, in failed.
        error: why the run failed, in failed.
    """

    rank: int
    world_size: int
    folder: str
    step: int
    total_steps: int
    epoch: int
    samples: int
    learning_rate: float
    loss: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    loss_scale: float = 1.0
    split: str = ""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    checkpoint: str = ""
    status: str = ""
    error: str = ""
