"""A script for torchrun: prints the threads of this process, as the kernel names them, after a run."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from main_multi_gpu import leave
from train_multi_gpu import train_with_multi_gpu


def threads() -> str:
    return " ".join(sorted(task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")))


model = nn.Linear(3, 2)
loader = DataLoader(TensorDataset(torch.ones(8, 3), torch.arange(8) % 2), batch_size=2)
train_with_multi_gpu(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), num_epochs=1, global_batch_size=4)
print(f"left: {threads()}\n", end="", flush=True)
leave(0)
