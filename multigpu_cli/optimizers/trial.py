"""Tries an optimizer on small weights before a run: its steps are possible and repeat, its state can be saved."""

import io
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.optimizers.eval_weights import eval_weights, is_schedule_free
from multigpu_cli.runtime.module_state import map_tensors
from multigpu_cli.runtime.seeding import seed_everything

_LONGEST, _RATE = 5, 0.01
Construct = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer over groups, like the one of the run."""


class Trial(NamedTuple):
    """An optimizer over small weights of its own."""

    optimizer: torch.optim.Optimizer
    weights: list[nn.Parameter]

    def step(self, number: int) -> None:
        """One step with gradients that depend on its number alone."""
        for group in self.optimizer.param_groups:
            group["lr"] = _RATE
        for place, weight in enumerate(self.weights):
            weight.grad = _draw(weight, 1000 * number + place)
        seed_everything(number)  # as a run does before each step of the user's own
        self.optimizer.step()

    def bits(self) -> list[Any]:
        """All that a checkpoint would hold, to be compared."""
        leaves = tree_leaves([self.optimizer.state_dict(), [weight.detach() for weight in self.weights]])
        return [_to_bytes(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def check_optimizer(
    optimizer: torch.optim.Optimizer, construct: Construct, name: str, *, exact: bool, workers: int = 1
) -> None:
    """Try a copy of the optimizer on small weights; the optimizer itself and torch's generators stay as they are.

    With `exact` its steps must have the same bits each time; with several workers, the same on each of them.
    RequestError: they have not; a step fails; or a state that was saved and loaded leads to other bits.
    """
    devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
        try:
            _check(optimizer, construct, name, exact=exact, workers=workers)
        except RequestError:
            raise
        except Exception as error:  # the user's own code may raise anything
            raise RequestError(
                f"--optimizer {name}: its step on small weights raised {type(error).__name__}: {error}",
                remedy="step() is called without arguments, each parameter has a gradient; --debug shows the traceback",
            ) from error


def _check(optimizer: torch.optim.Optimizer, construct: Construct, name: str, *, exact: bool, workers: int) -> None:
    one, other = make_trial(optimizer, construct), make_trial(optimizer, construct)
    for number in range(2):
        one.step(number)
        other.step(number)
    repeats = one.bits() == other.bits()
    if not repeats and (exact or workers > 1):
        where, way_out = ("--exact: ", "leave out --exact") if exact else ("", "one worker")
        problem = f"{where}--optimizer {name} is not deterministic: two steps from the same state give different bits"
        raise RequestError(problem, remedy=f"random numbers from torch's own generators, and no clock; or {way_out}")
    loaded = make_trial(optimizer, construct)
    with torch.no_grad():
        for target, source in zip(loaded.weights, one.weights, strict=True):
            target.copy_(source)
    loaded.optimizer.load_state_dict(_save_and_load(one.optimizer.state_dict(), name))
    if is_schedule_free(optimizer):
        with eval_weights(loaded.optimizer):
            pass
    for trial in (one, loaded):
        trial.step(2)
    if repeats and one.bits() != loaded.bits():
        between = ", or eval() and train() between" if is_schedule_free(optimizer) else ""
        raise RequestError(
            f"--optimizer {name}: a step after its state was saved and loaded{between} gives other bits, so no run "
            "could be resumed",
            remedy="keep all its state in self.state and self.param_groups, as tensors and plain values",
        )


def make_trial(optimizer: torch.optim.Optimizer, construct: Construct) -> Trial:
    """A like optimizer over one small weight for each number of dimensions in each group."""
    groups: list[dict[str, Any]] = []
    weights: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        tried = {parameter.ndim: parameter for parameter in group["params"]}.values()
        members = [_make_small(parameter, len(weights) + place) for place, parameter in enumerate(tried)]
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": members})
        weights += members
    return Trial(construct(groups), weights)


def _make_small(like: Tensor, number: int) -> nn.Parameter:
    return nn.Parameter(_draw(like.new_empty([max(1, min(length, _LONGEST)) for length in like.shape]), number))


def _draw(like: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def _save_and_load(state: dict[str, Any], name: str) -> Any:
    """The state after it was in a file, from which only tensors and plain values are read."""
    buffer = io.BytesIO()
    try:
        torch.save(map_tensors(state, lambda _, tensor: tensor.cpu()), buffer)  # as checkpoints copy it first
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # whatever pickle raises for a strange object
        raise RequestError(
            f"--optimizer {name}: a checkpoint can't hold its state ({type(error).__name__})",
            remedy="only tensors, numbers, texts and lists and dicts of them in self.state and self.param_groups",
        ) from error


def _to_bytes(value: Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(value.shape), value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def rehearse_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a first step for the memory it needs: with gradients and rates of 0 nothing moves, and no state is left."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups[:] = [group | {"lr": 0.0} for group in groups]  # copies: some count their steps there
    for parameter in (parameter for group in groups for parameter in group["params"]):
        parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
    try:
        optimizer.step()
    finally:
        optimizer.state.clear()
        optimizer.param_groups[:] = groups


_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23)  # of a small weight's dimensions: primes, so that products tell them too


def measure_state_bytes(model: nn.Module, config: OptimizerConfig) -> int:
    """Bytes of the optimizer's state after its first step on the model; single numbers are not counted."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small = [nn.Parameter(torch.ones(_LENGTHS[: parameter.ndim], dtype=parameter.dtype)) for parameter in learning]
    optimizer = build_optimizer(model, config, moved=small, rate=1e-3)
    set_rate(optimizer, 1e-3)
    for parameter in small:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(
        _scale(value, parameter)
        for parameter, tried in zip(learning, small, strict=True)
        for value in tree_leaves(dict(optimizer.state.get(tried, {})))
        if isinstance(value, Tensor)
    )


def _scale(value: Tensor, parameter: Tensor) -> int:
    """The bytes that a state of a small weight has for the parameter: its rows are that weight's rows, and so on."""
    shape = parameter.shape
    lengths = dict(zip(_LENGTHS, shape, strict=False))
    lengths |= {prod(_LENGTHS[:count]): prod(shape[:count]) for count in range(2, len(shape) + 1)}
    return value.element_size() * prod(lengths.get(length, length) for length in value.shape) if value.ndim else 0
