"""Muon moves the hidden matrices, AdamW the rest, each as torch's own does."""

import pytest
import torch
from torch import nn

from multigpu_cli.capabilities import MODELS
from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.optimizers.fused import find_hidden_matrices
from multigpu_cli.runtime.factories import call_factory, find_factory

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
MUON = OptimizerConfig(name="muon", weight_decay=0.1)


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = {"words": nn.Embedding(5, 8), "first": nn.Linear(8, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 5)}
    return nn.ModuleDict(parts)


def give_gradients(model: nn.Module, number: int) -> None:
    torch.manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_embedding_head_and_vectors_are_adamws() -> None:
    assert find_hidden_matrices(network()) == {"first.weight"}
    kernels = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 4), nn.Linear(4, 2))
    assert find_hidden_matrices(kernels) == {"1.weight"}


def test_a_head_that_shares_the_embedding_leaves_all_blocks_to_muon() -> None:
    args = {"depth": 2, "heads": 2, "width": 8}
    offered = {"input_shape": (4,), "num_classes": 7, "seed": 0}
    model = call_factory(find_factory("gpt", MODELS, flag="--model"), offered, args, where="model")
    hidden = find_hidden_matrices(model)
    assert {name.split(".")[1] for name in hidden} == {"0", "1"}
    assert not any("tokens" in name or "places" in name for name in hidden)
    assert len(hidden) == sum(p.ndim == 2 for name, p in model.named_parameters() if name.startswith("blocks"))


def test_further_matrices_are_spared_by_pattern_and_nothing_left_is_refused() -> None:
    assert find_hidden_matrices(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), ["0.*"]) == {
        "1.weight",
        "2.weight",
    }
    with pytest.raises(RequestError, match="no hidden matrix to train"):
        find_hidden_matrices(network(), ["first.*"])
    with pytest.raises(RequestError, match=r"optimizer\.args\.adamw 'frist\.\*' matches no matrix"):
        build_optimizer(network(), OptimizerConfig(name="muon", args={"adamw": "frist.*"}))


def test_each_part_is_torchs_own_also_after_a_checkpoint() -> None:
    ours, theirs = network(), network()
    optimizer = build_optimizer(ours, MUON)
    matrix = theirs.get_parameter("first.weight")
    others = [p for p in theirs.parameters() if p is not matrix]
    decayed, plain = ([p for p in others if (p.ndim == 2) == matrices] for matrices in (True, False))
    muon = torch.optim.Muon([matrix], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, fused=True)
    for number in range(4):
        if number == 2:
            state, optimizer = optimizer.state_dict(), build_optimizer(ours, MUON)
            optimizer.load_state_dict(state)
        for each in (optimizer, muon, adamw):
            set_rate(each, 0.01)
        give_gradients(ours, number)
        give_gradients(theirs, number)
        for each in (optimizer, muon, adamw):
            each.step()
    assert fingerprint(ours.state_dict()) == fingerprint(theirs.state_dict())


def test_a_torch_without_it_says_from_when_on_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RequestError, match="has no Muon"):
        build_optimizer(network(), MUON)
