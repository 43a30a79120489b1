"""A process that works alone, on the CPU."""

import torch

from multigpu_cli.distributed.world import World

CPU = torch.device("cpu")
ALONE = World(CPU)
