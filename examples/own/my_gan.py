"""Two networks and two optimizers, in a loop of your own."""

import torch
from my_samples import Numbers
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, DistributedSampler

from train_multi_gpu import cleanup_distributed, setup_multi_gpu_training

generator, wrapped, info = setup_multi_gpu_training(nn.Linear(4, 8), same_inputs=True)
critic = setup_multi_gpu_training(nn.Linear(8, 1), same_inputs=True)[0]
device = next(critic.parameters()).device
dataset = Numbers("train")
loader = DataLoader(dataset, 16, sampler=DistributedSampler(dataset) if wrapped else None)
for_generator, for_critic = (torch.optim.AdamW(model.parameters()) for model in (generator, critic))
for real, _ in loader:
    made = generator(torch.randn(len(real), 4, device=device))
    for_critic.zero_grad()
    critic_loss = softplus(critic(made.detach())).mean() + softplus(-critic(real.to(device))).mean()
    critic_loss.backward()
    for_critic.step()
    for_generator.zero_grad()
    softplus(-critic(made)).mean().backward()
    for_generator.step()
print(f"batches {len(loader)}")
cleanup_distributed()
