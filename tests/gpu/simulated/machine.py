"""What GPUs a simulated machine has, and how it travels to the processes that run on it. No torch here."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "SIMULATED_CUDA"  # its value is a Machine as JSON; boot/sitecustomize.py reads it
GIB = 2**30
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory: bytes; an allocation beyond them is out of memory.
        capability: compute capability; from (8, 0) on there is bf16.
        nvml: what NVML says of it, as a field of fake_nvml's `a100`; None is "not supported", an
            Exception's text under "lost" makes every question about this GPU fail with it.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GIB
    capability: tuple[int, int] = (9, 0)
    nvml: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The GPUs of a machine, in the order of their numbers.

    Attributes:
        no_nvml: NVML can't be opened, and why; "" where it can.
        record: a file to which every process appends what it did, one JSON line per event; "" for none.
    """

    gpus: tuple[Gpu, ...] = (Gpu(), Gpu())
    no_nvml: str = ""
    record: str = ""

    @classmethod
    def of(cls, count: int, **changed: Any) -> "Machine":
        """So many GPUs alike; what is changed are fields of Gpu."""
        return cls(tuple(Gpu(**changed) for _ in range(count)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Machine | None":
        """The machine that this process was started on; None for the real one."""
        if not environ.get(VARIABLE):
            return None
        told = json.loads(environ[VARIABLE])
        gpus = tuple(Gpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in told.pop("gpus"))
        return cls(gpus, **told)

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables with which any Python process that imports torch finds itself on this machine."""
        before = dict(os.environ if environ is None else environ)
        places = [str(_HERE / "boot"), str(_ROOT), *filter(None, [before.get("PYTHONPATH")])]
        return before | {VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(places)}

    def uuid(self, number: int) -> str:
        """As torch writes it; NVML puts GPU- before it."""
        return f"{number:08x}-1111-2222-3333-444444444444"

    def visible(self, environ: Mapping[str, str]) -> list[int]:
        """The numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set."""
        wanted = environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return list(range(len(self.gpus)))
        by_uuid = {f"GPU-{self.uuid(number)}": number for number in range(len(self.gpus))}
        found: list[int] = []
        for each in filter(None, (one.strip() for one in wanted.split(","))):
            number = by_uuid.get(each, int(each) if each.isdecimal() else -1)
            if not 0 <= number < len(self.gpus):  # as CUDA does: what comes after it is not seen
                break
            found.append(number)
        return found
