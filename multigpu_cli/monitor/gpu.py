"""What NVIDIA's management library (NVML, by nvidia-ml-py) says of the GPUs of this machine, whoever uses them."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LINKS = 18  # most NVLinks of one GPU so far
_TOPOLOGY = {
    0: "on one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one CPU socket, several host bridges",
    50: "across CPU sockets",
}


class NoNvml(Exception):
    """NVML can't be asked, and why."""


@dataclass(frozen=True)
class Tenant:
    """A process that holds memory of a GPU; bytes are None where the driver does not say."""

    pid: int
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, now. What the driver does not say is None.

    Attributes:
        number: NVML's, in the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says.
        capability: compute capability, as (9, 0).
        memory_total, memory_used: bytes.
        utilisation: per cent of the last second or so in which some kernel ran.
        temperature: °C. power: watts.
        mig: the GPU is cut into instances.
        pcie, pcie_most: (generation, lanes), now and at best; idle GPUs may run at a lower generation.
    """

    number: int
    name: str
    uuid: str
    capability: tuple[int, int] | None
    memory_total: int
    memory_used: int
    utilisation: int | None = None
    temperature: int | None = None
    power: float | None = None
    mig: bool = False
    pcie: tuple[int, int] | None = None
    pcie_most: tuple[int, int] | None = None
    tenants: tuple[Tenant, ...] = ()


def opened() -> Any:
    """The library, ready to be asked.

    Raises:
        NoNvml: nvidia-ml-py is not installed, or there is no NVIDIA driver.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(f"NVML: {error}") from error
    return pynvml


def gpus(nvml: Any) -> list[Gpu]:
    """Every GPU of the machine."""
    return [_gpu(nvml, number, _handle(nvml, number)) for number in range(nvml.nvmlDeviceGetCount())]


def driver(nvml: Any) -> tuple[str, tuple[int, int]]:
    """The driver's version, and the newest CUDA that it runs."""
    newest = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return _text(nvml.nvmlSystemGetDriverVersion()), (newest // 1000, newest % 1000 // 10)


def links(nvml: Any) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is connected."""
    handles = [_handle(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    active = [_active_links(nvml, handle) for handle in handles]
    found = {}
    for one, first in enumerate(handles):
        for other in range(one + 1, len(handles)):
            by_nvlink = _asked(
                nvml, nvml.nvmlDeviceGetP2PStatus, first, handles[other], nvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
            level = _asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first, handles[other])
            if by_nvlink == nvml.NVML_P2P_STATUS_OK and active[one]:
                found[one, other] = f"NVLink ({active[one]} links)"
            else:
                found[one, other] = _TOPOLOGY.get(level, "unknown") if level is not None else "unknown"
    return found


def _gpu(nvml: Any, number: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    power = _asked(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    rates = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    mig = _asked(nvml, nvml.nvmlDeviceGetMigMode, handle)
    capability = _asked(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    tenants = _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return Gpu(
        number=number,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        capability=None if capability is None else tuple(capability),
        memory_total=memory.total,
        memory_used=memory.used,
        utilisation=None if rates is None else rates.gpu,
        temperature=_asked(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power=None if power is None else power / 1000,
        mig=bool(mig and mig[0]),
        pcie=_pcie(nvml, handle, nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_most=_pcie(nvml, handle, nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth),
        tenants=tuple(Tenant(each.pid, each.usedGpuMemory) for each in tenants),
    )


def _pcie(nvml: Any, handle: Any, generation: Callable[..., Any], width: Callable[..., Any]) -> tuple[int, int] | None:
    found = (_asked(nvml, generation, handle), _asked(nvml, width, handle))
    return None if None in found else found


def _active_links(nvml: Any, handle: Any) -> int:
    return sum(_asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(_LINKS))


def _handle(nvml: Any, number: int) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(number)


def _asked(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """The answer, or None where this GPU or driver has none."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _text(said: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return said.decode() if isinstance(said, bytes) else said


class Sampler:
    """Asks about one GPU again and again, in a thread beside the training; without NVML it stays silent.

    Args:
        uuid: of the GPU, as NVML writes it.
        nvml: the library; None opens the real one.
        every: seconds between two looks.
    """

    def __init__(self, uuid: str, nvml: Any = None, every: float = 1.0) -> None:
        self.missing = ""
        self._every, self._seen, self._lock = every, [], threading.Lock()  # type: ignore[var-annotated]
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._nvml = opened() if nvml is None else nvml
        except NoNvml as reason:
            self.missing = str(reason)
            return
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._thread = threading.Thread(target=self._look_on, name="gpu sampler", daemon=True)
        self._thread.start()

    def read(self) -> list[float]:
        """Means since the last call: utilisation in %, °C, watts, bytes of memory in use by everybody; NaN: unknown."""
        with self._lock:
            seen, self._seen = self._seen, []
        columns = list(zip(*seen, strict=True)) or [()] * 4
        known = [[value for value in column if value is not None] for column in columns]
        return [sum(values) / len(values) if values else math.nan for values in known]

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(self._every):
            now = _changing(self._nvml, self._handle)
            with self._lock:
                self._seen.append(now)


def _changing(nvml: Any, handle: Any) -> tuple[float | None, ...]:
    rates = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power = _asked(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return (
        None if rates is None else rates.gpu,
        _asked(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        None if power is None else power / 1000,
        None if memory is None else memory.used,
    )
