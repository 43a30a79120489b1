"""The state of this machine's GPUs, once and as samples, by NVIDIA's management library (nvidia-ml-py); peak rates.

Peak rates of known GPUs are those of dense 16-bit matrix products with 32-bit accumulation, without sparsity. Source:
NVIDIA's published rates, where "with sparsity" is twice the dense rate. Those of A100, A10, A40, H100 (SXM and PCIe),
H200, L4, L40S and V100 agree with published tables; the others were entered without a data sheet at hand.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

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
    """NVML can't be queried, and why."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses memory of a GPU; bytes are None where the driver does not report them."""

    pid: int
    memory: int | None


class GpuLoad(NamedTuple):
    """The load of one GPU at one moment. A value that the driver does not report is None."""

    utilisation: int | None = None  # per cent of the last second or so in which some kernel ran
    temperature: int | None = None  # °C
    power: float | None = None  # watts
    memory_used: int | None = None  # bytes
    memory_total: int | None = None  # bytes; None also where a GPU has no memory of its own


@dataclass(frozen=True)
class Gpu:
    """The state of one GPU. A value that the driver does not report is None."""

    number: int  # NVML's, in the order of the PCI bus, independent of CUDA_VISIBLE_DEVICES
    name: str = "unknown"
    uuid: str = ""
    capability: tuple[int, int] | None = None
    load: GpuLoad = GpuLoad()
    mig: bool = False
    processes: tuple[GpuProcess, ...] = ()
    unreachable: str = ""  # why NVML can't query it (it has fallen off the bus, say); "" where it can


def open_nvml() -> Any:
    """The initialized library; NoNvml: there is no nvidia-ml-py, or no NVIDIA driver."""
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
    gpus = []
    for number in range(_query(nvml, nvml.nvmlDeviceGetCount) or 0):
        try:
            gpus.append(_read_gpu(nvml, number, nvml.nvmlDeviceGetHandleByIndex(number)))
        except nvml.NVMLError as error:
            gpus.append(Gpu(number, unreachable=f"NVML: {error}"))
    return gpus


