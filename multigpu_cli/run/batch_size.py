"""Finds a micro-batch that fits into memory before the first step, and a smaller one where memory runs out later.

Each candidate runs forward and backward without communication, its gradients are discarded, and then the ranks vote:
an out-of-memory error on one rank in the middle of a reduction would leave the other ranks waiting forever. A batch of
an evaluation is tried in the same way.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from multigpu_cli.capabilities import MULTI_PROCESS, SHARDING
from multigpu_cli.checkpoint.files import fail_on_write_error
from multigpu_cli.checkpoint.run_folder import read_note, write_note
from multigpu_cli.data.loader import first_batch
from multigpu_cli.distributed.world import connect_collectives, free_memory, is_out_of_memory, run_in_step
from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError
from multigpu_cli.optimizers.trial import rehearse_step
from multigpu_cli.run.assembly.assemble import smoke_test_batch
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.global_batch import rehearse_global_loss
from multigpu_cli.run.request.checks import refuse_single_samples
from multigpu_cli.run.request.prepare import with_measured_batch
from multigpu_cli.run.request.spec import with_micro_batch
from multigpu_cli.run.run import Run
from multigpu_cli.run.step import forward_backward
from multigpu_cli.runtime.module_state import preserve_buffers

_ROOM = 0.08  # of the memory that a process can have --batch-size auto leaves, for fragments and between steps
Work = Callable[[], None]
_MAX_ON_CPU = 256  # host memory sets no clear limit, and a larger micro-batch is not faster


def fit_batch_sizes_to_memory(components: TrainComponents) -> list[str]:
    """Put the micro-batch that fits into memory into the plan, or fail; returns a warning for each halving."""
    first = components.strategy.reduces_first
    if first:
        warm_up(components)
    world, strategy = components.world, components.strategy
    if world.device.type == "cuda" and world.size > 1 and _searches(components):
        exact = components.config.reproducibility.exact
        run_in_step(world, lambda: connect_collectives(world, strategy.groups, pairs=exact))
    warnings = [*_choose_micro_batch(components), *_try_evaluation(components)]
    if not first:
        warm_up(components)
    return warnings


def try_micro_batch(components: TrainComponents) -> tuple[int, list[str]]:
    """Try a micro-batch for a dry run; returns its number of samples, and a warning for each halving.

    On a CPU, where memory sets no clear limit, two samples stand for all that fit. Raises what
    `fit_batch_sizes_to_memory` would.
    """
    if components.world.device.type == "cuda":
        warnings = fit_batch_sizes_to_memory(components)
        return components.plan.batches.micro_batch, warnings
    size = min(2, components.plan.batches.micro_batch)
    _try_shortest_micro_batch(components)
    _fits_in_memory(components, size)
    return size, [*_try_evaluation(components, size)]


def warm_up(components: TrainComponents) -> None:
    """Run the strategy's warm-up on two samples, which fit wherever a micro-batch does, or raise an OutOfMemory."""
    batch_size = min(2, components.plan.batches.micro_batch)
    batch = cache(lambda: first_batch(components.loaders.train, batch_size))

    def loss() -> Tensor:
        with components.state.precision.autocast():
            return components.task.loss_sum(components.strategy.callable, batch())

    with preserve_buffers(components.state.model):
        components.strategy.warm_up(loss)


def measure_peak_memory(components: TrainComponents) -> int:
    """Peak bytes of the GPU in a micro-batch, which must fit, including the optimizer's future state."""
    model, peaks = components.state.model, []

    def work() -> None:
        _run_micro_batch(components, components.plan.batches.micro_batch)
        peaks.append(torch.cuda.max_memory_allocated(components.world.device))

    with preserve_buffers(model):
        _fits_on_all_ranks(components, work)
    model.zero_grad(set_to_none=True)
    return peaks[0]


