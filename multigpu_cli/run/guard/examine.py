"""Examines user code on one small batch for what would make results depend on the number of workers.

A first pass, forward and backward, shows writes to parameters, collectives, and what changes at all. If anything does,
a second pass over the same batch, from the same parameters, buffers and seeds, may differ only by what the first one
left. Both halves of the batch show whether their losses add up. An evaluation shows whether it changes the model. Only
a finding costs further passes. Norms and dropout of torch, which depend on the batch, are off.
"""

import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multigpu_cli.data.loader import Batch
from multigpu_cli.distributed.world import is_out_of_memory
from multigpu_cli.run.guard import describe
from multigpu_cli.run.guard.asks import WouldCommunicate, as_another_worker, note_questions
from multigpu_cli.run.guard.buffers import Ends, Values, find_meaningless, read_buffers
from multigpu_cli.run.guard.findings import Finding, Refusal
from multigpu_cli.run.guard.parts import ForwardOnly, Row, Sums, additive_mode, find_mixing, halve, record_rows
from multigpu_cli.run.guard.state import Snapshot, read_global_generators
from multigpu_cli.run.guard.watch import Watch, Write, equal_tensors, locate_raise
from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers

_TOLERANCE_OF_SUMS = 1e-3  # relative, because networks that balance experts over a batch add a small loss of their own
_TOLERANCE_ON_GPU = 1e-4  # relative, because some kernels add in an order that changes
_PROJECTION_ULPS = 16  # rounding by which a projection that is repeated may move a weight


@dataclass(frozen=True, kw_only=True)
class Subject:
    """User code to examine: a model, its loss and a small batch, with what a pass needs."""

    model: nn.Module
    batch: Batch
    load_other_batch: Callable[[], Batch]  # of other samples, as far as there are any
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    backward: Callable[[Tensor], None]
    seed: Callable[[], None]
    autocast: Callable[[], AbstractContextManager[object]]
    evaluate: Callable[[nn.Module, Batch], object] | None = None  # None: the task evaluates in a way of its own
    others: Mapping[str, object] = field(default_factory=dict)  # the user's own task and criterion, by name
    has_additive_loss: bool = True  # False: the loss is over the global batch, and not the sum of its parts' losses
    devices: Sequence[torch.device] = ()  # GPUs whose generators are restored

    @property
    def tolerance(self) -> float:
        """How much two passes over the same batch may differ, relative."""
        return _TOLERANCE_ON_GPU if any(p.is_cuda for p in self.model.parameters()) else 0.0

    @property
    def tolerance_of_sums(self) -> float:
        """How much a sum of parts may differ from the whole, relative: kernels depend on the size of a batch."""
        with self.autocast():
            device = "cuda" if self.tolerance else "cpu"
            cast = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()}.union(cast)
        return max([_TOLERANCE_OF_SUMS, 100 * self.tolerance, *(8 * torch.finfo(dtype).eps for dtype in dtypes)])


@dataclass
class Examination:
    """What an examination found."""

    findings: list[Finding] = field(default_factory=list)
    loss: float | None = None  # of the batch; None if it is not the same each time, or no pass got that far
    failure: str = ""  # which pass raised what, after which nothing was examined; "" if none did


class PassResult(NamedTuple):
    """What a forward pass returned and did; parameters and buffers are restored."""

    loss: float
    writes: Mapping[str, Write]  # to parameters and buffers, by name
    parameters: Mapping[str, Tensor]  # by name, the values that it left in parameters that it wrote or replaced
    buffers: Values  # those that `read_buffers` lists
    uses: Mapping[str, str]  # how the loss uses the model, except its call: name → file:line
    collectives: Mapping[str, str]  # operator → file:line
    draws: bool  # forward has drawn random numbers
    backward_draws: bool = False  # backward has drawn from Python's or NumPy's generator


def run_pass(subject: Subject, batch: Batch, *, with_backward: bool = False) -> PassResult:
    """Run a pass in additive mode with the seeds of a step's first micro-batch, and restore what it writes."""
    model, watch, uses = subject.model, Watch(subject.model), dict[str, str]()
    called = ForwardOnly(model, uses) if "task" in subject.others else model
    subject.seed()
    before = read_global_generators(), *_read_torch_generators(subject.devices)
    backward_draws = False
    try:
        with preserve_buffers(model), additive_mode(model), watch, torch.enable_grad():
            with subject.autocast():
                loss = subject.loss_sum(called, batch)
            after = read_global_generators(), *_read_torch_generators(subject.devices)
            if with_backward:
                subject.backward(loss)
                backward_draws = read_global_generators() != after[0]
            buffers = read_buffers(model)
        parameters = watch.find_changed_parameters()
    finally:
        watch.restore()
    effects = watch.writes, parameters, buffers, uses, watch.collectives
    return PassResult(float(loss.detach()), *effects, before != after, backward_draws)


