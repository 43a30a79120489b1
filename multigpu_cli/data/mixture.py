"""--data mixture: several datasets with weights (data.mix) as one, the same on any number of workers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from multigpu_cli.data.collate import describe_shapes, get_sample, to_pair
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.mixture_order import MixtureOrder
from multigpu_cli.errors import RequestError, pluralize


class MixedSource(NamedTuple):
    """One dataset of a mixture.

    Attributes:
        name: as in data.mix, with its folder.
        weight: its share of an epoch's samples, relative to the others.
    """

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
    those of all sources, each sample once.

    Args:
        mix: of data.mix.
        samples: places in an epoch.
        shuffle_block, shuffle_window: data.shuffle_block and data.shuffle_window; they hold for each source by itself.

    Raises:
        RequestError: sources that don't go together, or one that has no place in an epoch.
    """
    if not mix:
        raise RequestError(
            "--data mixture needs data.mix, the datasets",
            remedy="data: {mix: [{data: csv, data_dir: a.csv}, …]} in YAML",
        )
    if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < len(mix)):
        raise RequestError(f"data.samples: {samples!r}", remedy=f"a whole number of at least {len(mix)}")
    for other in mix[1:]:
        _check_alike(mix[0], other)
    first, sizes = mix[0].source, [len(each.source.train) for each in mix]  # type: ignore[arg-type]
    order = MixtureOrder(
        sizes,
        [each.weight for each in mix],
        samples or sum(sizes),
        seed,
        [shuffle_block or each.source.shuffle_block for each in mix],
        shuffle_window,
    )
    shares = _describe_shares(mix, order)
    classes = first.num_classes if first.task == "classification" else 0
    splits = {part: _join([getattr(each.source, part) for each in mix], classes) for part in ("train", "val", "test")}
    warnings = tuple(warning for each in mix for warning in each.source.warnings)
    signature = " ".join(f"{each.name} {each.weight:g} {each.source.signature()}" for each in mix)
    return replace(
        first,
        train=splits["train"] or first.train,
        val=splits["val"],
        test=splits["test"],
        new=None,
        table=None,
        order=order,
        order_has_repeats=True,
        warnings=warnings,
        transform_signature=signature,
        note=f"{shares}: ",
    )


def _describe_shares(mix: Sequence[MixedSource], order: MixtureOrder) -> str:
    """Each source's share of an epoch, in words.

    Raises:
        RequestError: one has none.
    """
    words = []
    for each, count, least, size in zip(mix, order.counts, order.of_period, order.sizes, strict=True):
        if not count or not least:
            raise RequestError(
                f"data.mix: {each.name} has no place in an epoch of {len(order):,} samples with its weight of "
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
        "vocabularies": (_list_tokens(one), _list_tokens(two)),
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
        if each.source.order is not None or each.source.packed or each.source.paired:
            raise RequestError(
                f"data.mix: {each.name} has an order, packs or pairs of its own, and can't be mixed",
                remedy="one dataset of all its samples",
            )


def _list_tokens(source: DataSource) -> str:
    return source.vocabulary.serialize() if source.vocabulary else ""


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _describe_sample(source: DataSource) -> str:
    item = get_sample(source.train, 0)
    return ", ".join(map(describe_shapes, to_pair(item, "sample 0", source.form)))


def _join(parts: Sequence[Dataset[Any] | None], classes: int) -> Dataset[Any] | None:
    """The parts that are there, as one: in memory if all are, and by whole batches if all can be."""
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
