"""What NVML says of a simulated machine: pynvml, for whoever imports it."""

import sys
from types import ModuleType
from typing import Any

from tests.gpu.simulated.machine import Machine
from tests.support.fake_nvml import Error, Nvml, a100


class Planted(Nvml):
    """The library for a machine; a GPU that is "lost" answers nothing."""

    def __init__(self, machine: Machine) -> None:
        cards = [
            a100(name=gpu.name, total=gpu.memory, capability=gpu.capability, used=0) | dict(gpu.nvml)
            for gpu in machine.gpus
        ]
        super().__init__(cards)
        self._machine = machine

    def nvmlInit(self) -> None:
        if self._machine.no_nvml:
            raise Error(self._machine.no_nvml)

    def nvmlShutdown(self) -> None:
        """Nothing is open."""

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{self._machine.uuid(gpu)}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> int:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        known = {self.nvmlDeviceGetUUID(number): number for number in range(len(self._cards))}
        if text not in known or self._cards[known[text]].get("lost"):
            raise Error("Not Found" if text not in known else str(self._cards[known[text]]["lost"]))
        return known[text]

    def _of(self, gpu: int, field: str) -> Any:
        if lost := self._cards[gpu].get("lost"):
            raise Error(lost)
        return super()._of(gpu, field)


def put_in_place(machine: Machine) -> None:
    """Let `import pynvml` find it."""
    library, module = Planted(machine), ModuleType("pynvml")
    module.__getattr__ = lambda name: getattr(library, name)  # type: ignore[method-assign]
    sys.modules["pynvml"] = module