def examine(subject: Subject) -> Examination:
    """Examine the subject and restore it, except for values that code computes once and keeps.

    A pass that raises ends the examination, with a `failure`; an error of too little memory is raised again.
    """
    examination = _Examiner(subject)
    with _keep_generators(subject.devices), _keep_modes(subject.model), preserve_buffers(subject.model):
        try:
            examination.run()
        except Exception as error:  # user code may raise anything; `failure` reports it
            if is_out_of_memory(error):
                raise
            examination.note_failure(error)
        finally:
            examination.restore()
            subject.model.zero_grad(set_to_none=True)
    return examination.result


class _Examiner:
    """The passes of an examination, in order."""

    def __init__(self, subject: Subject) -> None:
        self.result = Examination()
        self._subject = subject
        self._untouched = self._take_snapshot()
        self._between: Snapshot | None = None  # after the first of two equal passes
        self._remembers = False  # something changes from pass to pass
        self._pass = "forward and backward"  # the current one, for messages

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(self._subject.model, self._subject.others)

    def note_failure(self, error: Exception) -> None:
        """Note which pass raised this error."""
        location = locate_raise(error.__traceback__)
        name = type(error).__name__ + (f" ({location})" if location else "")
        self.result.failure = f"{self._pass} of {len(self._subject.batch)} samples raised {name}"

    def restore(self) -> None:
        """Restore generators, and the attributes that change from pass to pass; others are caches, which stay."""
        now = self._take_snapshot()
        self._untouched.restore((self._between or self._untouched).list_changed(now, self._subject.tolerance))

    def run(self) -> None:
        """Run the passes, and add what they show to the result."""
        subject, findings = self._subject, self.result.findings
        questions: list[str] = []
        with note_questions(questions):
            first = run_pass(subject, subject.batch, with_backward=True)
        self._between = self._take_snapshot()
        findings += _find_effects(first)
        passes = [first]
        if self._untouched.differs(self._between, subject.tolerance):
            passes.append(self._run_again(first))
        self._pass = "a forward pass of half"
        halves = [] if first.draws else [run_pass(subject, half) for half in halve(subject.batch)]
        sums = Sums(first.loss, [half.loss for half in halves])
        if len(passes) == 1 and not (halves and sums.is_sum()):
            passes.append(self._run_again(first))
        self._pass = "a forward pass of other samples"
        findings += _find_writes(subject, *passes)
        repeats = _is_close(first.loss, passes[-1].loss, subject.tolerance)
        self.result.loss = first.loss if repeats else None
        if not (repeats or findings):
            findings.append(describe.other_loss(first.loss, passes[-1].loss))
        may_add_up = bool(halves) and subject.has_additive_loss
        if may_add_up and repeats and not self._remembers and not first.parameters:
            findings += self._find_no_sum(sums)
        findings += self._find_buffers(first, [half.buffers for half in halves])
        if questions and not first.collectives:
            self._pass = "a forward pass as another worker"
            findings += _find_other_worker(subject, questions[0], self.result.loss)
        if subject.evaluate is not None:
            self._pass = "an evaluation"
            findings += _find_in_evaluation(subject, subject.evaluate, known=first.parameters)

    def _run_again(self, first: PassResult) -> PassResult:
        """Repeat the first pass, and add findings for state that only differs because it is the second one."""
        subject, between = self._subject, self._between
        assert between is not None  # taken after the first pass
        self._pass = "a second forward pass"
        second = run_pass(subject, subject.batch)
        repeats = _is_close(first.loss, second.loss, subject.tolerance)
        state = list(_find_state(between, self._take_snapshot(), repeats=repeats, tolerance=subject.tolerance))
        self._remembers = bool(state)
        self.result.findings += state
        return second

    def _find_no_sum(self, sums: Sums) -> Iterator[Finding]:
        """Yield a finding if the losses of the halves do not add up to that of the batch."""
        subject, tolerance = self._subject, self._subject.tolerance_of_sums
        if sums.is_sum(tolerance=tolerance):
            return
        rows: list[list[Row]] = []
        for batch in (subject.batch, *halve(subject.batch)):
            rows.append([])
            with record_rows(subject.model, rows[-1]):
                run_pass(subject, batch)
        mixing = find_mixing(rows[0], rows[1:], tolerance)
        yield describe.no_sum(sums, len(subject.batch), tolerance, mixing)

    def _find_buffers(self, first: PassResult, halves: Sequence[Values]) -> Iterator[Finding]:
        """Yield findings for buffers that a mean makes wrong."""
        subject = self._subject

        def run_from(values: Values) -> Values:
            with preserve_buffers(subject.model), torch.no_grad():
                for name, value in values.items():
                    subject.model.get_buffer(name).copy_(value)
                try:
                    return run_pass(subject, subject.batch).buffers
                except Exception as error:  # such values may be too far for user code; then it shows nothing
                    if is_out_of_memory(error):
                        raise
                    return {}

        start = read_buffers(subject.model)
        return find_meaningless(subject.model, Ends(start, first.buffers, halves, first.writes), run_from)


