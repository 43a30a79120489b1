"""An optimizer's step on rows has the bits of its step on the whole weight, whatever its size and its layout."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.strategies.fsdp.exact import SimdTails

STEPS = 10  # each of which rounds about one number in fifty in another way
SHAPES = st.one_of(
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
)


class Weight(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A weight and its gradients."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(1 + STEPS)]


def optimize(values: list[Tensor], name: str, *, whole: tuple[int, Tensor] | None = None) -> list[Tensor]:
    """The weight and the optimizer's state after a few steps.

    Args:
        whole: where these rows start in the whole weight, and that weight.
    """
    model = Weight(values[0].clone())
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    set_rate(optimizer, 0.1)
    if whole:
        start, weight = whole
        SimdTails(optimizer).add(model.weight, start, weight.numel(), weight.stride())
    for gradient in values[1:]:
        model.weight.grad = gradient.clone()
        optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight]]
    return [model.weight.detach(), *(value for value in optimizer.state[model.weight].values() if value.ndim)]


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    workers=st.integers(2, 5),
    name=st.sampled_from(["adamw", "sgd"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    channels_last=st.booleans(),
)
@example(shape=(3, 7, 3, 3), workers=3, name="adamw", dtype=torch.float32, channels_last=True)
@example(shape=(7, 3, 3, 5), workers=2, name="adamw", dtype=torch.float32, channels_last=True)
def test_rows_end_as_the_whole_does(
    shape: tuple[int, ...], workers: int, name: str, dtype: torch.dtype, channels_last: bool
) -> None:
    values = draw(shape, dtype)
    if channels_last and len(shape) == 4:
        values = [value.to(memory_format=torch.channels_last) for value in values]
    expected = optimize(values, name)
    parts = [[part.contiguous() for part in value.chunk(workers)] for value in values]
    starts = itertools.accumulate((part.numel() for part in parts[0]), initial=0)
    found = [
        optimize(list(piece), name, whole=(start, values[0]))
        for piece, start in zip(zip(*parts, strict=True), starts, strict=False)
    ]
    for place, whole in enumerate(expected):
        assert torch.equal(torch.cat([state[place] for state in found]), whole)


def test_rows_that_learn_later_have_no_state_before() -> None:
    """As --freeze with model.unfreeze_at has them: the optimizer makes a state in their first step."""
    values = draw((7, 9), torch.float32)
    model = Weight(values[0].clone())
    optimizer = build_optimizer(model, OptimizerConfig())
    set_rate(optimizer, 0.1)
    SimdTails(optimizer).add(model.weight, 0, 2 * model.weight.numel(), values[0].stride())
    optimizer.step()
    assert not optimizer.state
    for gradient in values[1:]:
        model.weight.grad = gradient
        optimizer.step()
    assert torch.equal(model.weight, optimize(values, "adamw", whole=(0, torch.cat([values[0]] * 2)))[0])


def test_the_state_keeps_the_order_of_the_parameters() -> None:
    """Workers gather it together, and each pads others of its rows."""
    weights = [nn.Parameter(torch.ones(size)) for size in (7, 64, 9)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    SimdTails(optimizer).add(weights[0], 0, 8, None)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert [len(weight) for weight in optimizer.state] == [7, 64, 9]


@pytest.mark.parametrize(
    ("rows", "start", "whole", "padding"),
    [
        (64, 0, 128, None),
        (64, 64, 128, None),
        (64, 1, 129, None),
        (64, 0, 127, (0, 63)),
        (64, 0, 65, (0, 1)),
        (64, 1, 65, (1, 0)),
        (60, 0, 124, (0, 64)),
        (60, 100, 200, (36, 40)),
        (0, 200, 200, None),
    ],
)
def test_rows_are_copied_where_they_end_elsewhere_alone(
    rows: int, start: int, whole: int, padding: tuple[int, int] | None
) -> None:
    weight = nn.Parameter(torch.zeros(rows))
    tails = SimdTails(torch.optim.SGD([weight]))
    tails.add(weight, start, whole, None)
    assert [(piece.before, piece.after) for piece in tails._pieces.values()] == [padding] * (padding is not None)


def test_without_it_the_bits_differ() -> None:
    """The control: else this CPU has no vectors, and the test above nothing to find."""
    values = draw((200, 3), torch.float32)
    expected = optimize(values, "adamw")[0]
    pieces = zip(*(value.chunk(50) for value in values), strict=True)
    assert not torch.equal(torch.cat([optimize(list(piece), "adamw")[0] for piece in pieces]), expected)
