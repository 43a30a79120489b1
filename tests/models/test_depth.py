"""How deep parameters lie, in networks as people build them."""

from collections import OrderedDict

import pytest
from torch import nn

from multigpu_cli.models.blocks import measure_depths
from multigpu_cli.models.networks import convnet, gpt, mlp


def by_part(model: nn.Module, words: int) -> dict[str, int]:
    """The depth of each part, by the first words of its parameters' names."""
    parts: dict[str, set[int]] = {}
    for name, depth in measure_depths(model).items():
        parts.setdefault(".".join(name.split(".")[:words]), set()).add(depth)
    assert all(len(depths) == 1 for depths in parts.values()), parts
    return {part: depths.pop() for part, depths in parts.items()}


def test_a_transformers_blocks_count_between_embedding_and_head() -> None:
    model = gpt.GPT((8,), 11, depth=3, heads=2, width=8)
    names = list(model.state_dict())
    depths = by_part(model, 2)
    assert [depths[f"blocks.{number}"] for number in range(3)] == [1, 2, 3]
    assert measure_depths(model)[names[0]] == 0
    assert {depth for part, depth in depths.items() if not part.startswith("blocks")} <= {0, 4}


def test_stages_of_residual_blocks_count_by_the_blocks() -> None:
    depths = measure_depths(convnet.resnet18((3, 32, 32), 10, width=8))
    assert sorted(set(depths.values())) == list(range(10))
    assert {depth for name, depth in depths.items() if name.startswith("stages.7.")} == {8}


def test_layers_in_a_row_count_one_by_one() -> None:
    depths = by_part(mlp.build((6,), 3, width=8, depth=2), 1)
    assert list(depths.values()) == [1, 2, 3]
    assert set(by_part(nn.Linear(2, 2), 1).values()) == {0}


class Experts(nn.Module):
    """A mixture of experts: each block has a row within, of modules side by side."""

    def __init__(self) -> None:
        super().__init__()
        mix = [nn.ModuleDict({"inner": nn.ModuleDict({"experts": row()})}) for _ in range(3)]
        self.stem, self.blocks, self.head = nn.Linear(2, 2), nn.ModuleList(mix), nn.Linear(2, 2)


def row() -> nn.ModuleList:
    return nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(4)])


def test_rows_within_blocks_do_not_count() -> None:
    depths = by_part(Experts(), 2)
    assert depths == {
        "stem.weight": 0, "stem.bias": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3,
        "head.weight": 4, "head.bias": 4,
    }  # fmt: skip


def test_a_backbone_and_a_head_in_a_row_are_looked_into() -> None:
    model = nn.Sequential(OrderedDict(body=Experts(), head=nn.Linear(2, 2)))
    assert by_part(model, 3)["body.blocks.2"] == 3
    assert measure_depths(model)["head.weight"] == 4


class Stage(nn.Module):
    """As in Swin and ConvNeXt: what makes the picture smaller, then a row of blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.blocks = nn.Sequential(*(nn.Sequential(OrderedDict(layer=nn.Linear(2, 2))) for _ in range(blocks)))


def test_what_stands_before_a_stages_blocks_goes_with_the_block_before() -> None:
    stages = nn.Sequential(Stage(2), Stage(2))
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "stages": stages, "norm": nn.Linear(2, 2)})
    assert by_part(model, 4) == {
        "stem.weight": 0, "stem.bias": 0,
        "stages.0.downsample.0": 0, "stages.0.downsample.1": 0, "stages.0.blocks.0": 1, "stages.0.blocks.1": 2,
        "stages.1.downsample.0": 2, "stages.1.downsample.1": 2, "stages.1.blocks.0": 3, "stages.1.blocks.1": 4,
        "norm.weight": 5, "norm.bias": 5,
    }  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_frozen_teacher_adds_no_depth(first: bool) -> None:
    teacher, student = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))) for _ in range(2))
    teacher.requires_grad_(False)
    parts = {"teacher": teacher, "blocks": student} if first else {"blocks": student, "teacher": teacher}
    depths = by_part(nn.ModuleDict({"stem": nn.Linear(2, 2), **parts, "head": nn.Linear(2, 2)}), 2)
    assert depths == {
        "stem.weight": 0, "stem.bias": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3,
        "head.weight": 4, "head.bias": 4,
    }  # fmt: skip


def test_frozen_head_leaves_the_last_block_deepest() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "head": nn.Linear(2, 2)})
    model.get_submodule("head").requires_grad_(False)
    assert by_part(model, 2) == {"blocks.0": 1, "blocks.1": 2}
