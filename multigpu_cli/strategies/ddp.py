"""DistributedDataParallel: one process per device, gradients averaged while backward is still running.

PowerSGD: a gradient matrix is sent as the product of two thin ones; the error is added to the next step's gradient.
Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019; torch's hook does it.
"""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from multigpu_cli.config.schema import CommunicationConfig, Config
from multigpu_cli.distributed.world import World, broadcast_object, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.meters import Stopwatch
from multigpu_cli.strategies.base import Setup, Strategy

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Replica(nn.Module):
    """The module that DDP wraps: the model, or a loss of zero for a worker without a micro-batch in this step.

    With find_unused_parameters an idle worker must not seem to use the model's parameters. DDP needs at least one, so
    an extra parameter serves idle workers only; no optimizer has it.
    """

    def __init__(self, model: nn.Module, *, finds_unused: bool) -> None:
        super().__init__()
        self.model, self._finds_unused = model, finds_unused
        self.idle = False
        self._in_idle = [p for p in model.parameters() if p.requires_grad]
        if finds_unused:
            self._of_nobody = nn.Parameter(torch.zeros_like(self._in_idle[0].flatten()[:1]))
            self._in_idle = [self._of_nobody]

    def forward(self, *inputs: object, **named: object) -> Any:
        if self.idle:
            return torch.stack([p.sum() * 0 for p in self._in_idle]).sum()
        outputs: Any = self.model(*inputs, **named)
        if self._finds_unused and not any(isinstance(each, Tensor) for each in _find_tensors(outputs)):
            raise RequestError(
                f"--find-unused-parameters: DDP finds no tensor in the {type(outputs).__name__} that the model returns",
                remedy="a tensor, tuple, dict or dataclass in its place; or leave the flag out",
            )
        return outputs


class _DDPWithoutDynamo(DistributedDataParallel):
    """DDP without its import of torch._dynamo (a second and 80 MB per rank), made for one setting and an exemption."""

    _inside_ddp_forward = contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))

    def __init__(self, module: nn.Module, **options: Any) -> None:
        with ExitStack() as stack:
            if "_dynamo" not in vars(torch):  # nobody has imported it, so the setting has its default
                setting = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
                vars(torch)["_dynamo"] = SimpleNamespace(utils=setting)
                stack.callback(vars(torch).pop, "_dynamo")
            super().__init__(module, **options)
        self.broadcast_buffers = False


