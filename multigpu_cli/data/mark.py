"""A cheap mark of what a dataset holds: alike where two machines have the same data, whatever rounds their floats."""

from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.data.base import Source
from multigpu_cli.data.items import Keyed, elsewhere
from multigpu_cli.errors import RequestError

_ALL = 2**24  # values; of a larger tensor only some rows are looked at
_SOME = 4096  # rows
_FEW = 8  # samples of a dataset that is fetched one by one


def mark_of(source: Source, seed: int) -> tuple[list[int], list[float]]:
    """What must be the same to the bit, and what may be rounded differently.

    Returns:
        Four 64-bit numbers of a SHA-256 over lengths, shapes, whole numbers and bytes; sums of what is floating.
    """
    exact, sums = sha256(source.learned().encode()), numpy.zeros(12)
    for place, split in enumerate((source.train, source.val, source.test)):
        if split is None:
            exact.update(b"none")
            continue
        look = partial(_looked_at, split, seed)
        digest, sums[4 * place : 4 * place + 4] = look() if isinstance(split, TensorDataset) else elsewhere(look)
        exact.update(digest)
    return numpy.frombuffer(exact.digest(), dtype=numpy.int64).tolist(), sums.tolist()


def _looked_at(split: Dataset[Any], seed: int) -> tuple[bytes, list[float]]:
    """SHA-256 of length, shapes, whole numbers and bytes of one split, and the sums of what is floating."""
    exact, sums = sha256(str(len(split)).encode()), numpy.zeros(4)  # type: ignore[arg-type]
    for value in _values(split, seed):
        if isinstance(value, Tensor) and value.is_floating_point():
            exact.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sums += _sums(value)
        else:
            exact.update(_bytes(value))
    return exact.digest(), sums.tolist()


def _values(split: Dataset[Any], seed: int) -> Iterator[Any]:
    if isinstance(split, TensorDataset):
        yield from (_rows(tensor) for tensor in split.tensors)
        return
    keyed, count = Keyed(split, seed), len(split)  # type: ignore[arg-type]
    for index in sorted({number * count // _FEW for number in range(_FEW)}) if count else ():
        try:
            once, again = (_flat(keyed[0, index]) for _ in range(2))
        except RequestError:  # training will say so, and of which sample
            return
        values = [(one, other) for one, other in zip(once, again, strict=False) if _bytes(one) == _bytes(other)]
        yield from (one for one, _ in values)  # what changes from call to call marks nothing


def _rows(tensor: Tensor) -> Tensor:
    if tensor.numel() <= _ALL:
        return tensor
    return tensor[torch.arange(_SOME) * len(tensor) // _SOME]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [entry for name in value for entry in (name, *_flat(value[name]))]
    if isinstance(value, (list, tuple)):
        return [entry for each in value for entry in _flat(each)]
    if isinstance(value, (Tensor, numpy.ndarray)):
        return [torch.as_tensor(value)] if getattr(value, "dtype", None) != numpy.dtype(object) else []
    return [value]


def _sums(value: Tensor) -> list[float]:
    """Sum, sum of squares, and both with places counted, so that order matters."""
    flat = value.detach().double().cpu().flatten().nan_to_num()
    place = torch.linspace(1, 2, len(flat), dtype=torch.float64)
    return [float(part.sum()) for part in (flat, flat.square(), flat * place, flat.square() * place)]


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous().flatten()
        content = held.view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return f"{value.dtype} {tuple(value.shape)}".encode() + content
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value).encode()
    return getattr(value, "tobytes", lambda: type(value).__name__.encode())()  # an image says its pixels
