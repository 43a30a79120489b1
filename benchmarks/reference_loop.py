"""The script that one would write by hand for the MLP: for start-up time and memory against ours.

python -m benchmarks.reference_loop STEPS
"""

import os
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def main(steps: int) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(2048, 3072), torch.arange(2048) % 10
    model = nn.Sequential(nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    done = 0
    while done < steps:
        for indices in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            cross_entropy(model(inputs[indices]), targets[indices]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            if done == steps:
                break


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # as ours ends: past torch's exit
