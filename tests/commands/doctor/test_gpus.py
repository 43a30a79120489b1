"""What the doctor says of machines with no, one, four and eight GPUs, as NVML would describe them."""

from dataclasses import replace
from typing import Any

import pytest

from multigpu_cli.commands.doctor.gpus import GpuProcessInfo, MachineFacts, check_gpus
from multigpu_cli.commands.doctor.system import Finding
from multigpu_cli.monitor.gpu import list_gpus, read_driver, read_links
from tests.support.fake_nvml import GIB, Nvml, a100, t4

SOFTWARE = MachineFacts(
    python="3.12.1", torch="2.11.0", cuda="12.4", nccl="2.27.3", architectures=("sm_75", "sm_80", "sm_90")
)
OURS = GpuProcessInfo(4321, "python train.py", "ada", ours=True, orphan=False)


def machine(
    cards: list[dict[str, Any]], *, levels: dict[tuple[int, int], int] | None = None, **known: Any
) -> MachineFacts:
    nvml = Nvml(cards, levels=levels)
    version, newest = read_driver(nvml)
    asked = {"driver": version, "driver_cuda": newest, "gpus": list_gpus(nvml), "links": read_links(nvml)}
    return replace(SOFTWARE, **({"visible": len(cards)} | asked | known))


def read_findings(facts: MachineFacts) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_gpus(facts)}


def verdicts(facts: MachineFacts) -> dict[str, str]:
    return {name: finding.verdict for name, finding in read_findings(facts).items()}


def test_no_gpu_is_not_checked() -> None:
    bare = MachineFacts(python="3.11.7", torch="2.13.0+cpu", no_nvml="NVML: Shared Library Not Found")
    assert verdicts(bare) == {"versions": "ok", "GPUs": "not checked", "leftovers": "ok"}
    assert "built for CPU only" in read_findings(bare)["versions"].evidence


def test_one_idle_gpu() -> None:
    one = read_findings(machine([a100()]))
    assert {name: finding.verdict for name, finding in one.items()} == dict.fromkeys(
        ("versions", "GPUs", "GPU 0", "leftovers"), "ok"
    )
    assert one["GPU 0"].evidence == (
        "NVIDIA A100-SXM4-40GB, 40.0 GiB (39.5 free), compute capability 8.0, 0 % busy, 31 °C, 52 W"
    )


def test_eight_equal_gpus_on_nvlink() -> None:
    every = [[True] * 8] * 8
    eight = read_findings(machine([a100()] * 8, peers=every))
    assert {finding.verdict for finding in eight.values()} == {"ok"}
    assert eight["equal GPUs"].evidence == "8 of one kind"
    assert eight["topology"].evidence.startswith("NVLink (12 links): 0-1, 0-2")
    assert "and 16 more" in eight["topology"].evidence
    assert "peer access" in eight


def test_four_unequal_gpus_across_sockets() -> None:
    cards = [a100(nvlinks=0), a100(nvlinks=0), t4(), a100(nvlinks=0)]
    peers = [[True, True, False, True], [True, True, True, True], [False, True, True, True], [True] * 4]
    four = read_findings(machine(cards, levels={(0, 1): 10}, peers=peers))
    assert four["equal GPUs"].verdict == "warn"
    assert "GPU 2 with the least memory" in four["equal GPUs"].evidence
    assert four["equal GPUs"].fix.endswith("CUDA_VISIBLE_DEVICES=0,1,3")
    assert four["topology"].verdict == "warn"
    assert "one PCIe switch: 0-1" in four["topology"].evidence
    assert four["peer access"].verdict == "warn"
    assert "between 0-2:" in four["peer access"].evidence


