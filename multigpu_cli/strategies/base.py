"""The interface of strategies, what the loop needs from any way to share the work; one device, and DataParallel."""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multigpu_cli.capabilities import EXACT_STRATEGIES, SHARDING, STRATEGIES, load
from multigpu_cli.checkpoint.pieces import State, fill_outlines
from multigpu_cli.checkpoint.snapshot import Snapshot, TrainState, Writer
from multigpu_cli.checkpoint.store import Peers, Store
from multigpu_cli.checkpoint.weights import copy_to_host
from multigpu_cli.config.schema import Config
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World, all_gather, all_reduce_sum, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.runtime.module_state import TensorPath, broadcast_outline, broadcast_tensor, map_tensors
from multigpu_cli.strategies.buffer_rules import find_rules
from multigpu_cli.strategies.buffers import StepBuffers


class ReadRows(Protocol):
    """Reads rows `begin` to `end` of a tensor, or all of it, from a checkpoint in pieces."""

    def __call__(self, name: str, outline: Tensor, begin: int = 0, end: int | None = None, /) -> Tensor: ...


_NOTHING = nullcontext()


class Setup(NamedTuple):
    """What the strategy of a run is made of, with further arguments of torch's class; see `BuiltModel`."""

    world: World
    placement: Placement
    config: Config
    average: EMAModel | None
    source: int | None
    options: Mapping[str, Any]


class Saver:
    """Brings the state of all workers into checkpoints: rank 0 writes its own, which is that of all."""

    note = ""  # what the user is told of it

    def __init__(self, strategy: "Strategy", world: World, store: Store, writer: Writer) -> None:
        self._strategy, self._world, self._store, self._writer = strategy, world, store, writer
        self._captured: State | None = None  # the last one, whose memory the next one takes

    def wait(self) -> None:
        """Wait for what other ranks still write of the last checkpoint; all ranks call it together."""

    def capture(self, state: TrainState, held: State, step: int) -> Snapshot | None:
        """Begin to copy what a checkpoint holds; all ranks call it together; None on others than rank 0."""
        return self._capture(state, held) if self._world.is_main else None

    def capture_best(self, weights: State) -> State:
        """Copy a state dict that is the best so far; all ranks call it together; {} on others than rank 0.

        On the meta device are tensors that `Peers.complete_best` completes, as a later checkpoint is written.
        """
        return dict(copy_to_host(weights)) if self._world.is_main else {}

    def share_best(self, step: int) -> Peers | None:
        """Begin to write what this rank holds of the best weights, which are of this step; all ranks call it together.

        Return, on rank 0, who completes them; None if `capture_best` has returned all of them.
        """
        return None

    def _capture(self, state: TrainState, held: State) -> Snapshot:
        snapshot = state.begin_capture(self._captured, held)
        self._captured = snapshot.state
        return snapshot


