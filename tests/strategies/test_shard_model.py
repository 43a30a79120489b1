"""The groups of workers among which a model is divided."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.world import World
from multigpu_cli.runtime.precision import PrecisionChoice
from multigpu_cli.strategies.fsdp import shard
from multigpu_cli.strategies.fsdp.shard import ModelSharder, choose_param_dtype, create_mesh
from tests.support.ranks import TIMEOUT, run_on_each_rank
from tests.support.world import ALONE


def test_every_group_waits_as_long_as_that_of_all_workers() -> None:
    def work(world: World) -> list[bool]:
        mesh = create_mesh(world, 1)
        groups = [dist.group.WORLD, mesh.get_group("replicate"), mesh.get_group("shard")]
        return [group._get_backend(world.device).options._timeout == TIMEOUT for group in groups]  # type: ignore[union-attr]

    assert run_on_each_rank(2, work) == [[True, True, True]] * 2


class Told(nn.Linear):
    """Keeps more than tensors, and a buffer."""

    seen: Tensor

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, value)
        self.register_buffer("seen", torch.full((2,), value))
        self.told = value

    def get_extra_state(self) -> float:
        return self.told

    def set_extra_state(self, state: float) -> None:
        self.told = state


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize(
    ("frees", "expected"), [(True, [True, True, False, True]), (False, [False, True, False, True])]
)
def test_a_copy_has_the_same_values_and_is_freed_after_each_pass(
    frees: bool, expected: list[bool], source: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in no block is kept for the backward pass, which a copy has not. One process sends nothing."""
    freed, values = list[bool](), list[float]()

    def fully_shard(part: nn.Module, *, reshard_after_forward: bool, **_: Any) -> None:
        freed.append(reshard_after_forward)
        values.extend(float(parameter.detach().max()) for parameter in part.parameters() if parameter.ndim == 2)

    monkeypatch.setattr(shard, "fully_shard", fully_shard)
    for average in (nn.Sequential(Told(2.0)), None):
        model = nn.Sequential(Told(1.0))
        freed.clear()
        held = [*model.parameters(), *(average.parameters() if average else ())]
        sharder = ModelSharder(model, average, ALONE, source)
        sharder.shard(cast(Any, None), ["0"], frees_after_forward=frees, param_dtype=None)
        assert freed == (expected if average else expected[::2])
        assert set(values[:2]) == {1.0}
        assert all(parameter.numel() == 0 for parameter in held), "an optimizer may have them"
        if average:
            copied = cast(Told, average[0])
            assert copied.seen.tolist() == [1.0, 1.0]
            assert copied.told == (2.0 if source is None else 1.0), "else a state will be loaded"


@pytest.mark.parametrize(
    ("device", "precision", "model", "flags", "expected"),
    [
        ("cuda", "bf16", nn.Linear(2, 2), {}, "bf16"),
        ("cuda", "bf16", nn.Linear(2, 2), {"exact": True}, "fp32"),
        ("cuda", "bf16", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {}, "fp32"),  # it takes 32 bits only
        ("cuda", "bf16", nn.InstanceNorm2d(2, affine=True), {}, "fp32"),  # and it, for inputs in 32 bits
        ("cuda", "bf16", nn.Linear(2, 2).bfloat16(), {}, "fp32"),  # as they are
        ("cuda", "fp16", nn.Linear(2, 2), {}, "fp32"),
        ("cpu", "bf16", nn.Linear(2, 2), {}, "fp32"),
    ],
)
def test_weights_are_gathered_in_bf16_where_most_are_used_in_it(
    device: str, precision: str, model: nn.Module, flags: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "agree_on_precision", lambda *_: PrecisionChoice(precision, ""))
    assert choose_param_dtype(model, resolve(flags, (), None), World(torch.device(device))) == expected
