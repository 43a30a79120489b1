"""Which weights of a sharded model took part in a step, for --find-unused-parameters."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from multigpu_cli.runtime.collectives import all_reduce_sum
from multigpu_cli.runtime.world import World
from multigpu_cli.strategies.sharded_probe import list_groups


class WeightUsage:
    """Notes which weights get a gradient in the passes of a step.

    Workers send zeros for what their micro-batches do not use. What nobody used must not be moved by its momentum or
    its weight decay: in one process it has no gradient, and the optimizer leaves it alone.

    Args:
        model: sharded.

    Attributes:
        counts: whether passes are those of a step; padding passes are not.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world, self._held = world, [held for group in list_groups([model]) for held in group.fsdp_params]
        self._watched: set[int] = set()
        self._used: set[int] = set()
        self.counts = False

    def begin_step(self) -> None:
        """Watch the weights that are new: of a block that had not run before, or that learn since now."""
        self.counts = True
        for held in self._held:
            which = id(held.sharded_param)
            if which not in self._watched and hasattr(held, "_unsharded_param") and held._unsharded_param.requires_grad:
                held._unsharded_param.register_post_accumulate_grad_hook(partial(self._note, which))
                self._watched.add(which)

    def _note(self, which: int, _: Tensor) -> None:
        if self.counts:
            self._used.add(which)

    def take_unused(self, parameters: Iterable[Tensor]) -> set[int]:
        """The ids of those that no worker used in the step that ends; waits for the device, and is a collective."""
        listed = list(parameters)
        unused = self._watched - self._used  # what is not watched yet has no gradient unless it was used
        used = torch.tensor([float(id(parameter) not in unused) for parameter in listed], device=self._world.device)
        self._used.clear()
        counts = all_reduce_sum(self._world, used).tolist()
        return {id(parameter) for parameter, count in zip(listed, counts, strict=True) if not count}
