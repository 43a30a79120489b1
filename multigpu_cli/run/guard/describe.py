"""Findings in words: what each fault is, why it matters, and how to mend it."""

from collections.abc import Mapping, Sequence

from torch import nn

from multigpu_cli.run.guard.findings import Finding, Refusal, list_names
from multigpu_cli.run.guard.parts import Sums
from multigpu_cli.run.guard.watch import Write

_ONCE = "forward runs once for each micro-batch of a worker, so what it leaves depends on the number of workers"
_ALONE = "it would see as many samples as there are workers, and hang if a worker has no micro-batch"
_SEEDED = "use the functions of torch, numpy.random or random without a generator: they are seeded for each micro-batch"


def written_parameters(model: nn.Module, names: Sequence[str], writes: Mapping[str, Write]) -> Finding:
    """Forward, backward or a hook writes parameters, or rebinds them."""
    remedy = "update the copy in after_step of the model or the task, use --ema, or keep a codebook in buffers"
    if any("renorm" in writes[name].operator for name in names if name in writes):
        remedy = "use max_norm=None with --max-grad-norm, or clamp what the embedding returns"
    return Finding(f"forward writes the parameters {_locate(model, names, writes)}", _ONCE, remedy, Refusal.SEVERAL)


def projection(model: nn.Module, names: Sequence[str], writes: Mapping[str, Write]) -> Finding:
    """Forward projects trained weights, as forced weight normalization does."""
    return Finding(
        f"forward projects the weights {_locate(model, names, writes)}",
        "a worker without a micro-batch in a step does not run it",
        "compute the projected weight and use that (torch.nn.utils.parametrize), without writing the parameter",
        Refusal.NEVER,
        only_several=True,
    )


def changed_attributes(names: Sequence[str], *, repeats: bool) -> Finding:
    """Python attributes change from pass to pass; the loss depends on them unless it `repeats`."""
    if repeats:
        return Finding(
            f"forward changes {list_names(names)}",
            f"{_ONCE}, and a checkpoint contains it only if get_extra_state returns it; so far the loss is the same",
            "keep it in a buffer (register_buffer): buffers move by the mean of the micro-batches' changes",
            Refusal.EXACT,
        )
    return Finding(
        f"forward changes {list_names(names)}, and the loss depends on it",
        f"{_ONCE}, and a checkpoint contains it only if get_extra_state returns it",
        "keep a count in a buffer of whole numbers (register_buffer), an annealed weight in one that after_step(step) "
        "writes; start a hidden state anew for each sample",
        Refusal.SEVERAL,
    )


def own_generators(names: Sequence[str]) -> Finding:
    """Forward draws from generators that the run does not seed."""
    return Finding(
        f"forward draws from a random generator of its own: {list_names(names)}",
        "it is not seeded for each micro-batch: several workers, or a resumed run, draw other numbers",
        _SEEDED,
        Refusal.EXACT,
    )


def drawing_backward() -> Finding:
    """Backward draws random numbers outside of torch."""
    return Finding(
        "backward draws from Python's or NumPy's random generator",
        "a checkpointed block that is recomputed gets other random numbers than in forward: its gradient is wrong",
        "use torch's functions in checkpointed blocks: their generator is restored for the recomputation",
        Refusal.NEVER,
    )


def other_loss(first: float, second: float) -> Finding:
    """The same batch has a different loss the second time, for a reason that no attribute shows."""
    return Finding(
        f"the same batch with the same seeds has a different loss the second time ({first:.6g}, then {second:.6g})",
        "the model or the loss draws random numbers by itself, or remembers earlier batches",
        f"{_SEEDED}; keep state in buffers",
        Refusal.SEVERAL,
    )


def collectives(locations: Mapping[str, str]) -> Finding:
    """User code communicates."""
    calls = list_names([f"{name} ({location})" for name, location in locations.items()])
    remedy = "leave it out (sync_codebook=False, gather=False, …): gradients and buffers are reduced for you"
    return Finding(f"the model or the loss communicates by itself: {calls}", _ALONE, remedy, Refusal.ALWAYS)


def collectives_of_others(call: str) -> Finding:
    """User code would communicate if there were several workers."""
    problem = f"with several workers the model or the loss would communicate by itself: {call}"
    return Finding(problem, _ALONE, "leave it out (sync_codebook=False, gather=False, …)", Refusal.EXACT)


