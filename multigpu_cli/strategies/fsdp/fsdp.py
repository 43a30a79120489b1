"""FSDP2 (`fully_shard`): each process holds some rows of every weight, of its gradient and of the optimizer's state.

The weights of a block are gathered when a pass reaches it, and freed after it, so each pass of the model communicates,
on all workers alike. A worker with fewer micro-batches than others therefore runs padding passes, times zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from multigpu_cli.checkpoint.pieces import State
from multigpu_cli.checkpoint.snapshot import Writer
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.schema import Config
from multigpu_cli.distributed.world import World, all_gather_object, all_reduce_max, all_reduce_sum, run_in_step
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.models.blocks import describe_blocks, find_blocks_to_wrap
from multigpu_cli.optimizers.eval_weights import is_schedule_free
from multigpu_cli.run.assembly.assemble import BuiltModel, ModelFactory
from multigpu_cli.runtime.compile import CompiledModel
from multigpu_cli.strategies.base import ReadRows, Saver, Setup, Strategy
from multigpu_cli.strategies.fsdp import probe
from multigpu_cli.strategies.fsdp.rules import find_sharding_errors
from multigpu_cli.strategies.fsdp.shard import ModelSharder, build_model_to_shard, choose_param_dtype, create_mesh
from multigpu_cli.strategies.fsdp.state import GatheringSaver, RowSaver, ShardedState, agree_on_owner

_MARKS = 2**16  # their squares, summed over a thousand workers, are whole numbers in float64


class FSDP2(Strategy):
    """FSDP2 over the process group; gradients are summed, since losses are divided by the global count already.

    The optimizer works on this rank's rows as ordinary tensors: fused kernels take no DTensors. RequestError: the
    weights can't be divided.
    """

    name = "fsdp"
    sharded = True
    keeps_casts = False
    reduces_each_pass = False  # less memory between the passes of a step: no gradient of whole weights
    min_workers = 2
    compile_note = ", each gathered block by itself"
    memory_remedy = (
        "several processes, which share them, also to try it: torchrun --nproc_per_node=N … --dry-run; and for a "
        "forecast CUDA_VISIBLE_DEVICES=, which measures one worker on the CPU"
    )

    def __init__(
        self,
        model: nn.Module,  # whole on the rank `source`, perhaps on the meta device on the others; sharded in place
        world: World,
        average: nn.Module | None = None,  # a copy of the model, such as its EMA; sharded alike, given its weights
        *,
        blocks: Sequence[str] = (),  # names of modules that are gathered as one, inner ones first; the rest is one more
        keeps_weights: bool = False,  # gathered ones stay until the last backward pass: less traffic, more memory
        finds_unused: bool = False,  # what no worker used in a step has no gradient, rather than zeros
        source: int | None = 0,  # whose weights all get; None: nobody's, a state is loaded before the first pass
        shard_size: int | None = None,  # workers of each group that has all rows; None: all workers are one
        param_dtype: torch.dtype | None = None,  # in which weights are gathered; None: as they are
        reduces_each_pass: bool = False,  # gradients, rather than once per step
    ) -> None:
        probe.check_can_be_sharded(model)
        whole = dict(model.named_parameters())  # they are emptied, and tell which rows are in their place
        self._keeps_weights, self._casts = keeps_weights, param_dtype is not None
        self.reduces_each_pass |= reduces_each_pass
        mesh = create_mesh(world, shard_size)
        self.groups = tuple(mesh.get_all_groups()) if mesh.ndim > 1 else ()
        self.num_shards = mesh.size(-1)
        sharder = ModelSharder(model, average, world, source)
        sharder.shard(mesh, blocks, frees_after_forward=not keeps_weights, param_dtype=param_dtype)
        super().__init__(model, world)  # not before: it has views of buffers, which keep these from getting memory
        self._model, self._usage = cast(FSDPModule, model), WeightUsage(model, world) if finds_unused else None
        self._roots = [model] if average is None else [model, average]
        for group in probe.list_groups(self._roots):
            group.lazy_init()  # torch 2.8 pads its rows anew here, and after it has loaded a state
        model.register_load_state_dict_post_hook(lambda *_: self._point_rows_to_weights())
        parameters = {name: cast(DTensor, p) for name, p in model.named_parameters(remove_duplicate=False)}
        local = {name: parameters[name].detach().to_local() for name in whole}  # type: ignore[attr-defined]
        rows = {name: nn.Parameter(local[name], p.requires_grad) for name, p in whole.items()}
        self._state = ShardedState(world, parameters, mesh)
        self._blocks, self._parameters = blocks, parameters
        self._parts: dict[Tensor, DTensor] = {row: parameters[name] for name, row in rows.items()}
        self._find_learning()
        if not keeps_weights:
            model.register_forward_hook(self._free_rest_without_backward)  # after FSDP's own
        self._reduces_next, self._probes = True, False
        self._watch_order(model, blocks)

    def _watch_order(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Register hooks that compare, over the workers, which blocks of the model run, one after the other.

        Each gathering is a collective, so workers that run blocks in another order would wait for each other.
        """
        self._rounds = self._done = 0  # passes of each worker in the step, and those that this one has begun
        self._order = 0  # a hash of the blocks that have run
        for number, block in enumerate([*blocks, ""]):
            hook = partial(self._note_gather, number)
            model.get_submodule(block).register_forward_pre_hook(hook, prepend=True)  # before the gathering
        # a worker that runs fewer blocks than the others is noticed here
        model.register_forward_hook(lambda *_: self._compare_blocks(-1))

    @classmethod
    def find_errors(cls, config: Config, workers: int) -> Iterator[RequestError]:
        yield from find_sharding_errors(config, workers)
        yield from probe.find_torch_errors(config)

    @classmethod
    def build_model(cls, factory: ModelFactory) -> BuiltModel:
        return build_model_to_shard(factory)

    @classmethod
    def measure_settings(cls, model: nn.Module, config: Config, world: World) -> dict[str, Any]:
        """strategy.param_dtype; bf16 that does not go with model or precision is refused, but on a CPU when resumed."""
        wanted, found = config.communication.param_dtype, choose_param_dtype(model, config, world)
        given = "strategy.param_dtype" in config.explicit
        if wanted == "bf16" != found and (given or world.device.type == "cuda"):
            raise RequestError(
                "strategy.param_dtype bf16: it needs GPUs, --amp bf16 without --exact, and a model of float32 weights "
                "without BatchNorm and InstanceNorm",
                remedy="leave strategy.param_dtype out",
            )
        return {} if wanted in ("fp32", found) else {"strategy.param_dtype": found}

    @classmethod
    def describe(cls, model: nn.Module, config: Config, workers: int) -> dict[str, str]:
        device = config.device
        blocks = describe_blocks(model, find_blocks_to_wrap(model, device.wrap))
        freed = "each pass" if device.reshard == "forward" else "the step"
        groups = f" within groups of {device.shard_size} workers" if device.shard_size not in (None, workers) else ""
        halved = " in bf16" if config.communication.param_dtype == "bf16" else ""
        reduced = "; gradients are reduced in each pass" if config.communication.reduce == "pass" else ""
        words = f"by {blocks}{groups}; weights are gathered{halved}, and freed after {freed}{reduced}"
        return {"sharding": words if workers > 1 else "none: one process holds everything"}

    @classmethod
    def create(cls, model: nn.Module, setup: Setup) -> Strategy:
        whole, device = model.model if isinstance(model, CompiledModel) else model, setup.config.device
        strategy = cls(
            whole,
            setup.world,
            average=setup.average and setup.average.module,
            blocks=find_blocks_to_wrap(whole, device.wrap),
            keeps_weights=device.reshard == "step",
            source=setup.source,
            shard_size=device.shard_size,
            finds_unused=setup.config.communication.find_unused_parameters,
            param_dtype=torch.bfloat16 if setup.config.communication.param_dtype == "bf16" else None,
            reduces_each_pass=setup.config.communication.reduce == "pass",
        )
        strategy.callable = model
        return strategy

    def create_saver(self, store: Store, writer: Writer) -> Saver:
        folder = store.folder.parent
        if owner := agree_on_owner(self._world, folder):
            return RowSaver(self, self._world, store, writer, owner)
        saver = GatheringSaver(self, self._world, store, writer)
        saver.note = f"not all workers see {folder}: worker 0 gathers what the checkpoints hold, and writes them alone"
        return saver

    def _find_learning(self) -> None:
        self._pairs = [(parameter, row) for row, parameter in self._parts.items() if parameter.requires_grad]
        self.local_parameters = [row for _, row in self._pairs]

    def _point_rows_to_weights(self) -> None:
        for row, parameter in self._parts.items():
            row.data = parameter.detach().to_local()  # type: ignore[attr-defined]

    def follow_trained(self, build: Callable[[], Strategy]) -> Strategy:
        """Itself: FSDP looks at `requires_grad` when it gathers a weight."""
        self._reshard()
        self._find_learning()
        return self

    def _reshard(self) -> None:
        """Free gathered weights, which an evaluation leaves: `model.parameters()` are the divided ones again."""
        for module in self._model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def _note_gather(self, block: int, *_: object) -> None:
        self._order = hash((self._order, block))
        self._compare_blocks(block)

    def _compare_blocks(self, block: int) -> None:
        """On CPUs, where gloo ends the process if workers gather weights of unlike sizes; a GPU would have to wait."""
        self.on_gather()
        if self._world.device.type == "cpu" and not self._probes:
            greatest, least = all_reduce_max(self._world, [block, -block])
            if greatest != -least:
                raise _unlike_blocks()

    def _free_rest_without_backward(self, *_: object) -> None:
        """Free the weights in no block, which are kept for the backward pass, in a pass that has none."""
        if not torch.is_grad_enabled():
            self._model.reshard()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._keeps_weights and is_schedule_free(optimizer):
            raise RequestError(
                f"--reshard step can't be used with {type(optimizer).__name__}: the weights that an "
                "evaluation gathered would stay for the next step, which needs others",
                remedy="--reshard forward",
            )
        probe.check_is_elementwise(optimizer)
        moved = [self._parts[row] for group in optimizer.param_groups for row in group["params"]]
        self._state.moved = dict(enumerate(moved))

    def warm_up(self, loss: Callable[[], Tensor]) -> None:
        """Keep the pass, which every worker can run at any time, as the padding pass."""
        self._padding = loss
        for module in self._model.modules():  # type: ignore[attr-defined]
            # From here on, since what the pass before it finds without a gradient is refused: a worker whose
            # micro-batches do not use a weight sends zeros, or workers would send unlike lengths. Not in torch 2.8.
            if isinstance(module, FSDPModule) and hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True)
        with torch.no_grad():
            loss()  # fetches its samples while no loader is at work
        self._reshard()

    def probe_memory(self, work: Callable[[], None], *, accumulates: bool = False) -> None:
        """See `Strategy`; a torch that can't go on after a failed pass ends the run on this rank, without a vote."""
        if not probe.can_probe():
            return run_in_step(self._world, work)
        self._rounds, self._done, self._probes = 2 if accumulates else 0, 0, True
        try:
            with probe.without_collectives(self._roots):
                return super().probe_memory(work)
        finally:
            self._rounds, self._order, self._probes = 0, 0, False

    def explain_failure(self, error: BaseException, work: Callable[[], object]) -> None:
        if "DTensor" not in str(error):
            return
        name = probe.find_direct_use(work, {parameter: name for name, parameter in self._parameters.items()})
        if block := next((block for block in self._blocks if name.startswith(f"{block}.")), ""):
            raise RequestError(
                f"--multi-gpu fsdp: the model uses {name} without a call of {block}, in which alone it is gathered",
                remedy=f"call {block}, or --set strategy.wrap=… that does not match {block}: what is in no block is "
                "gathered for the whole pass",
            ) from error

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self._rounds, self._done = -(-micro_batches // self._world.size), 0
        for parameter, _ in self._pairs:
            parameter.grad = None  # of a step that was not finished
        if self._usage:
            self._usage.begin_step()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """The last pass is that of all workers; outside of a step each pass is by itself."""
        self._done += 1
        last = self._done >= self._rounds
        if last != self._reduces_next:  # each call goes through all modules
            self._model.set_requires_gradient_sync(last or self.reduces_each_pass)
            if self._keeps_weights:
                self._model.set_reshard_after_backward(last)
            self._reduces_next = last
        if last and self._rounds > 1 and self._casts:
            self._complete_sums()
        if self._probes:  # nor between groups of workers, which the call above may have turned on
            self._model.set_requires_all_reduce(False)
        yield

    def _complete_sums(self) -> None:
        """Give each weight a sum in float32 where others of its group have one from earlier passes.

        FSDP reduces the gradients of a group together, in one format, and that of a single pass is in the weights'.
        """
        for group in probe.list_groups(self._roots[:1]):
            if any(held.unsharded_accumulated_grad is not None for held in group.fsdp_params):
                for held in group.fsdp_params:
                    if held.unsharded_accumulated_grad is None and held.sharded_param.requires_grad:
                        sums = torch.zeros(held._orig_size, dtype=held.reduce_dtype, device=self._world.device)
                        held.unsharded_accumulated_grad = sums

    def local_gradients(self) -> list[Tensor]:
        """None are kept if they are reduced in each pass."""
        if self.reduces_each_pass:
            return []
        held = [parameter for group in probe.list_groups(self._roots[:1]) for parameter in group.fsdp_params]
        found = [getattr(each, "_unsharded_param", each.sharded_param).grad for each in held]
        found += [each.unsharded_accumulated_grad for each in held]
        return [gradient for gradient in found if gradient is not None]

    def reduce_gradients(self, *, idle: bool) -> None:
        if self._usage:
            self._usage.counts = False
        while self._done < self._rounds:
            with self.accumulate(last=False):
                (self._padding() * 0).backward()
            self._end_padding_pass()
        self._rounds = 0
        summed = self._finish_sums()
        unused = self._usage.take_unused(parameter for parameter, _ in self._pairs) if self._usage else set()
        for parameter, row in self._pairs:
            gradient, parameter.grad = cast(DTensor | None, parameter.grad), None
            row.grad = None if gradient is None or id(parameter) in unused else gradient._local_tensor
        self._buffers.apply_mean_change(summed)

    def _end_padding_pass(self) -> None:
        self._buffers.abort_step()  # what this pass alone has changed

    def _finish_sums(self) -> list[Tensor] | None:
        """Complete the gradients; returns the changes of floating buffers if they are summed by now."""
        return None

    def find_parameter(self, moved: Tensor) -> Tensor:
        return self._parts[moved]

    def total_norm(self, local: Tensor) -> Tensor:
        """The norm (); NaN, so that the step is skipped, if workers ran different blocks since the start."""
        square, mark = local.double().square() / self._state.replicas, self._order % _MARKS
        sent = [square, square.new_full((), mark), square.new_full((), mark**2)]
        total, marks, squares = all_reduce_sum(self._world, torch.stack(sent))
        norm = total.sqrt().to(local.dtype)
        return torch.where(marks.square() == squares * self._world.size, norm, torch.nan)  # only if all are equal

    def gather_state(self, state: State) -> State:
        self.check_passes()
        return self._state.gather(state)

    def sharded_state_dict(self, state: State) -> tuple[State, dict[str, tuple[Tensor, int]]]:
        self.check_passes()
        return self._state.split(state)

    def load_sharded(self, outline: State, read: ReadRows) -> State:
        return self._state.read(outline, read)

    def scatter_state(self, state: State | None, *, source: int = 0, into: Mapping[str, Any] = {}) -> State:
        return self._state.scatter(state, source)

    def check_passes(self) -> None:
        if len(set(all_gather_object(self._world, self._order))) > 1:
            raise _unlike_blocks()


def _unlike_blocks() -> TrainingError:
    problem = "the workers ran different blocks of the model, so that one gathered the weights of another's block"
    remedy = "--set strategy.wrap=… names only modules that every pass runs, or use --multi-gpu ddp"
    return TrainingError(problem, remedy=remedy)


class WeightUsage:
    """Notes which weights of a sharded model get a gradient in the passes of a step.

    Workers send zeros for what their micro-batches do not use. What nobody used must not be moved by its momentum or
    its weight decay: in one process it has no gradient, and the optimizer leaves it alone.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world, self._held = world, [held for group in probe.list_groups([model]) for held in group.fsdp_params]
        self._watched: set[int] = set()
        self._used: set[int] = set()
        self.counts = False  # whether passes are those of a step; padding passes are not

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
