"""A stand-in for pynvml that answers as machines with some GPUs would; what it does not know raises, as NVML does."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class Error(Exception):
    """What the library raises for a question that a GPU has no answer to."""


def a100(**changed: Any) -> dict[str, Any]:
    """An idle A100 of 40 GiB on a board with NVLink."""
    idle = {"name": "NVIDIA A100-SXM4-40GB", "total": 40 * GIB, "used": GIB // 2, "capability": (8, 0), "busy": 0}
    return idle | {"temperature": 31, "milliwatts": 52_000, "nvlinks": 12, "tenants": []} | changed


def t4(**changed: Any) -> dict[str, Any]:
    """An idle T4 of 15 GiB, which has no NVLink."""
    other = {"name": "Tesla T4", "total": 15 * GIB, "used": GIB // 4, "capability": (7, 5), "nvlinks": 0}
    return a100() | other | changed


class Nvml:
    """The library for these GPUs.

    Args:
        cards: what each GPU says; a field that is None is not supported, and none of a card that is `lost`. Its `uuid`
            is GPU-00000000 and so on by its number, where it says no other.
        levels: the topology level of a pair; 50 (across sockets) where it is not named.
    """

    NVMLError = Error
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_TEMPERATURE_GPU = 2, 0, 0

    def __init__(
        self,
        cards: Sequence[Mapping[str, Any]],
        *,
        levels: Mapping[tuple[int, int], int] | None = None,
        driver: str = "550.54.15",
        cuda: int = 12040,
    ) -> None:
        self._cards, self._levels, self._driver, self._cuda = cards, levels or {}, driver, cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if self._cards[number].get("lost"):
            raise Error("GPU is lost")
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for number in range(len(self._cards)):
            if self.nvmlDeviceGetUUID(number) == uuid:
                return self.nvmlDeviceGetHandleByIndex(number)
        raise Error("Not Found")

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self._driver.encode()  # as older bindings answer

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self._cuda

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return str(self._of(gpu, "name"))

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return str(self._cards[gpu].get("uuid", f"GPU-{gpu:08d}"))

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=self._of(gpu, "total"), used=self._of(gpu, "used"))

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> list[int]:
        return list(self._of(gpu, "capability"))

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=self._of(gpu, "busy"))

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return int(self._of(gpu, "temperature"))

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return int(self._of(gpu, "milliwatts"))

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [int(self._of(gpu, "mig")), 0]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self._of(gpu, "tenants")]

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= self._of(gpu, "nvlinks"):
            raise Error("not supported")
        return 1

    def nvmlDeviceGetP2PStatus(self, gpu: int, other: int, kind: int) -> int:
        return 0 if self._of(gpu, "nvlinks") and self._of(other, "nvlinks") else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, gpu: int, other: int) -> int:
        return self._levels.get((gpu, other), 50)

    def _of(self, gpu: int, field: str) -> Any:
        value = self._cards[gpu].get(field)
        if self._cards[gpu].get("lost"):
            raise Error("GPU is lost")
        if value is None:
            raise Error("not supported")
        return value