def read_driver(nvml: Any) -> tuple[str | None, tuple[int, int] | None]:
    """The driver's version, and the newest CUDA that it runs."""
    version = _query(nvml, nvml.nvmlSystemGetDriverVersion)
    newest = _query(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return version and _decode(version), newest and (newest // 1000, newest % 1000 // 10)


def explain_unseen_gpus(built_for: str) -> str:
    """Which GPUs NVML sees, and why a torch that was built for this CUDA may see none; "" where there are none."""
    try:
        nvml = open_nvml()
        gpus, (version, newest) = list_gpus(nvml), read_driver(nvml)
    except NoNvml:
        return ""
    if not gpus:
        return ""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    seen = f"NVML sees {pluralize(len(gpus), 'GPU')} here ({names}), torch none"
    if newest and int(built_for.partition(".")[0]) > newest[0]:
        cuda = f"{newest[0]}.{newest[1]}"
        fix = f"a newer driver, or a torch built for CUDA {cuda} or older"
        return f"{seen}: driver {version} runs CUDA up to {cuda}, torch was built for {built_for}: {fix}"
    return f"{seen}: python -c 'import torch; torch.zeros(1).cuda()' says why"


def read_links(nvml: Any) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is connected."""
    count = range(_query(nvml, nvml.nvmlDeviceGetCount) or 0)
    handles = [_query(nvml, nvml.nvmlDeviceGetHandleByIndex, number) for number in count]
    return {(one, other): _read_link(nvml, handles[one], handles[other]) for one, other in combinations(count, 2)}


def _read_link(nvml: Any, one: Any, other: Any) -> str:
    """How two GPUs are connected; a handle is None where NVML can't reach the GPU."""
    if one is None or other is None:
        return "unknown"
    by_nvlink = _query(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    active = sum(_query(nvml, nvml.nvmlDeviceGetNvLinkState, one, link) == 1 for link in range(_LINKS))
    if by_nvlink == nvml.NVML_P2P_STATUS_OK and active:
        return f"NVLink ({active} links)"
    return _TOPOLOGY.get(_query(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other), "unknown")


def _read_gpu(nvml: Any, number: int, handle: Any) -> Gpu:
    def query(function: Callable[..., Any], *more: Any) -> Any:
        return _query(nvml, function, handle, *more)

    mig = query(nvml.nvmlDeviceGetMigMode)
    capability = query(nvml.nvmlDeviceGetCudaComputeCapability)
    processes = query(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return Gpu(
        number=number,
        name=_decode(nvml.nvmlDeviceGetName(handle)),
        uuid=_decode(nvml.nvmlDeviceGetUUID(handle)),
        capability=None if capability is None else tuple(capability),
        load=read_load(nvml, query),
        mig=bool(mig and mig[0]),
        processes=tuple(GpuProcess(each.pid, each.usedGpuMemory) for each in processes),
    )


def read_load(nvml: Any, query: Callable[..., Any]) -> GpuLoad:
    """The load of one GPU, whose `query` gives a function's answer, or None."""
    rates, power = query(nvml.nvmlDeviceGetUtilizationRates), query(nvml.nvmlDeviceGetPowerUsage)
    memory = query(nvml.nvmlDeviceGetMemoryInfo)
    return GpuLoad(
        None if rates is None else rates.gpu,
        query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        None if power is None else power / 1000,
        None if memory is None else memory.used,
        None if memory is None else memory.total,
    )


def _query(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this GPU or driver has none."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _decode(answer: str | bytes) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer


def find_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a GPU or a MIG instance; NoNvml: it knows neither, or has lost it."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        if (instance := _query(nvml, nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}")) is not None:
            return instance
        raise NoNvml(f"NVML: {error}") from error


class Sampler:
    """Queries one GPU at regular intervals, in a thread beside the training; values that NVML does not report are NaN.

    `uuid` is that of the GPU, or of the MIG instance, as torch writes it; `every` the seconds between two queries.
    `missing` says why some value is unknown, by NVML's last error; "" where it has answered everything.
    """

    def __init__(self, uuid: str, nvml: Any = None, every: float = 1.0) -> None:
        self.missing = ""
        self._every, self._lock, self._over = every, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[GpuLoad] = []
        self._last = GpuLoad()
        try:
            self._nvml = open_nvml() if nvml is None else nvml
            self._handle = find_handle(self._nvml, uuid)
        except NoNvml as reason:
            self.missing = str(reason)
            return
        self._last = read_load(self._nvml, self._query)
        self._thread = threading.Thread(target=self._sample, name="gpu sampler", daemon=True)
        self._thread.start()

    def read(self) -> list[float]:
        """Means since the last call: utilisation in %, °C, watts, bytes of memory in use; NaN where unknown."""
        with self._lock:
            samples, self._samples = self._samples or [self._last], []
            self._last = samples[-1]
        columns = list(zip(*samples, strict=True))[:4]  # without the total memory
        known = [[value for value in column if value is not None] for column in columns]
        return [sum(values) / len(values) if values else math.nan for values in known]

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(self._every):
            now = read_load(self._nvml, self._query)
            with self._lock:
                self._samples.append(now)

    def _query(self, function: Callable[..., Any], *more: Any) -> Any:
        try:
            return function(self._handle, *more)
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"
            return None


_TERA = 1e12
_BF16 = (  # TFLOP/s by CUDA's name of the device, without "NVIDIA"
    {"GB200": 2500, "B200": 2250}
    | {"GH200 480GB": 989, "GH200 144G HBM3e": 989, "H200": 989, "H200 NVL": 835}
    | {"H100 80GB HBM3": 989, "H100 NVL": 835, "H100 PCIe": 756}
    | dict.fromkeys(("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"), 312)
    | {"A30": 165, "A40": 149.7, "A10": 125, "A10G": 70}
    | {"L40S": 362, "L40": 181, "L4": 121}
    | {"RTX 6000 Ada Generation": 364.2, "RTX A6000": 154.8, "RTX A5000": 111.1, "RTX A4000": 76.7}
    | {"GeForce RTX 5090": 209.5, "GeForce RTX 4090": 165.2, "GeForce RTX 4080": 97.5, "GeForce RTX 3090": 71}
)
_FP16 = {"Tesla T4": 65} | {
    f"Tesla V100-{form}-{size}GB": rate for form, rate in (("SXM2", 125), ("PCIE", 112)) for size in (16, 32)
}


def peak_flops(device: str, precision: str) -> float | None:
    """FLOP/s of a device by its name; None if it is unknown, or in full precision, where it depends on TF32.

    The whole name must match: the names of laptop GPUs, MIG slices and virtual GPUs contain that of a faster GPU.
    """
    if precision not in ("bf16", "fp16"):
        return None
    rate = (_BF16 | (_FP16 if precision == "fp16" else {})).get(device.removeprefix("NVIDIA "))
    return None if rate is None else rate * _TERA
