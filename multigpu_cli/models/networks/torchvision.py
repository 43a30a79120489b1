"""Networks of the torchvision library by its own names, with fresh weights; loaded where one of them is asked for."""

from collections.abc import Callable
from typing import Any

from torchvision import models


def list_networks() -> dict[str, Callable[..., Any]]:
    """The factory of each network by its name, such as resnet18."""
    return {name: models.get_model_builder(name) for name in models.list_models()}
