"""torch.compile for full micro-batches; shorter ones run uncompiled."""

import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError

_COMPILERS = {  # for the code that torch generates; on CUDA Triton compiles its launchers, in C
    "cpu": ("C++", ("g++", "c++", "clang++")),
    "cuda": ("C", ("gcc", "clang")),
}


class CompiledModel(nn.Module):
    """A network whose full micro-batches run compiled.

    An epoch's last micro-batch may be short. Compiled anew it would cost many seconds, or make all of them slower
    because sizes now vary; met once an epoch, it is quicker as it is.

    Args:
        mode: torch.compile's; with reduce-overhead a pass runs as CUDA graphs, whose memory the next one takes again.
        backend: torch.compile's.

    Attributes:
        size: tells how many samples a full micro-batch has.
        seconds: what compiling took; None before the first full micro-batch.
    """

    def __init__(self, model: nn.Module, mode: str | None, backend: str = "inductor") -> None:
        super().__init__()
        self.model = model
        self.full_batch_size: Callable[[], int] = lambda: 0
        self.seconds: float | None = None
        self._fast = (torch.compile(model, mode=mode, backend=backend, dynamic=False),)  # no second name for the same
        self._in_graphs = mode == "reduce-overhead"
        self._first_given: list[Tensor] = []  # parameters that had no gradient before the last such pass

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if _length(inputs or tuple(named.values())) != self.full_batch_size():
            return self.model(*inputs, **named)
        if self._in_graphs:
            self._keep_gradients()
        if self.seconds is not None:
            return self._fast[0](*inputs, **named)
        began = time.perf_counter()
        result = self._fast[0](*inputs, **named)
        self.seconds = time.perf_counter() - began
        return result

    def _keep_gradients(self) -> None:
        """Copy what the last pass left in `.grad` out of the graphs' memory, before they write over it.

        A gradient that comes where there was none is taken as it is, without a copy: the next ones would be added to
        what the next pass writes there (pytorch#96693), or fail (pytorch#169545). Added to a copy they are safe.
        """
        for parameter in self._first_given:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._first_given = [parameter for parameter in self.model.parameters() if parameter.grad is None]

    def report(self) -> dict[str, Any]:
        """`seconds`, and under `graph_breaks` why parts of the network were left out, a line each; {} before it ran."""
        if self.seconds is None:
            return {}
        from torch._dynamo.utils import counters

        reasons = [str(reason).splitlines()[0] for reason in counters["graph_break"]]
        return {"seconds": self.seconds, "graph_breaks": sorted(set(reasons))}


def compile_model(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model as --compile asks for it.

    Raises:
        RequestError: no compiler is installed, or the mode does not go with --exact.
    """
    wanted = config.model.compile
    if wanted == "off":
        return model
    language, names = _COMPILERS[device.type]
    if not any(map(shutil.which, names)):
        raise RequestError(
            f"--compile {wanted} on {device.type.upper()} needs a {language} compiler, and none is installed",
            remedy=f"--compile off, or install {names[0]}",
        )
    if device.type == "cuda" and wanted == "reduce-overhead" and config.reproducibility.exact:
        raise RequestError(
            "--compile reduce-overhead: CUDA graphs write over the gradients that --exact still has to add up",
            remedy="--compile default, or no --exact",
        )
    return CompiledModel(model, None if wanted == "default" else wanted)


def _length(inputs: tuple[Any, ...]) -> int:
    """Samples in what a network is called with: the first tensor's first dimension, or the length of the first list;
    -1 where there is neither."""
    for value in inputs:
        if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim):
            return len(value)
        parts = tuple(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        if (inside := _length(parts)) >= 0:
            return inside
    return -1
