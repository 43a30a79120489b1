"""A loop of the user's own, with a loader that gives every rank all samples, is refused at its first step."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from tests.support.ranks import run_on_each_rank
from train_multi_gpu import setup_multi_gpu_training

DATA = TensorDataset(torch.arange(32.0).view(16, 2), torch.arange(16) % 2)


def train_epoch(*, sampled: bool, **more: Any) -> str:
    """A loop as people write it; what refused it, empty where nothing did."""
    model, wrapped, _ = setup_multi_gpu_training(torch.nn.Linear(2, 2), **more)
    assert wrapped
    loader = DataLoader(DATA, 4, sampler=DistributedSampler(DATA) if sampled else None)
    model.eval()
    with torch.no_grad():
        model(DATA.tensors[0])  # no training: every rank may look at the same samples
    model.train()
    try:
        for inputs, targets in loader:
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    except RequestError as error:
        return str(error)
    return ""


def test_ranks_that_train_on_the_same_batches_are_refused_with_the_line_to_add() -> None:
    def work(world: World) -> list[str]:
        return [train_epoch(sampled=False), train_epoch(sampled=True), train_epoch(sampled=False, same_inputs=True)]

    first, *others = run_on_each_rank(3, work)
    assert others == [first] * 2
    refused, *trained = first
    assert refused.startswith("the model's first batch is the same on several ranks")
    assert "sampler=DistributedSampler(dataset)" in refused
    assert trained == ["", ""]


def test_only_the_first_pass_compares() -> None:
    def work(world: World) -> list[int]:
        model, _, _ = setup_multi_gpu_training(torch.nn.Linear(2, 2))
        before = len(model._forward_pre_hooks)
        model(DATA.tensors[0] + world.rank)
        return [before, len(model._forward_pre_hooks)]

    assert run_on_each_rank(2, work) == [[1, 0]] * 2
