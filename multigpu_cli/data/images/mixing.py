"""Mixup and CutMix: each training sample is mixed with another one of its micro-batch, drawn by seed, epoch and sample.

Sources: H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412; S. Yun et al., "CutMix:
Regularization Strategy to Train Strong Classifiers with Localizable Features", arXiv:1905.04899.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from multigpu_cli.data.collate import describe_shapes
from multigpu_cli.data.order import KeyedRandom
from multigpu_cli.errors import RequestError

_PARTNER, _CHOICE, _SHARE, _PLACE = 16, 17, 18, 19  # streams of random numbers of their own
_LEVELS = 4096  # of the table from which shares are drawn


class SampleMixer:
    """Mixes samples, and gives the shares of their classes as targets.

    `mixup` and `cutmix` are both parameters of the beta distribution of the shares, None for neither; with both, each
    sample meets one of them, with probability ½.
    """

    def __init__(self, mixup: float | None, cutmix: float | None, classes: int) -> None:
        if classes < 2:
            raise RequestError("data.mixup and data.cutmix mix the classes of samples, and the data has none")
        self._classes = classes
        self._cutmix_odds = 0.0 if cutmix is None else 1.0 if mixup is None else 0.5
        self._tables = torch.stack([_tabulate_shares(mixup or cutmix or 1.0), _tabulate_shares(cutmix or mixup or 1.0)])

    def __call__(self, inputs: Tensor, targets: Tensor, draws: KeyedRandom, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Mixed inputs, and targets (n, classes) float32 that add up to 1.

        The inputs are (n, …) floating, as the model meets them, for CutMix images (n, C, H, W); the targets (n,) int64
        class numbers. `micro_batch` is the samples of one; several may have been joined (DataParallel).
        """
        self.check(inputs, targets)
        partner = _choose_partners(draws, micro_batch)
        if self._tables.device != inputs.device:
            self._tables = self._tables.to(inputs.device)  # once: each copy would stall the stream
        cut = draws.uniform(_CHOICE)[:, 0] < self._cutmix_odds
        levels = (draws.uniform(_SHARE)[:, 0] * _LEVELS).long()
        share = self._tables[cut.long(), levels].float()  # of the sample itself
        others = inputs[partner]
        weight = share.view(-1, *[1] * (inputs.ndim - 1)).to(inputs.dtype)
        mixed = others + (inputs - others) * weight
        if self._cutmix_odds:
            box, left = _cut_boxes(inputs, share, draws)
            mixed = torch.where(cut.view(-1, 1, 1, 1), torch.where(box, others, inputs), mixed)
            share = torch.where(cut, left, share)
        own, other = (one_hot(labels, self._classes).float() for labels in (targets, targets[partner]))
        return mixed, other + (own - other) * share[:, None]

    def check(self, inputs: Any, targets: Any) -> None:
        """Refuse inputs that are no tensor of numbers, for CutMix no images, and targets that are no class numbers."""
        fits = isinstance(inputs, Tensor) and inputs.is_floating_point() and (inputs.ndim == 4 or not self._cutmix_odds)
        if not fits:
            raise RequestError(
                f"data.mixup and data.cutmix: inputs are {describe_shapes(inputs)}, and can't be mixed",
                remedy="samples that are floating-point numbers; for data.cutmix images (channels, height, width)",
            )
        if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.ndim != 1:
            problem = f"data.mixup and data.cutmix: targets are {describe_shapes(targets)}"
            raise RequestError(problem, remedy="targets (n,) int64, the class numbers")


def _tabulate_shares(alpha: float) -> Tensor:
    """(levels,) float64: quantiles of Beta(alpha, alpha), the same on every machine."""
    from scipy.stats import beta

    return torch.from_numpy(beta.ppf((torch.arange(_LEVELS).double().numpy() + 0.5) / _LEVELS, alpha, alpha))


def _choose_partners(draws: KeyedRandom, micro_batch: int) -> Tensor:
    """(n,) int64: for each sample one of its own micro-batch, perhaps itself."""
    drawn = draws.uniform(_PARTNER)[:, 0]
    position = torch.arange(len(drawn), device=drawn.device)
    first = position // micro_batch * micro_batch
    size = (len(drawn) - first).clamp(max=micro_batch)
    return first + (drawn * size).long()


def _cut_boxes(images: Tensor, share: Tensor, draws: KeyedRandom) -> tuple[Tensor, Tensor]:
    """(n, 1, H, W) bool, where the other image is, around a random centre; and (n,) the share that is left."""
    half = (1 - share).sqrt() / 2
    centers = draws.uniform(_PLACE, 2)
    rows, high = _cut_spans(centers[:, 0], half, images.shape[-2])
    columns, wide = _cut_spans(centers[:, 1], half, images.shape[-1])
    return (rows[:, :, None] & columns[:, None, :])[:, None], 1 - high * wide


def _cut_spans(center: Tensor, half: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(n, count) bool, the pixels of one dimension in the box; and (n,) the share of them."""
    low, high = (((center + side * half) * count).round().clamp(0, count)[:, None] for side in (-1, 1))
    pixels = torch.arange(count, device=center.device)
    return (pixels >= low) & (pixels < high), (high - low)[:, 0] / count
