import sys
from typing import Any

import pytest

from multigpu_cli.monitor import gpu
from multigpu_cli.monitor.gpu import GpuProcess, NoNvml, list_gpus, open_nvml, read_driver, read_links
from tests.support.fake_nvml import GIB, Nvml, a100, t4


def test_what_a_gpu_says() -> None:
    (found,) = list_gpus(Nvml([a100(used=9 * GIB, busy=97, tenants=[(4321, 8 * GIB), (4322, None)])]))
    assert (found.number, found.name, found.uuid) == (0, "NVIDIA A100-SXM4-40GB", "GPU-00000000")
    assert (found.load.memory_total, found.load.memory_used, found.capability) == (40 * GIB, 9 * GIB, (8, 0))
    assert found.load[:3] == (97, 31, 52.0)
    assert not found.mig
    assert found.processes == (GpuProcess(4321, 8 * GIB), GpuProcess(4322, None))


def test_what_a_gpu_does_not_say_is_none() -> None:
    silent = a100(busy=None, temperature=None, milliwatts=None, capability=None, tenants=None)
    (found,) = list_gpus(Nvml([silent]))
    assert (*found.load[:3], found.capability) == (None,) * 4
    assert found.processes == ()


def test_connections_of_eight_and_of_four() -> None:
    eight = read_links(Nvml([a100()] * 8))
    assert len(eight) == 28
    assert set(eight.values()) == {"NVLink (12 links)"}
    four = read_links(Nvml([t4()] * 4, levels={(0, 1): 10, (2, 3): 30, (0, 2): 99}))
    assert (four[0, 1], four[2, 3], four[1, 2], four[0, 2]) == (
        "one PCIe switch",
        "one PCIe host bridge",
        "across CPU sockets",
        "unknown",
    )


def test_the_driver_is_named() -> None:
    assert read_driver(Nvml([a100()], driver="535.104", cuda=12020)) == ("535.104", (12, 2))


def test_a_driver_that_says_nothing_of_itself_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Nvml):
        def nvmlSystemGetDriverVersion(self) -> bytes:
            raise self.NVMLError("Unknown Error")

        def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
            raise self.NVMLError("Function Not Found")

    assert read_driver(Silent([t4()])) == (None, None)
    monkeypatch.setattr(gpu, "open_nvml", lambda: Silent([t4()]))
    assert "torch.zeros(1).cuda()" in gpu.explain_unseen_gpus("13.0")


def test_gpus_that_torch_overlooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(cards: list[Any], built_for: str) -> str:
        monkeypatch.setattr(gpu, "open_nvml", lambda: Nvml(cards, driver="535.104", cuda=12020))
        return gpu.explain_unseen_gpus(built_for)

    assert "runs CUDA up to 12.2, torch was built for 13.0: a newer driver, or a torch" in told([a100(), t4()], "13.0")
    assert told([a100(), t4()], "12.8").startswith(
        "NVML sees 2 GPUs here (NVIDIA A100-SXM4-40GB, Tesla T4), torch none"
    )
    assert "torch.zeros(1).cuda()" in told([t4()], "12.8"), "minor versions go together"
    assert told([], "12.8") == ""
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.explain_unseen_gpus("12.8") == ""


def test_without_the_library_or_a_driver_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Nvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Broken([]))
    with pytest.raises(NoNvml, match="Driver Not Loaded"):
        open_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoNvml, match="nvidia-ml-py is not installed"):
        gpu.open_nvml()


def test_a_lost_gpu_and_one_without_memory_of_its_own_stand_beside_the_others() -> None:
    lost, shared, well = list_gpus(Nvml([a100(lost=True), a100(total=None, used=None), a100()]))
    assert (lost.unreachable, lost.load.memory_total) == ("NVML: GPU is lost", None)
    assert (shared.unreachable, shared.name, shared.load.memory_total) == ("", well.name, None)
    assert well.load.memory_total == 40 * GIB
    assert read_links(Nvml([a100(lost=True), a100(), a100()])) == {
        (0, 1): "unknown",
        (0, 2): "unknown",
        (1, 2): "NVLink (12 links)",
    }
