"""torch.cuda over the simulated device: the functions of its C part; its Python part is torch's own.

Only streams, events and deep copies are stand-ins: in a build without CUDA they have no base to stand on.
"""

import os
import time
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu.simulated.machine import Machine

_CUDA = 1  # c10's number of this device type


class Stream(torch.Stream):
    """As torch.cuda.Stream; the guard keeps what it has to do."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> "Stream":
        if known:
            return super().__new__(cls, **known)
        number = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, torch.device("cuda", number), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """As torch.cuda.Event: of the device on which it is recorded first."""

    _timed: bool

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        made: Event = super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)
        made._timed = enable_timing
        return made

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds; the host's clock, since kernels run as they are launched."""
        if not self._timed or not end._timed:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return float(1e3 * (end._at - self._at))


def _resize(device: Any) -> Any:
    """In place of a method of torch's, which FSDP frees and gets gathered weights with."""
    real = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != "cuda":
            return real(storage, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    return resize


def put_in_place(device: Any, machine: Machine, visible: list[int]) -> None:
    """Give torch.cuda these GPUs.

    Args:
        device: the compiled library.
        visible: the machine's numbers of cuda:0, cuda:1, …
    """
    for name, function in (_device(device, len(visible)) | _memory(device)).items():
        setattr(torch._C, name, function)
    torch._C._has_cuda = True
    torch.UntypedStorage.resize_ = _resize(device)  # type: ignore[method-assign]
    torch.version.cuda = "12.8"
    cuda: Any = torch.cuda
    cuda._exchange_device = cuda._maybe_exchange_device = device.exchange_device
    cuda._is_in_bad_fork = _forked()
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=lambda number: _free(device, number))
    cuda._cached_device_count = None
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    cuda.default_generators = tuple(device.generator(number) for number in range(len(visible)))
    properties = [_properties(machine, number) for number in visible]
    cuda._get_device_properties = properties.__getitem__
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.nccl.is_available = lambda tensors: False  # DataParallel adds by itself
    cuda.nccl.version = lambda: (2, 27, 3)
    _copy_deeply()


def _device(device: Any, count: int) -> dict[str, Any]:
    def stream(number: int) -> tuple[int, int, int]:
        return device.stream(number), number, _CUDA

    return {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": device.device,
        "_cuda_setDevice": device.exchange_device,
        "_cuda_exchangeDevice": device.exchange_device,
        "_cuda_maybeExchangeDevice": device.exchange_device,
        "_cuda_synchronize": lambda: device.synchronize(device.device()),
        "_cuda_getCurrentStream": stream,
        "_cuda_getCurrentRawStream": device.stream,
        "_cuda_getDefaultStream": lambda number: (0, number, _CUDA),
        "_cuda_setStream": lambda stream_id, device_index, device_type: device.set_stream(device_index, stream_id),
        "_cuda_set_sync_debug_mode": device.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": device.sync_debug_mode,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_getArchFlags": lambda: "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100",
        "_cuda_ipc_collect": lambda: None,
    }


def _memory(device: Any) -> dict[str, Any]:
    def stats(number: int) -> dict[str, Any]:
        now = device.memory(number)
        used = {"current": now["allocated"], "peak": now["peak"]}
        held = {"current": now["reserved"], "peak": now["reserved_peak"]}
        return {f"{kind}_bytes": {"all": used} for kind in ("allocated", "active", "requested")} | {
            "reserved_bytes": {"all": held},
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": device.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda number: None,
        "_cuda_emptyCache": device.empty_cache,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def _free(device: Any, number: int) -> tuple[int, int]:
    now = device.memory(number)
    return now["capacity"] - now["reserved"], now["capacity"]


def _properties(machine: Machine, number: int) -> Any:
    gpu = machine.gpus[number]
    return SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.memory,
        uuid=machine.uuid(number),
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=132,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _forked() -> Any:
    """Whether this process was forked from one that had GPUs already, which CUDA does not survive."""
    owner = os.getpid()
    return lambda: os.getpid() != owner


def _copy_deeply() -> None:
    """A build without CUDA can't make the storage that torch's own way copies into."""
    theirs = torch.Tensor.__deepcopy__

    def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_cuda or type(self) is not torch.Tensor:
            return theirs(self, memo)  # type: ignore[no-any-return]
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    torch.Tensor.__deepcopy__ = __deepcopy__  # type: ignore[method-assign]
