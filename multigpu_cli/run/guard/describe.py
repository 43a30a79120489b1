"""Findings in words: what each fault is, why it matters, and how to mend it."""

from collections.abc import Mapping, Sequence

from torch import nn

from multigpu_cli.run.guard.findings import Finding, Refusal, list_names
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