def _find_effects(first: PassResult) -> Iterator[Finding]:
    """Yield findings for collectives, for random numbers of backward, and for uses of the model by the task."""
    if first.collectives:
        yield describe.collectives(first.collectives)
    if first.backward_draws:
        yield describe.drawing_backward()
    if first.uses:
        yield describe.uses_of_model(first.uses)


def _find_writes(subject: Subject, *passes: PassResult) -> Iterator[Finding]:
    """Yield findings for the parameters that passes over the same batch have written or replaced."""
    writes = {name: write for each in passes for name, write in each.writes.items()}
    left = {name: value for each in passes for name, value in each.parameters.items()}
    if not left:
        return
    projected = _find_projected(subject, left, writes)
    if projected:
        yield describe.projection(subject.model, projected, writes)
    if rest := [name for name in left if name not in projected]:
        yield describe.written_parameters(subject.model, rest, writes)


def _find_projected(subject: Subject, left: Mapping[str, Tensor], writes: Mapping[str, Write]) -> list[str]:
    """Return the trained parameters that a pass only projects.

    A projection leaves the same values whatever the samples, and does not move them a second time.
    """
    trained = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    names = [name for name in left if name in trained and name in writes and "renorm" not in writes[name].operator]
    if not names:
        return []
    other = run_pass(subject, subject.load_other_batch()).parameters
    starts = {name: trained[name].detach().clone() for name in names}
    try:
        _copy_into(trained, {name: left[name] for name in names})
        again = run_pass(subject, subject.batch).parameters
    finally:
        _copy_into(trained, starts)
    results = (other, again)
    return [name for name in names if all(name in each and _is_near(each[name], left[name]) for each in results)]


@torch.no_grad()
def _copy_into(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def _find_state(before: Snapshot, later: Snapshot, *, repeats: bool, tolerance: float) -> Iterator[Finding]:
    """Yield findings for generators that drew, and attributes that changed, between two passes over the same batch."""
    if drawn := before.list_drawn(later):
        yield describe.own_generators(drawn)
    if changed := before.list_changed(later, tolerance):
        yield describe.changed_attributes(changed, repeats=repeats or bool(drawn))


def _find_other_worker(subject: Subject, location: str, loss: float | None) -> Iterator[Finding]:
    """Yield what code that asks for its rank, at `location`, would do as another worker.

    `loss` is that of this worker; None if it is not the same each time.
    """
    try:
        with as_another_worker():
            other = run_pass(subject, subject.batch)
    except WouldCommunicate as call:
        yield describe.collectives_of_others(f"{call.name} ({call.location})")
        return
    if loss is not None and not _is_close(loss, other.loss, subject.tolerance):
        yield describe.loss_by_rank(location, loss, other.loss)


def _find_in_evaluation(
    subject: Subject, evaluate: Callable[[nn.Module, Batch], object], known: Container[str]
) -> Iterator[Finding]:
    """Yield findings for buffers, and parameters other than the `known` ones, that an evaluation changes."""
    model, watch = subject.model, Watch(subject.model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if not is_lazy(buffer)}
    subject.seed()
    try:
        with eval_mode(model):
            with watch, subject.autocast():
                evaluate(model, subject.batch)
            after = dict(model.named_buffers())
            # of another shape is a cache that grows
            same_shape = [name for name in before if name in after and after[name].shape == before[name].shape]
            buffers = [name for name in same_shape if not equal_tensors(before[name], after[name])]
        parameters = [name for name in watch.find_changed_parameters() if name not in known]
    finally:
        watch.restore()
    if parameters:
        yield describe.evaluation(model, parameters, watch.writes, Refusal.SEVERAL)
    if buffers:
        yield describe.evaluation(model, buffers, watch.writes, Refusal.NEVER)


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Return whether two values of a weight are equal up to the rounding of a projection."""
    if one.shape != other.shape:
        return False
    limit = _PROJECTION_ULPS * torch.finfo(one.dtype).eps * one.abs().max()
    return bool((one - other).abs().max() <= limit)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    """Return whether two losses are equal, or both NaN, up to a relative tolerance."""
    return one == other or (one != one and other != other) or abs(one - other) <= tolerance * abs(one)


def _read_torch_generators(devices: Sequence[torch.device]) -> list[bytes]:
    """Return the states of torch's global generators of the CPU and of these devices, to be compared."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda")]
    return [state.numpy().tobytes() for state in states]


@contextmanager
def _keep_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch, on these devices too."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


@contextmanager
def _keep_modes(model: nn.Module) -> Iterator[None]:
    """Restore which modules are in training mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
