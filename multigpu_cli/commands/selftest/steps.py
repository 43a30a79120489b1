"""The selftest's measurements of optimizer steps: gradients, a resumed run, a run with --exact, a sharded one."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import fsum
from typing import Any

import torch
from torch import Tensor

from multigpu_cli.checkpoint.serialize import deserialize, serialize
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.commands.selftest.checksums import hash_state, max_difference
from multigpu_cli.commands.selftest.process import Measured, SelftestProcess
from multigpu_cli.data.loader import Batch
from multigpu_cli.engine import train_step
from multigpu_cli.errors import RequestError
from multigpu_cli.run.components import TrainComponents
from multigpu_cli.run.forward_backward import forward_backward
from multigpu_cli.run.run import Run
from multigpu_cli.run.step_result import StepResult
from multigpu_cli.runtime.collectives import all_gather, broadcast_object
from multigpu_cli.runtime.schedule_free import eval_weights
from multigpu_cli.runtime.seeding import seed_micro_batch
from multigpu_cli.runtime.torch_settings import enable_determinism
from multigpu_cli.tasks.base import Task

_LOSS_SCALE = 1024.0  # fp16: large enough to keep small gradients, too small to overflow at once


def measure_reference(process: SelftestProcess, stack: ExitStack) -> Measured:
    """Gradients by definition, one micro-batch at a time on one device: their sum, divided by the samples seen.

    "by rows" are those of contiguous weights, as --multi-gpu fsdp gathers them: kernels of another layout round
    otherwise, and where an activation is next to a ReLU's zero, a rounding decides about its whole gradient.
    """
    if process.world.size > 1:
        return {}
    components = process.alone.components(compile="off")
    stack.callback(components.loaders.train.close)
    measured = _compute_definitions(components)
    model = components.state.model
    if all(parameter.is_contiguous() for parameter in model.parameters()):
        return measured | {"by rows": measured}
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return measured | {"by rows": _compute_definitions(components)}


def _compute_definitions(components: TrainComponents) -> Measured:
    """In the first step of an epoch and in its last."""
    steps = {"first": 0, "last": components.plan.batches.steps_per_epoch - 1}
    return {which: _compute_definition(components, number) for which, number in steps.items()}


def _compute_definition(components: TrainComponents, number: int) -> Measured:
    scale, seed = _set_modest_scale(components), components.config.reproducibility.seed
    named = {name: p for name, p in components.state.model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    missing: set[str] = set()
    seen, loss = 0, 0.0
    layout, work = next(components.loaders.train.epoch(components.plan.batches, 0, number, 0, 1))
    whole = layout.samples * components.task.units_per_sample
    for batch in work:
        seed_micro_batch(seed, number, batch.micro_batch_index, components.world.device)
        loss += float(forward_backward(components, batch, whole, last=True))
        seen += int(components.task.units(batch))
        for name, parameter in named.items():
            if parameter.grad is None:
                missing.add(name)
            else:
                total[name] += parameter.grad / scale
            parameter.grad = None
    gradient = {name: (value * (whole / seen)).cpu() for name, value in total.items()}  # divided by the units seen
    return {"gradient": gradient, "loss": loss / max(1, seen), "missing": sorted(missing)}


def measure_gradients(process: SelftestProcess, stack: ExitStack) -> Measured:
    """What `_measure_steps` says, and how the last step is divided."""
    run = process.run(stack, max_grad_norm="off")
    last = run.plan.batches.steps_per_epoch - 1
    shares = [run.plan.batches.local_micro_batches(last, rank) for rank in range(run.plan.batches.workers)]
    return _measure_steps(run) | {"shares": [sum(stop - start for _, start, stop in share) for share in shares]}


def measure_sharded(process: SelftestProcess, stack: ExitStack) -> Measured:
    """The same steps with --multi-gpu fsdp, from the same weights."""
    if process.world.size == 1:
        return {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # the measurement with --exact has insisted
    sharded = replace(process, placement=process.placement._replace(strategy="fsdp"))
    try:
        run = sharded.run(stack, max_grad_norm="off")
    except RequestError as error:
        return {"refused": error.problem.splitlines()[0]}
    return _measure_steps(run)


def _measure_steps(run: Run) -> Measured:
    """An epoch's first step, its last, and the first with a norm limit that takes effect, all from the same start."""
    strategy, state, last = run.strategy, run.state, run.plan.batches.steps_per_epoch - 1
    start = strategy.gather_state(state.state_dict()) if strategy.sharded else state.capture()
    measured: Measured = {"buffers": {}}
    for which, number in {"first": 0, "last": last, "clipped": 0}.items():
        if which == "clipped":
            measured["limit"] = limit = measured["first"]["norm"] / 2
            limited = replace(run.config, optimizer=replace(run.config.optimizer, max_grad_norm=limit))
            run.spec = replace(run.spec, config=limited)
        buffers = {name: (now, now.clone()) for name, now in state.model.named_buffers() if now.is_floating_point()}
        measured[which] = _measure_step(run, number)
        for name, (now, was) in buffers.items():  # constants may be infinite
            measured["buffers"][f"{which} {name}"] = torch.where(now == was, 0.0, now - was).cpu()
        state.restore(strategy.scatter_state(start) if strategy.sharded else start, "selftest")
    return measured


