"""The guard's look at a run's own model, task and first samples, before its first step."""

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch

from multigpu_cli.data.loader import Batch, Loader, first_batch
from multigpu_cli.distributed.world import all_gather, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.guard import describe
from multigpu_cli.run.guard.examine import Examination, Subject, examine
from multigpu_cli.run.guard.findings import Finding, decide, list_names
from multigpu_cli.run.request.spec import with_notes
from multigpu_cli.runtime.seeding import seed_micro_batch
from multigpu_cli.tasks.base import Task

_MAX_SAMPLES = 8
_SAME_LOSS = 1e-6  # relative difference between ranks
_SAME_LOSS_ON_GPU = 1e-3  # of different models, or with numbers of 16 bits


def check_user_code(components: TrainComponents) -> list[str]:
    """Return warnings about code whose result depends on the number of workers; all ranks call it together.

    A sharded model is not examined, because its parameters are replaced within a pass. The plan says if nothing was
    examined. RequestError, on every rank: the result of this run would depend on it.
    """
    if reason := _find_exemption(components):
        components.spec = with_notes(components.spec, guard=reason)
        return []
    world, batches = components.world, components.plan.batches
    run_on_all_ranks(world, partial(_refuse_rebound, components))
    # user code that communicates does so on every rank, as in the trial of a micro-batch before
    examination = run_on_all_ranks(world, partial(_examine, components))
    losses = _gather_losses(components, examination.loss)
    findings = examination.findings + _compare_losses(components, losses)
    several = batches.micro_batches > 1 or batches.workers > 1
    verdict = decide(findings, several=several, exact=components.config.reproducibility.exact)
    run_on_all_ranks(world, partial(_refuse, verdict.refused))
    warnings = [str(finding) for finding in verdict.warned]
    if examination.failure:
        warnings.append(f"{examination.failure}, which training may not do: the guard examined no further")
    return warnings


def _find_exemption(components: TrainComponents) -> str:
    """Return why the guard does not examine this run; "" if it does."""
    if components.config.reproducibility.guard == "off":
        return "off: code whose result depends on the number of workers is not looked for"
    if components.strategy.sharded:
        return f"does not examine a model that --multi-gpu {components.strategy.name} divides among workers"
    return ""


def _refuse_rebound(components: TrainComponents) -> None:
    """Raise RequestError if a parameter of the optimizer is no longer one of the model: the trial has replaced it."""
    parameters = dict(components.state.model.named_parameters())
    ids = {id(parameter) for parameter in parameters.values()}
    trained = {id(parameter) for group in components.state.optimizer.param_groups for parameter in group["params"]}
    if trained - ids:
        names = [name for name, p in parameters.items() if p.requires_grad and id(p) not in trained]
        raise RequestError(
            f"--model: forward replaces the parameters {list_names(names)}, and the optimizer does not have the others",
            remedy="write into them under torch.no_grad (parameter.copy_), or keep such values in buffers",
        )


def _examine(components: TrainComponents) -> Examination:
    state, task, world, strategy = components.state, components.task, components.world, components.strategy
    is_own = not type(task).__module__.startswith("multigpu_cli.")
    others: dict[str, object] = {"task": task} if is_own else {}
    if (criterion := getattr(task, "criterion", None)) is not None:
        others["criterion"] = criterion
    batch, load_others = _load_batches(components)
    if is_own and type(task).units is Task.units:  # a task that counts samples, although rows were dropped
        from multigpu_cli.tasks.own_loss import refuse_dropped_rows  # late: most runs have no task of their own

        refuse_dropped_rows(task.source, batch, batch.inputs, batch.targets)
    seed = components.config.reproducibility.seed
    subject = Subject(
        model=state.model,
        batch=batch,
        load_other_batch=load_others,
        loss_sum=task.loss_sum,
        backward=state.precision.backward,
        seed=lambda: seed_micro_batch(seed, 0, 0, world.device),
        autocast=state.precision.autocast,
        evaluate=task.measure if components.evaluates_in_batches else None,
        others=others,
        # a stream of the task's own may join samples
        has_additive_loss=task.global_loss is None and isinstance(components.loaders.train, Loader),
        devices=[world.device],
    )
    with strategy.accumulate(last=False):  # the model's gradients are not reduced
        return examine(subject)


def _load_batches(components: TrainComponents) -> tuple[Batch, Callable[[], Batch]]:
    """Load a small batch, and return it with a function that loads other samples, as far as there are any.

    The samples come from all over a dataset, because the first ones often share a class. A stream of the task's own
    has its first ones, and half of them as the others if there are no more.
    """
    stream, micro_batch = components.loaders.train, components.plan.batches.micro_batch
    size = min(_MAX_SAMPLES, micro_batch, stream.size)
    size -= size % 2 if size > 1 else 0  # two equal halves
    if isinstance(stream, Loader):
        indices = torch.linspace(0, stream.size - 1, 2 * size).long()
        return stream.pick(indices[::2]), lambda: stream.pick(indices[1::2])

    def load_others() -> Batch:
        batches = list(islice(stream.eval_batches(size, 0, 1), 2))
        return batches[1] if len(batches) > 1 else first_batch(stream, -(-size // 2))

    return first_batch(stream, size), load_others


def _gather_losses(components: TrainComponents, loss: float | None) -> list[float]:
    """Return the losses of all ranks that have one."""
    world = components.world
    own = torch.tensor([0.0 if loss is None else loss, loss is not None], dtype=torch.float64, device=world.device)
    return [float(value) for value, is_known in torch.stack(all_gather(world, own)).tolist() if is_known]


def _compare_losses(components: TrainComponents, losses: list[float]) -> list[Finding]:
    """Return a finding if the same batch has different losses on different ranks."""
    on_cpu = components.world.device.type == "cpu" and components.state.precision.name == "off"
    tolerance = _SAME_LOSS if on_cpu else _SAME_LOSS_ON_GPU
    if losses and max(losses) - min(losses) > tolerance * max(map(abs, losses)):
        return [describe.losses_differ(losses)]
    return []


def _refuse(refused: list[Finding]) -> None:
    """Raise one RequestError for all findings that refuse the run."""
    if refused:
        first, *others = refused
        also = (f"also {finding.problem}: {finding.reason}" for finding in others)
        remedy = f"{first.remedy}; or --set guard=off"
        raise RequestError("\n  ".join([f"{first.problem}: {first.reason}", *also]), remedy=remedy)
