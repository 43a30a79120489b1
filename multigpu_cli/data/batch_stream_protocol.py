"""`BatchStream`: the protocol of what yields micro-batches to the training loop."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from multigpu_cli.data.loader import Batch, StepWork
from multigpu_cli.planning.batch import BatchPlan


class BatchStream(Protocol):
    """Micro-batches for one worker; a Loader serves those of a dataset, a task may bring a stream of its own.

    Attributes:
        size: samples in an epoch.
        data_location: where they come from, for the journal.
        resumable_only_at_epoch: a run can only go on from the end of an epoch, so checkpoints wait for it.
    """

    size: int
    data_location: str
    resumable_only_at_epoch: bool

    def epoch(
        self, plan: BatchPlan, epoch: int, start: int, rank: int, replicas_per_process: int
    ) -> Iterator[StepWork]:
        """The steps of an epoch from step `start` on: the layout of each, and this worker's batches."""

    def next_step(self, step: int, plan: BatchPlan) -> int:
        """The step after this one, counted over the run; all ranks ask together."""

    def optimizer_steps_done_at(self, step: int, plan: BatchPlan) -> int:
        """Optimizer steps taken up to this place in the schedule: fewer than `step` where some were left out."""

    def samples_seen_at(self, step: int, plan: BatchPlan) -> int:
        """Samples trained in so many steps."""

    def sample_order(self, epoch: int) -> Tensor:
        """(n,) int64: the number of the sample at each position of an epoch."""

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """This worker's part of one ordered pass; the first batch tells whether network, task and data fit together."""

    def close(self) -> None:
        """Let go of what is open."""
