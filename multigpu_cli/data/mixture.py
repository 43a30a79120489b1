"""--data mixture: several datasets with weights (data.mix) as one, the same on any number of workers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from multigpu_cli.data.collate import describe_shapes, get_sample, to_pair
from multigpu_cli.data.order import OrderByPieces, OrderOfEpoch, shuffle_epoch
from multigpu_cli.data.source import SPLITS, Codec, DataSource
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.planning.batch import apportion, make_key

PERIOD = 65536  # positions, in each of which every source has the same number
_MIX = 0x313C  # separates these random numbers from those of other streams
_ORDERS = 2  # of each source that are kept: the ends of a pass and of the next


class MixtureOrder:
    """The order of a mixture: each source has its share of every epoch, and goes through its samples pass by pass.

    A source takes up where it stopped in the epoch before; when all its samples have had their turn, it shuffles them
    anew. In each period of 65,536 positions, and in the rest at the end, the sources have fixed numbers of places,
    which the seed shuffles. An epoch has `samples` places, each source `counts` of them; `blocks` has each one's
    data.shuffle_block.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        samples: int,
        seed: int,
        blocks: Sequence[int | None],
        window: int,
    ) -> None:
        self.sizes, self.samples, self.seed, self.blocks, self.window = list(sizes), samples, seed, blocks, window
        self.periods, rest = divmod(samples, PERIOD)
        self.of_period, self.of_rest = apportion(PERIOD, weights), apportion(rest, weights)
        self.counts = [self.periods * each + left for each, left in zip(self.of_period, self.of_rest, strict=True)]
        self.offsets = [0, *accumulate(sizes)]
        self._open_pass = [lru_cache(_ORDERS)(partial(self._shuffle_pass, source)) for source in range(len(sizes))]

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> OrderOfEpoch:
        """The numbers of the samples, counted over all sources one after the other.

        A source's second pass within the epoch counts on from the end of all sources, a third from there, and so on.
        """
        return _MixtureEpoch(self, epoch)

    def find_places(self, source: int, first: int, count: int, epoch: int) -> Tensor:
        """(count,) int64: what a source gives from its place `first` on, counted over all epochs."""
        size, total, found = self.sizes[source], self.offsets[-1], []
        began = epoch * self.counts[source] // size  # the pass in which the epoch begins
        while count:
            number, at = divmod(first, size)
            taken = min(count, size - at)
            rows = self._open_pass[source](number)[at : at + taken]
            found.append(rows + (self.offsets[source] + (number - began) * total))
            first, count = first + taken, count - taken
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _shuffle_pass(self, source: int, number: int) -> OrderOfEpoch:
        seed = make_key(self.seed, _MIX, source)
        return shuffle_epoch(self.sizes[source], seed, number, self.blocks[source], self.window)


class _MixtureEpoch(OrderByPieces):
    """One epoch of a MixtureOrder, a period a piece."""

    def __init__(self, mixture: MixtureOrder, epoch: int) -> None:
        super().__init__([*range(0, mixture.samples, PERIOD), mixture.samples])
        self._mixture, self._epoch = mixture, epoch

    def make_piece(self, number: int) -> Tensor:
        mixture, epoch = self._mixture, self._epoch
        counts = mixture.of_period if number < mixture.periods else mixture.of_rest
        generator = torch.Generator().manual_seed(make_key(mixture.seed, epoch, _MIX, number))
        sources = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        sources = sources[torch.randperm(len(sources), generator=generator)]
        found = torch.empty(len(sources), dtype=torch.int64)
        for source, count in enumerate(counts):  # each in the order of its pass
            first = epoch * mixture.counts[source] + number * mixture.of_period[source]
            found[sources == source] = mixture.find_places(source, first, count, epoch)
        return found


class MixedSource(NamedTuple):
    """One dataset of a mixture: its name in data.mix with its folder, and its weight, relative to the others."""

    name: str
    source: DataSource
    weight: float


