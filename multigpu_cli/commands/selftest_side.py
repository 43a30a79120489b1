"""What one process measures for the selftest, alone or as one of several workers: plain values and tensors.

Nothing is judged here; both sides run the same functions, and `selftest_verdicts` compares what they found.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multigpu_cli.checkpoint.files import packed, unpacked
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.commands.selftest_marks import Watched, apart, bits, each_sample, marks, on_device
from multigpu_cli.config.pinned import with_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.data.base import Source
from multigpu_cli.data.loader import Batch, Loader
from multigpu_cli.data.sampler import epoch_order
from multigpu_cli.engine import step
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.learner import Learner, build_learner
from multigpu_cli.run.parts import Run, assemble
from multigpu_cli.run.settle import settle
from multigpu_cli.runtime.collectives import from_main, gathered
from multigpu_cli.runtime.determinism import be_deterministic, seed_micro_batch, share_threads
from multigpu_cli.runtime.devices import Choice, cores
from multigpu_cli.runtime.world import World

_SAMPLES = 16
_LOSS_SCALE = 1024.0  # fp16: large enough to keep small gradients, too small to overflow at once

Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One process's view of the test.

    Attributes:
        config: the user's settings, with the global batch fixed and a run folder that goes away.
        choice, world: as for a run.
        source: the dataset, shortened.
        workers: how many the other side has; both take as many threads as it.
        steps: length of the runs that are compared.
        exact: whether --exact is tried too.
        batch: the samples on which the model is tried; None takes the first ones.
    """

    config: Config
    choice: Choice
    world: World
    source: Source
    workers: int
    steps: int
    exact: bool = True
    batch: Batch | None = None

    @property
    def alone(self) -> "Side":
        """The same without the other workers."""
        device = self.world.device
        return replace(self, choice=Choice("single", (device,), 0, "selftest"), world=World(device))

    def learner(self, **overrides: Any) -> Learner:
        """Everything that learns, built afresh."""
        config = with_settings(self.config, overrides)
        settled = settle(config, self.choice, self.world, attempt=0, source=self.source)
        share_threads(self.workers, cores(), exact=config.reproducibility.exact)
        return build_learner(settled, self.choice, self.world)

    def run(self, stack: ExitStack, **overrides: Any) -> Run:
        """A run that is ready for its first step."""
        return assemble(self.learner(**overrides), Console("silent"), StopRequest(), stack)


def measured(side: Side, keep: Callable[[Found], None]) -> Found:
    """All parts in turn; `keep` gets what has been found so far, since the next part may end the process."""
    be_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=True)  # only --exact insists
    found: Found = {}
    for name, part in _PARTS.items():
        with ExitStack() as stack:
            found[name] = part(side, stack)
        keep(found)
    return found


def first_batch(side: Side) -> Batch:
    """The first micro-batch of the first step."""
    learner = side.alone.learner()
    with closing(learner.train):
        return next(next(learner.train.epoch(learner.plan.batches, 0, 0, 0, 1)))


def samples(side: Side, stack: ExitStack) -> Found:
    """The marks of a few training samples, fetched in several ways."""
    config, size = side.config, len(side.source.train)  # type: ignore[arg-type]
    order = epoch_order(size, config.reproducibility.seed, 0)[:_SAMPLES]
    found = {}
    for way, (chunks, processes) in {
        "in one order": (order.split(4), 0),
        "in another order": (order.flip(0).split(3), 0),
        "once more": (order.split(4), 0),
        "by a loader process": (order.split(4), 1),
    }.items():
        if processes and (side.world.size > 1 or isinstance(side.source.train, TensorDataset)):
            continue
        data = replace(config.data, num_workers=processes)
        seed, device = config.reproducibility.seed, side.world.device
        with closing(Loader(side.source.train, side.source, data, device=device, seed=seed)) as loader:
            found[way] = {
                number: marks(sample)
                for batch in loader.samples(list(chunks), 0)
                for number, sample in zip(batch.indices.tolist(), each_sample(batch), strict=True)
            }
    return found


