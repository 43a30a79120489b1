"""How the samples of an epoch become global batches, micro-batches and each worker's share.

    micro-batch     samples in one forward/backward pass on one device
    global batch    samples in one optimizer step, over all workers and all accumulation
    worker          one process of DDP, or one device of DataParallel

Only the shares depend on the number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multigpu_cli.errors import RequestError


class MicroBatch(NamedTuple):
    """A slice of an epoch's order: the samples at positions start … stop-1."""

    number: int  # index of the micro-batch in its optimizer step, counted over all workers
    start: int
    stop: int


class StepLayout(NamedTuple):
    """The division of one optimizer step, for one worker."""

    step: int  # counted from 0 over the whole run
    samples: int  # samples in its global batch
    micro_batches: int  # forward passes of all workers together
    passes: list[MicroBatch]  # forward passes of this worker; may be empty


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batches of one run."""

    samples: int  # size of the training set
    micro_batch: int  # B, samples per forward/backward pass
    global_batch: int  # G, samples per optimizer step
    workers: int  # number of workers that share a step
    drop_last: bool = False  # leave out an epoch's last short global batch
    interleaved: bool = False  # a pass of all workers takes successive micro-batches; else each has a contiguous block

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        return self.samples // self.global_batch if self.drop_last else -(-self.samples // self.global_batch)

    @property
    def last_batch_samples(self) -> int:
        """Samples in the last, short global batch of an epoch, which is trained on or dropped; 0 if there is none."""
        return self.samples % self.global_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a full step, over all workers."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def smallest_micro_batch(self) -> int:
        """Samples in the smallest micro-batch of an epoch."""
        steps = {self.num_samples(0), self.num_samples(self.steps_per_epoch - 1)}
        return min(samples % self.micro_batch or min(samples, self.micro_batch) for samples in steps)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a full step on the worker that has the most."""
        return -(-self.micro_batches // self.workers)

    @property
    def is_even(self) -> bool:
        """Whether all workers have the same number of micro-batches in every step."""
        last = -(-self.last_batch_samples // self.micro_batch) if self.last_batch_samples and not self.drop_last else 0
        return self.micro_batches % self.workers == 0 and last % self.workers == 0

    def num_samples(self, step: int) -> int:
        """Samples in a step of an epoch, counted from 0."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def samples_after(self, steps: int) -> int:
        """Samples trained on in the first `steps` optimizer steps of a run."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        per_epoch = self.samples - (self.last_batch_samples if self.drop_last else 0)
        return epochs * per_epoch + min(rest * self.global_batch, per_epoch)

    def num_micro_batches(self, step: int) -> int:
        """Micro-batches in a step of an epoch, over all workers."""
        return -(-self.num_samples(step) // self.micro_batch)

    def all_micro_batches(self, step: int) -> list[MicroBatch]:
        """All micro-batches of a step of an epoch, in order; the last may be short."""
        return self._pieces(step, range(self.num_micro_batches(step)))

    def local_micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """One worker's micro-batches of a step, balanced to within one; may be empty."""
        count = self.num_micro_batches(step)
        if self.interleaved:
            return self._pieces(step, range(rank, count, self.workers))
        return self._pieces(step, range(count * rank // self.workers, count * (rank + 1) // self.workers))

    def _pieces(self, step: int, numbers: range) -> list[MicroBatch]:
        first, size = step * self.global_batch, self.micro_batch
        end = first + self.num_samples(step)
        return [MicroBatch(n, first + n * size, min(first + (n + 1) * size, end)) for n in numbers]

    def local_forward_passes(self, step: int, rank: int, replicas_per_process: int) -> list[MicroBatch]:
        """One process's forward passes in a step; with several replicas (DataParallel) each joins micro-batches."""
        if replicas_per_process == 1:
            return self.local_micro_batches(step, rank)
        every = self.all_micro_batches(step)
        groups = [every[at : at + replicas_per_process] for at in range(0, len(every), replicas_per_process)]
        return [MicroBatch(number, group[0].start, group[-1].stop) for number, group in enumerate(groups)]

    def layout(self, number: int, rank: int, replicas_per_process: int) -> StepLayout:
        """The layout of optimizer step `number`, counted from 0 over the run, for `rank`."""
        step = number % self.steps_per_epoch
        samples = self.num_samples(step)
        passes = -(-samples // (self.micro_batch * replicas_per_process))
        return StepLayout(number, samples, passes, self.local_forward_passes(step, rank, replicas_per_process))


def plan_batches(
    *,
    samples: int,
    micro_batch: int,
    workers: int,
    accumulation: int | None = None,
    global_batch: int | None = None,
    drop_last: bool = False,
    interleaved: bool = False,
) -> BatchPlan:
    """Plan the batches of an epoch. Without `global_batch`, it is micro_batch × accumulation × workers samples.

    Raises RequestError if accumulation and global batch disagree, or if there are too few samples for the workers or
    for one step.
    """
    product = micro_batch * (accumulation or 1) * workers
    chosen = global_batch or product
    if global_batch is not None and accumulation is not None and product != global_batch:
        reason = f"{micro_batch} × {accumulation} × {workers} workers = {product}"
        problem = f"--global-batch-size {global_batch} and --grad-accum-steps {accumulation} disagree: {reason}"
        raise RequestError(problem, remedy="leave --grad-accum-steps out (it is derived), or make the two agree")
    _check_sizes(samples, chosen, workers, drop_last=drop_last)
    return BatchPlan(
        samples=samples,
        micro_batch=micro_batch,
        global_batch=chosen,
        workers=workers,
        drop_last=drop_last,
        interleaved=interleaved,
    )


def _check_sizes(samples: int, global_batch: int, workers: int, *, drop_last: bool) -> None:
    """Raise RequestError if some worker would never have a sample, or if an epoch would have no step."""
    if global_batch < workers:
        problem = f"--global-batch-size {global_batch} is below the number of workers ({workers})"
        raise RequestError(problem, remedy=f"use --global-batch-size {workers} or more, or fewer workers")
    if samples < workers:
        problem = f"--data: the training set has {samples} samples for {workers} workers"
        raise RequestError(problem, remedy="use more samples, or fewer workers")
    if drop_last and samples < global_batch:
        reason = f"{samples} training samples are less than one global batch of {global_batch}"
        remedy = "leave --drop-last out, or use a smaller --batch-size"
        raise RequestError(f"--drop-last leaves no step: {reason}", remedy=remedy)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum up to `total`, as near as can be to shares by positive weights (largest remainders)."""
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    first = sorted(range(len(weights)), key=lambda at: (counts[at] - shares[at], at))
    for at in first[: total - sum(counts)]:
        counts[at] += 1
    return counts


_MASK = (1 << 64) - 1


def make_key(*parts: int) -> int:
    """One 63-bit seed from several numbers; their order matters, and close numbers give unrelated seeds.

    SplitMix64's finalizer mixes the bits of each, and those of the result with what came before (Steele, Lea and Flood
    2014; of whole tensors: data/order.py).
    """
    state = 0
    for part in parts:
        number = part & _MASK
        for other in (0, state):  # no function of its own, since each step of a run makes keys
            number = ((number ^ other) + 0x9E3779B97F4A7C15) & _MASK
            number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
            number ^= number >> 31
        state = number
    return state >> 1
