"""What NVIDIA's management library (NVML, by nvidia-ml-py) says of the GPUs of this machine, whoever uses them."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multigpu_cli.errors import pluralize

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
class GpuProcess:
    """A process that holds memory of a GPU; bytes are None where the driver does not say."""

    pid: int
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, now. What the driver does not say is None.

    Attributes:
        number: NVML's, in the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says.
        capability: compute capability, as (9, 0).
        memory_total, memory_used: bytes; None also where a GPU has no memory of its own.
        utilisation: per cent of the last second or so in which some kernel ran.
        temperature: °C. power: watts.
        mig: the GPU is cut into instances.
        pcie, pcie_most: (generation, lanes), now and at best; idle GPUs may run at a lower generation.
        unreachable: why NVML can't ask it anything (it has fallen off the bus, say); "" where it can.
    """

    number: int
    name: str = "unknown"
    uuid: str = ""
    capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilisation: int | None = None
    temperature: int | None = None
    power: float | None = None
    mig: bool = False
    pcie: tuple[int, int] | None = None
    pcie_most: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()
    unreachable: str = ""


def open_nvml() -> Any:
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


def list_gpus(nvml: Any) -> list[Gpu]:
    """Every GPU of the machine."""
    found = []
    for number in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
        try:
            found.append(_gpu(nvml, number, nvml.nvmlDeviceGetHandleByIndex(number)))
        except nvml.NVMLError as error:
            found.append(Gpu(number, unreachable=f"NVML: {error}"))
    return found


def read_driver(nvml: Any) -> tuple[str | None, tuple[int, int] | None]:
    """The driver's version, and the newest CUDA that it runs."""
    version, newest = (
        _ask(nvml, ask) for ask in (nvml.nvmlSystemGetDriverVersion, nvml.nvmlSystemGetCudaDriverVersion_v2)
    )
    return version and _text(version), newest and (newest // 1000, newest % 1000 // 10)


def explain_unseen_gpus(built_for: str) -> str:
    """Which GPUs NVML sees, and why a torch that was built for this CUDA may see none; "" where there are none."""
    try:
        nvml = open_nvml()
        found, (version, newest) = list_gpus(nvml), read_driver(nvml)
    except NoNvml:
        return ""
    if not found:
        return ""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in found))
    told = f"NVML sees {pluralize(len(found), 'GPU')} here ({names}), torch none"
    if newest and int(built_for.partition(".")[0]) > newest[0]:
        fix = f"a newer driver, or a torch built for CUDA {newest[0]}.{newest[1]} or older"
        return (
            f"{told}: driver {version} runs CUDA up to {newest[0]}.{newest[1]}, torch was built for {built_for}: {fix}"
        )
    return f"{told}: python -c 'import torch; torch.zeros(1).cuda()' says why"


def read_links(nvml: Any) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is connected."""
    count = range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0)
    handles = {number: _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, number) for number in count}
    pairs = [(one, other) for one in count for other in count if one < other]
    return {(one, other): _link(nvml, handles[one], handles[other]) for one, other in pairs}


def _link(nvml: Any, one: Any, other: Any) -> str:
    """How two GPUs are connected; a handle is None where NVML can't reach the GPU."""
    if one is None or other is None:
        return "unknown"
    by_nvlink = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    active = _active_links(nvml, one)
    if by_nvlink == nvml.NVML_P2P_STATUS_OK and active:
        return f"NVLink ({active} links)"
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return _TOPOLOGY.get(level, "unknown")


def _gpu(nvml: Any, number: int, handle: Any) -> Gpu:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    power = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    tenants = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return Gpu(
        number=number,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        capability=None if capability is None else tuple(capability),
        memory_total=None if memory is None else memory.total,
        memory_used=None if memory is None else memory.used,
        utilisation=None if rates is None else rates.gpu,
        temperature=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power=None if power is None else power / 1000,
        mig=bool(mig and mig[0]),
        pcie=_pcie(nvml, handle, nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_most=_pcie(nvml, handle, nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth),
        processes=tuple(GpuProcess(each.pid, each.usedGpuMemory) for each in tenants),
    )


def _pcie(nvml: Any, handle: Any, generation: Callable[..., Any], width: Callable[..., Any]) -> tuple[int, int] | None:
    found = (_ask(nvml, generation, handle), _ask(nvml, width, handle))
    return None if None in found else found


def _active_links(nvml: Any, handle: Any) -> int:
    return sum(_ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(_LINKS))


def _ask(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """The answer, or None where this GPU or driver has none."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _text(answer: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer


_Look = tuple[float | None, ...]  # utilisation, temperature, watts, bytes


class Sampler:
    """Asks about one GPU again and again, in a thread beside the training; what NVML does not say is unknown.

    Args:
        uuid: of the GPU, or of the MIG instance, as torch writes it.
        nvml: the library; None opens the real one.
        every: seconds between two looks.

    Attributes:
        missing: why something is unknown, as NVML said last; "" where it has answered everything.
    """

    def __init__(self, uuid: str, nvml: Any = None, every: float = 1.0) -> None:
        self.missing = ""
        self._every, self._lock, self._over = every, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: list[_Look] = []
        self._last: _Look = (None,) * 4
        try:
            self._nvml = open_nvml() if nvml is None else nvml
            self._handle = _handle(self._nvml, uuid)
        except NoNvml as reason:
            self.missing = str(reason)
            return
        self._last = self._look()
        self._thread = threading.Thread(target=self._look_on, name="gpu sampler", daemon=True)
        self._thread.start()

    def read(self) -> list[float]:
        """Means since the last call: utilisation in %, °C, watts, bytes of memory in use by everybody; NaN: unknown.

        Where nobody has looked since, what was seen last.
        """
        with self._lock:
            seen, self._seen = self._seen or [self._last], []
            self._last = seen[-1]
        known = [[value for value in column if value is not None] for column in zip(*seen, strict=True)]
        return [sum(values) / len(values) if values else math.nan for values in known]

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(self._every):
            now = self._look()
            with self._lock:
                self._seen.append(now)

    def _look(self) -> _Look:
        nvml = self._nvml
        rates, power = self._ask(nvml.nvmlDeviceGetUtilizationRates), self._ask(nvml.nvmlDeviceGetPowerUsage)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        return (
            None if rates is None else rates.gpu,
            self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            None if power is None else power / 1000,
            None if memory is None else memory.used,
        )

    def _ask(self, question: Callable[..., Any], *more: Any) -> Any:
        try:
            return question(self._handle, *more)
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"
            return None


def _handle(nvml: Any, uuid: str) -> Any:
    """What NVML knows a GPU, or a MIG instance, by.

    Raises:
        NoNvml: it knows neither, or has lost it.
    """
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        if (instance := _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}")) is not None:
            return instance
        raise NoNvml(f"NVML: {error}") from error