def model_alone(side: Side, stack: ExitStack) -> Found:
    """What the model says to the same samples with the same seeds, twice, without any other worker."""
    learner = side.alone.learner()
    kept, batch = learner.kept, side.batch or first_batch(side)
    device = side.world.device
    batch = replace(batch, inputs=on_device(batch.inputs, device), targets=on_device(batch.targets, device))
    start = kept.capture()
    twice = []
    for _ in range(2):
        kept.restore(start, "selftest")
        seed_micro_batch(side.config.reproducibility.seed, 0, batch.index, device)
        with Watched(kept.model) as heard, learner.precision.autocast(), torch.no_grad():
            loss = learner.task.loss_sum(kept.model, batch)
        twice.append([*heard, ["loss", type(learner.task).__name__, marks(loss)]])
    return {"weights": fingerprint(start["model"]), "outputs": twice[0], "again": twice[1]}


def reference(side: Side, stack: ExitStack) -> Found:
    """Gradients by definition, without strategy and engine: the sum over micro-batches, divided by the samples seen."""
    if side.world.size > 1:
        return {}
    learner = side.alone.learner()
    stack.callback(learner.train.close)
    last = learner.plan.batches.steps_per_epoch - 1
    return {"first": _by_definition(learner, 0), "last": _by_definition(learner, last)}


def _by_definition(learner: Learner, number: int) -> Found:
    model, precision, seed = learner.kept.model, learner.precision, learner.config.reproducibility.seed
    scale = _modest_scale(learner)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    missing: set[str] = set()
    seen = 0
    whole = learner.plan.batches.samples_in(number)
    for batch in next(learner.train.epoch(learner.plan.batches, 0, number, 0, 1)):
        seed_micro_batch(seed, number, batch.index, learner.world.device)
        with precision.autocast():
            loss = learner.task.loss_sum(model, batch)
        precision.backward(loss / whole)
        seen += len(batch)
        for name, parameter in named.items():
            if parameter.grad is None:
                missing.add(name)
            else:
                total[name] += parameter.grad / scale
            parameter.grad = None
    gradient = {name: (value * (whole / seen)).cpu() for name, value in total.items()}  # by the samples themselves
    return {"gradient": gradient, "missing": sorted(missing), "samples": seen}


def gradients(side: Side, stack: ExitStack) -> Found:
    """What the optimizer would be given in an epoch's first step, in its last, and with a limit that binds."""
    run = side.run(stack, max_grad_norm="off")
    start = run.kept.capture()
    last = run.plan.batches.steps_per_epoch - 1
    first_gradient, norm = _given_to_optimizer(run, 0)
    run.kept.restore(start, "selftest")
    last_gradient, _ = _given_to_optimizer(run, last)
    run.kept.restore(start, "selftest")
    limit = norm / 2
    limited = replace(run.config, optimizer=replace(run.config.optimizer, max_grad_norm=limit))
    run.settled = replace(run.settled, config=limited)
    clipped, clipped_norm = _given_to_optimizer(run, 0)
    tensors = {"first": first_gradient, "last": last_gradient, "clipped": clipped} if side.world.main else {}
    shares = [run.plan.batches.share(last, rank) for rank in range(run.plan.batches.workers)]
    return tensors | {
        "limit": limit,
        "norm": clipped_norm,
        "left_over": run.plan.batches.samples_in(last),
        "shares": [sum(stop - start for _, start, stop in share) for share in shares],
    }


def _given_to_optimizer(run: Run, number: int) -> tuple[dict[str, Tensor], float]:
    """The gradient with which the optimizer is called in a step: reduced, unscaled, clipped; and the norm reported."""
    _modest_scale(run)
    named = {name: p for name, p in run.kept.model.named_parameters() if p.requires_grad}
    seen: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        seen.update({name: p.grad.detach().cpu().clone() for name, p in named.items() if p.grad is not None})

    hook = run.kept.optimizer.register_step_pre_hook(note)
    batches = run.plan.batches
    epoch = run.train.epoch(batches, 0, number, run.world.rank, run.strategy.lanes)
    _, outcome = step(run, number, next(epoch))
    hook.remove()
    return seen, float(outcome[0])


