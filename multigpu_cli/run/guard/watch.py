"""Watches a pass of user code: the parameters and buffers that it writes, its collectives, and the lines of both."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # namespaces of torch's operators
_TORCH = str(Path(torch.__file__).parent)
_PROJECT = str(Path(__file__).parents[2])
_GUARD = str(Path(__file__).parent)
_PUBLIC = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py", "functional.py")
_DISPATCH = ("_ops.py", "_compile.py", "eval_frame.py", "_python_dispatch.py")
"""Files of torch.distributed that user code calls, and those between them and the mode; any other file of torch
communicates for torch itself."""


class Slot(NamedTuple):
    """A parameter or buffer under its name in a module."""

    name: str  # in the model
    tensors: dict[str, Tensor | None]  # the module's `_parameters` or `_buffers`
    key: str
    tensor: Tensor
    start: Tensor  # an alias of the tensor's memory from before the pass

    @property
    def current(self) -> Tensor | None:
        """The tensor that has the name now."""
        return self.tensors.get(self.key)

    @property
    def is_rebound(self) -> bool:
        """Whether another tensor, or other memory, has taken its place (`p.data = …`)."""
        current = self.current
        return current is not self.tensor or current.data_ptr() != self.start.data_ptr()


class Write(NamedTuple):
    """The first write to a parameter or buffer."""

    operator: str  # without namespace: "mul_"
    location: str  # file:line of user code


class Watch(TorchDispatchMode):
    """Notes in-place writes to parameters and buffers, and collectives.

    A storage is copied before its first write, so that `restore` costs nothing if nobody writes. Kernels of torch's
    norms write running statistics without declaring it; the caller restores buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.writes: dict[str, Write] = {}
        self.collectives: dict[str, str] = {}  # operator → file:line of user code
        self.parameters = list(_list_slots(model, "_parameters"))
        self._copies: dict[int, Tensor] = {}  # by address of the storage: its bytes before the first write
        self._names: dict[int, list[str]] = {}
        for slot in (*self.parameters, *_list_slots(model, "_buffers")):
            self._names.setdefault(_address(slot.tensor), []).append(slot.name)
        self._written_arguments: dict[OpOverload, list[tuple[int, str]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that this mode needs no guard against torch.compile, which would import it: half a second."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: arguments and results of any operator of torch
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            self._note_collective(func)
        for index, name in self._list_written_arguments(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self._note_write(func, tensor)
        return func(*args, **kwargs)

    def _list_written_arguments(self, func: OpOverload) -> list[tuple[int, str]]:
        if func not in self._written_arguments:
            self._written_arguments[func] = [
                (index, argument.name)
                for index, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        return self._written_arguments[func]

    def _note_write(self, func: OpOverload, tensor: Tensor) -> None:
        address = _address(tensor)
        names = self._names.get(address, [])
        if names and address not in self._copies:
            self._copies[address] = _view_bytes(tensor).clone()
        for name in names:
            if name not in self.writes:
                self.writes[name] = Write(func._schema.name.partition("::")[2], find_location())

    def _note_collective(self, func: OpOverload) -> None:
        name = func._schema.name.partition("::")[2].strip("_")
        if not name.startswith("wait_tensor") and (location := find_caller_of_collective()):
            self.collectives.setdefault(name, location)

    def find_changed_parameters(self) -> dict[str, Tensor]:
        """Copies of the current values of parameters that were written, or rebound to other values.

        A parameter that a module has no more, or none of this shape, counts with what it has instead.
        """
        changed = {}
        for slot in self.parameters:
            current = slot.tensor if slot.current is None else slot.current
            if slot.name in self.writes or (slot.is_rebound and not equal_tensors(slot.start, current)):
                changed[slot.name] = current.detach().clone()
        return changed

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the parameters under their names, and every storage that was written."""
        for slot in self.parameters:
            if (copy := self._copies.get(_address(slot.start))) is not None:
                _view_bytes(slot.start).copy_(copy)
            if slot.tensor.data_ptr() != slot.start.data_ptr():
                slot.tensor.data = slot.start
            if slot.current is not slot.tensor:
                slot.tensors[slot.key] = slot.tensor


def _list_slots(model: nn.Module, table: str) -> Iterator[Slot]:
    for path, module in model.named_modules():
        tensors: dict[str, Tensor | None] = getattr(module, table)
        for key, tensor in tensors.items():
            if tensor is not None and not is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                yield Slot(f"{path}.{key}" if path else key, tensors, key, tensor, tensor.detach())


def find_location() -> str:
    """Return file:line of the innermost frame of user code, or else of torch."""
    fallback = ""
    for file, line in _list_frames():
        if not file.startswith((_TORCH, _PROJECT, "<")):
            return f"{Path(file).name}:{line}"
        if file.startswith(_TORCH) and "_python_dispatch" not in file and "_ops" not in file:
            fallback = fallback or f"torch/{Path(file).name}:{line}"
    return fallback


def find_caller_of_collective() -> str:
    """Return file:line of user code that called torch.distributed; "" if torch or the project itself did."""
    for file, line in _list_frames():
        name = Path(file).name
        public = file.startswith(_TORCH) and name in (*_PUBLIC, *_DISPATCH)
        if not public and not file.startswith(_GUARD) and name != "contextlib.py":
            return "" if file.startswith((_TORCH, _PROJECT)) else f"{name}:{line}"
    return ""


def find_caller() -> str:
    """Return file:line of the first frame outside the guard if it is user code; "" otherwise."""
    file, line = next((frame for frame in _list_frames() if not frame[0].startswith(_GUARD)), ("", 0))
    return "" if not file or file.startswith((_TORCH, _PROJECT, "<")) else f"{Path(file).name}:{line}"


def _list_frames() -> Iterator[tuple[str, int]]:
    """File and line of each frame from the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def locate_raise(traceback: TracebackType | None) -> str:
    """Return file:line of the innermost frame of user code in a traceback; "" if it has none."""
    location = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith((_TORCH, _PROJECT, "<")):
            location = f"{Path(file).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return location


def equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Return whether shapes and values are equal; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or an id of its own if it has none."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return -id(tensor)
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
