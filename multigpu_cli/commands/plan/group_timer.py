"""The times in which FSDP gathers weights and reduces gradients: its collectives, and the copies before and after."""

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from multigpu_cli.strategies.sharded_probe import list_groups


class GroupTimer:
    """Counts the seconds that the groups of a sharded model take on a CPU, where nothing else runs meanwhile.

    Attributes:
        gathering, reducing: since `read`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.gathering = self.reducing = 0.0
        for group in list_groups([model]):
            group.unshard = self._count("gathering", group.unshard)
            group.wait_for_unshard = self._count("gathering", group.wait_for_unshard)
            group.post_backward = self._count("reducing", group.post_backward)

    def _count(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = work(*arguments)
            setattr(self, kind, getattr(self, kind) + time.perf_counter() - began)
            return result

        return counted

    def read(self) -> tuple[float, float]:
        """Seconds of gathering and of reducing since the last call."""
        seconds, self.gathering, self.reducing = (self.gathering, self.reducing), 0.0, 0.0
        return seconds