def _choose_micro_batch(components: TrainComponents) -> Iterator[str]:
    spec = components.spec
    if _searches(components):
        _find_largest_micro_batch(components)
        return
    if smaller := spec.resume_point.micro_batch_after_oom:
        components.spec = with_micro_batch(spec, smaller)
    _try_shortest_micro_batch(components)
    while not _fits_in_memory(components, components.plan.batches.micro_batch):
        if components.plan.batches.micro_batch == 1:
            refuse_single_samples(components.spec)
        yield halve_micro_batch(components)


def _searches(components: TrainComponents) -> bool:
    """Whether the micro-batch is to be found, with --batch-size auto."""
    return components.spec.user_config.batch.size == "auto" and not components.spec.resume_point.manifest


def _try_evaluation(components: TrainComponents, size: int | None = None) -> Iterator[str]:
    """Try each split's first batch and its last one, whose samples may be padded, before there is training."""
    components.loaders.max_eval_batch_size = components.spec.resume_point.eval_batch_after_oom
    splits = {"validation": components.loaders.val, "test": components.loaders.test}
    loaders = {name: loader for name, loader in splits.items() if loader is not None}
    if not loaders or not components.evaluates_in_batches:
        return

    def evaluate_batches() -> None:
        most, state = size or components.eval_batch_size, components.state
        for name, loader in loaders.items():
            last = -(-loader.size // most) - 1
            for number, which in {0: f"first {name} batch", last: f"last {name} batch"}.items():
                batch, model = next(loader.eval_batches(most, number, last + 1)), state.eval_model()
                smoke_test_batch(components.spec, components.task, model, state.precision, batch, which=which)

    while not _fits_on_all_ranks(components, evaluate_batches):
        yield halve_eval_batch(components)


def _try_shortest_micro_batch(components: TrainComponents) -> None:
    """Try a micro-batch of one sample if an epoch has one: BatchNorm over single features fails on it."""
    batches = components.plan.batches
    if components.strategy.replicas_per_process > 1 or batches.smallest_micro_batch > 1:
        return
    which = "an epoch ends with one sample"
    remedy = "--drop-last, or a --batch-size that leaves more than one sample for the last step"
    if batches.micro_batch == 1:
        which, remedy = "a batch is one sample", "a larger --batch-size"
    try:
        _fits_in_memory(components, 1)
    except ValueError as error:
        problem = f"{which}; --model {components.spec.model} can't train on it: {error}"
        raise RequestError(problem, remedy=remedy) from error


def _find_largest_micro_batch(components: TrainComponents) -> None:
    """--batch-size auto: double until something does not fit, or a micro-batch is a worker's whole share.

    With --compile the search continues compiled from the size that fits uncompiled: each size takes a compilation.
    """
    batches = components.plan.batches
    share = components.config.batch.global_size or components.loaders.train.size
    limit = min(-(-share // batches.workers), components.spec.resume_point.micro_batch_after_oom or share)
    if components.world.device.type != "cuda":
        limit = min(limit, _MAX_ON_CPU)
    size, best = 1, 0
    try:
        _fits_in_memory(components, size)
    except ValueError:  # BatchNorm over single features can't train on one sample; any other error comes again with two
        size = 2
    while size <= limit and _fits_in_memory(components, size):
        size, best = size * 2, size
    if components.compiled and best:
        halves = (best >> times for times in range(best.bit_length()))
        best = next((size for size in halves if _fits_compiled(components, size)), 0)
        while best and (size := 2 * best) <= limit and _fits_compiled(components, size):
            best = size
    if not best:
        refuse_single_samples(components.spec)
        raise TrainingError("--batch-size auto: out of memory with a single sample", remedy=REMEDY)
    reason = f"measured: {size} does not fit" if size <= limit else "the largest that is of use here"
    components.spec = with_measured_batch(components.spec, best, components.world, reason)
    _try_shortest_micro_batch(components)


def _fits_compiled(components: TrainComponents, size: int) -> bool:
    components.spec = with_micro_batch(components.spec, size)  # only the plan's micro-batch runs compiled
    return _fits_in_memory(components, size)


def _fits_in_memory(components: TrainComponents, size: int) -> bool:
    """Whether forward and backward of so many samples, and the optimizer's state, fit into every rank's memory."""
    model, batches, settings = components.state.model, components.plan.batches, components.config.batch
    if settings.size != "auto" or settings.global_size:  # else the global batch follows the micro-batch
        batches = replace(batches, micro_batch=size)
    searches = _searches(components) and size > 1 and components.world.device.type == "cuda"  # one may take all
    rest = partial(_take_rest_of_step, components) if searches else None
    work = partial(_run_micro_batch, components, size)
    with preserve_buffers(model):
        fits = _fits_on_all_ranks(components, work, rest, accumulates=batches.accumulation > 1)
        if fits and components.strategy.sharded:  # whose probe leaves no gradients
            _run_micro_batch(components, min(2, size))
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] if fits else []
    model.zero_grad(set_to_none=True)
    strategy = components.spec.placement.strategy
    waits = strategy in MULTI_PROCESS and not components.config.reproducibility.exact
    if unused and waits and not components.config.communication.find_unused_parameters:
        names = ", ".join(unused[:4]) + (" …" if len(unused) > 4 else "")
        reason = f"{strategy.upper()} waits for every gradient"
        problem = f"--model {components.spec.model}: {names} took no part in the loss, and {reason}"
        raise RequestError(problem, remedy="--find-unused-parameters, or --freeze them")
    return fits


def _fits_on_all_ranks(components: TrainComponents, work: Work, rest: Work | None = None, **probing: bool) -> bool:
    """Whether all have memory for the work, with the optimizer's future state reserved, and then for the rest."""

    def work_beside_the_state() -> None:
        device, state = components.world.device, components.state.optimizer.state
        copies = 2 if device.type == "cuda" and not state else 0  # of each parameter: what Adam's first step allocates
        reserved = [torch.empty_like(p) for p in components.strategy.local_parameters for _ in range(copies)]
        work()
        reserved.clear()
        if rest:
            rest()

    try:
        components.strategy.probe_memory(work_beside_the_state, **probing)
    except OutOfMemory:
        if components.compiled:
            components.compiled.reset()
        return False
    finally:
        free_memory(components.world.device)
    return True


def _take_rest_of_step(components: TrainComponents) -> None:
    """What follows the passes, except that nothing moves: the optimizer's step; then see whether room is left."""
    optimizer = components.state.optimizer
    if not (components.strategy.sharded or components.optimizer_draws or optimizer.state):
        rehearse_step(optimizer)
    free = torch.cuda.mem_get_info(components.world.device)[0]
    if free < _ROOM * (free + torch.cuda.memory_reserved(components.world.device)):  # others may hold the rest
        raise torch.OutOfMemoryError(f"less than {_ROOM:.0%} of the GPU's memory would be left")


def _run_micro_batch(components: TrainComponents, size: int) -> None:
    """Forward and backward; twice on a GPU, where accumulation holds the first pass's gradients in the second."""
    batch = first_batch(components.loaders.train, size * components.strategy.replicas_per_process)
    for _ in range(2 if components.world.device.type == "cuda" else 1):
        try:
            if components.task.global_loss:
                rehearse_global_loss(components, batch, _find_global_batch(components, size))
            forward_backward(components, batch, 1.0, last=False)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if not is_out_of_memory(error):
                state, two = components.state, first_batch(components.loaders.train, 2)
                strategy, task = components.strategy, components.task
                strategy.explain_failure(error, partial(task.loss_sum, strategy.callable, two))
                smoke_test_batch(components.spec, task, state.model, state.precision, two, training=True)
            raise


def _find_global_batch(components: TrainComponents, size: int) -> int:
    """Return the samples of a global batch of micro-batches of `size`, which it follows while that is searched for."""
    batches, settings = components.plan.batches, components.config.batch
    follows = _searches(components) and not settings.global_size
    return size * (settings.grad_accum_steps or 1) * batches.workers if follows else batches.global_batch


REMEDY = (
    "a smaller --batch-size (with the same --global-batch-size), --grad-checkpointing, --amp bf16, or, if the weights "
    f"and the optimizer's state are too large for one of several devices, {SHARDING}"
)


def halve_micro_batch(components: TrainComponents) -> str:
    """Halve the micro-batch, or raise a TrainingError; the global batch, and so the gradient, stay as they are."""
    size = components.plan.batches.micro_batch
    groups = {"whole groups of environments": components.spec.source.fixed_batch_sizes is not None}
    _check_may_halve(components, size, f"with micro-batches of {size}", groups)
    components.spec = with_micro_batch(components.spec, size // 2)
    layers = {type(m).__name__ for m in components.state.model.modules() if isinstance(m, _BatchNorm | _DropoutNd)}
    text = f"out of memory: micro-batches of {size // 2} instead of {size}, the same global batch"
    return text + (f"; smaller micro-batches for {' and '.join(sorted(layers))} too" if layers else "")


def halve_eval_batch(components: TrainComponents) -> str:
    """Halve the batches of evaluations, whose metrics change by rounding only, or raise a TrainingError."""
    size = components.eval_batch_size
    own = {"the task's own evaluation": not components.evaluates_in_batches}
    _check_may_halve(components, size, f"in an evaluation with batches of {size}", own)
    components.loaders.max_eval_batch_size = size // 2
    return f"out of memory in an evaluation: batches of {size // 2} instead of {size}"


def _check_may_halve(components: TrainComponents, size: int, where: str, reasons: dict[str, bool]) -> None:
    """Raise TrainingError with the first reason that holds."""
    stops, exact = components.config.fault.on_oom == "stop", components.config.reproducibility.exact
    reasons = {"--on-oom stop": stops, "one sample": size == 1, "--exact": exact} | reasons
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise TrainingError(f"out of memory {where} ({reason})", remedy=REMEDY)


def recover_from_out_of_memory(run: Run, error: RuntimeError) -> None:
    """Discard a step that ran out of memory, and go on with micro-batches of half the size.

    With several processes the others are in the middle of a reduction, and in the optimizer's phase some weights may
    have moved already. Then the run has to start again: the next attempt reads the note that is left in the folder.
    TrainingError: it has to start again, or the micro-batch can't be halved.
    """
    moved = run.observer.watchdog.own.phase == "optimizer"
    run.strategy.abort_step()
    run.state.optimizer.zero_grad(set_to_none=True)
    traceback.clear_frames(error.__traceback__)  # which hold the step's tensors
    free_memory(run.world.device)
    text = halve_micro_batch(run)
    if run.world.size == 1 and not moved:
        run.log_fault("out of memory", text)
        return
    batches = run.plan.batches
    smaller = {"batch_size": batches.micro_batch, "global_batch_size": batches.global_batch}
    _end_attempt(run, "in the optimizer " if moved else "", smaller, text)


def end_evaluation_without_memory(run: Run) -> NoReturn:
    """Have the next attempt evaluate in batches of half the size: the other ranks wait in the middle of a pass."""
    text = halve_eval_batch(run)
    _end_attempt(run, "in an evaluation ", {"eval_batch_size": run.eval_batch_size}, text)


def _end_attempt(run: Run, where: str, smaller: dict[str, int], text: str) -> NoReturn:
    """Leave a note of the smaller sizes, which `text` describes, for the next attempt."""
    with fail_on_write_error(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)  # on a node that has no part of it yet
        write_note(run.folder, read_note(run.folder) | smaller)
    who = f"rank {run.world.rank} ran out of memory" if run.world.size > 1 else "out of memory"
    remedy = f"run the same command again: it resumes from the last checkpoint with {text.split(': ')[1]}"
    raise TrainingError(f"{who} {where}at step {run.progress.step}", remedy=remedy)
