import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from multigpu_cli.models.build import build_on_meta, copy_to_meta, find_unsaved_tensors
from tests.support.awkward_models import shy


def masked(*, kept: bool) -> nn.Module:
    """Its mask is a view, of a table that is kept beside it or is not."""
    model, table = nn.Linear(3, 3), torch.ones(4, 4).tril()
    model.register_buffer("mask", table.view(1, 1, 4, 4))
    model.register_buffer("rows", model.mask[0])  # type: ignore[index]
    if kept:
        model.table = table
    return model


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """A build looks through all that are not frozen."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: masked(kept=False), ""),
        (lambda: masked(kept=True), "it has tensors that are neither parameters nor buffers"),
        (lambda: shy((4,), 3, "silent"), ""),
        (lambda: nn.LSTM(3, 4), ""),
        (lambda: shy((4,), 3, "reads"), "on the meta device its factory raises RuntimeError"),
        (lambda: shy((4,), 3, "keeps"), "it has tensors that are neither parameters nor buffers"),
        (lambda: shy((4,), 3, "draws"), "its factory draws random numbers on a device of its own choice"),
        (lambda: nn.LazyLinear(3), "its first pass creates weights"),
    ],
)
def test_a_network_without_memory_or_the_reason_against_it(build: Callable[[], nn.Module], reason: str) -> None:
    other = torch.empty(3, device="meta")  # somebody's own
    model, found = build_on_meta(build)
    assert other.is_meta
    assert found == reason
    assert (model is None) == bool(reason)
    if model is not None:
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_what_no_checkpoint_has() -> None:
    assert find_unsaved_tensors(shy((4,), 3, "silent")) == ["scale"]
    assert find_unsaved_tensors(nn.Sequential(nn.BatchNorm1d(3))) == []


def test_a_copy_has_no_memory_and_leaves_the_network_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    copy = copy_to_meta(model)
    assert all(tensor.is_meta for tensor in [*copy.parameters(), *copy.buffers()])
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert copy[2].weight is copy[0].weight  # type: ignore[index]
    assert not copy[0].bias.requires_grad  # type: ignore[index]
    assert copy[0].weight.requires_grad  # type: ignore[index]
