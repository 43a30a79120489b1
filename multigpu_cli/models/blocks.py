"""The repeated blocks of a network: gathered as one when its weights are sharded, counted for layer-wise decay.

How deep each parameter lies is counted in repeated blocks. A row is a Sequential or ModuleList that holds at least two
elements of one class with parameters, and lies in no other row. Its elements with parameters are blocks. But an element
that is, or directly holds, a Sequential or ModuleList of nothing but elements of one class that consist of modules
themselves is a stage (ResNet, Swin, ConvNeXt): it counts by these.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from torch import nn

from multigpu_cli.config.code_names import match_names
from multigpu_cli.errors import pluralize


def find_blocks_to_wrap(model: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """The names of modules, inner ones first: those that match a pattern, or else the model's repeated blocks.

    Of a row of blocks of several classes those count whose class holds most of its parameters: the convolutions, say,
    and not the norms between them, which would be gathered one by one. A module that shares a weight with another part
    of the model is left out: such weights are gathered together.
    """
    named = {name: module for name, module in model.named_modules() if name and _can_be_gathered(module)}
    if patterns:
        for pattern in patterns:
            match_names(list(named), pattern, f"strategy.wrap {pattern!r}", "module")
        chosen = [name for name in named if any(fnmatch(name, pattern) for pattern in patterns)]
    else:
        blocks = [prefix.removesuffix(".") for prefix in _find_prefixes(model, "")]
        chosen = list(_list_main_blocks(model, [name for name in blocks if name in named]))
    inner_first = sorted(chosen, key=lambda name: -name.count("."))
    return [name for name in inner_first if not _shares_weights(model, named[name])]


def describe_blocks(model: nn.Module, blocks: Sequence[str]) -> str:
    """'4 blocks (Block: blocks.0 … blocks.3) and the rest', for the plan."""
    if not blocks:
        return f"{type(model).__name__} as a whole: it has no repeated blocks, see strategy.wrap"
    names = [name for name, _ in model.named_modules() if name in blocks]
    kinds = list(dict.fromkeys(type(model.get_submodule(name)).__name__ for name in names))
    where = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return f"{pluralize(len(names), 'block')} ({', '.join(kinds[:3])}: {where}) and the rest"


def _list_main_blocks(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Those of the class that holds most of the parameters of their row."""
    sizes: dict[str, Counter[type[nn.Module]]] = {}
    for name in blocks:
        module = model.get_submodule(name)
        row = sizes.setdefault(name.rpartition(".")[0], Counter())
        row[type(module)] += sum(parameter.numel() for parameter in module.parameters())
    for name in blocks:
        if type(model.get_submodule(name)) is sizes[name.rpartition(".")[0]].most_common(1)[0][0]:
            yield name


def _can_be_gathered(module: nn.Module) -> bool:
    """Whether it has weights, and a pass of its own that needs them: a ModuleList has none."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


def _shares_weights(model: nn.Module, block: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    outside = (module for module in model.modules() if id(module) not in inside)
    return any(id(parameter) in own for module in outside for parameter in module.parameters(recurse=False))


def measure_depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of each trainable parameter by name, in the order in which modules are registered.

    Parameters before the first block have depth 0, those of the n-th block n, and those after the last block (norm,
    head) one more than it. Parameters between two blocks have the depth of the earlier one. Without blocks all have 0.
    Frozen blocks, such as those of a teacher next to the network, don't count.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    blocks = [path for path in _find_prefixes(model, "") if any(name.startswith(path) for name in names)]
    reached, depths = 0, {}
    for name in names:
        inside = next((number for number, path in enumerate(blocks, 1) if name.startswith(path)), 0)
        reached = inside or reached
        depths[name] = reached + (blocks != [] and reached == len(blocks) and not inside)
    return depths


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
    """The children that have parameters, with their names."""
    return [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