def test_a_busy_gpu_names_its_users_and_the_others() -> None:
    busy = a100(used=30 * GIB, busy=99, tenants=[(4321, 29 * GIB), (9, None)])
    found = read_findings(machine([a100(), busy], tenants={4321: OURS}))
    assert (found["GPU 0"].verdict, found["GPU 1"].verdict) == ("ok", "warn")
    assert "in use by process 4321 with 29.0 GiB: python train.py (ada)\nin use by process 9" in found["GPU 1"].evidence
    assert found["GPU 1"].fix.endswith("CUDA_VISIBLE_DEVICES=0")
    unseen = read_findings(machine([a100(used=30 * GIB)]))["GPU 0"]
    assert (unseen.verdict, unseen.fix) == ("warn", "nvidia-smi")


def test_a_worker_whose_launcher_is_gone_is_named() -> None:
    left = replace(OURS, orphan=True)
    found = read_findings(machine([a100(used=30 * GIB, tenants=[(4321, GIB)])], tenants={4321: left}))["leftovers"]
    assert (found.verdict, found.fix) == ("warn", "kill 4321")
    others = read_findings(machine([a100()], tenants={4321: replace(left, ours=False)}))["leftovers"]
    assert others.verdict == "ok", "another user's process is not ours to end"


@pytest.mark.parametrize(
    ("cuda", "newest", "verdict"),
    [("12.4", (12, 4), "ok"), ("12.4", (13, 0), "ok"), ("12.8", (12, 4), "warn"), ("13.0", (12, 9), "fail")],
)
def test_torch_and_driver_must_fit(cuda: str, newest: tuple[int, int], verdict: str) -> None:
    found = read_findings(machine([a100()], cuda=cuda, driver_cuda=newest))["versions"]
    assert found.verdict == verdict
    assert (verdict == "ok") == (found.fix == "")


@pytest.mark.parametrize(
    ("built", "verdict"),
    [
        (("sm_80",), "ok"),
        (("sm_75", "sm_90"), "fail"),
        (("sm_86",), "fail"),
        (("sm_75", "compute_75"), "ok"),
        (("sm_90", "compute_90"), "fail"),
        ((), "ok"),
    ],
)
def test_torch_must_have_kernels_for_the_gpu(built: tuple[str, ...], verdict: str) -> None:
    """Kernels run on the same major version, PTX is compiled for newer ones."""
    assert read_findings(machine([a100()], architectures=built))["GPU 0"].verdict == verdict


@pytest.mark.parametrize(
    ("known", "verdict", "said"),
    [
        ({"visible": 0, "cuda": None}, "fail", "built for CPU only"),
        ({"visible": 0, "hidden": ""}, "warn", "CUDA_VISIBLE_DEVICES is empty"),
        ({"visible": 0}, "fail", "2 on this machine, 0 visible"),
        ({"visible": 1, "hidden": "1"}, "ok", "CUDA_VISIBLE_DEVICES=1"),
        ({"no_nvml": "nvidia-ml-py is not installed", "gpus": ()}, "warn", "nvidia-ml-py is not installed"),
        ({"no_nvml": "NVML: no", "gpus": (), "hip": "6.4", "cuda": None}, "warn", "ROCm has no NVML"),
    ],
)
def test_what_torch_sees(known: dict[str, Any], verdict: str, said: str) -> None:
    found = read_findings(machine([a100(), a100()], **known))["GPUs"]
    assert found.verdict == verdict
    assert said in found.evidence


def test_mig_is_named() -> None:
    assert "MIG" in read_findings(machine([a100(mig=1)]))["GPU 0"].evidence


def test_a_gpu_that_nvml_cannot_ask_fails_and_the_others_are_told() -> None:
    found = read_findings(machine([a100(), a100(lost=True), a100(total=None, used=None), a100()]))
    assert (found["GPU 1"].verdict, found["GPU 1"].evidence) == ("fail", "can't be queried: NVML: GPU is lost")
    assert [found[name].verdict for name in ("GPU 0", "GPU 2", "GPU 3")] == ["ok"] * 3
    assert "GiB" not in found["GPU 2"].evidence
    assert found["equal GPUs"].fix.endswith("CUDA_VISIBLE_DEVICES=0,3")
