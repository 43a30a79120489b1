"""Turns samples in any common form into batches of (inputs, targets), counts their tokens, moves them to the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, Subset, default_collate

from multigpu_cli.data.files import explain_unreadable
from multigpu_cli.distributed.world import copy_stream, pin_memory
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.runtime.factories import describe_error
from multigpu_cli.runtime.model_call import IGNORED, TARGETS


@dataclass(frozen=True)
class SampleForm:
    """How the parts of a sample are divided into inputs and targets."""

    inputs: int | None = None  # so many parts of a tuple are inputs, and the others targets; None: one and one
    needs_target: bool = True
    keeps_mappings: bool = False  # a mapping stays whole, with its targets in it
    ignored: int | None = None  # targets are a class for each pixel, but for this number; None: they are not
    classes: int | None = None  # number of classes, if known before the samples are read; 0 if targets are numbers


PAIR = SampleForm()
_MOST_AT_ONCE, _BYTES_AT_ONCE = 32, 2**23  # batches that are fetched together

VOID = 255  # the class that no pixel has, in the masks of most datasets for segmentation


def get_sample(dataset: Dataset[Any], index: int, split: str = "train") -> Any:
    """Return one sample as the dataset hands it out; an error of its own code says where, and in which split."""
    with report_own_code(dataset, f"sample {index}", f"[{index}]", split):
        return dataset[index]


def get_samples(dataset: Dataset[Any], indices: list[int], split: str = "train") -> Sequence[Any]:
    """Return several samples of a dataset that hands them out at once; errors are those of `get_sample`."""
    what = f"samples {', '.join(map(str, indices[:8]))}"
    with report_own_code(dataset, what, f".__getitems__({indices[:8]})", split):
        items: Sequence[Any] = dataset.__getitems__(indices)  # type: ignore[attr-defined]
    if len(items) != len(indices):
        raise RequestError(
            f"--data: {type(unwrap_dataset(dataset)).__name__}.__getitems__ gave {len(items)} samples "
            f"where {len(indices)} were asked for",
            remedy="one for each index, in their order",
        )
    return items


@contextmanager
def report_own_code(dataset: Dataset[Any], what: str, call: str, split: str = "train") -> Iterator[None]:
    """Report an error of the dataset's own code, which `what` (in words) raised, as a RequestError that says where.

    `call` is the expression on the dataset of `split` that shows it in Python. Raises TrainingError if a disk failed.
    """
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # the user's own code: reported as what is wrong with the request
        remedy = f"see what {type(unwrap_dataset(dataset)).__name__}{call} of the {split} split gives in Python"
        raise explain_unreadable(f"--data: {what} raised {describe_error(error)}", error, remedy) from error


def to_pair(item: Any, what: str, form: SampleForm = PAIR) -> tuple[Any, Any]:
    """(inputs, targets) of a sample, or of a batch that a collate_fn made; several inputs or targets are a tuple.

    A mapping's target is its entry called target, targets, label, labels or y; the others are the inputs, and a lone
    one stands for itself. In a mapping with `input_ids`, labels of the same length stand at the place of their token,
    as in Hugging Face's datasets, and are moved by one; where there are none, the tokens themselves are. Targets are
    None where the sample has none, and the form needs none.

    Args:
        what: "sample 3", say, for messages.
    """
    if isinstance(item, Mapping):
        if form.inputs:
            raise RequestError(f"data.inputs={form.inputs}: {what} is a dict of named entries", remedy="leave it out")
        return (to_tensors(item), None) if form.keeps_mappings else _from_mapping(dict(item), what, form)
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    inputs = form.inputs or 1
    if len(parts) < inputs + form.needs_target or (form.inputs is None and len(parts) > 2):
        kind = f"{type(item).__name__}{f' of {len(parts)}' if isinstance(item, tuple | list) else ''}"
        wanted = f"data.inputs={form.inputs} and a target" if form.inputs else "(input, target)"
        more = f"--set data.inputs={len(parts) - 1} where all but the last are inputs; " if len(parts) > 2 else ""
        problem = f"--data: {what} must be {wanted}, not {kind}"
        raise RequestError(problem, remedy=f"{more}a pair, or a dict with the target under one of {', '.join(TARGETS)}")
    return _join(parts[:inputs]), _join(parts[inputs:])


def _join(parts: tuple[Any, ...]) -> Any:
    """Several parts as a tuple; a lone one stands for itself, and none is None."""
    tensors = tuple(to_tensors(part) for part in parts)
    return tensors if len(tensors) > 1 else next(iter(tensors), None)


def _from_mapping(item: dict[Any, Any], what: str, form: SampleForm) -> tuple[Any, Any]:
    named = [name for name in TARGETS if name in item]
    tokens = to_tensors(item["input_ids"]) if "input_ids" in item else None
    if len(named) > 1 or (not named and tokens is None and form.needs_target):
        problem = f"--data: {what} has {' and '.join(named) or 'no target'} among {', '.join(map(str, item))}"
        raise RequestError(problem, remedy=f"one entry called {', '.join(TARGETS)}")
    target = to_tensors(item.pop(named[0])) if named else tokens
    inputs = {name: to_tensors(value) for name, value in item.items()}
    if tokens is not None and isinstance(target, Tensor) and target.shape == tokens.shape and target.ndim:
        if (mask := inputs.get("attention_mask")) is not None:  # padding is not predicted
            target = torch.where(mask.bool(), target, IGNORED)
        target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], IGNORED)], dim=-1)
    return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), target


def to_tensors(value: Any) -> Any:
    """Arrays, numbers, images and lists of numbers as tensors; float64 of NumPy and Python as torch's default type."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, numpy.ndarray | numpy.generic | float | int | bool):
        tensor = torch.as_tensor(value)
        return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor
    if isinstance(value, Mapping):
        return {name: to_tensors(entry) for name, entry in value.items()}
    if isinstance(value, list) and value and all(isinstance(entry, int | float) for entry in value):
        return to_tensors(numpy.asarray(value))
    if type(value) in (list, tuple):
        return type(value)(map(to_tensors, value))
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # a PIL image, without loading PIL
        pixels = torch.from_numpy(numpy.array(value))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
    return value


