"""Turns the samples of a user's dataset, in any common form, into batches of (inputs, targets)."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from multigpu_cli.errors import RequestError, TrainingError

TARGETS = ("target", "targets", "label", "labels", "y")
_IGNORED = -100  # a target that does not count: torch's own default


def get_sample(dataset: Dataset[Any], index: int) -> Any:
    """One sample as the dataset hands it out.

    Raises:
        RequestError: the dataset's own code failed; says at which sample, and where.
    """
    with _own_code(dataset, f"sample {index}", f"[{index}]"):
        return dataset[index]


def get_samples(dataset: Dataset[Any], indices: list[int]) -> Sequence[Any]:
    """The same of a dataset that hands out several at once."""
    with _own_code(dataset, f"samples {', '.join(map(str, indices[:8]))}", f".__getitems__({indices[:8]})"):
        items: Sequence[Any] = dataset.__getitems__(indices)  # type: ignore[attr-defined]
    if len(items) != len(indices):
        raise RequestError(
            f"--data: {type(unwrap_dataset(dataset)).__name__}.__getitems__ gave "
            f"{len(items)} samples where {len(indices)} were "
            "asked for",
            remedy="one for each index, in their order",
        )
    return items


@contextmanager
def _own_code(dataset: Dataset[Any], what: str, call: str) -> Iterator[None]:
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # the user's own code: reported as what is wrong with the request
        line = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).splitlines() or [""])[0]
        raise RequestError(
            f"--data: {what} raised {type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {said}",
            remedy=f"see what {type(unwrap_dataset(dataset)).__name__}{call} gives in Python",
        ) from error


def to_pair(item: Any, what: str) -> tuple[Any, Any]:
    """(inputs, targets) of a sample, or of a batch that a collate_fn made.

    A mapping's target is its entry called target, targets, label, labels or y; the others are the inputs, and a lone
    one stands for itself. In a mapping with `input_ids`, labels of the same length stand at the place of their token,
    as in Hugging Face's datasets, and are moved by one; where there are none, the tokens themselves are.

    Args:
        what: "sample 3", say, for messages.

    Raises:
        RequestError: it is neither a pair nor a mapping with one target.
    """
    if isinstance(item, Mapping):
        return _from_mapping(dict(item), what)
    if not isinstance(item, tuple | list) or len(item) != 2:
        length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise RequestError(
            f"--data: {what} must be (input, target), not {type(item).__name__}{length}",
            remedy=f"a pair, or a dict with the target under one of {', '.join(TARGETS)}",
        )
    return to_tensors(item[0]), to_tensors(item[1])


def _from_mapping(item: dict[Any, Any], what: str) -> tuple[Any, Any]:
    named = [name for name in TARGETS if name in item]
    tokens = to_tensors(item["input_ids"]) if "input_ids" in item else None
    if len(named) != 1 and not (tokens is not None and not named):
        raise RequestError(
            f"--data: {what} has {' and '.join(named) or 'no target'} among {', '.join(map(str, item))}",
            remedy=f"one entry called {', '.join(TARGETS)}",
        )
    target = to_tensors(item.pop(named[0])) if named else tokens
    inputs = {name: to_tensors(value) for name, value in item.items()}
    if tokens is not None and isinstance(target, Tensor) and target.shape == tokens.shape and target.ndim:
        target = _following(target, inputs.get("attention_mask"))
    return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), target


def _following(labels: Tensor, mask: Tensor | None) -> Tensor:
    """(…, t) labels that stand at their tokens → those that each place has to predict; none of them padding."""
    if mask is not None:
        labels = torch.where(mask.bool(), labels, _IGNORED)
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], _IGNORED)], dim=-1)


def to_tensors(value: Any) -> Any:
    """Arrays, numbers, images and lists of numbers as tensors; float64 of NumPy and Python as torch's default type."""
    if isinstance(value, numpy.ndarray | numpy.generic | float | int | bool):
        tensor = torch.as_tensor(value)
        return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor
    if isinstance(value, Mapping):
        return {name: to_tensors(entry) for name, entry in value.items()}
    if isinstance(value, list) and value and all(isinstance(entry, int | float) for entry in value):
        return to_tensors(numpy.asarray(value))
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


class Collate:
    """Samples → (inputs, targets) of a batch, by the dataset's own `collate_fn` where it has one.

    Samples come as (number, sample); with a `collate_fn` they reach it as the dataset handed them out.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.own: Callable[[list[Any]], Any] | None = getattr(unwrap_dataset(dataset), "collate_fn", None)
        self._classes = count_declared_classes(dataset)

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
        if self.own is not None:
            return to_pair(self.own([item for _, item in numbered]), "what collate_fn returns")
        pairs = [to_pair(item, f"sample {number}") for number, item in numbered]
        try:
            inputs, targets = default_collate(pairs)
        except (RuntimeError, TypeError, KeyError) as error:
            named = [
                f"sample {number}: {describe_shapes(pair)}" for (number, _), pair in zip(numbered, pairs, strict=True)
            ]
            raise RequestError(
                f"--data: these samples make no batch ({str(error).splitlines()[0]})\n    " + "\n    ".join(named[:3]),
                remedy="samples of one shape, or a method collate_fn(samples) of the dataset: it returns the batch's "
                "(inputs, targets), padded as the model wants them",
            ) from error
        if self._classes and isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.ndim == 1:
            self._check_labels([number for number, _ in numbered], targets)
        return inputs, targets

    def _check_labels(self, numbers: list[int], labels: Tensor) -> None:
        """Here, on the host: a GPU would only fail an assertion, and be lost to the process."""
        wrong = (labels >= self._classes) | ((labels < 0) & (labels != _IGNORED))
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise RequestError(
                f"--data: sample {numbers[first]} has the label {int(labels[first])}, and there are "
                f"{self._classes} classes",
                remedy=f"labels from 0 to {self._classes - 1}, or another num_classes of the dataset",
            )


def count_declared_classes(dataset: Dataset[Any]) -> int:
    """How many classes a user's dataset says there are; 0 where it says nothing."""
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
