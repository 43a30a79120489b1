"""A cheap fingerprint of a dataset, equal on machines with the same data up to floating-point rounding."""

import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError

DataFingerprint = tuple[Sequence[int], Sequence[float]]
"""Digests, which must be equal, and sums of floating-point values, which may differ by rounding."""

_PARTS = ("classes, tokens or scales", "training samples", "validation samples", "test samples")
_SUMS = 4  # of each split
_ROUNDING = 1e-6  # relative; machines sum in different orders
_ALL = 2**24  # values; of a larger tensor only some rows are read
_SOME = 4096  # rows
_FEW = 8  # samples that are read of a dataset that is fetched one by one
_AT_ONCE = 2**15  # values in double precision, which fit in a cache


def compute_fingerprint(source: DataSource, seed: int) -> DataFingerprint:
    """Compute a fingerprint of each split, and of what was fitted to the training split.

    Digests are 64 bits of a SHA-256 for what was fitted, and for the lengths, shapes, integers and bytes of train, val
    and test; sums four of the floating-point values of each split.
    """
    splits = (source.train, source.val, source.test)

    def fingerprint_splits() -> list[tuple[bytes, list[float]]]:
        return [
            (b"none".ljust(8), [0.0] * _SUMS) if each is None else _fingerprint_split(each, seed) for each in splits
        ]

    if all(split is None or isinstance(split, TensorDataset | range) for split in splits):
        found = fingerprint_splits()
    else:
        from multigpu_cli.data.fetcher import run_in_process  # late: samples are fetched one by one

        found = run_in_process(fingerprint_splits)
    digests, sums = zip(*found, strict=True)
    exact = [sha256(source.signature().encode()).digest(), *digests]
    return list(map(_digest, exact)), [one for each in sums for one in each]


def _digest(found: bytes) -> int:
    return int.from_bytes(found[:8], signed=True)


def _know_nothing(split: Dataset[Any]) -> bytes:
    """SHA-256 of a split of which no value is the same when it is fetched again."""
    count = len(split)  # type: ignore[arg-type]
    return sha256(str(count).encode() + b"".join(map(_bytes, _choose(count)))).digest()


def find_shared_samples(source: DataSource, fingerprint: DataFingerprint) -> list[str]:
    """A warning for each split whose samples are those of another, as far as a fingerprint tells."""
    parts, names = _by_part(fingerprint)[1:], ("training", "validation", "test")
    splits: Sequence[Any] = (source.train, source.val, source.test)
    looked = [
        (name, part, len(split))
        for name, part, split in zip(names, parts, splits, strict=True)
        if split is not None and not isinstance(split, range) and part[0] != _digest(_know_nothing(split))
    ]
    return [
        f"the {name} samples are the {other} samples: {count:,} of both, all that were looked at are the same"
        for (other, theirs, _), (name, mine, count) in combinations(looked, 2)
        if mine == theirs
    ]


def describe_differences(one: DataFingerprint, other: DataFingerprint) -> list[str]:
    """The names of the parts that differ."""
    each = zip(_PARTS, _by_part(one), _by_part(other), strict=True)
    return [part for part, here, there in each if here[0] != there[0] or not _close(here[1], there[1])]


def _by_part(fingerprint: DataFingerprint) -> list[tuple[int, Sequence[float]]]:
    """Digest and sums of each part; the first part has no sums."""
    exact, sums = fingerprint
    return [(exact[part], sums[_SUMS * max(part - 1, 0) : _SUMS * part]) for part in range(len(_PARTS))]


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(
        math.isclose(here, there, rel_tol=_ROUNDING, abs_tol=_ROUNDING * max(map(abs, one)))
        for here, there in zip(one, other, strict=True)
    )


def _fingerprint_split(split: Dataset[Any], seed: int) -> tuple[bytes, list[float]]:
    """SHA-256 of length, shapes, integers and bytes of one split, and the sums of its floating-point values."""
    exact, sums = sha256(str(len(split)).encode()), numpy.zeros(_SUMS)  # type: ignore[arg-type]
    for value in _values(split, seed):
        if isinstance(value, Tensor) and value.is_floating_point():
            exact.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sums += _sums(value)
        else:
            exact.update(_bytes(value))
    return exact.digest(), sums.tolist()


def _values(split: Dataset[Any], seed: int) -> Iterator[Any]:
    if isinstance(split, TensorDataset):
        for tensor in split.tensors:
            yield tensor if tensor.numel() <= _ALL else tensor[torch.arange(_SOME) * len(tensor) // _SOME]
        return
    from multigpu_cli.data.fetcher import SeededDataset  # late: samples are fetched one by one

    keyed, count = SeededDataset(split, seed), len(split)  # type: ignore[arg-type]
    for index in _choose(count):
        try:
            once, again = (_flat(keyed[0, index]) for _ in range(2))
        except RequestError:  # training will report it, and name the sample
            return
        values = [(one, other) for one, other in zip(once, again, strict=False) if _bytes(one) == _bytes(other)]
        yield from (one for one, _ in values)  # values that change from call to call are left out


def _choose(count: int) -> list[int]:
    return sorted({number * count // _FEW for number in range(_FEW)}) if count else []


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [entry for name in value for entry in (name, *_flat(value[name]))]
    if isinstance(value, (list, tuple)):
        return [entry for each in value for entry in _flat(each)]
    if isinstance(value, Tensor):
        return [value if value.layout == torch.strided else value.to_dense()]
    if not isinstance(value, numpy.ndarray):
        return [value]
    try:
        return [torch.as_tensor(numpy.ascontiguousarray(value))]
    except TypeError:  # strings, dates, objects
        return [] if value.dtype.hasobject else [value]


def _sums(value: Tensor) -> list[float]:
    """Sum and sum of squares, both also weighted by position, so that the order matters."""
    flat, sums = value.detach().cpu().flatten(), numpy.zeros(_SUMS)
    for start in range(0, len(flat), _AT_ONCE):
        here = flat[start : start + _AT_ONCE].double().nan_to_num(posinf=0.0, neginf=0.0)
        places = 1 + torch.arange(start, start + len(here), dtype=torch.float64) / max(len(flat) - 1, 1)  # from 1 to 2
        squares = here.square()
        sums += [float(each) for each in (here.sum(), squares.sum(), here.dot(places), squares.dot(places))]
    return sums.tolist()


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous().flatten()
        content = held.view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return f"{value.dtype} {tuple(value.shape)}".encode() + content
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value).encode()
    return getattr(value, "tobytes", lambda: type(value).__name__.encode())()  # the pixels of a PIL image
