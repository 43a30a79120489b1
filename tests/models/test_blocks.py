import pytest
from torch import nn

from multigpu_cli.errors import RequestError
from multigpu_cli.models.blocks import describe_blocks, find_blocks_to_wrap
from multigpu_cli.models.networks import convnet, gpt


def small_gpt() -> nn.Module:
    return gpt.GPT((8,), 5, depth=3, heads=2, width=8)


def test_the_repeated_blocks_are_found() -> None:
    assert find_blocks_to_wrap(small_gpt()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert (
        describe_blocks(small_gpt(), ["blocks.0", "blocks.1"]) == "2 blocks (Block: blocks.0 … blocks.1) and the rest"
    )
    assert len(find_blocks_to_wrap(convnet.resnet18((3, 8, 8), 3, width=8))) == 8


def test_norms_between_larger_blocks_are_not_gathered_one_by_one() -> None:
    found = find_blocks_to_wrap(convnet.ConvNet((1, 8, 8), 3, width=8))
    assert found == [f"features.{place}" for place in (0, 3, 7, 10, 14, 17)]


def test_patterns_name_others_and_inner_modules_come_first() -> None:
    found = find_blocks_to_wrap(small_gpt(), ["blocks.?", "blocks.0.w*"])
    assert found == ["blocks.0.widen", "blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(RequestError, match=r"strategy.wrap 'layers.\*' matches no module"):
        find_blocks_to_wrap(small_gpt(), ["layers.*"])


def test_a_list_of_modules_has_no_pass_of_its_own() -> None:
    model = nn.ModuleDict({"rows": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
    assert find_blocks_to_wrap(model, ["*"]) == ["rows.0", "rows.1"]
    with pytest.raises(RequestError, match=r"'rows' matches no module(.|\n)*rows.0"):
        find_blocks_to_wrap(model, ["rows"])


def test_a_block_that_shares_a_weight_with_another_is_gathered_with_the_rest() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model[2].weight = model[1].weight
    assert find_blocks_to_wrap(model) == ["0", "3"]


def test_without_repeated_blocks_the_model_is_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert find_blocks_to_wrap(model) == []
    assert describe_blocks(model, []).startswith("Sequential as a whole")
