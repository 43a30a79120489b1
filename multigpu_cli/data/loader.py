"""Batches as a pure function of (seed, epoch, step, micro-batch): there is no loader state to save."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.batch_transforms import BatchTransforms
from multigpu_cli.data.class_weights import count_repeats, draw_samples, resolve_sample_weights
from multigpu_cli.data.data_source import DataSource, LoaderOptions
from multigpu_cli.data.epoch_order import EVAL_EPOCH, epoch_order
from multigpu_cli.data.transfer import Fetched, move_batches, to_device
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan, StepLayout

if TYPE_CHECKING:
    from multigpu_cli.data.map_style_fetcher import ItemFetcher

_SHARE_OF_GPU = 0.25  # of the free memory that a dataset may take with --data-on-device auto


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device.

    Attributes:
        inputs, targets: whole batches, first dimension n.
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
            self._fetch = _InMemoryFetcher(split, device, config.on_device, source.loader_options)
        else:
            from multigpu_cli.data.map_style_fetcher import (
                ItemFetcher,  # late: what lies in memory needs no loader processes
            )

            self._fetch = ItemFetcher(split, device, seed, config.num_workers, workers_here, source.loader_options)
        self.data_location = self._fetch.data_location
        self._weights_wanted = config.sample_weights
        self._transforms = BatchTransforms(config, source, seed, device, training=split is source.train)

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
        order = self._keyed_order(epoch)
        steps = range(start, plan.steps_per_epoch)
        chunks = (
            order[first:stop]
            for step in steps
            for _, first, stop in plan.local_forward_passes(step, rank, replicas_per_process)
        )
        batches = self._fetch.stream(chunks, epoch)
        for step in steps:
            layout = plan.layout(epoch * plan.steps_per_epoch + step, rank, replicas_per_process)
            micro = plan.micro_batch
            yield layout, (self._finish_batch(next(batches), index, epoch, micro) for index, _, _ in layout.passes)

    def sample_order(self, epoch: int) -> Tensor:
        """(n,) int64: the sample at each position of an epoch of training."""
        if self._weights_wanted is not None:
            return draw_samples(self._weights, self.seed, epoch)
        own = self.source.order
        return epoch_order(self.size, self.seed, epoch) if own is None else own(epoch)

    @cached_property
    def _weights(self) -> Tensor:
        """(n,) float64 of the samples; looked up when training begins, for the split may be another one's."""
        assert self._weights_wanted is not None
        return resolve_sample_weights(self._weights_wanted, self.source, "data.sample_weights")

    def _keyed_order(self, epoch: int) -> Tensor:
        """(n,) int64: the order, where a sample that comes again gets a number of its own beyond the dataset's end.

        It is fetched modulo the size, and augmented by that number: each time differently.
        """
        order = self.sample_order(epoch)
        return order if self._weights_wanted is None else order + self.size * count_repeats(order)

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        """This worker's part of one ordered pass: fixed batches, each sample once on any number of workers."""
        count = -(-self.size // batch_size)
        mine = range(count * rank // workers, count * (rank + 1) // workers)
        chunks = [torch.arange(i * batch_size, min((i + 1) * batch_size, self.size)) for i in mine]
        for index, fetched in zip(mine, self._fetch.stream(chunks, EVAL_EPOCH), strict=True):
            yield self._finish_batch(fetched, index, 0, None)

    def iter_training_batches(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Any samples in any order, as an epoch's training meets them.

        Args:
            chunks: (n,) int64 each, the samples of one batch.
        """
        for index, fetched in enumerate(self._fetch.stream(chunks, epoch)):
            yield self._finish_batch(fetched, index, epoch, len(fetched[2]))

    def _finish_batch(self, fetched: "Fetched", index: int, epoch: int, micro_batch: int | None) -> Batch:
        """Transform a batch.

        Args:
            micro_batch: its samples, or those of each part of a joined batch; None in an evaluation.
        """
        inputs, targets, keys = fetched
        if micro_batch is None:
            return Batch(*self._transforms.evaluate(inputs, targets), keys, index)
        pair = self._transforms.train(inputs, targets, keys, epoch, micro_batch)
        return Batch(*pair, keys if self._weights_wanted is None else keys % self.size, index)


class _InMemoryFetcher:
    """A dataset held in one piece, in host or device memory, and indexed by whole batches."""

    def __init__(self, split: TensorDataset, device: torch.device, wanted: str, fetching: LoaderOptions) -> None:
        tensors = split.tensors
        if len(tensors) != 2:
            raise RequestError(f"--data: a sample must be (input, target), not {len(tensors)} tensors")
        self.device, on_device, self._pin = device, device.type == "cpu", fetching.pin_memory
        if device.type == "cuda":
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            free, _ = torch.cuda.mem_get_info(device)
            on_device = wanted == "on" or (wanted == "auto" and size <= _SHARE_OF_GPU * free)
        home = device if on_device else torch.device("cpu")
        self.inputs, self.targets = (tensor.to(home) for tensor in tensors)
        self.data_location = f"in {'GPU' if home.type == 'cuda' else 'host'} memory"

    def close(self) -> None:
        """Nothing is open."""

    def stream(self, chunks: Iterable[Tensor], epoch: int) -> Iterator[Fetched]:
        batches = self._pick(chunks)
        return batches if self.inputs.device == self.device else move_batches(batches, self.device, pin=self._pin)

    def _pick(self, chunks: Iterable[Tensor]) -> Iterator[Fetched]:
        for indices in chunks:
            at = to_device(indices % len(self.inputs), self.inputs.device)
            yield self.inputs.index_select(0, at), self.targets.index_select(0, at), indices
