"""`BatchStream`: the protocol of objects that yield micro-batches to the training loop."""

from collections.abc import Iterator
from typing import Protocol

from multigpu_cli.data.epoch_order import OrderOfEpoch
from multigpu_cli.data.loader import Batch, StepWork
from multigpu_cli.planning.batch import BatchPlan


class BatchStream(Protocol):
    """The micro-batches of one worker: a Loader yields those of a dataset; a task may define its own stream.

    Attributes:
        size: samples in an epoch.
        data_location: where the samples are, for the journal.
        resumable_only_at_epoch: a run can resume only at the end of an epoch, so checkpoints are written only there.
    """

    size: int
    data_location: str
    resumable_only_at_epoch: bool

    def epoch(
        self, plan: BatchPlan, epoch: int, start: int, rank: int, replicas_per_process: int
    ) -> Iterator[StepWork]:
        """The steps of an epoch from step `start` on: each with its layout and this worker's batches."""

    def next_step(self, step: int, plan: BatchPlan) -> int:
        """The step after this one, counted over the run; a collective call."""

    def optimizer_steps_done_at(self, step: int, plan: BatchPlan) -> int:
        """Optimizer steps done up to this position in the schedule: fewer than `step` if some were skipped."""

    def samples_seen_at(self, step: int, plan: BatchPlan) -> int:
        """Samples trained on in this number of steps."""

    def sample_order(self, epoch: int) -> OrderOfEpoch:
        """The index of the sample at each position of an epoch."""

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """This worker's part of one ordered pass; the first batch is also used to check model and task against it."""

    def close(self) -> None:
        """Release processes and files."""


def first_batch(stream: BatchStream, size: int) -> Batch:
    """The first `size` samples, or all if there are fewer, unshuffled: the same on every rank, and at every start."""
    return next(stream.eval_batches(min(size, stream.size), 0, 1))
