"""How deep in a network each parameter lies, counted in repeated blocks: for layer-wise decay of the learning rate.

A row is a Sequential or ModuleList that holds at least two elements of one class with parameters, and lies in no other
row. Its elements with parameters are blocks. But an element that is, or directly holds, a Sequential or ModuleList of
nothing but elements of one class that consist of modules themselves is a stage (ResNet, Swin, ConvNeXt): it counts by
these.
"""

from collections.abc import Iterator

from torch import nn


def measure_depths(model: nn.Module) -> dict[str, int]:
    """The depth of each parameter by name, in the order in which modules are registered.

    What comes before the first block has depth 0, the n-th block n, and what comes after the last one (norm, head) one
    more than it. What lies between two blocks has the depth of the one before. 0 throughout where there is no block.
    """
    blocks = list(_find_prefixes(model, ""))
    reached, depths = 0, {}
    for name, _ in model.named_parameters():
        inside = next((number for number, path in enumerate(blocks, 1) if name.startswith(path)), 0)
        reached = inside or reached
        depths[name] = reached + (blocks != [] and reached == len(blocks) and not inside)
    return depths


def find_blocks(model: nn.Module) -> list[str]:
    """The names of the blocks, in order."""
    return [prefix.removesuffix(".") for prefix in _find_prefixes(model, "")]


def _find_prefixes(module: nn.Module, path: str) -> Iterator[str]:
    """How the names of each block's parameters begin."""
    for name, child in _list_children(module):
        inner = f"{path}{name}."
        if not _is_row(module):
            yield from _find_prefixes(child, inner)
        elif stage := next((held for held in [("", child), *_list_children(child)] if _holds_blocks(held[1])), None):
            yield from _find_prefixes(stage[1], f"{inner}{stage[0]}." if stage[0] else inner)
        else:
            yield inner


def _is_row(module: nn.Module) -> bool:
    kinds = [type(child) for _, child in _list_children(module)]
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(set(kinds)) < len(kinds)


def _holds_blocks(module: nn.Module) -> bool:
    """Whether it is a row of elements of one class that consist of modules."""
    elements = [child for _, child in _list_children(module)]
    return _is_row(module) and len({type(child) for child in elements}) == 1 and bool(_list_children(elements[0]))


def _list_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those with parameters."""
    return [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