class DDP(Strategy):
    """DDP over the process group.

    DDP divides by the number of workers; losses here are sums divided by the global count, so they are multiplied by it
    again. Buffers are not broadcast: `StepBuffers` keeps them the same.
    """

    name = "ddp"
    compile_note = ", inside DDP: in pieces that end with its buckets, so that these travel during backward"

    def __init__(
        self, model: nn.Module, world: World, config: CommunicationConfig, more: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(model, world)
        self.loss_factor = float(world.size)
        self.reduces_first = bool((more or {}).get("static_graph"))  # the warm-up fixes which parameters are used
        self._replica = Replica(model, finds_unused=config.find_unused_parameters and not self.reduces_first)
        self._ddp = _DDPWithoutDynamo(
            self._replica,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            find_unused_parameters=config.find_unused_parameters,
            **{"gradient_as_bucket_view": True} | dict(more or {}),
            # torch's default has a first bucket of 1 MB, which starts sooner; its size given as a number has not
            bucket_cap_mb=None if config.bucket_cap_mb in ("auto", DEFAULT_CAP) else float(config.bucket_cap_mb),
        )
        self._lays_out_first = world.size > 2 or self.reduces_first
        self._low_rank = PowerSGD(self._ddp) if config.grad_compression == "powersgd" else None
        if hook := _HOOKS.get(config.grad_compression):
            self._ddp.register_comm_hook(None, hook)
        self.callable = self._ddp
        self._wait = CommWait((p for p in model.parameters() if p.requires_grad), world.device)

    @classmethod
    def measure_settings(cls, model: nn.Module, config: Config, world: World) -> dict[str, Any]:
        """--bucket-cap-mb auto, because the order of summation depends on it."""
        if config.communication.bucket_cap_mb != "auto" or world.size == 1:
            return {}
        return {"bucket_cap_mb": measure_cap(model, world)}

    @classmethod
    def create(cls, model: nn.Module, setup: Setup) -> Strategy:
        return cls(model, setup.world, setup.config.communication, setup.options)

    def warm_up(self, loss: Callable[[], Tensor]) -> None:
        """Let DDP fix the layout of its buckets.

        After its first backward pass DDP assigns the gradients to buckets again. With more than two workers the order
        of summation depends on a gradient's place in its bucket, so without this a resumed run would take its first
        step with other bits than an uninterrupted one. With static_graph DDP learns the graph in that pass, and fails
        or hangs if another pass comes first.
        """
        if not self._lays_out_first:
            return
        (run_on_all_ranks(self._world, loss) * 0).backward()
        self._ddp.zero_grad(set_to_none=True)

    def explain_failure(self, error: BaseException, work: Callable[[], object]) -> None:
        if isinstance(error, AttributeError) and error.obj is self._ddp:
            raise RequestError(
                f"--task: uses model.{error.name}, which DDP does not have: it reduces the gradients of model(…) only",
                remedy="call model(…) alone, and have forward choose by an argument what it computes; or --exact",
            ) from error

    def rollback_buffers(self, skipped: Tensor) -> None:
        super().rollback_buffers(skipped)
        if self._low_rank:
            self._low_rank.rollback(skipped)

    def synchronize_forward(self) -> None:
        """Rebuild DDP's buckets, as the first forward pass after its first reduction would do with all ranks."""
        self._ddp.reducer._rebuild_buckets()

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        return self._wait if last else self._ddp.no_sync()

    def reduce_gradients(self, *, idle: bool) -> None:
        if idle:
            self._replica.idle = True
            with self._wait:  # on CUDA, DDP moves inputs to the device, and fails without an input
                self._ddp(None).backward()
            self._replica.idle = False
        super().reduce_gradients(idle=idle)

    def read_comm_wait(self) -> float | None:
        return self._wait.read()

    def close(self) -> None:
        """DDP lies in a cycle of references: without this its hooks and buckets would stay."""
        self._wait.close()
        del self._ddp.reducer
        self._ddp.logger = None  # it holds the reducer too


_RANK = 4
_PLAIN_STEPS = 100  # the first gradients change fast and are sent whole (§4.3: not in the paper, torch advises it)
_TINY = 1e-8  # keeps a gradient of zeros from being divided by its norm


class PowerSGD:
    """The hook and its error memory, which is local to this process and empty after a restart."""

    def __init__(self, ddp: DistributedDataParallel, *, plain_steps: int = _PLAIN_STEPS) -> None:
        self._state = PowerSGDState(
            None, matrix_approximation_rank=_RANK, start_powerSGD_iter=plain_steps, orthogonalization_epsilon=_TINY
        )
        in_turn = dist.get_backend(ddp.process_group) == "gloo"
        ddp.register_comm_hook(self._state, _one_by_one if in_turn else powerSGD_hook)

    @torch.no_grad()
    def rollback(self, skipped: Tensor) -> None:
        """Remove a skipped step from the error memory: its NaN would be added to every later step; no host sync."""
        for residual in self._state.error_dict.values():
            residual.masked_fill_(skipped.bool(), 0.0)
        for factor in self._state.q_memory_dict.values():
            spread = torch.arange(factor.numel(), device=factor.device, dtype=factor.dtype).add_(1).sin_()
            factor.copy_(torch.where(skipped.bool(), spread.view_as(factor), factor))


def _one_by_one(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket at a time: torch's hook waits for its second reduction on one of gloo's two threads.

    With two buckets at once both threads would wait, and none would reduce.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


class CommWait:
    """Times from this worker's last gradient to the end of the reduction.

    DDP reduces a bucket of gradients while backward computes the next ones; only the last bucket overlaps with nothing,
    and there a worker also waits for slower ones. The first step shows which of the parameters is last.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        self._watch = Stopwatch(of_gpu=device.type == "cuda")
        self._last: Tensor | None = None
        self._hooks = {p: p.register_post_accumulate_grad_hook(self._record_arrival) for p in parameters}

    def __enter__(self) -> None:
        """Begin the backward pass in which gradients travel, or an explicit reduction."""
        self._watch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()
        if self._last is not None:
            for parameter in [*self._hooks]:
                if parameter is not self._last:
                    self._hooks.pop(parameter).remove()

    def close(self) -> None:
        """Watch no parameter any more."""
        for hook in self._hooks.values():
            hook.remove()

    def read(self) -> float | None:
        """The mean seconds of the waits since the last call, or None; waits for the device."""
        seconds, waits = self._watch.read()
        return seconds / waits if waits else None

    def _record_arrival(self, parameter: Tensor) -> None:
        self._watch.__enter__()
        self._last = parameter


DEFAULT_CAP = 25  # MB, DDP's own
_SIZES = (1, 2, 5, 10, DEFAULT_CAP)
_ROUNDS = 3
_AS_GOOD = 1.05


def measure_cap(model: nn.Module, world: World) -> int:
    """The smallest bucket, in MB, whose all-reduce is within 5 % of the best rate: small buckets start sooner.

    The same on every rank. Nothing is measured if the gradients fit into the smallest bucket.
    """
    total = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    sizes = [size for size in _SIZES if size * 2**20 < total]
    if not sizes:
        return DEFAULT_CAP
    paces = {size: _seconds(size, world) / size for size in sizes}
    best = min(paces.values())
    return int(broadcast_object(world, min(size for size, pace in paces.items() if pace <= _AS_GOOD * best)))


def _seconds(size: int, world: World) -> float:
    """Seconds of one all-reduce of `size` MB: the fastest of a few, after a warm-up."""
    message = torch.zeros(size * 2**18, device=world.device)
    took = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        dist.all_reduce(message)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        took.append(time.perf_counter() - began)
    return min(took[1:])
