"""The sampler of one GPU's load, on a simulated NVML."""

import math
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from multigpu_cli.monitor.gpu import Sampler
from tests.support.fake_nvml import GIB, Nvml, a100


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
    return True


def test_the_sampler_averages_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Utilisation 40, 60 and 50 %, and no temperature; the first look comes with the sampler."""
    busy = iter([40, 60, 50])
    both = threading.Event()

    class Changing(Nvml):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
            assert uuid == "GPU-x", "torch says x"
            return 0

        def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
            now = next(busy, None)
            if now is None:
                both.set()
                raise self.NVMLError("over")
            return SimpleNamespace(gpu=now)

    sampler = Sampler("x", Changing([a100(temperature=None)]), every=0.001)
    assert both.wait(5)
    sampler.close()
    used, temperature, power, memory = sampler.read()
    assert (used, power, memory) == (55, 52.0, GIB // 2), "the first look counts where no other has come"
    assert math.isnan(temperature)
    assert sampler.read()[2:] == [52.0, GIB // 2], "nobody has looked since: as it was last"


def test_without_nvml_the_sampler_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = Sampler("x")
    assert sampler.missing == "nvidia-ml-py is not installed"
    assert all(map(math.isnan, sampler.read()))
    sampler.close()


@pytest.mark.parametrize(
    ("card", "unknown", "why"),
    [
        (a100(uuid="GPU-x", lost=True), {0, 1, 2, 3}, "NVML: GPU is lost"),
        (a100(uuid="GPU-y"), {0, 1, 2, 3}, "NVML: Not Found"),
        (a100(uuid="MIG-x", busy=None, temperature=None, milliwatts=None), {0, 1, 2}, "NVML: not supported"),
        (a100(uuid="GPU-x", used=None), {3}, "NVML: not supported"),
        (a100(uuid="GPU-x"), set(), ""),
    ],
    ids=["lost", "hidden", "MIG instance", "no memory of its own", "all well"],
)
def test_what_nvml_does_not_say_is_unknown_and_nothing_ends(card: Any, unknown: set[int], why: str) -> None:
    sampler = Sampler("x", Nvml([card]), every=0.001)
    assert {place for place, value in enumerate(sampler.read()) if math.isnan(value)} == unknown
    assert sampler.missing == why
    sampler.close()


def test_a_gpu_that_is_lost_on_the_way_goes_blank() -> None:
    card = a100(uuid="GPU-x")
    sampler = Sampler("x", Nvml([card]), every=0.001)
    assert not any(map(math.isnan, sampler.read()))
    card["lost"] = True
    assert within(5, lambda: all(map(math.isnan, sampler.read())))
    assert sampler.missing == "NVML: GPU is lost"
    sampler.close()
