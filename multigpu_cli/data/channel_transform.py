"""Normalizes batches per channel, and applies --mode: all channels, their mean, or the first one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multigpu_cli.errors import RequestError, did_you_mean

MODES = ("flatten", "average", "first")


@dataclass(frozen=True)
class Standardised:
    """Normalizes a stored batch (n, C, …) of any dtype to float32, mean 0 and deviation 1 per channel; applies `mode`.

    `flatten` keeps every channel (n, C, …); `average` (their mean) and `first` leave one (n, 1, …).

    Attributes:
        mean, deviation: one number per channel, of the stored training samples.
        mode: flatten, average or first.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    mode: str
    _constants: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, batch: Tensor) -> Tensor:
        mean, scale = self._on(batch.device, batch.ndim)
        if self.mode == "first":
            return (batch[:, :1].float() - mean[:, :1]) * scale[:, :1]
        standardised = batch.to(torch.float32, copy=True).sub_(mean).mul_(scale)
        return standardised.mean(dim=1, keepdim=True) if self.mode == "average" else standardised

    def _on(self, device: torch.device, ndim: int) -> tuple[Tensor, Tensor]:
        """Mean and 1/deviation, (1, C, 1, …); copied to a device once: a copy per batch would stall the stream."""
        if (device, ndim) not in self._constants:
            shape = (1, -1) + (1,) * (ndim - 2)
            mean = torch.tensor(self.mean, device=device).view(shape)
            scale = torch.tensor([1 / (deviation or 1.0) for deviation in self.deviation], device=device).view(shape)
            self._constants[device, ndim] = mean, scale
        return self._constants[device, ndim]


def fit_standardised(train: Tensor, mode: str) -> Standardised:
    """Learn the channels' means and deviations from the stored training samples (n, C, …)."""
    mean, deviation = zip(*(_moments(train[:, channel]) for channel in range(train.shape[1])), strict=True)
    return Standardised(mean, deviation, mode)


def model_input_shape(sample_shape: Sequence[int], mode: str) -> tuple[int, ...]:
    """Shape of one sample as the model receives it.

    Raises:
        RequestError: an unknown mode, or a mode for channels where a sample is a vector.
    """
    if mode not in MODES:
        raise RequestError(f"--mode: unknown name {mode!r}", remedy=did_you_mean(mode, MODES))
    if mode == "flatten":
        return tuple(sample_shape)
    if len(sample_shape) < 2:
        raise RequestError(
            f"--mode {mode} needs samples with channels; --data gives vectors of {sample_shape[0]} numbers",
            remedy="use --mode flatten",
        )
    return (1, *sample_shape[1:])


def _moments(values: Tensor) -> tuple[float, float]:
    """Mean and standard deviation; for bytes from a histogram, which is exact and needs no float copy of the data."""
    if values.dtype != torch.uint8:
        spread, mean = torch.std_mean(values.double(), correction=0)
        return float(mean), float(spread)
    counts = torch.bincount(values.flatten(), minlength=256).double()
    levels = torch.arange(256, dtype=torch.float64)
    mean = (counts * levels).sum() / counts.sum()
    return float(mean), float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt())
