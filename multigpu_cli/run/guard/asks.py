"""Whether user code asks which worker it is, and what it would do as another one of several."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from multigpu_cli.run.guard.watch import find_caller, find_caller_of_collective

_QUESTIONS = ("is_initialized", "get_rank", "get_world_size")
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "send", "recv"),
)
Function = Callable[..., Any]  # of torch.distributed: any arguments, any result


class WouldCommunicate(Exception):
    """A collective of user code in the pretence of `as_another_worker`: its name and file:line."""

    def __init__(self, name: str, location: str) -> None:
        super().__init__(name, location)
        self.name, self.location = name, location


@contextmanager
def _replaced(functions: Mapping[str, Function], *modules: ModuleType) -> Iterator[None]:
    """Replace functions of torch.distributed by name, in each module of torch that has them."""
    places = (dist, dist.distributed_c10d, *modules)
    originals = [(module, name, vars(module)[name]) for module in places for name in functions if name in vars(module)]
    for module, name, _ in originals:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


@contextmanager
def note_questions(locations: list[str]) -> Iterator[None]:
    """Append file:line of user code that asks for its rank or the number of workers."""

    def ask(function: Function, *args: Any, **kwargs: Any) -> Any:
        if location := find_caller():
            locations.append(location)
        return function(*args, **kwargs)

    with _replaced({name: partial(ask, getattr(dist, name)) for name in _QUESTIONS}):
        yield


@contextmanager
def as_another_worker() -> Iterator[None]:
    """Tell user code that it is the last of one more worker than there are; its collectives raise WouldCommunicate."""
    from torch.distributed.nn import functional  # late: imported only for code that asks

    workers = (dist.get_world_size() if dist.is_initialized() else 1) + 1
    answers = {"is_initialized": True, "get_rank": workers - 1, "get_world_size": workers}

    def answer(name: str, function: Function, *args: Any, **kwargs: Any) -> Any:
        return answers[name] if find_caller() else function(*args, **kwargs)

    def refuse(name: str, function: Function, *args: Any, **kwargs: Any) -> Any:
        if location := find_caller_of_collective():
            raise WouldCommunicate(name, location)
        return function(*args, **kwargs)

    functions = {name: partial(answer, name, getattr(dist, name)) for name in _QUESTIONS}
    functions |= {name: partial(refuse, name, getattr(dist, name)) for name in _COLLECTIVES if hasattr(dist, name)}
    with _replaced(functions, functional):
        yield