def loss_by_rank(location: str, loss: float, other: float) -> Finding:
    """The loss is another one for another worker."""
    return Finding(
        f"the loss depends on the rank or the number of workers, for which {location} asks",
        f"it is {loss:.6g} here, and {other:.6g} as another worker",
        "leave rank and number of workers out of model and loss",
        Refusal.EXACT,
    )


def buffers(model: nn.Module, case: str, names: Sequence[str], writes: Mapping[str, Write]) -> Finding:
    """Buffers are bounds that start at infinity or at a finite value, or slots that each micro-batch overwrites."""
    where = _locate(model, names, writes)
    if case == "slots":
        return Finding(
            f"forward overwrites a part of the buffers {where}, as a queue or a memory bank does",
            "each micro-batch of a step writes into the same slots, and the step would keep the mean",
            "enqueue after the optimizer's step; or let a step be one micro-batch on one worker",
            Refusal.SEVERAL,
            only_several=True,
        )
    return Finding(
        f"forward keeps the least or greatest value so far in the buffers {where}",
        "buffers move by the mean of the micro-batches' changes, which is no bound",
        "name their rules in the model: buffer_rules = {'*.low': 'min', '*.high': 'max'}",
        Refusal.SEVERAL if case == "infinite" else Refusal.NEVER,
        only_several=True,
    )


def no_sum(sums: Sums, size: int, tolerance: float, mixing: str) -> Finding:
    """The loss of a batch is not the sum of its halves' losses; `mixing` names a module whose rows mix, if any."""
    problem = f"the loss of {size} samples is {sums.whole:.6g}, and that of their halves together {sums.of_halves:.6g}"
    reason = "each micro-batch has its own weights, negatives or statistics: the result depends on --batch-size"
    remedy = "a --task whose loss_sum is a sum (reduction='sum') and whose units are the weights; for a loss "
    remedy += "over the global batch, a task with rows and loss"
    if sums.is_sum(2.0, tolerance):
        reason = "loss_sum returns a mean, so each micro-batch counts the same, however many samples it has"
        remedy = "return the sum: multiply by self.units(batch), or reduction='sum'"
    elif sums.is_sum(0.5, tolerance):
        reason = "a sum over the micro-batch is taken for its mean, so the loss grows with --batch-size"
        remedy = "return the mean over the samples (reduction='mean', ctc_loss_reduction='mean'), or (n,) losses"
    elif mixing:
        reason = f"the output of {mixing} for a sample depends on the other samples of its micro-batch"
        remedy = "GroupNorm or LayerNorm instead, or a mask for padding; or keep --batch-size for all runs"
    return Finding(problem, reason, remedy, Refusal.NEVER, only_several=True)


def uses_of_model(uses: Mapping[str, str]) -> Finding:
    """The task uses more of the model than its call."""
    names = list_names(
        [f"model.{name} ({location})" if location else f"model.{name}" for name, location in uses.items()]
    )
    return Finding(
        f"the task uses {names}",
        "--multi-gpu wraps the model, and only model(…) reduces gradients: with several workers the task fails",
        "call model(…) alone, and have forward choose by an argument what it computes; or --exact",
        Refusal.NEVER,
    )


def losses_differ(losses: Sequence[float]) -> Finding:
    """The same batch has a different loss on each rank."""
    values = list_names([f"{loss:.6g}" for loss in losses])
    return Finding(
        f"the same batch has a different loss on each rank ({values})",
        "the model or the loss depends on the rank, or on something that only one rank has",
        "leave the rank out of model and loss",
        Refusal.ALWAYS,
    )


def evaluation(model: nn.Module, names: Sequence[str], writes: Mapping[str, Write], refusal: Refusal) -> Finding:
    """An evaluation changes parameters, or buffers, which are restored after each batch of an evaluation."""
    reason = "training continues from other values, and each worker evaluates other samples: the replicas differ"
    if refusal is Refusal.NEVER:
        reason = "they are restored after each batch, but its metrics use values that depend on its samples"
    problem = f"an evaluation changes {_locate(model, names, writes)}"
    return Finding(problem, reason, "change them only if self.training", refusal)


def _locate(model: nn.Module, names: Sequence[str], writes: Mapping[str, Write]) -> str:
    """'k.weight, k.bias (Linear, dino.py:45)'."""
    owner = type(model.get_submodule(names[0].rpartition(".")[0])).__name__
    location = next((writes[name].location for name in names if name in writes), "")
    return f"{list_names(names)} ({', '.join(filter(None, (owner, location)))})"
