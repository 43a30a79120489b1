"""A training loop of your own, on any number of workers."""

import torch
from my_samples import Net, Numbers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from train_multi_gpu import cleanup_distributed, setup_multi_gpu_training

model, wrapped, info = setup_multi_gpu_training(Net(2))
device = next(model.parameters()).device
dataset = Numbers("train")
loader = DataLoader(dataset, 16, sampler=DistributedSampler(dataset) if wrapped else None, shuffle=not wrapped)
optimizer = torch.optim.AdamW(model.parameters())
for inputs, targets in loader:
    optimizer.zero_grad()
    cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
    optimizer.step()
print(f"batches {len(loader)}")
cleanup_distributed()
