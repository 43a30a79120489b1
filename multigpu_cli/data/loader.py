"""Batches as a pure function of (seed, epoch, step, micro-batch): there is no loader state to save."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.collate import to_pair
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.epoch_order import EVAL_EPOCH, epoch_order
from multigpu_cli.data.keyed_random import KeyedRandom
from multigpu_cli.data.transfer import Fetched, move_batches, to_device
from multigpu_cli.planning.batch import BatchPlan, StepLayout

if TYPE_CHECKING:
    from multigpu_cli.data.map_style_fetcher import ItemFetcher

_SHARE_OF_GPU = 0.25  # of the free memory that a dataset may take with --data-on-device auto


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device.

    Attributes:
        inputs, targets: whole batches, first dimension n; several inputs are a tuple or a dict of these, and targets
            are None where samples have none.
        sample_indices: (n,) int64 on the CPU, the samples' numbers in their dataset.
        micro_batch_index: which micro-batch of its step (or of its evaluation), over all workers.
    """

    inputs: Any
    targets: Any
    sample_indices: Tensor
    micro_batch_index: int

    def __len__(self) -> int:
        return len(self.sample_indices)


StepWork = tuple[StepLayout, Iterator[Batch]]
"""What a worker has to do in one optimizer step, and its micro-batches, in order."""


class Loader:
    """Serves one split to one worker.

    Args:
        split: a TensorDataset is indexed by whole batches; anything else is fetched sample by sample.
        source: the dataset's own preparation and augmentation.
        config: loader processes, and whether to hold the data on the device.
        device: where batches go.
        seed: the run's seed.
        workers_here: loaders of other workers on this machine share its cores.
    """

    resumable_only_at_epoch = False  # a run may go on from any step
    _fetch: "_InMemoryFetcher | ItemFetcher"

    def __init__(
        self,
        split: Dataset[Any],
        source: DataSource,
        config: DataConfig,
        *,
        device: torch.device,
        seed: int,
        workers_here: int = 1,
    ) -> None:
        self.source, self.device, self.seed = source, device, seed
        self.size = len(split)  # type: ignore[arg-type]
        if isinstance(split, TensorDataset):
            self._fetch = _InMemoryFetcher(split, device, config.on_device, source)
        else:
            from multigpu_cli.data.map_style_fetcher import (
                ItemFetcher,  # late: what lies in memory needs no loader processes
            )

            self._fetch = ItemFetcher(split, device, seed, config.num_workers, workers_here, source)
        self.data_location = self._fetch.data_location

    def close(self) -> None:
        """End the loader processes, if there are any."""
        self._fetch.close()

    def next_step(self, step: int, plan: BatchPlan) -> int:
        """The step after this one, counted over the run."""
        return step + 1

    def optimizer_steps_done_at(self, step: int, plan: BatchPlan) -> int:
        """Optimizer steps taken up to this place in the schedule: none is left out."""
        return step

    def samples_seen_at(self, step: int, plan: BatchPlan) -> int:
        """Samples trained in so many steps."""
        return plan.samples_after(step)

    def epoch(
        self, plan: BatchPlan, epoch: int, start: int, rank: int, replicas_per_process: int
    ) -> Iterator[StepWork]:
        """The steps of an epoch from step `start` on: the layout of each, and this worker's batches.

        Args:
            replicas_per_process: micro-batches joined into one batch (DataParallel takes one for each device).
        """
        order = self.sample_order(epoch)
        steps = range(start, plan.steps_per_epoch)
        chunks = (
            order[first:stop]
            for step in steps
            for _, first, stop in plan.local_forward_passes(step, rank, replicas_per_process)
        )
        batches = self._fetch.stream(chunks, epoch)
        for step in steps:
            layout = plan.layout(epoch * plan.steps_per_epoch + step, rank, replicas_per_process)
            yield layout, (self._finish_batch(next(batches), index, epoch, train=True) for index, _, _ in layout.passes)

    def sample_order(self, epoch: int) -> Tensor:
        """(n,) int64: the sample at each position of an epoch of training."""
        own = self.source.order
        return epoch_order(self.size, self.seed, epoch) if own is None else own(epoch)

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """This worker's part of one ordered pass: fixed batches, each sample once on any number of workers."""
        count = -(-self.size // batch_size)
        mine = range(count * rank // workers, count * (rank + 1) // workers)
        chunks = [torch.arange(i * batch_size, min((i + 1) * batch_size, self.size)) for i in mine]
        for index, fetched in zip(mine, self._fetch.stream(chunks, EVAL_EPOCH), strict=True):
            yield self._finish_batch(fetched, index, 0, train=False)

    def iter_training_batches(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Any samples in any order, as an epoch's training meets them.

        Args:
            chunks: (n,) int64 each, the samples of one batch.
        """
        for index, fetched in enumerate(self._fetch.stream(chunks, epoch)):
            yield self._finish_batch(fetched, index, epoch, train=True)

    def _finish_batch(self, fetched: "Fetched", index: int, epoch: int, *, train: bool) -> Batch:
        inputs, targets, indices = fetched
        if isinstance(inputs, Tensor):
            if train and self.source.augment is not None:
                inputs = self.source.augment(inputs, KeyedRandom(self.seed, epoch, to_device(indices, self.device)))
            inputs = self.source.prepare(inputs)
        return Batch(inputs, targets, indices, index)


class _InMemoryFetcher:
    """A dataset held in one piece, in host or device memory, and indexed by whole batches."""

    def __init__(self, split: TensorDataset, device: torch.device, wanted: str, source: DataSource) -> None:
        tensors, self._form = split.tensors, source.form
        to_pair(tensors, "a sample", self._form)  # or it is refused
        self.device, on_device, self._pin = device, device.type == "cpu", source.loader_options.pin_memory
        if device.type == "cuda":
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            free, _ = torch.cuda.mem_get_info(device)
            on_device = wanted == "on" or (wanted == "auto" and size <= _SHARE_OF_GPU * free)
        home = device if on_device else torch.device("cpu")
        self._home, self._tensors = home, [tensor.to(home) for tensor in tensors]
        self.data_location = f"in {'GPU' if home.type == 'cuda' else 'host'} memory"

    def close(self) -> None:
        """Nothing is open."""

    def stream(self, chunks: Iterable[Tensor], epoch: int) -> Iterator[Fetched]:
        batches = self._pick(chunks)
        return batches if self._home == self.device else move_batches(batches, self.device, pin=self._pin)

    def _pick(self, chunks: Iterable[Tensor]) -> Iterator[Fetched]:
        for indices in chunks:
            at = to_device(indices, self._home)
            parts = tuple(tensor.index_select(0, at) for tensor in self._tensors)
            yield *to_pair(parts, "a sample", self._form), indices