class MixedBatches(ConcatDataset[Any]):
    """Several datasets of whole batches, one after the other."""

    def __init__(self, parts: Sequence[Dataset[Any]], num_classes: int) -> None:
        super().__init__(parts)
        self.num_classes = num_classes
        self._starts = np.array([0, *self.cumulative_sizes])
        first = get_sample(parts[0], 0)[0]
        self._shape, self._dtype = first.shape, first.dtype

    def fetch_batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs (n, …) and targets (n, …) of some samples."""
        numbers = self._starts.searchsorted(indices, side="right") - 1
        inputs, targets = torch.empty((len(indices), *self._shape), dtype=self._dtype), None
        out = inputs.numpy()
        for number in set(numbers.tolist()):
            places = np.flatnonzero(numbers == number)
            found = _fetch_into(self.datasets[number], indices[places] - self._starts[number], out, places)
            if targets is None:
                targets = torch.empty((len(indices), *found.shape[1:]), dtype=found.dtype)
            targets.numpy()[places] = found.numpy()
        assert targets is not None
        return inputs, targets


def load(
    seed: int,
    mix: Sequence[MixedSource] = (),
    samples: int | None = None,
    shuffle_block: int | None = None,
    shuffle_window: int = 64,
) -> DataSource:
    """The sources as one dataset, which is like the first of them.

    An epoch has `samples` places, by default as many as all sources have training samples. Validation and test are
    those of all sources, each sample once. data.shuffle_block and data.shuffle_window hold for each source by itself.
    """
    if not mix:
        problem = "--data mixture needs data.mix, the datasets"
        raise RequestError(problem, remedy="data: {mix: [{data: csv, data_dir: a.csv}, …]} in YAML")
    if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < len(mix)):
        raise RequestError(f"data.samples: {samples!r}", remedy=f"a whole number of at least {len(mix)}")
    for other in mix[1:]:
        _check_alike(mix[0], other)
    first, sizes = mix[0].source, [len(each.source.train) for each in mix]  # type: ignore[arg-type]
    weights, blocks = [each.weight for each in mix], [shuffle_block or each.source.shuffle_block for each in mix]
    order = MixtureOrder(sizes, weights, samples or sum(sizes), seed, blocks, shuffle_window)
    shares = _describe_shares(mix, order)
    classes = first.num_classes if first.task == "classification" else 0
    splits: dict[str, Any] = {part: _join([getattr(each.source, part) for each in mix], classes) for part in SPLITS}
    warnings = tuple(warning for each in mix for warning in each.source.warnings)
    signature = " ".join(f"{each.name} {each.weight:g} {each.source.signature()}" for each in mix)
    return replace(
        first,
        **splits,
        new=None,
        codec=first.codec if first.codec.serialize() else Codec(),  # features are those of one table
        order=order,
        order_has_repeats=True,
        warnings=warnings,
        transform_signature=signature,
        note=f"{shares}: ",
    )


def _describe_shares(mix: Sequence[MixedSource], order: MixtureOrder) -> str:
    """Each source's share of an epoch, in words; RequestError where one has none."""
    words = []
    for each, count, least, size in zip(mix, order.counts, order.of_period, order.sizes, strict=True):
        if not count or not least:
            raise RequestError(
                f"data.mix: {each.name} gets no sample in an epoch of {len(order):,} samples with its weight of "
                f"{each.weight:g}",
                remedy="a larger weight, or leave it out; a weight counts in parts of 1/65,536",
            )
        words.append(f"{each.name} {100 * count / len(order):.1f} % from {pluralize(size, 'sample')}")
    return "; ".join(words)


def _check_alike(first: MixedSource, other: MixedSource) -> None:
    """Refuse sources of which no batch, or no common model, can be made."""
    one, two = first.source, other.source
    facts = {
        "samples for the model": (one.input_shape, two.input_shape),
        "tasks": (one.task, two.task),
        "classes": (one.class_names or one.num_classes, two.class_names or two.num_classes),
        "outputs": (one.num_outputs, two.num_outputs),
        "vocabularies": (one.codec.serialize(), two.codec.serialize()),
        "preparations": (type(one.prepare).__name__, type(two.prepare).__name__),
        "samples": (_describe_sample(one), _describe_sample(two)),
    }
    for what, (here, there) in facts.items():
        if here != there:
            raise RequestError(
                f"data.mix: {what} of {first.name} and {other.name} differ: {_shorten(here)} and {_shorten(there)}",
                remedy="datasets of one shape and one task; args: {…} of each may choose columns and sizes",
            )
    for each in (first, other):
        if each.source.order is not None or each.source.noun != "samples":
            problem = f"data.mix: {each.name} has its own order, packs or pairs, so it can't be mixed"
            raise RequestError(problem, remedy="one dataset of all its samples")


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _describe_sample(source: DataSource) -> str:
    return ", ".join(map(describe_shapes, to_pair(get_sample(source.train, 0), "sample 0", source.form)))


def _join(parts: Sequence[Dataset[Any] | None], classes: int) -> Dataset[Any] | None:
    """Join the datasets that exist: in memory if all are, and read by whole batches if all can be."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    in_memory = [part for part in there if isinstance(part, TensorDataset)]
    if len(in_memory) == len(there):
        return TensorDataset(*(torch.cat(each) for each in zip(*(part.tensors for part in in_memory), strict=True)))
    if all(isinstance(part, TensorDataset) or hasattr(part, "fetch_batch") for part in there):
        return MixedBatches(there, classes)
    return ConcatDataset(there)


def _fetch_into(part: Any, indices: np.ndarray, out: np.ndarray, at: np.ndarray) -> Tensor:
    """Write the inputs of some samples to the entries `at` of a batch; returns their targets."""
    if isinstance(part, TensorDataset):
        inputs, targets = (tensor[torch.from_numpy(indices)] for tensor in part.tensors)
        out[at] = inputs.numpy()
        return targets
    return part.fetch_into(indices, out, at.tolist())  # type: ignore[no-any-return]
