"""Loads batches as a pure function of (seed, epoch, step, micro-batch), so that there is no loader state to save."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import tee
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.class_weights import count_repeats, draw_samples, resolve_sample_weights
from multigpu_cli.data.collate import Fetched, TokenCounts, fetch_together, for_each, move_batches, to_device, to_pair
from multigpu_cli.data.order import EVAL_EPOCH, OrderOfEpoch, shuffle_epoch
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import BatchTransforms
from multigpu_cli.planning.batch import BatchPlan, StepLayout

if TYPE_CHECKING:
    from multigpu_cli.data.fetcher import ItemFetcher

_SHARE_OF_GPU = 0.25  # of its free memory, which a dataset may use with --data-on-device auto


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device."""

    inputs: Any  # of n rows; several inputs are a tuple or a dict
    targets: Any  # of n rows; None if samples have none
    sample_indices: Tensor  # (n,) int64 on the CPU, the samples' indices in their dataset
    micro_batch_index: int  # index of the micro-batch in its step (or evaluation), counted over all workers
    tokens: TokenCounts | None = None  # how many there are, where samples are texts that were fetched one by one

    def __len__(self) -> int:
        return len(self.sample_indices)


StepWork = tuple[StepLayout, Iterator[Batch]]  # the layout of one optimizer step, and a worker's micro-batches in order
EpochWork = Iterator[StepWork]  # the steps of an epoch, in order


class BatchStream(ABC):
    """The micro-batches of one worker: a Loader yields those of a dataset; a task may define its own stream."""

    size: int  # samples in an epoch
    data_location: str  # where the samples are, for the journal
    resumable_only_at_epoch = False  # a run can resume only at an epoch's end: checkpoints are written only there
    ready = False  # the batches lie on the GPU as the model takes them: there is no wait for them

    @abstractmethod
    def epoch(self, plan: BatchPlan, epoch: int, start: int, rank: int, replicas_per_process: int) -> EpochWork:
        """The steps of an epoch from step `start` on: each with its layout and this worker's batches.

        `replicas_per_process` micro-batches are joined into one batch (DataParallel needs one per device).
        """

    def next_step(self, step: int, plan: BatchPlan) -> int:
        """The step after this one, counted over the run; a collective call."""
        return step + 1

    def optimizer_steps_done_at(self, step: int, plan: BatchPlan) -> int:
        """Optimizer steps done up to this position in the schedule: fewer than `step` if some were skipped."""
        return step

    def samples_seen_at(self, step: int, plan: BatchPlan) -> int:
        """Samples trained on in this number of steps."""
        return plan.samples_after(step)

    @abstractmethod
    def sample_order(self, epoch: int) -> OrderOfEpoch:
        """The index of the sample at each position of an epoch of training."""

    @abstractmethod
    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """This worker's part of one ordered pass; the first batch is also used to check model and task against it."""

    def close(self) -> None:  # noqa: B027 - not every stream has something to release
        """Release processes and files."""