def get_tokens(inputs: Any) -> Any:
    """The entry `input_ids` of a mapping; anything else as it is."""
    return inputs.get("input_ids") if isinstance(inputs, dict) else inputs


def unwrap_dataset(dataset: Any) -> Any:
    """The user's own dataset inside of what we have divided."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


class Collated(NamedTuple):
    """A batch in host memory."""

    inputs: Any
    targets: Any

    def pin_memory(self) -> "Collated":
        """The same in page-locked memory; DataLoader's own way makes lists of tuples in some versions of torch."""
        return Collated(*tree_map_only(Tensor, pin_memory, tuple(self)))


class Collate:
    """Samples → (inputs, targets) of a batch, by the dataset's own `collate_fn` if it has one.

    Samples come as (number, sample); with a `collate_fn` they reach it as the dataset handed them out.
    """

    def __init__(self, dataset: Dataset[Any], form: SampleForm = PAIR) -> None:
        self.own: Callable[[list[Any]], Any] | None = getattr(unwrap_dataset(dataset), "collate_fn", None)
        self._classes, self._form = count_declared_classes(dataset) or form.classes, form

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> Collated:
        if self.own is not None:
            made = to_pair(self.own([item for _, item in numbered]), "what collate_fn returns", self._form)
            return _list_samples(*made, len(numbered))
        pairs = [to_pair(item, f"sample {number}", self._form) for number, item in numbered]
        try:
            inputs, targets = (_stack(list(side)) for side in zip(*pairs, strict=True))
        except (RuntimeError, TypeError, KeyError, ValueError) as error:
            named = [
                f"sample {number}: {describe_shapes(pair)}" for (number, _), pair in zip(numbered, pairs, strict=True)
            ]
            raise RequestError(
                f"--data: these samples can't be stacked into a batch ({str(error).splitlines()[0]})\n    "
                + "\n    ".join(named[:3]),
                remedy="samples of one shape, or a method collate_fn(samples) of the dataset: it returns the batch's "
                "(inputs, targets), padded as the model wants them",
            ) from error
        self.check_classes([number for number, _ in numbered], targets)
        return Collated(inputs, targets)

    def check_classes(self, numbers: Sequence[int] | Tensor, targets: Any) -> None:
        """Refuse, by its sample's number, a class that the dataset does not have."""
        if not (self._classes and isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.ndim == 1):
            return
        wrong = (targets >= self._classes) | ((targets < 0) & (targets != IGNORED))
        if wrong.any():  # here, on the host: a GPU would only fail an assertion, and be lost to the process
            first = int(wrong.nonzero()[0])
            raise RequestError(
                f"--data: sample {int(numbers[first])} has the label {int(targets[first])}, and there are "
                f"{self._classes} classes",
                remedy=f"labels from 0 to {self._classes - 1}, or another num_classes of the dataset",
            )


def _stack(values: list[Any]) -> Any:
    """As default_collate does, but tuples and lists stay tuples, and what no sample has is None."""
    if all(value is None for value in values):
        return None
    if all(type(value) in (tuple, list) for value in values):
        return tuple(_stack(list(column)) for column in zip(*values, strict=True))
    return default_collate(values)