class Strategy(ABC):
    """Spreads micro-batches over workers, and reduces their gradients.

    A step is `begin_step`, then for each micro-batch of this worker forward and backward inside `accumulate` and
    `after_backward`, then `reduce_gradients`. If each loss was multiplied by `loss_factor`, `.grad` then holds on every
    rank the sum of all workers' gradients: that of the global batch.

    Where it is `sharded`, each process holds a part of weights, gradients and optimizer state: every pass of the model,
    also in an evaluation, communicates, and `.grad` is empty until `reduce_gradients`.
    """

    name: str
    replicas_per_process: int = 1  # micro-batches that one forward pass takes in (dp: one for each device)
    loss_factor: float = 1.0  # what each loss is multiplied by before backward, to undo an average over workers
    reduces_first: bool = False  # no backward pass without communication may come before `warm_up`
    sharded: bool = False
    num_shards: int = 1  # workers that share weights, gradients and optimizer state: rank r + num_shards is like r
    groups: Sequence[dist.ProcessGroup] = ()  # process groups of its own, beside the one of all workers
    keeps_casts: bool = True  # see `Precision`
    cudnn_benchmark: bool = True  # cuDNN may time its kernels for each new shape; what it finds holds for one thread
    min_workers: int = 1  # with fewer, one process trains as `single` does
    interleaved: bool = False  # see `BatchPlan`
    compile_note: str = ""  # what the plan says of --compile
    memory_remedy: str = f"{SHARDING}, which divides weights, gradients and the optimizer's state over several GPUs"
    on_gather: Callable[[], None]  # called where a pass is about to wait for all workers
    local_parameters: list[Tensor]  # those that the optimizer of this process moves

    def __init__(self, model: nn.Module, world: World | None = None, *, always: bool = False) -> None:
        self.callable: Callable[..., Tensor] = model
        self.local_parameters = [p for p in model.parameters() if p.requires_grad]
        self.on_gather = lambda: None
        self._world = world or World(torch.device("cpu"))
        total, gather = partial(all_reduce_sum, self._world), partial(all_gather, self._world)
        self._buffers = StepBuffers(model, self._world.size, total, gather, always=always)

    @classmethod
    def find_errors(cls, config: Config, workers: int) -> Iterator[RequestError]:
        """The settings that it does not take, now that those of a checkpoint are known."""
        yield from ()

    @classmethod
    def build_model(cls, factory: Any) -> Any:
        """A run's network as a `BuiltModel`, from a `ModelFactory`; all ranks call it together."""
        return factory.build_whole()

    @classmethod
    def measure_settings(cls, model: nn.Module, config: Config, world: World) -> dict[str, Any]:
        """Settings that are measured here, the same on all ranks, which call it together; a checkpoint pins them."""
        return {}

    @classmethod
    def describe(cls, model: nn.Module, config: Config, workers: int) -> dict[str, str]:
        """What the plan says of it, by the keys of PLAN_NOTES; refuses settings that do not fit the model."""
        return {}

    @classmethod
    def create(cls, model: nn.Module, setup: Setup) -> "Strategy":
        """The strategy of a run, for the parameters of a network that learn now; it may be compiled."""
        return cls(model)

    def create_saver(self, store: Store, writer: Writer) -> Saver:
        """What brings the state into checkpoints; all ranks call it together."""
        return Saver(self, self._world, store, writer)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most strategies keep no state
        """Get to know the optimizer of `local_parameters`, or refuse it, before its state is gathered or scattered."""

    def warm_up(self, loss: Callable[[], Tensor]) -> None:  # noqa: B027 - most strategies have nothing to do
        """Do what is needed before the first step so that a resumed run continues with the same bits.

        `loss` is a forward pass of a few samples, the same on every rank and at every start of the run; the caller
        restores the buffers. Once called, it may be called again in any step.
        """

    def probe_memory(self, work: Callable[[], None], *, accumulates: bool = False) -> None:
        """Run passes that are only to show whether memory suffices; outside of a step, and all ranks call it together.

        `work` is passes without communication of its own; the caller discards what they leave in buffers and `.grad`.
        It has two if a step `accumulates`: several passes on a worker. OutOfMemory, on all ranks: too little on some.
        """
        run_on_all_ranks(self._world, work)

    def explain_failure(self, error: BaseException, work: Callable[[], object]) -> None:  # noqa: B027 - most have no part
        """Raise a RequestError if a first pass, on every rank, failed because of how the work is shared."""

    def begin_step(self, micro_batches: int) -> None:
        """Start a step of `micro_batches` over all workers."""
        self._buffers.begin_step(micro_batches)

    def synchronize_forward(self) -> None:  # noqa: B027 - most strategies communicate in no forward pass
        """Communicate now what the next forward pass would; all ranks call it together, also those without a pass."""

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of one micro-batch's forward and backward pass; gradients are reduced only in the last one."""
        return _NOTHING

    def local_gradients(self) -> list[Tensor]:
        """Return this worker's gradients, summed over the step's micro-batches before the last one; [] if not kept."""
        return [parameter.grad for parameter in self.local_parameters if parameter.grad is not None]

    def after_backward(self, number: int) -> None:
        """After the backward pass of micro-batch `number` of the step, counted over all workers."""
        self._buffers.collect(number)

    def reduce_gradients(self, *, idle: bool) -> None:
        """End the step: reduce what has not been reduced yet; an idle worker contributes zeros."""
        self._buffers.apply_mean_change()

    def find_parameter(self, moved: Tensor) -> Tensor:
        """The model's parameter that a tensor of the optimizer is, or is a part of."""
        return moved

    def total_norm(self, local: Tensor) -> Tensor:
        """The norm () of the whole gradient, given that of the gradients of `local_parameters`."""
        return local

    def check_passes(self) -> None:  # noqa: B027 - most strategies run no pass together
        """Raise a TrainingError on all ranks if they ran different blocks of the model; all ranks call it together."""

    def gather_state(self, state: State) -> State:
        """A state as one process would have it; all ranks call it together.

        It has "model", and perhaps "average", "optimizer" and others, as in a checkpoint. Returns the same tensors, on
        every rank; or, if sharded, copies in host memory, on rank 0 only. TrainingError: see `check_passes`.
        """
        return state

    def scatter_state(self, state: State | None, *, source: int = 0, into: Mapping[str, Any] = {}) -> State:
        """The opposite of `gather_state`: the source's state, for `load_state_dict` of model, average, optimizer.

        It comes tensor by tensor: those of the optimizer on the device, and those of the parts that `into` has, if all
        of them fit, into its own. So neither device nor host has a copy beside what training has.
        """
        if self._world.size == 1:
            return state or {}
        outline = broadcast_outline(self._world, state, source)
        fits = all(_shapes(held) == _shapes(outline.get(part) or {}) for part, held in into.items())

        def receive(path: TensorPath, tensor: Tensor) -> Tensor:
            whole = broadcast_tensor(self._world, tensor, state, path, source)
            if fits and path[0] in into and len(path) == 2:
                return into[path[0]][path[1]].copy_(whole)  # type: ignore[no-any-return]
            return whole if path[0] == "optimizer" and whole.ndim else whole.cpu()

        return dict(map_tensors(outline, receive))

    def sharded_state_dict(self, state: State) -> tuple[State, dict[str, tuple[Tensor, int]]]:
        """A state as files of several ranks hold it; all ranks call it together, and nothing is copied.

        Returns the state, with an outline (of the whole's shape, on the meta device) of each divided tensor; and
        by name the rows of these that this rank writes, with the first one's number. Of replicas one alone has any.
        """
        return state, {}

    def load_sharded(self, outline: State, read: ReadRows) -> State:
        """A state for `load_state_dict`, of what `sharded_state_dict` returned; each rank reads what it needs."""
        return fill_outlines(outline, read)

    def rollback_buffers(self, skipped: Tensor) -> None:
        """Restore the buffers to the step's start if the optimizer skipped it; `skipped` is () 1.0 or 0.0."""
        self._buffers.rollback(skipped)

    def read_comm_wait(self) -> float | None:
        """Mean seconds per step, since the last call, of waiting for the reduction; None: unknown."""
        return None

    def follow_trained(self, build: "Callable[[], Strategy]") -> "Strategy":
        """The strategy for the parameters that learn from now on, in the place of this one; perhaps what it builds."""
        self.close()
        return build()

    def close(self) -> None:  # noqa: B027 - most strategies leave nothing
        """Take back what was attached to the model, which another strategy takes over."""

    def abort_step(self) -> None:
        """Discard a step that could not be finished."""
        self._buffers.abort_step()


