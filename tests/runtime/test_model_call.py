"""How a batch meets a network, by the signature of its forward."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.model_call import CallRecorder, Labelled, bind_arguments, bind_call, unbind_call

A, B, C, Y = (torch.full((2, 1), float(number)) for number in range(4))
PAIR, NAMED = (A, B), {"a": A, "b": B}
ALONE: dict[str, Tensor] = {"left": A, "right": B}


def network(forward: Callable[..., Any]) -> nn.Module:
    model = type("Network", (nn.Module,), {"forward": forward})()
    bind_call(model)
    return model  # type: ignore[no-any-return]


def one(self: Any, batch: Any) -> Any:
    return batch


def two(self: Any, a: Any, b: Any) -> Any:
    return a, b


def maybe(self: Any, a: Any, b: Any = None) -> Any:
    return a, b


def option(self: Any, batch: Any, flag: bool = False) -> Any:
    return batch


def annotated(self: Any, batch: tuple[Tensor, Tensor], mask: Any = None) -> Any:
    return batch


def annotated_dict(self: Any, batch: "Mapping[str, Tensor]", a: Any = None) -> Any:
    return batch


def any_number(self: Any, *parts: Any) -> Any:
    return parts


def anything(self: Any, **entries: Any) -> Any:
    return entries


def take_anything(self: Any, *args: Any, **entries: Any) -> Any:
    return args[0]


@pytest.mark.parametrize(
    ("forward", "inputs", "returned"),
    [
        (one, A, A),
        (one, PAIR, PAIR),
        (one, NAMED, NAMED),
        (two, PAIR, PAIR),
        (two, NAMED, PAIR),
        (two, {"b": B, "a": A}, PAIR),
        (maybe, A, (A, None)),
        (maybe, PAIR, PAIR),
        (maybe, {"a": A}, (A, None)),
        (maybe, ALONE, (ALONE, None)),
        (maybe, [A, B], ([A, B], None)),
        (maybe, (A, B, C), ((A, B, C), None)),
        (option, PAIR, PAIR),
        (option, NAMED, NAMED),
        (annotated, PAIR, PAIR),
        (annotated_dict, NAMED, NAMED),
        (any_number, (A, B, C), (A, B, C)),
        (anything, NAMED, NAMED),
        (take_anything, PAIR, PAIR),
        (take_anything, NAMED, NAMED),
    ],
)
def test_the_signature_decides(forward: Callable[..., Any], inputs: Any, returned: Any) -> None:
    model = network(forward)
    for each in (model, copy.deepcopy(model)):
        assert _same(each(inputs), returned)
        args, named = bind_arguments(each, inputs)
        assert _same(each(*args, **named), returned), "as somebody writes it"
    unbind_call(model)
    assert not model._forward_pre_hooks


def with_targets(self: Any, images: Any, targets: Any = None) -> Any:
    return images, targets


def with_labels(self: Any, a: Any, b: Any, labels: Any) -> Any:
    return a, b, labels


def with_truth(self: Any, a: Any, b: Any, truth: Any) -> Any:
    return a, b, truth


def targets_first(self: Any, y: Any, x: Any) -> Any:
    return x, y


@pytest.mark.parametrize(
    ("forward", "inputs", "returned"),
    [
        (with_targets, A, (A, Y)),
        (with_targets, [A, B, C], ([A, B, C], Y)),
        (with_labels, PAIR, (A, B, Y)),
        (with_labels, NAMED, (A, B, Y)),
        (with_truth, PAIR, (A, B, Y)),
        (with_truth, NAMED, (A, B, Y)),
        (targets_first, A, (A, Y)),
        (two, A, (A, Y)),
        (one, PAIR, (PAIR, Y)),
    ],
)
def test_a_network_that_takes_its_targets_gets_them(forward: Callable[..., Any], inputs: Any, returned: Any) -> None:
    assert _same(network(forward)(Labelled(inputs, Y)), returned)


@pytest.mark.parametrize(
    ("forward", "inputs", "named"),
    [
        (two, {"a": A, "b": B, "box": C}, "forward(a, b) takes no box"),
        (two, {"a": A}, "forward(a, b) needs b, and a sample has a"),
        (two, ALONE, "forward(a, b) takes no left, right"),
        (two, (A, B, C), "forward(a, b) does not take the 3 parts"),
        (with_labels, PAIR, "forward(a, b, labels) does not take the 2 parts"),
        (two, Labelled(NAMED, Y), "forward(a, b) has no parameter for the targets"),
    ],
)
def test_what_a_network_does_not_take_is_named(forward: Callable[..., Any], inputs: Any, named: str) -> None:
    with pytest.raises(RequestError, match=re.escape(named)) as refused:
        network(forward)(inputs)
    assert refused.value.remedy


def test_a_call_is_told_in_words() -> None:
    said = {}
    for name, forward, inputs in (
        ("whole", one, PAIR), ("spread", two, PAIR), ("by name", two, NAMED), ("", maybe, A),
    ):  # fmt: skip
        model = network(forward)
        with CallRecorder(model) as seen:
            model(inputs)
        said[name] = seen.describe().partition(": ")[0]
        assert len(model._forward_hooks) == 0
    assert said == {"whole": "model(batch)", "spread": "model(a, b)", "by name": "model(a=…, b=…)", "": ""}


def _same(one: Any, other: Any) -> bool:
    """The same objects in the same places."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other
