"""Factories with **kwargs, names of libraries, and what to type for another number of outputs."""

from typing import Any

import pytest
from torch import nn

from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import call_model_factory, find_model_factory, suggest_outputs

OFFERED = {"input_shape": (3, 8, 8), "num_classes": 7, "task": "classification", "mode": "flatten", "seed": 1}
HERE = "tests.models.test_factory"


def takes_anything(**settings: Any) -> dict[str, Any]:
    return settings


def refuses_classes(width: int = 2, **settings: Any) -> tuple[int, dict[str, Any]]:
    if "num_classes" in settings:
        raise TypeError("unexpected keyword argument 'num_classes'")
    if unknown := settings.keys() - {"depth"}:
        raise ValueError(f"no such setting: {sorted(unknown)}")
    return width, settings


def needs_classes(**settings: Any) -> int:
    if settings.get("depth", 0) < 0:
        raise ValueError("a depth below zero")
    classes: int = settings["num_classes"]
    return classes


def build_with_n_classes(n_classes: int = 1000, width: int = 1000, dropout: float = 0.0) -> nn.Module:
    return nn.Linear(width, n_classes)


def build_with_size(size: int = 12) -> nn.Module:
    return nn.Linear(size, size)


def fixed(num_classes: int, pooled: bool = True) -> nn.Module:
    return nn.Identity()


def test_a_factory_with_any_keywords_gets_the_number_of_classes_alone() -> None:
    assert call_model_factory(takes_anything, OFFERED, {"depth": 3}) == {"num_classes": 7, "depth": 3}
    assert call_model_factory(takes_anything, OFFERED, {"num_classes": 5}) == {"num_classes": 5}


def test_one_that_refuses_it_is_called_without() -> None:
    assert call_model_factory(refuses_classes, OFFERED, {"depth": 3}) == (2, {"depth": 3})


@pytest.mark.parametrize(
    ("factory", "args", "reason"),
    [
        (refuses_classes, {"detph": 3}, r"ValueError.*no such setting: \['detph'\]"),
        (needs_classes, {"depth": -1}, "ValueError.*a depth below zero"),
    ],
)
def test_one_that_fails_either_way_tells_the_users_own_mistake(factory: Any, args: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        call_model_factory(factory, OFFERED, args)


@pytest.mark.parametrize(
    ("name", "args", "remedy"),
    [
        (f"{HERE}:build_with_n_classes", {}, "--set model.n_classes=7"),
        (f"{HERE}:build_with_size", {}, "--set model.size=7"),
        (
            f"{HERE}:build_with_size",
            {"size": 5},
            "a factory that has as many outputs as its num_classes says, which is 7",
        ),
        (f"{HERE}:fixed", {}, "a factory that has as many outputs as its num_classes says, which is 7"),
        (f"{HERE}:takes_anything", {"num_classes": 12}, "--set model.num_classes=7"),
        ("mlp", {"num_classes": 12}, "--set model.num_classes=7"),
    ],
)
def test_the_remedy_for_twelve_outputs_is_what_the_factory_takes(name: str, args: dict[str, int], remedy: str) -> None:
    assert suggest_outputs(name, args, 12, 7) == remedy


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_network_that_a_library_does_not_have(library: str) -> None:
    with pytest.raises(RequestError, match=f"--model {library}/resnet81: {library} has no such network") as refused:
        find_model_factory(f"{library}/resnet81", {})
    assert "did you mean 'resnet" in refused.value.remedy
    with pytest.raises(RequestError, match=f"--model {library}/: {library} has no such network"):
        find_model_factory(f"{library}/", {})


@pytest.mark.parametrize(
    ("name", "args", "named"),
    [
        ("timm/resnet18", {"pretrained": True}, r"model\.pretrained=True names weights to download"),
        ("timm/resnet18.a1_in1k", {}, r"resnet18\.a1_in1k names weights to download"),
        ("torchvision/resnet18", {"weights": "DEFAULT"}, r"model\.weights='DEFAULT' names weights"),
        ("torchvision/fcn_resnet50", {"weights_backbone": "DEFAULT"}, r"model\.weights_backbone='DEFAULT'"),
    ],
)
def test_nothing_is_downloaded(name: str, args: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named) as refused:
        find_model_factory(name, args)
    assert f"--model {name.partition('.')[0]} --init-from FILE" in refused.value.remedy