def _modest_scale(learner: Learner) -> float:
    """For fp16, start from a loss scale that does not overflow in the first step; returns it, 1 for other formats."""
    state = learner.precision.state_dict()
    if not state:
        return 1.0
    learner.precision.load_state_dict(state | {"scale": _LOSS_SCALE})
    return _LOSS_SCALE


class _Counted(Loader):
    """Notes which samples an evaluation meets."""

    seen: list[int]

    def held_out(self, batch_size: int, rank: int, workers: int) -> Iterator[Batch]:
        self.seen = []
        for batch in super().held_out(batch_size, rank, workers):
            self.seen += batch.indices.tolist()
            yield batch


def evaluation(side: Side, stack: ExitStack) -> Found:
    """Metrics of the first weights, and the samples that this worker met."""
    learner = side.learner()
    assert side.source.val is not None
    seed, here = side.config.reproducibility.seed, side.world.local_size
    counted = _Counted(
        side.source.val, side.source, side.config.data, device=side.world.device, seed=seed, workers_here=here
    )
    model = learner.kept.for_use()
    result = learner.task.evaluate(model, counted, side.world, learner.precision, learner.eval_batch)
    return {"metrics": dict(result.metrics), "size": counted.size, "seen": counted.seen}


def resume(side: Side, stack: ExitStack) -> Found:
    """A run of some steps, and one that is captured half-way and goes on in fresh parts."""
    half = side.steps // 2
    whole = side.run(stack)
    advance(whole, half)
    state = from_main(side.world, unpacked(packed(whole.kept.capture()), "selftest"))  # as a checkpoint would
    advance(whole, side.steps)
    again = side.run(stack)
    again.kept.restore(state, "selftest")
    advance(again, side.steps)
    ends = [run.kept.capture() for run in (whole, again)]
    return {
        "whole": bits(ends[0]),
        "resumed": bits(ends[1]),
        "replica": fingerprint(ends[0]["model"]),
        "apart": apart(ends[0]["model"], ends[1]["model"]),
    }


def exact(side: Side, stack: ExitStack) -> Found:
    """A run with --exact: its end, and the loss of every step."""
    if not side.exact:
        return {}
    be_deterministic()
    try:
        run = side.run(stack, exact=True)
        losses = advance(run, side.steps)
    except RequestError as error:
        return {"refused": error.problem}
    except RuntimeError as error:  # torch names an operator that has no deterministic kernel
        if "deterministic" not in str(error) or side.world.size > 1:
            raise
        return {"refused": str(error).splitlines()[0]}
    assert run.val is not None
    result = run.task.evaluate(run.kept.for_use(), run.val, side.world, run.precision, run.eval_batch)
    return {"end": bits(run.kept.capture()), "losses": losses, "metrics": dict(result.metrics)}


_PARTS: dict[str, Callable[[Side, ExitStack], Found]] = {
    "samples": samples,
    "model": model_alone,
    "reference": reference,
    "gradients": gradients,
    "evaluation": evaluation,
    "resume": resume,
    "exact": exact,
}


def advance(run: Run, until: int) -> list[float]:
    """Optimizer steps up to number `until`; the mean loss of each."""
    batches, progress, losses = run.plan.batches, run.progress, []
    while progress.step < until:
        epoch, first = divmod(progress.step, batches.steps_per_epoch)
        for work in run.train.epoch(batches, epoch, first, run.world.rank, run.strategy.lanes):
            sums, _ = step(run, progress.step, work)
            in_step = batches.samples_in(progress.step % batches.steps_per_epoch)
            losses.append(fsum(torch.cat(gathered(run.world, sums)).tolist()) / in_step)
            progress.step += 1
            if progress.step == until:
                break
    return losses
