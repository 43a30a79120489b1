"""A GPU's waits, told from the host's by planted events: each is reached when the device has done what came before."""

import pytest
import torch

from multigpu_cli.monitor.meters import StepTimer, Stopwatch
from tests.monitor.test_meters import Clock


class Device:
    """A host and a GPU with a queue, each with a time of its own."""

    def __init__(self) -> None:
        self.host, self.free_at = Clock(), 0.0

    def queue(self, seconds: float) -> None:
        """A kernel: the host goes on at once."""
        self.free_at = max(self.free_at, self.host.now) + seconds

    def wait(self) -> None:
        """What a blocking copy does."""
        self.host.now = max(self.host.now, self.free_at)

    def event(self, **_: object) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.reached = device, 0.0

    def record(self) -> None:
        self.reached = max(self._device.host.now, self._device.free_at)

    def synchronize(self) -> None:
        self._device.host.now = max(self._device.host.now, self.reached)

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.reached - self.reached)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


def test_what_the_host_waits_for_the_gpu_is_no_wait_of_the_gpu(device: Device) -> None:
    """Steps of 100 ms on the device; the host needs 1 ms for a step, and 20 ms for the samples of each fifth one."""
    meters = StepTimer(device_runs_ahead=True, clock=device.host)
    for number in range(10):
        with meters.data_wait:
            device.host.pass_by(0.02 if number % 5 == 0 else 0.0)
            device.wait()  # a blocking copy
        device.host.pass_by(0.001)
        device.queue(0.1)
        meters.step(1)
    device.wait()
    assert meters.seconds < 1.1, "the host was in there for most of the time"
    assert meters.data_wait.read()[0] == pytest.approx(0.02), "that of the first step, when the queue was empty"


def test_what_the_gpu_waits_for_samples_counts(device: Device) -> None:
    """Samples take 150 ms, and what the device has to do in the meantime 100."""
    watch = Stopwatch(of_gpu=True)
    for _ in range(6):
        device.queue(0.1)
        with watch:
            device.host.pass_by(0.15)
    assert watch.read() == pytest.approx((6 * 0.05, 6))
    assert watch.read() == (0.0, 0)


def test_of_very_many_waits_the_last_ones_stand_for_all(device: Device) -> None:
    watch = Stopwatch(of_gpu=True)
    for _ in range(2000):
        with watch:
            device.host.pass_by(0.001)
    assert watch.read() == pytest.approx((2, 2000))
    assert watch._pairs.maxlen is not None


def test_on_the_cpu_it_is_the_hosts_clock() -> None:
    clock = Clock()
    watch = Stopwatch(of_gpu=False, clock=clock)
    with watch:
        clock.pass_by(5)
        watch.__enter__()  # begins anew
        clock.pass_by(0.25)
    assert watch.read() == pytest.approx((0.25, 1))