def _measure_step(run: Run, number: int) -> Measured:
    """A step's loss and norm, and the gradient with which the optimizer is called: reduced, unscaled, clipped.

    Rank 0 has the whole of it, also where it is sharded; the others have nothing.
    """
    _set_modest_scale(run)
    names = [name for name, p in run.state.model.named_parameters() if p.requires_grad]
    named = dict(zip(names, run.strategy.trained, strict=True))
    gradient: dict[str, Tensor] = {}
    optimizer = run.state.optimizer

    def record(*_: Any) -> None:
        gradients = {name: p.grad.detach() for name, p in named.items() if p.grad is not None}
        scale = getattr(optimizer, "grad_scale", None)  # what a fused kernel divides by, to clip
        divisor = 1.0 if scale is None else scale.cpu()
        whole = run.strategy.gather_state({"model": gradients}).get("model", {})
        gradient.update({name: part.cpu() / divisor for name, part in whole.items() if run.world.is_main})

    hook = optimizer.register_step_pre_hook(record)
    epoch = run.loaders.train.epoch(run.plan.batches, 0, number, run.world.rank, run.strategy.replicas_per_process)
    outcome = train_step(run, *next(epoch))
    hook.remove()
    return {"gradient": gradient, "loss": _mean_loss(run, outcome), "norm": float(outcome.grad_norm)}


def _mean_loss(run: Run, outcome: StepResult) -> float:
    """The loss of a step, over all workers."""
    sums = outcome.losses_by_micro_batch(run.world.device)
    return fsum(torch.cat(all_gather(run.world, sums)).tolist()) / max(1, int(run.loss_normalizer.last))


def _set_modest_scale(components: TrainComponents) -> float:
    """For fp16, start from a loss scale that does not overflow in the first step; returns it, 1 for other formats."""
    state = components.state.precision.state_dict()
    if not state:
        return 1.0
    components.state.precision.load_state_dict(state | {"scale": _LOSS_SCALE})
    return _LOSS_SCALE


def measure_resume(process: SelftestProcess, stack: ExitStack) -> Measured:
    """A run of some steps, and one that goes on in newly built components from its state in the middle of an epoch."""
    run, seen = process.run(stack), []
    half, epoch = process.steps // 2, run.plan.batches.steps_per_epoch
    half -= epoch > 1 and half % epoch == 0
    for _, samples in advance(run, process.steps):
        seen.append(samples)
        if run.progress.step == half:
            saved = deserialize(serialize(run.state.capture()), "selftest")  # as a checkpoint would
    again = process.run(stack)
    again.state.restore(broadcast_object(process.world, saved), "selftest")
    rest = [samples for _, samples in advance(again, process.steps)]
    ends = [each.state.capture() for each in (run, again)]
    return {
        "whole": hash_state(ends[0]),
        "resumed": hash_state(ends[1]),
        "replica": fingerprint(ends[0]["model"]),
        "apart": max_difference(ends[0]["model"], ends[1]["model"]),
        "samples": seen,
        "in order": rest == seen[half:],
        "epoch": epoch,
        "shuffled": run.config.data.sample_weights is None and type(run.task).train_stream is Task.train_stream,
    }


def measure_exact(process: SelftestProcess, stack: ExitStack) -> Measured:
    """A run with --exact: its final state, and the loss of every step."""
    if not process.exact:
        return {}
    enable_determinism()
    try:
        run = process.run(stack, exact=True)
        losses = [loss for loss, _ in advance(run, process.steps)]
    except RequestError as error:
        return {"refused": error.problem}
    except RuntimeError as error:  # torch names an operator that has no deterministic kernel
        if "deterministic" not in str(error) or process.world.size > 1:
            raise
        return {"refused": str(error).splitlines()[0]}
    assert run.loaders.val is not None
    model, precision = run.state.eval_model(), run.state.precision
    with eval_weights(run.state.optimizer):
        result = run.task.evaluate(model, run.loaders.val, process.world, precision, run.eval_batch_size)
    end = run.strategy.gather_state(run.state.state_dict())
    return {"end": hash_state(end), "losses": losses, "metrics": dict(result.metrics)}


def measure_sharded_exact(process: SelftestProcess, stack: ExitStack) -> Measured:
    """The same with --multi-gpu fsdp; rank 0 has the whole state."""
    if process.world.size == 1:
        return {}
    return measure_exact(replace(process, placement=process.placement._replace(strategy="fsdp")), stack)


def advance(run: Run, until: int) -> Iterator[tuple[float, list[int]]]:
    """Optimizer steps up to number `until`: the mean loss of each, and this worker's samples in it."""
    batches, progress = run.plan.batches, run.progress
    replicas = run.strategy.replicas_per_process
    while progress.step < until:
        epoch, first = divmod(progress.step, batches.steps_per_epoch)
        for layout, work in run.loaders.train.epoch(batches, epoch, first, run.world.rank, replicas):
            samples: list[int] = []
            loss = _mean_loss(run, train_step(run, layout, _list_samples(work, samples)))
            progress.step += 1
            yield loss, samples
            if progress.step == until:
                break


def _list_samples(work: Iterator[Batch], into: list[int]) -> Iterator[Batch]:
    for batch in work:
        into += batch.sample_indices.tolist()
        yield batch
