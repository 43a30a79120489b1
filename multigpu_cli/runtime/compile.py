"""torch.compile for full micro-batches; shorter ones run uncompiled."""

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError

_COMPILERS = {  # for the code that torch generates; on CUDA Triton compiles its launchers in C
    "cpu": ("C++", ("g++", "c++", "clang++")),
    "cuda": ("C", ("gcc", "clang")),
}


class CompiledModel(nn.Module):
    """A model whose full micro-batches run compiled.

    An epoch's last micro-batch may be short. Compiling it as well would take many seconds, or make all micro-batches
    slower through dynamic shapes; since it occurs once per epoch, running it uncompiled is faster.

    Batches of one shape have one graph. Once there is another shape, torch compiles for any size of the dimensions that
    differ, so lengths of texts take two graphs, and sizes of images two or three. Another size of a full micro-batch,
    as after running out of memory, starts again.

    The mode is of torch.compile; with reduce-overhead a pass runs as CUDA graphs, whose memory the next pass reuses.
    The blocks are compiled each by itself, in place, rather than the whole: for weights that are gathered block by
    block, by hooks around `forward`.
    """

    def __init__(
        self, model: nn.Module, mode: str | None, *, blocks: Sequence[nn.Module] = (), backend: str = "inductor"
    ) -> None:
        super().__init__()
        self.model = model
        self.full_batch_size: Callable[[], int] = lambda: 0  # the samples of a full micro-batch
        self.seconds: float | None = None  # of the compilation, after the first full micro-batch
        self._samples = self._compilations = 0  # samples of the latest full micro-batch; passes that compiled for it
        self._most_compilations: float = 2  # without a warning: for the first shape, and for all others
        compiled = partial(torch.compile, mode=mode, backend=backend)
        self._is_full = False
        for module in model.modules():
            names = getattr(module, "uncompiled", ())  # a user's network may have another attribute of that name
            for name in names if isinstance(names, tuple) else ():
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        if blocks:  # at most one graph for each and size, of one function for all blocks of a class
            settings = torch._dynamo.config
            settings.recompile_limit = max(settings.recompile_limit, 2 * len(blocks))
        for block in blocks:
            _replace_forward(block, lambda forward: self._run_full_ones(compiled(forward), forward))
        # in a tuple, so that the same parameters are not registered under a second name
        self._fast = (model if blocks else compiled(model),)
        self._in_graphs = mode == "reduce-overhead"
        self._all = list(model.parameters())  # in each pass, to look for a dozen of them would take 70 µs
        self._first_given: list[Tensor] = []  # those that had no gradient before the last such pass

    def forward(self, *inputs: Any, **named: Any) -> Any:
        full = _length(inputs or tuple(named.values())) == self.full_batch_size()
        self._is_full = full and not is_in_torch_dispatch_mode()  # there torch gives up a compiled function for good
        if not self._is_full:
            return self.model(*inputs, **named)
        if self._in_graphs:
            self._keep_gradients()
        if self._samples not in (0, self.full_batch_size()):
            self.reset()
        self._samples = self.full_batch_size()
        stats, began = torch._dynamo.utils.counters["stats"], time.perf_counter()
        graphs = stats["unique_graphs"]
        result = self._fast[0](*inputs, **named)
        self.seconds = self.seconds or time.perf_counter() - began
        self._compilations += stats["unique_graphs"] > graphs
        return result

    def reset(self) -> None:
        """Forget all graphs, those of other micro-batches, and free the memory that CUDA graphs keep."""
        torch._dynamo.reset()
        self._samples = self._compilations = 0

    def take_warning(self) -> str:
        """Return a warning, once, after the second recompilation; after eight torch gives up. Otherwise ""."""
        if self._compilations <= self._most_compilations:
            return ""
        self._most_compilations = inf
        return (
            "--compile: recompiled twice, for other shapes of batches; pad them in a collate_fn, or use --compile off"
        )

    def _run_full_ones(self, compiled: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward pass: compiled in full micro-batches, also where it is run again in their backward pass."""

        @wraps(forward)
        def run(*inputs: Any, **named: Any) -> Any:
            trains = self._is_full and torch.is_grad_enabled()  # evaluations call the model itself, without gradients
            return (compiled if trains else forward)(*inputs, **named)

        return run

    def _keep_gradients(self) -> None:
        """Copy gradients of the last pass out of the graphs' memory, before the next pass overwrites it.

        Autograd stores the first gradient of a parameter without a copy. Accumulating into it would then use memory
        that the next pass overwrites (pytorch#96693), or fail (pytorch#169545); accumulating into a copy is safe.
        """
        for parameter in self._first_given:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._first_given = [parameter for parameter in self._all if parameter.grad is None]

    def report(self) -> dict[str, Any]:
        """`seconds`, and `graph_breaks` with one line per reason; {} before the first full micro-batch."""
        if self.seconds is None:
            return {}
        reasons = [str(reason).splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]]
        return {"seconds": self.seconds, "graph_breaks": sorted(set(reasons))}


def compile_model(
    model: nn.Module, config: Config, device: torch.device, blocks: Sequence[nn.Module] = ()
) -> nn.Module:
    """Wrap the model, or these blocks of it, as --compile requests, if there is a compiler and --exact allows it."""
    wanted = config.model.compile
    if wanted == "off":
        return model
    language, names = _COMPILERS[device.type]
    if not any(map(shutil.which, names)):
        problem = f"--compile {wanted} on {device.type.upper()} needs a {language} compiler, and none is installed"
        raise RequestError(problem, remedy=f"use --compile off, or install {names[0]}")
    if device.type == "cuda" and wanted == "reduce-overhead" and config.reproducibility.exact:
        raise RequestError(
            "--compile reduce-overhead with --exact: CUDA graphs overwrite gradients that --exact has yet to reduce",
            remedy="use --compile default, or leave out --exact",
        )
    blocks = _choose_blocks(model, blocks)
    if blocks and wanted == "reduce-overhead":  # FSDP has refused it before
        raise RequestError(
            "--compile reduce-overhead with --grad-checkpointing: CUDA graphs can't repeat blocks that have buffers",
            remedy="use --compile default, or leave out --grad-checkpointing",
        )
    return CompiledModel(model, None if wanted == "default" else wanted, blocks=blocks)


def _choose_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules to compile one by one, given those that a strategy requires; [] means the whole model.

    If the second pass of a checkpointed block restores its buffers, torch can't trace the checkpoint, so these blocks
    are compiled inside of it. Before torch 2.13 DDP can't split a graph with any checkpoint in it (pytorch#104674).
    """
    passes = {each: each.forward for each in model.modules() if isinstance(each.forward, partial)}
    settings = {each: run.keywords for each, run in passes.items() if run.func is checkpoint}
    apart = [each for each in settings if "context_fn" in settings[each] or torch.__version__ < "2.13"]
    outer = [each for each in blocks or settings if each in apart or not set(apart) & set(each.modules())]
    return list(dict.fromkeys([*outer, *apart])) if apart else list(blocks)


def _replace_forward(block: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a block's forward pass, inside of what checkpoints its activations.

    Around it there would be one compiled graph for each block, rather than one for all blocks that are alike.
    """
    outer = block.forward
    if isinstance(outer, partial) and outer.func is checkpoint:
        block.forward = partial(checkpoint, wrap(outer.args[0]), *outer.args[1:], **outer.keywords)
    else:
        block.forward = wrap(outer)


def _length(inputs: tuple[Any, ...]) -> int:
    """Number of samples in a model's inputs, by the first tensor or list; -1 if there is neither."""
    for value in inputs:
        if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim):
            return len(value)
        parts = tuple(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        if (inside := _length(parts)) >= 0:
            return inside
    return -1
