"""doctor, plan and bench on two simulated GPUs of unlike models, as processes of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.commands import bench_overlap
from multigpu_cli.commands.doctor import bandwidth, doctor
from multigpu_cli.commands.doctor.bandwidth import check_host_to_device
from multigpu_cli.commands.doctor.doctor import check_model
from multigpu_cli.commands.plan import measure
from multigpu_cli.config.sources import resolve
from tests.gpu.simulated.gpus import alone, front_door
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import GIB, Gpu, Machine

MIB = 2**20
NEW, OLD = Gpu(), Gpu("Tesla T4", 15 * GIB, (7, 5), {"used": 4 * GIB, "tenants": [(4321, 3 * GIB)]})
UNLIKE = Machine((NEW, OLD))


def run_json(*words: str, code: int = 0, machine: Machine = UNLIKE) -> dict[str, Any]:
    """What a command says with --json, its exit code being this one."""
    done = front_door(*words, "--json", machine=machine)
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_doctor_tells_of_both_gpus_what_there_is_to_know(tmp_path: Path) -> None:
    findings = run_json("doctor", "--save-dir", str(tmp_path))["findings"]
    found = {each["name"]: (each["verdict"], each["evidence"]) for each in findings}
    assert found["GPUs"] == ("ok", "2 on this machine, 2 visible to torch")
    assert found["GPU 0"][0] == "ok"
    assert found["GPU 0"][1].startswith(f"{NEW.name}, 80.0 GiB (80.0 free), compute capability 9.0, 0 % busy")
    assert found["GPU 1"][0] == "warn"
    assert found["GPU 1"][1].startswith("Tesla T4, 15.0 GiB (11.0 free), compute capability 7.5")
    assert "in use by process 4321 with 3.0 GiB" in found["GPU 1"][1]
    assert found["equal GPUs"][0] == "warn"
    assert found["topology"] == ("ok", "NVLink (12 links): 0-1")
    assert found["peer access"] == ("ok", "every GPU reaches every other's memory")
    assert {"host to GPU 0", "host to GPU 1"} <= found.keys()
    (wire,) = (each for each in findings if each["name"] == "all-reduce (nccl)")
    assert (wire["verdict"], wire["numbers"]["workers"], wire["numbers"]["wrong"]) == ("ok", 2, [])


def test_doctor_says_that_a_gpu_is_full() -> None:
    """Others may have all of its memory: that is why somebody asks the doctor."""

    def work(sim: Simulated) -> list[tuple[str, str]]:
        bandwidth._COPIED = 16 * MIB
        found = [check_host_to_device(torch.device("cuda", number)) for number in range(2)]
        return [(each.name, each.evidence) for each in found if "memory is full" in each.evidence]

    told = alone(work, Machine((Gpu(), Gpu(memory=12 * MIB))))
    assert told == [("host to GPU 1", "its memory is full: 16 MiB could not be allocated")]


def test_doctor_says_what_a_micro_batch_takes() -> None:
    """A sample keeps 128 KiB for backward; beside the weights are their gradients, and twice their size for AdamW."""
    flags = {"data": "tests.support.user_code:tensors", "model": "tests.gpu.networks:wide", "amp": "off"}
    sets = ["data.args.train=256", "model.args.width=4096", "model.args.depth=8"]

    def work(sim: Simulated) -> list[dict[str, str]]:
        doctor._GIB = GIB // 8
        sizes = ("64", "256")
        return [
            {each.name: each.evidence for each in check_model(resolve(flags | {"batch_size": size}, sets, None))}
            for size in sizes
        ]

    found, too_large = alone(work, Machine.of(1, memory=GIB // 32))
    taken = found["model"].partition("--batch-size 64 takes ")[2].partition(" of 0 GiB")[0]
    weights = 4 * (6 + 1 + 3) * 4096
    assert 1 < float(taken) * (GIB // 8) / (8 * MIB + 4 * weights) < 2
    assert found["largest batch"] == "--batch-size 128 a device: measured: 256 does not fit"
    assert too_large["model"].endswith("--batch-size 256 does not fit, 128 does")


def test_plan_rests_on_the_gpu_and_knows_what_its_memory_takes(capsys: pytest.CaptureFixture[str]) -> None:
    def work(sim: Simulated) -> list[tuple[int, str]]:
        measure._SECONDS = 0
        words = ["plan", "--workers", "1,2", "--interconnect", "pcie4", "--model", "mlp"]
        return [(main_multi_gpu.run([*words, *more]), capsys.readouterr().out) for more in (["--json"], [])]

    (code, said), (again, lines) = alone(work, UNLIKE)
    found = json.loads(said)
    assert (code, again, found["capacity"]) == (0, 0, NEW.memory)
    assert "of 80.00 GiB; 9 tenths of them would hold micro-batches of " in lines
    assert (found["about"]["device"], found["about"]["precision"]) == (NEW.name, "bf16")
    assert [row["workers"] for row in found["rows"]] == [1, 2]
    assert all(row["samples_per_second"] > 0 for row in found["rows"])
    assert found["memory"]["optimizer"] >= 2 * found["memory"]["weights"] > 0


def test_bench_measures_the_loading_onto_a_gpu() -> None:
    """The clock stops when the batch has arrived."""
    config = resolve({"data": "tests.support.user_code:tensors", "batch_size": "20"}, [], None)

    def work(sim: Simulated) -> tuple[list[float], set[str]]:
        with sim.record.watching() as events:
            rates = bench_overlap.measure_loading(config, 1).rates[0]
        return rates, {event.place.split(":")[0] for event in events if event.kind == "sync"}

    (rate,), waits = alone(work, Machine.of(1))
    assert rate > 0
    assert "multigpu_cli/commands/bench_overlap.py" in waits


@pytest.mark.slow
def test_bench_measures_ddp_and_dp_on_both_gpus(tmp_path: Path) -> None:
    words = ["--workers", "1,2", "--steps", "8", "--repetitions", "1", "--model", "mlp", "--out", str(tmp_path)]
    found = run_json("bench", *words, machine=Machine.of(2))
    assert [(rung["strategy"], rung["workers"]) for rung in found["rungs"]] == [("single", 1), ("ddp", 2), ("dp", 2)]
    assert all(rung["samples_per_second"] > 0 for rung in found["rungs"])
    assert found["about"]["device"] == Gpu().name
    assert found["about"]["wire"].startswith("measured")
    assert found["notes"] == []
    assert json.loads((tmp_path / "bench.json").read_text())["rungs"] == found["rungs"]


@pytest.mark.slow
def test_selftest_compares_in_the_format_that_all_gpus_have() -> None:
    found = run_json("selftest", "--steps", "4", "--model", "mlp", machine=UNLIKE)
    assert found["holds"], found["verdicts"]
    assert (found["workers"], found["device"], found["precision"]) == (2, "cuda", "fp16")
