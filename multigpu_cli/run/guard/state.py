"""Python attributes and random generators of user code: state that no worker shares, and few checkpoints have."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from itertools import islice
from math import isclose, isnan
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module())) | {"training"}  # attributes of every module
_OF_TASKS = frozenset({"source", "config", "moved", "batch_evaluated", "own_metrics", "meet"})  # of every task
_MAX_ITEMS, _MAX_BYTES, _MAX_DEPTH = 256, 2**26, 4  # of a container; of all tensors of a snapshot; of nesting
_LIBRARIES = ("torch", "multigpu_cli", "builtins", "abc", "typing", "collections")  # whose classes keep no user state
_GENERATORS = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
_OPAQUE = (ModuleType, FunctionType, BuiltinFunctionType, MethodType, type, torch.device, torch.dtype, nn.Module)
Comparable = Any  # None, bool, int, str, bytes, float, Tensor, or a list of these
Undo = Callable[[], object]


class Attribute(NamedTuple):
    """An attribute at the time of a snapshot."""

    value: Comparable
    undo: list[Undo]  # restores the binding, and the contents of what it is bound to


class Snapshot:
    """The attributes of a model's modules and of other objects of the user, by 'path (Class) .name'.

    Parameters, buffers, hooks, and what torch keeps itself are left out. Tensors are copied to the CPU, up to a limit
    beyond which their sum stands for them; containers are compared to a limited depth and length.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, object]) -> None:
        self.attributes: dict[str, Attribute] = {}
        self.generators: dict[str, Attribute] = {}
        self._bytes_left = _MAX_BYTES
        self._seen: set[int] = set()  # objects that have been walked, because references may form a cycle
        self._where = ""
        self._add_modules("", model)
        for name, other in others.items():
            if isinstance(other, nn.Module):
                self._add_modules(name, other)
            elif isinstance(other, FunctionType):
                self._add_closure(name, other)
            elif hasattr(other, "__dict__") and not isinstance(other, _OPAQUE):
                own = {key: value for key, value in vars(other).items() if key not in _OF_TASKS}
                self._add(f"{name} ({type(other).__name__})", other, own.items())
                self._add_class(f"{name} ({type(other).__name__})", other)

    def _add_modules(self, name: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            where = f"{'.'.join(filter(None, (name, path))) or 'model'} ({type(module).__name__})"
            own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
            buffers = module._buffers if name else {}  # those of a criterion are in no checkpoint
            self._add(where, module, (own | buffers).items())
            self._add_class(where, module)

    def _add_class(self, where: str, owner: object) -> None:
        """Add plain values of the user's classes (`calls = 0`), and generators of the files of their methods."""
        plain = (bool, int, float, list, dict, set, deque, Tensor, *_GENERATORS)
        for kind in type(owner).__mro__:
            if kind.__module__.partition(".")[0] in _LIBRARIES:
                continue
            values = {name: value for name, value in vars(kind).items() if isinstance(value, plain)}
            self._add(where, kind, [(name, value) for name, value in values.items() if name not in vars(owner)])
            for name in values.keys() - vars(owner).keys():  # `self.calls += 1` gives the object one of its own
                if not name.startswith("__"):
                    self.attributes[f"{where} .{name}"].undo.insert(0, partial(vars(owner).pop, name, None))
            for function in vars(kind).values() if id(kind) not in self._seen else ():
                if isinstance(function, FunctionType):
                    self._add_globals(where, function)
            self._seen.add(id(kind))

    def _add_globals(self, where: str, function: FunctionType) -> None:
        for name in function.__code__.co_names:
            if isinstance(value := function.__globals__.get(name), _GENERATORS):
                self._add(where, None, [(f"global {name}", value)])

    def _add_closure(self, name: str, function: FunctionType) -> None:
        """Add what a function's closure holds."""
        where = f"{name} ({function.__name__})"
        self._add_globals(where, function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != type(cell)():  # an empty cell has no contents
                self._add(where, None, [(variable, cell.cell_contents)])
                undo = partial(setattr, cell, "cell_contents", cell.cell_contents)
                self.attributes[f"{where} .{variable}"].undo.append(undo)

    def _add(self, where: str, owner: object, attributes: Iterable[tuple[str, object]]) -> None:
        """Add attributes of an owner, to which `undo` binds them again; with None it restores their contents only."""
        for name, value in attributes:
            if not name.startswith("__"):
                self._where = f"{where} .{name}"
                undo: list[Undo] = []
                frozen = self._freeze(value, undo, 0)
                if owner is not None and not isinstance(value, nn.Module):
                    undo.append(partial(setattr, owner, name, value))
                self.attributes[self._where] = Attribute(frozen, undo)

    def _freeze(self, value: Any, undo: list[Undo], depth: int) -> Comparable:
        """Return a value to compare with a later one, and append what restores the contents of `value`."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        if isinstance(value, numpy.generic):
            return value.item()
        if isinstance(value, Tensor):
            return None if isinstance(value, nn.Parameter) else self._freeze_tensor(value, undo)
        if isinstance(value, numpy.ndarray):
            return self._freeze_array(value, undo)
        if isinstance(value, _GENERATORS):
            self.generators[self._where] = Attribute(*freeze_generator(value))
            return None
        if isinstance(value, _OPAQUE) or depth >= _MAX_DEPTH or id(value) in self._seen:
            return None
        self._seen.add(id(value))
        return self._freeze_container(value, undo, depth + 1)

    def _freeze_container(self, value: Any, undo: list[Undo], depth: int) -> Comparable:
        if isinstance(value, set | frozenset):
            if isinstance(value, set):
                undo.append(partial(_refill_set, value, set(value)))
            return sorted(map(repr, islice(value, _MAX_ITEMS + 1)))
        if isinstance(value, list | tuple | deque):
            if not isinstance(value, tuple):
                undo.append(partial(_refill_list, value, list(value)))
            return [len(value), *(self._freeze(item, undo, depth) for item in islice(value, _MAX_ITEMS))]
        entries = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if not isinstance(entries, dict):
            return None
        undo.append(partial(_refill_dict, entries, dict(entries)))
        items = islice(entries.items(), _MAX_ITEMS)
        return [len(entries), *([repr(key)[:80], self._freeze(item, undo, depth)] for key, item in items)]

    def _freeze_tensor(self, value: Tensor, undo: list[Undo]) -> Comparable:
        value = value.detach()
        if value.is_meta or value.layout != torch.strided or value.is_quantized or type(value) is not Tensor:
            return list(value.shape)
        size = value.numel() * value.element_size()
        if size > self._bytes_left:
            return [*value.shape, float(value.double().sum())]
        self._bytes_left -= size
        copy = value.cpu().clone()
        undo.append(partial(_copy_values, value, copy))
        return copy

    def _freeze_array(self, value: Any, undo: list[Undo]) -> Comparable:  # Any: an array of any dtype
        if value.dtype == object or value.nbytes > self._bytes_left:
            return list(value.shape)
        self._bytes_left -= value.nbytes
        if value.flags.writeable:
            undo.append(partial(numpy.copyto, value, value.copy()))
        return [*value.shape, value.tobytes()]

    def list_changed(self, later: "Snapshot", tolerance: float) -> list[str]:
        """Return the attributes that both have, with values that differ by more than a relative tolerance."""
        common = self.attributes.keys() & later.attributes.keys()
        return [
            where
            for where, attribute in self.attributes.items()
            if where in common and not _is_same(attribute.value, later.attributes[where].value, tolerance)
        ]

    def differs(self, later: "Snapshot", tolerance: float) -> bool:
        """Return whether an attribute or a generator has changed, or attributes have come or gone."""
        same_names = self.attributes.keys() == later.attributes.keys()
        return not same_names or bool(self.list_changed(later, tolerance) or self.list_drawn(later))

    def list_drawn(self, later: "Snapshot") -> list[str]:
        """Return the generators that have drawn in between."""
        common = self.generators.keys() & later.generators.keys()
        return [where for where in common if self.generators[where].value != later.generators[where].value]

    def restore(self, names: Iterable[str]) -> None:
        """Restore all generators, and these attributes."""
        undo = [each for attribute in self.generators.values() for each in attribute.undo]
        undo += [each for name in names if name in self.attributes for each in self.attributes[name].undo]
        for restore in undo:
            restore()


def freeze_generator(value: Any) -> tuple[str, list[Undo]]:
    """Return the state of one of the four types of generators as text, and what restores it."""
    if isinstance(value, numpy.random.Generator):
        state = deepcopy(value.bit_generator.state)
        return repr(state), [partial(setattr, value.bit_generator, "state", state)]
    if isinstance(value, numpy.random.RandomState):
        known = value.get_state(legacy=False)
        return repr((known["state"]["key"].tobytes(), known["state"]["pos"])), [partial(value.set_state, known)]
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return repr(numbers), [partial(value.setstate, numbers)]
    bits = value.get_state()
    return repr(bits.numpy().tobytes()), [partial(value.set_state, bits)]


def _is_same(one: Comparable, other: Comparable, tolerance: float) -> bool:
    """Return whether two frozen values are equal, floating-point numbers up to a relative tolerance."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            _is_same(left, right, tolerance) for left, right in zip(one, other, strict=True)
        )
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) or (isnan(one) and isnan(other))
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point() and tolerance:
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _refill_list(target: "list[object] | deque[object]", items: list[object]) -> None:
    target.clear()
    target.extend(items)


def _refill_dict(target: dict[object, object], items: dict[object, object]) -> None:
    target.clear()
    target.update(items)


def _refill_set(target: set[object], items: set[object]) -> None:
    target.clear()
    target.update(items)


def _copy_values(target: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)


def read_global_generators() -> tuple[object, bytes, int]:
    """Return the states of Python's and NumPy's global generators, to be compared."""
    known = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), known["key"].tobytes(), known["pos"]
