"""SimCLR, which contrasts two views of each image over the global batch; and a linear probe of what it has learned.

python main_multi_gpu.py --data fashion-mnist --task own_simclr:SimCLR --model own_simclr:Encoder \
    --global-batch-size 512 --batch-size 64 --save-dir runs/simclr
python main_multi_gpu.py --data fashion-mnist --model own_simclr:Probe --freeze 'features.*' \
    --init-from runs/simclr/last.pt --init-partial --save-dir runs/probe
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, normalize

from multigpu_cli.tasks.own_loss import GlobalBatchTask


def draw_view(images: Tensor) -> Tensor:
    """Crop, mirror and fade each image; torch's generators are seeded, alike in both passes of a micro-batch."""
    count, draw = len(images), torch.rand(6, len(images), device=images.device)
    size, fade, mirror = 0.5 + 0.5 * draw[0], 0.6 + 0.8 * draw[1], 1 - 2 * (draw[2] < 0.5).float()
    window = images.new_zeros(count, 2, 3)
    window[:, 0, 0], window[:, 1, 1] = size * mirror, size
    window[:, :, 2] = ((1 - size) * (2 * draw[3:5] - 1)).T
    crops = grid_sample(images, affine_grid(window, list(images.shape), align_corners=False), align_corners=False)
    return crops * fade.view(-1, 1, 1, 1) + 0.1 * torch.randn_like(crops)


def build_features(channels: int) -> nn.Sequential:  # GroupNorm: BatchNorm would be that of a micro-batch
    blocks: list[nn.Module] = []
    for inputs, outputs in ((channels, 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten())


class Encoder(nn.Sequential):
    def __init__(self, input_shape: Any) -> None:
        super().__init__()
        self.features = build_features(input_shape[0])
        self.head = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 64))


class Probe(nn.Sequential):
    def __init__(self, input_shape: Any, num_classes: int) -> None:
        super().__init__()
        self.features = build_features(input_shape[0])
        self.classifier = nn.Linear(512, num_classes)


class SimCLR(GlobalBatchTask):
    temperature = 0.2

    def rows(self, model: Any, batch: Any) -> Tensor:  # (n, 2, d): a row for each sample
        views = model(torch.cat([draw_view(batch.inputs), draw_view(batch.inputs)]))
        return torch.stack(views.chunk(2), 1)

    def loss(self, rows: Tensor, targets: Any) -> Tensor:  # of all samples of the global batch
        views, count = normalize(torch.cat([rows[:, 0], rows[:, 1]]), dim=1), len(rows)
        logits = (views @ views.T / self.temperature).fill_diagonal_(-1e9)
        other_view = torch.arange(2 * count, device=rows.device).roll(count)
        return cross_entropy(logits, other_view)
