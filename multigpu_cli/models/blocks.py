"""Which modules of a network are gathered as one when its weights are sharded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from torch import nn

from multigpu_cli.config.match_names import match_names
from multigpu_cli.errors import pluralize
from multigpu_cli.models.depth import find_blocks


def find_blocks_to_wrap(model: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """The names of modules, inner ones first: those that match a pattern, or else the model's repeated blocks.

    Of a row of blocks of several classes those count whose class holds most of its parameters: the convolutions, say,
    and not the norms between them, which would be gathered one by one.

    A module that shares a weight with another part of the model is left out: such weights are gathered together.

    Raises:
        RequestError: a pattern that matches no module.
    """
    named = {name: module for name, module in model.named_modules() if name and _can_be_gathered(module)}
    if patterns:
        for pattern in patterns:
            match_names(list(named), pattern, f"strategy.wrap {pattern!r}", "module")
        chosen = [name for name in named if any(fnmatch(name, pattern) for pattern in patterns)]
    else:
        chosen = list(_list_main_blocks(model, [name for name in find_blocks(model) if name in named]))
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