class Loader(BatchStream):
    """Loads the batches of one split for one worker."""

    _fetch: "_InMemoryFetcher | ItemFetcher"

    def __init__(
        self,
        split: Dataset[Any],  # a TensorDataset is indexed by whole batches; any other is fetched sample by sample
        source: DataSource,  # its `prepare` and `augment` are applied
        config: DataConfig,
        *,
        device: torch.device,
        seed: int,
        workers_here: int = 1,  # workers on this machine, whose loaders share its cores
    ) -> None:
        self.source, self.device, self.seed = source, device, seed
        self.size = len(split)  # type: ignore[arg-type]
        self._transforms = BatchTransforms(config, source, seed, device, training=split is source.train)
        if isinstance(split, TensorDataset):
            self._fetch = _InMemoryFetcher(split, device, config, source)
            if self._fetch.on_gpu:
                self._fetch.inputs = self._transforms.prepare_stored(self._fetch.inputs)
                self.ready = not self._transforms.draws
        else:
            from multigpu_cli.data.fetcher import ItemFetcher

            self._fetch = ItemFetcher(split, device, seed, config.num_workers, workers_here, source)
        self.data_location = self._fetch.data_location
        self._weights_wanted = config.sample_weights
        self._repeats = config.sample_weights is not None or source.order_has_repeats
        self._block, self._window = config.shuffle_block or source.shuffle_block, config.shuffle_window

    def close(self) -> None:
        self._fetch.close()

    def epoch(self, plan: BatchPlan, epoch: int, start: int, rank: int, replicas_per_process: int) -> EpochWork:
        order = self._keyed_order(epoch)
        micro, per_epoch = plan.micro_batch, plan.steps_per_epoch
        steps = range(epoch * per_epoch + start, (epoch + 1) * per_epoch)
        ahead, layouts = tee(plan.layout(step, rank, replicas_per_process) for step in steps)
        chunks = (order[first:stop] for layout in ahead for _, first, stop in layout.passes)
        batches = self._fetch.stream(chunks, epoch)
        for layout in layouts:
            yield layout, (self._finish_batch(next(batches), index, epoch, micro) for index, _, _ in layout.passes)

    def sample_order(self, epoch: int) -> OrderOfEpoch:
        if self._weights_wanted is not None:
            return draw_samples(self._weights, self.seed, epoch)
        own = self.source.order
        return shuffle_epoch(self.size, self.seed, epoch, self._block, self._window) if own is None else own(epoch)

    @cached_property
    def _weights(self) -> Tensor:
        """(n,) float64 of the samples; looked up when training begins, for the split may be another one's."""
        assert self._weights_wanted is not None
        return resolve_sample_weights(self._weights_wanted, self.source, "data.sample_weights")

    def _keyed_order(self, epoch: int) -> OrderOfEpoch:
        """The order, where a sample that comes again gets a number of its own beyond the dataset's end.

        It is fetched modulo the size, and augmented by that number: each time differently.
        """
        order = self.sample_order(epoch)
        if self._weights_wanted is None:
            return order
        drawn = order[:]
        return drawn + self.size * count_repeats(drawn)

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """This worker's part of one ordered pass: the same batches, each sample once, for any number of workers."""
        count = -(-self.size // batch_size)
        mine = range(count * rank // workers, count * (rank + 1) // workers)
        chunks = (torch.arange(i * batch_size, min((i + 1) * batch_size, self.size)) for i in mine)
        for index, fetched in zip(mine, self._fetch.stream(chunks, EVAL_EPOCH), strict=True):
            yield self._finish_batch(fetched, index, 0, None)

    def pick(self, indices: Tensor) -> Batch:
        """The samples of these indices, (n,) int64, as in an evaluation."""
        return self._finish_batch(next(self._fetch.stream([indices], EVAL_EPOCH)), 0, 0, None)

    def iter_training_batches(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Batches of the given samples, (n,) int64 each, prepared and augmented as in training."""
        for index, fetched in enumerate(self._fetch.stream(chunks, epoch)):
            yield self._finish_batch(fetched, index, epoch, len(fetched.indices))

    def _finish_batch(self, fetched: Fetched, index: int, epoch: int, micro_batch: int | None) -> Batch:
        """Transform a batch of micro-batches of so many samples (of a joined batch, each part); None: evaluation."""
        inputs, targets, keys, tokens = fetched
        if micro_batch is None:
            return Batch(*self._transforms.evaluate(inputs, targets), keys, index, tokens)
        pair = self._transforms.train(inputs, targets, keys, epoch, micro_batch)
        return Batch(*pair, keys % self.size if self._repeats else keys, index, tokens)


class _InMemoryFetcher:
    """A dataset in host or device memory, indexed by whole batches."""

    def __init__(self, split: TensorDataset, device: torch.device, config: DataConfig, source: DataSource) -> None:
        tensors = split.tensors
        self.device, on_device, self._pin = device, device.type == "cpu", source.loader_options.pin_memory
        if device.type == "cuda":
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            free, _ = torch.cuda.mem_get_info(device)
            on_device = config.on_device == "on" or (config.on_device == "auto" and size <= _SHARE_OF_GPU * free)
        home = device if on_device else torch.device("cpu")
        self._size = len(split)
        self._repeats = config.sample_weights is not None or source.order_has_repeats
        self._home, parts = home, tuple(tensor.to(home) for tensor in tensors)
        self.inputs, self._targets = to_pair(parts, "a sample", source.form)
        self.on_gpu = home.type == "cuda"
        self.data_location = f"in {'GPU' if self.on_gpu else 'host'} memory"

    def close(self) -> None:
        """There is nothing to release."""

    def stream(self, chunks: Iterable[Tensor], epoch: int) -> Iterator[Fetched]:
        if self.on_gpu:  # where a kernel takes little time, and the host's launch of it more
            return fetch_together(chunks, self._pick)
        batches = map(self._pick, chunks)
        return batches if self._home == self.device else move_batches(batches, self.device, pin=self._pin)

    def _pick(self, indices: Tensor) -> Fetched:
        at = to_device(indices % self._size if self._repeats else indices, self._home)
        pick = partial(torch.index_select, dim=0, index=at)
        return Fetched(for_each(self.inputs, pick), for_each(self._targets, pick), indices)


def map_batch(batch: Batch, work: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with the results of `work` on the tensors of its inputs and targets."""
    inputs, targets = tree_map_only(Tensor, work, (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)


def first_batch(stream: BatchStream, size: int) -> Batch:
    """The first `size` samples, or all if there are fewer, unshuffled: the same on every rank, and at every start."""
    return next(stream.eval_batches(min(size, stream.size), 0, 1))