def _shapes(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in held.items()}


class Single(Strategy):
    """One process, one device."""

    name = "single"


class _Replicas(nn.DataParallel[nn.Module]):
    """Replicas that compute in the caller's number format: torch tells their threads only that autocast is on."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        cast = [torch.autocast("cuda", dtype, enabled)(replica) for replica in replicas]
        return super().parallel_apply(cast, inputs, kwargs)


class DataParallel(Strategy):
    """Each pass takes one micro-batch for every device; the first has model, and BatchNorm's buffers are its own."""

    name = "dp"
    cudnn_benchmark = False  # each pass has new threads, and cuDNN would time its kernels again in each

    def __init__(self, model: nn.Module, devices: tuple[torch.device, ...]) -> None:
        super().__init__(model)
        if find_rules(model):
            problem = "--multi-gpu dp: keeps the buffers of its first device only, and the model has buffer_rules"
            raise RequestError(problem, remedy="--multi-gpu ddp")
        self.replicas_per_process = len(devices)
        self.callable = _Replicas(model, device_ids=[device.index for device in devices])

    @classmethod
    def create(cls, model: nn.Module, setup: Setup) -> Strategy:
        return cls(model, setup.placement.devices)


def find_strategy(name: str, *, exact: bool = False) -> type[Strategy]:
    """The class of a placement's strategy, or of the one that --multi-gpu names; a RequestError without its room."""
    if name not in (*STRATEGIES, "auto", "none"):
        raise RequestError(f"--multi-gpu {name}: it is not part of this installation", remedy="--multi-gpu ddp")
    table = EXACT_STRATEGIES if exact else STRATEGIES
    strategy: type[Strategy] = load(table.get(name, table["single"]))
    return strategy


def choose_strategy(placement: Placement, world: World, *, exact: bool) -> type[Strategy]:
    """Return the strategy of this process: a single one if the placement's other processes have not been started."""
    planned = find_strategy(placement.strategy, exact=exact)
    alone = placement.num_processes_to_launch or world.size < planned.min_workers
    return find_strategy("single", exact=exact) if alone else planned