def _list_samples(inputs: Any, targets: Any, count: int) -> Collated:
    """The batch that a collate_fn made; `tuple(zip(*samples))`, one entry for each sample, as lists.

    A tuple of several inputs holds whole batches: tensors whose first dimension is the number of samples.
    """
    sides = inputs if targets is None else targets
    single = type(inputs) is tuple and len(inputs) == count and isinstance(sides, tuple | list)
    if not single or len(sides) != count or all(isinstance(one, Tensor) and one.shape[:1] == (count,) for one in sides):
        return Collated(inputs, targets)
    return Collated(list(inputs), targets if targets is None else list(targets))


def count_declared_classes(dataset: Dataset[Any]) -> int:
    """Return the number of classes that a user's dataset declares; 0 if it does not declare a number."""
    own = unwrap_dataset(dataset)
    count = getattr(own, "num_classes", None)
    return count if isinstance(count, int) else len(getattr(own, "classes", None) or ())


def describe_shapes(value: Any) -> str:
    """Types and shapes in words: 'float32 (2, 8)', '{x: int64 (3,), y: float32 ()}'."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {describe_shapes(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, tuple | list):
        more = ", …" if len(value) > 4 else ""
        return "(" + ", ".join(describe_shapes(entry) for entry in value[:4]) + more + ")"
    return type(value).__name__


class TokenCounts(NamedTuple):
    """Tokens of a batch: `real` without padding, `places` with it, and `learned`, the targets that count."""

    real: int
    learned: int
    places: int


def count_tokens(items: Sequence[Any], targets: Any) -> TokenCounts | None:
    """The tokens of a batch; None where its samples are no rows of `input_ids`.

    `items` are the samples as the dataset handed them out; those of preferences are two rows each.
    """
    rows = [row for item in items for row in (item if isinstance(item, list) else [item])]
    if not all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
        return None
    if not isinstance(targets, Tensor) or targets.ndim not in (2, 3) or targets.dtype != torch.int64:
        return None
    real = sum(len(row["input_ids"]) for row in rows)
    return TokenCounts(real, int((targets != IGNORED).sum()), targets.numel())


class Fetched(NamedTuple):
    """Samples that were fetched as a batch, with their indices in the dataset."""

    inputs: Any
    targets: Any
    indices: Tensor
    tokens: TokenCounts | None = None


def fetch_together(chunks: Iterable[Tensor], fetch: Callable[[Tensor], Fetched]) -> Iterator[Fetched]:
    """The batches of (n,) indices each; of short rows several are fetched at once, which costs little more than one."""
    waiting, at_once = iter(chunks), 1
    while group := list(islice(waiting, at_once)):
        whole, first = fetch(torch.cat(group)), 0
        for indices in group:
            cut = partial(_cut_rows, rows=slice(first, first := first + len(indices)))
            yield Fetched(for_each(whole.inputs, cut), for_each(whole.targets, cut), indices)
        size = sum(part.nbytes for part in tree_leaves(whole.inputs))
        at_once = min(_MOST_AT_ONCE, max(1, _BYTES_AT_ONCE * len(group) // max(1, size)))


def _cut_rows(part: Tensor, rows: slice) -> Tensor:
    """Rows where torch begins any tensor, so that sums have the same bits whatever was fetched with them."""
    found = part[rows].detach()  # or a network that adds a weight to them in place adds it to other batches' graph
    misplaced = found.storage_offset() * found.itemsize % 512 if part.is_cuda else found.data_ptr() % 64  # bytes
    return found.clone() if misplaced else found


def for_each(part: Any, work: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or each in a tuple, after some work; None stays None."""
    return work(part) if isinstance(part, Tensor) else part and tuple(map(work, part))


def move_batches(batches: Iterable[Fetched], device: torch.device, *, pin: bool = False) -> Iterator[Fetched]:
    """The same batches with inputs and targets on the device.

    On CUDA the next batch is copied on its own stream while the current one is being processed; with `pin` through
    page-locked memory, if the tensors are not there yet.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch._replace(inputs=_there(batch.inputs, device), targets=_there(batch.targets, device))
        return
    stream = copy_stream(device, "batches")
    ready: Fetched | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            there = _there(batch.inputs, device, pin=pin), _there(batch.targets, device, pin=pin)
        if ready:
            yield ready
        now = torch.cuda.current_stream(device)
        now.wait_stream(stream)  # delays only the next step: the current one is already queued
        for tensor in tree_leaves(there):
            if isinstance(tensor, Tensor):
                tensor.record_stream(now)
        ready = Fetched(*there, batch.indices, batch.tokens)
    if ready:
        yield ready


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device; on CUDA from page-locked memory, so that the host does not wait."""
    return pin_memory(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _there(value: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Copy every tensor in nested dicts, lists and tuples to the device; other values are unchanged."""
    if isinstance(value, Tensor):  # tree_map_only takes 10 µs
        return (pin_memory(value) if pin else value).to(device, non_blocking=True)
    return tree_map_only(Tensor, partial(_there, device=device, pin=pin), value)
