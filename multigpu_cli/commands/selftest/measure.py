"""What each process of the selftest measures; one worker and several run the same functions; checks.py compares."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from math import fsum
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.checkpoint.pieces import deserialize, serialize
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.commands.selftest.checks import measure_mixing
from multigpu_cli.commands.selftest.process import (
    Measured,
    SelftestProcess,
    compute_checksums,
    first_batch,
    hash_state,
    record_outputs,
    relative_distance,
    split_batch,
)
from multigpu_cli.data.collate import unwrap_dataset
from multigpu_cli.data.loader import Batch, Loader, map_batch
from multigpu_cli.data.order import shuffle_numbers
from multigpu_cli.distributed.world import all_gather, broadcast_object
from multigpu_cli.engine import train_step
from multigpu_cli.errors import RequestError
from multigpu_cli.run.assembly.components import StepResult, TrainComponents
from multigpu_cli.run.global_batch import find_row_gradients
from multigpu_cli.run.run import Run
from multigpu_cli.run.step import forward_backward
from multigpu_cli.runtime.module_state import preserve_buffers
from multigpu_cli.runtime.seeding import enable_determinism, seed_micro_batch
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
    batches: Iterator[tuple[Batch, bool]] = ((batch, False) for batch in work)
    if components.task.global_loss:
        batches = find_row_gradients(components, layout, batches)
    for batch, _ in batches:
        seed_micro_batch(seed, number, batch.micro_batch_index, components.world.device)
        with preserve_buffers(components.state.model):  # each micro-batch starts from those of the step's start
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
    enable_determinism(only_warns=True)  # the measurement with --exact has insisted
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
    """Return a step's loss and norm, and the gradient that the optimizer receives: reduced, unscaled, clipped.

    Rank 0 returns the full gradient, even if it is sharded; the other ranks return an empty one.
    """
    _set_modest_scale(run)
    names = [name for name, p in run.state.model.named_parameters() if p.requires_grad]
    named = dict(zip(names, run.strategy.local_parameters, strict=True))
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
        "apart": relative_distance(ends[1]["model"], ends[0]["model"]),
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
    with run.state.eval_weights() as model:
        result = run.task.evaluate(model, run.loaders.val, process.world, run.state.precision, run.eval_batch_size)
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


_SAMPLES = 16


def measure_all(process: SelftestProcess, save: Callable[[Measured], None]) -> Measured:
    """All parts in turn; `save` gets the results so far after each part, since the next one may end the process."""
    enable_determinism(only_warns=True)  # only --exact insists
    measured: Measured = {}
    for name, part in _PARTS.items():
        with ExitStack() as stack:
            measured[name] = part(process, stack)
        save(measured)
    return measured


def measure_samples(process: SelftestProcess, stack: ExitStack) -> Measured:
    """Checksums of a few training samples, fetched in several ways, before mixup and cutmix join each to another."""
    seed, device = process.config.reproducibility.seed, process.world.device
    order = shuffle_numbers(len(process.source.train), seed, 0)[:_SAMPLES]  # type: ignore[arg-type]
    fills_up = hasattr(unwrap_dataset(process.source.train), "collate_fn")  # to the longest of a batch, perhaps
    some, fewer = (1, 1) if fills_up else (4, 3)
    checksums = {}
    for way, (chunks, processes) in {
        "in one order": (order.split(some), 0),
        "in another order": (order.flip(0).split(fewer), 0),
        "once more": (order.split(some), 0),
        "by a loader process": (order.split(some), 1),
    }.items():
        if processes and (process.world.size > 1 or isinstance(process.source.train, TensorDataset)):
            continue
        data = replace(process.config.data, num_workers=processes, mixup=None, cutmix=None)
        with closing(Loader(process.source.train, process.source, data, device=device, seed=seed)) as loader:
            checksums[way] = {
                number: compute_checksums(sample)
                for batch in loader.iter_training_batches(list(chunks), 0)
                for number, sample in zip(batch.sample_indices.tolist(), split_batch(batch), strict=True)
            }
    return checksums


def measure_model(process: SelftestProcess, stack: ExitStack) -> Measured:
    """The model's outputs for the same samples with the same seeds, twice, without any other worker."""
    components = process.alone.components()
    state, batch = components.state, process.batch or first_batch(process)
    device = process.world.device
    batch = map_batch(batch, lambda tensor: tensor.to(device))
    start = state.capture()
    twice = []
    for _ in range(2):
        state.restore(start, "selftest")
        seed_micro_batch(process.config.reproducibility.seed, 0, batch.micro_batch_index, device)
        with record_outputs(state.model) as outputs, state.precision.autocast(), torch.no_grad():
            loss = components.task.loss_sum(state.model, batch)
        twice.append([*outputs, ["loss", type(components.task).__name__, compute_checksums(loss)]])
    return {"weights": fingerprint(start["model"]), "outputs": twice[0], "again": twice[1]}


class _CountingLoader(Loader):
    """Records which samples an evaluation fetches."""

    seen: list[int]

    def eval_batches(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        self.seen = []
        return _list_samples(super().eval_batches(batch_size, rank, workers), self.seen)


def measure_evaluation(process: SelftestProcess, stack: ExitStack) -> Measured:
    """Metrics of the initial weights, and the samples that this worker evaluated."""
    components = process.components()
    world, source, config = process.world, process.source, process.config
    assert source.val is not None, "prepare_run has given it some samples"
    seed = config.reproducibility.seed
    counted = _CountingLoader(
        source.val, source, config.data, device=world.device, seed=seed, workers_here=world.local_size
    )
    model = components.state.eval_model()
    result = components.task.evaluate(model, counted, world, components.state.precision, components.eval_batch_size)
    return {"metrics": dict(result.metrics), "size": counted.size, "seen": counted.seen}


_PARTS: dict[str, Callable[[SelftestProcess, ExitStack], Measured]] = {
    "samples": measure_samples,
    "model": measure_model,
    "mixing": measure_mixing,
    "reference": measure_reference,
    "gradients": measure_gradients,
    "evaluation": measure_evaluation,
    "resume": measure_resume,
    "exact": measure_exact,
    "sharded": measure_sharded,
    "sharded exact": measure_sharded_exact,
}
