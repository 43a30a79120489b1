"""`nn.DataParallel`: one process drives several GPUs. PyTorch itself advises DDP; this is for quick trials."""

import torch
from torch import nn

from multigpu_cli.strategies.base import Strategy


class DataParallel(Strategy):
    """Each forward pass takes one micro-batch for every device; BatchNorm's buffers are those of the first replica.

    Args:
        model: on the first device.
        devices: CUDA devices, the first one gathers.
    """

    name = "dp"

    def __init__(self, model: nn.Module, devices: tuple[torch.device, ...]) -> None:
        super().__init__(model)
        self.replicas_per_process = len(devices)
        self.callable = nn.DataParallel(model, device_ids=[device.index for device in devices])
