import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.runtime.module_state import eval_mode, preserve_buffers


class Moving(nn.Module):
    """Does to its buffers all that a forward pass may."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm1d()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("rebound", torch.ones(3))
        self.register_buffer("late", None)
        self.seen: Tensor
        self.rebound: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        self.rebound = self.rebound * 2
        self.late = torch.arange(3.0)
        outputs: Tensor = self.norm(inputs)
        return outputs


def test_buffers_are_put_back_and_what_was_made_stays() -> None:
    model = Moving()
    rebound = model.rebound
    with preserve_buffers(model):
        model(torch.randn(4, 3))
        assert float(model.seen) == 1
    assert float(model.seen) == 0
    assert model.rebound is rebound
    assert torch.equal(rebound, torch.ones(3)), "and no other tensor has its name now"
    assert torch.equal(model.late, torch.arange(3.0))
    assert model.norm.num_features == 3


def test_an_evaluation_leaves_each_module_in_its_mode_and_what_it_makes_can_be_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)).train()
    model[0].eval()
    with eval_mode(model):
        assert not model[1].training
        kept = model(torch.randn(4, 3))
    assert [module.training for module in model.modules()] == [True, False, True]
    assert not kept.requires_grad
    assert not any(tensor.is_inference() for tensor in (kept, *model.parameters()))
    model(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_grows_stays_if_no_checkpoint_has_it(persistent: bool) -> None:
    """The length of a cache often stands in an attribute, which would then be wrong."""
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(1), persistent=persistent)
    with preserve_buffers(model):
        model.cache = torch.zeros(4)
    assert len(model.cache) == (1 if persistent else 4)


def test_an_evaluation_leaves_buffers_as_they_were() -> None:
    model = Moving()
    model(torch.randn(4, 3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with eval_mode(model):
        model(torch.randn(4, 3))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
