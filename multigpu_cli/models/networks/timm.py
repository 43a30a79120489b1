"""Networks of the timm library by its own names, with fresh weights; loaded where one of them is asked for."""

from collections.abc import Callable
from typing import Any

import timm


def list_networks() -> dict[str, Callable[..., Any]]:
    """The factory of each network by its name, such as vit_tiny_patch16_224."""
    return {name: timm.model_entrypoint(name) for name in timm.list_models()}


def fit_to_images(factory: Callable[..., Any], input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Arguments for images (channels, height, width) of another kind than the network was made for."""
    if len(input_shape) != 3:
        return {}
    channels, *size = input_shape
    made_for = timm.get_pretrained_cfg(getattr(factory, "__name__", ""))
    other_size = made_for and made_for.fixed_input_size and list(made_for.input_size[1:]) != size
    return ({"in_chans": channels} if channels != 3 else {}) | ({"img_size": tuple(size)} if other_size else {})
