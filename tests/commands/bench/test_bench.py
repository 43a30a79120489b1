"""The benchmark: one real run is read for what it says, the rest is arithmetic on planted figures."""

import json
import math
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import main_multi_gpu
from multigpu_cli.commands import bench
from multigpu_cli.commands import bench_overlap as overlap_module
from multigpu_cli.commands.bench import (
    choose_worker_counts,
    format_benchmark,
    run_benchmark,
    run_trainer,
    why_no_dp,
    write_files,
)
from multigpu_cli.commands.bench_overlap import Overlap, measure_overlap
from multigpu_cli.commands.plan import plan
from multigpu_cli.commands.plan.plan import measure_interconnect
from multigpu_cli.commands.requests import build_config
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed import placement
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.errors import RequestError
from multigpu_cli.launch import WorkersFailed
from multigpu_cli.planning.speedup import Link
from tests.distributed.forked import start_forked

OWN = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net"}


def test_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 6)
    config = resolve(OWN, [], None)
    assert choose_worker_counts(None, config) == [1, 2, 4]
    assert choose_worker_counts("6,3", config) == [1, 3, 6]
    with pytest.raises(RequestError, match="--workers 7: only 6 devices can be used"):
        choose_worker_counts("7", config)
    some = resolve(OWN | {"gpu_ids": "5,1,4"}, [], None)
    assert choose_worker_counts(None, some) == [1, 2]
    with pytest.raises(RequestError, match="--workers 4: only 3 devices can be used"):
        choose_worker_counts("4", some)
    with pytest.raises(RequestError, match="--gpu-ids 9: there is no GPU 9"):
        choose_worker_counts(None, resolve(OWN | {"gpu_ids": "9"}, [], None))


def test_only_the_gpus_that_were_named_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run, the overlap and the wire take the first so many of them; each request passes the door of a training."""
    asked: list[str] = []

    def started(*words: Any) -> None:
        asked.append(words[0][1])
        raise InterruptedError

    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 4)
    monkeypatch.setattr(bench, "run_cli", started)
    config = resolve(OWN | {"gpu_ids": "3,1,2"}, [], None)
    several = resolve(OWN | {"nproc_per_node": "2"}, [], None)
    sides = [(config, "single", 1), (config, "ddp", 2), (config, "dp", 3), (several, "single", 1), (several, "ddp", 4)]
    sides.append((config, "fsdp", 3))
    for number, (each, strategy, count) in enumerate(sides):
        with pytest.raises(InterruptedError):
            run_trainer(each, strategy, count, 8, tmp_path / f"{number}", {})
    places = [build_config(dict.fromkeys(SETTINGS) | {"config": file}, {}).device for file in asked]
    assert [(place.multi_gpu, place.gpu_ids, place.nproc_per_node) for place in places] == [
        ("none", (3,), None),
        ("ddp", (3, 1), 2),
        ("dp", (3, 1, 2), None),
        ("none", None, None),
        ("ddp", None, 4),
        ("fsdp", (3, 1, 2), 3),
    ]


def test_the_wire_and_the_overlap_are_those_of_the_gpus_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(OWN | {"gpu_ids": "3,1,2"}, [], None)
    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 4)
    chosen: list[Placement] = []

    def started(*words: Any) -> None:
        chosen.extend(word for word in words if isinstance(word, Placement))
        raise InterruptedError

    monkeypatch.setattr(overlap_module, "run_in_workers", started)
    monkeypatch.setattr(plan, "measure_in_workers", started)
    with pytest.raises(InterruptedError):
        measure_overlap(config, 2)
    with pytest.raises(InterruptedError):
        measure_interconnect(2, config.device)
    assert [[device.index for device in choice.devices] for choice in chosen] == [[3, 1]] * 2


def test_a_real_run_is_read(tmp_path: Path) -> None:
    """The planted millisecond of each sample is the data share; the request says all that the user said."""
    config = resolve(
        OWN | {"data": "tests.support.user_code:SlowItems", "batch_size": "10", "num_workers": "0"}, [], None
    )
    found = run_trainer(config, "single", 1, 16, tmp_path / "a", os.environ)
    assert found["data"] > 0.5
    assert (found["wire"], found["stragglers"]) == (0, 0)
    assert 0 < found["utilisation"] < 70, "asleep for the better part"
    assert 2**26 < found["memory"] < 2**33, "torch is loaded"
    assert found["step_ms"] * found["data"] > 10
    request = (tmp_path / "a.yaml").read_text()
    assert "max_steps: 16" in request
    assert "SlowItems" in request


def test_runs_have_some_seconds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one worker of the first forecast takes in them; 64 at least."""
    asked: list[int] = []

    def return_figures(config: Config, strategy: str, workers: int, steps: int, *rest: Any) -> dict[str, float]:
        asked.append(steps)
        return dict.fromkeys(("step_ms", "data", "wire", "stragglers", "utilisation", "memory"), 1.0)

    monkeypatch.setattr(bench, "run_trainer", return_figures)
    monkeypatch.setattr("multigpu_cli.commands.plan.measure._SECONDS", 0)
    for pause, expected in (("0", (65, 40_000)), ("0.1", (64, 64))):
        monkeypatch.setenv("OWN_PAUSE", pause)
        run_benchmark(resolve(OWN | {"batch_size": "20"}, [], None), [1], None, 2, {})
        assert expected[0] <= asked[-1] <= expected[1]
        assert asked[-1] == asked[-2], "each repetition as many"


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, env, **_: nullcontext(start_forked(command, tmp_path, **env))
    )
    with pytest.raises(WorkersFailed, match=r"^--model nowhere:net: there is no module 'nowhere'") as failed:
        run_trainer(resolve({"model": "nowhere:net"}, [], None), "single", 1, 8, tmp_path / "a", os.environ)
    assert "checkpoint" not in str(failed.value), "a benchmark does not go on"


def test_what_is_made_of_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One worker takes 11 ms for 20 samples, two take 12.5 ms for 40, 2.5 of which nothing hides; dp takes 20 ms."""
    order: list[str] = []

    def return_figures(config: Config, strategy: str, workers: int, *rest: Any) -> dict[str, float]:
        order.append(f"{strategy} {workers}")
        shares = {"memory": 2.0**21} | {
            "data": 0.05,
            "wire": 0.7,
            "stragglers": 0.0,
            "utilisation": math.nan if strategy == "dp" else 90.0,
        }
        return shares | {"step_ms": {"single": 11.0, "ddp": 12.5, "dp": 20.0}[strategy] + (len(order) - 1) // 3 - 1}

    monkeypatch.setattr(bench, "run_trainer", return_figures)
    monkeypatch.setattr("multigpu_cli.commands.plan.measure._SECONDS", 0)
    monkeypatch.setattr("multigpu_cli.commands.plan.measure.count_cores", lambda: 1)
    monkeypatch.setattr(bench, "measure_interconnect", lambda workers, device: Link("planted", 0.0, 1e30, "planted"))
    monkeypatch.setattr(bench, "measure_overlap", lambda config, workers: Overlap(5.0, 2.5) if workers > 1 else None)
    monkeypatch.setattr(bench, "why_no_dp", lambda config: "")
    found = run_benchmark(resolve(OWN | {"batch_size": "20"}, [], None), [1, 2], 10, 3, {})
    assert order == ["single 1", "ddp 2", "dp 2"] * 3, "interleaved"
    one, two, dp = found.rungs
    assert (one.median, two.median, dp.median) == (11.0, 12.5, 20.0)
    assert (two.shares["wire"], two.shares["compute"]) == pytest.approx((0.2, 0.75))
    assert dp.shares["wire"] == 0.7, "there is nothing else to go by"
    assert (two.utilisation, dp.utilisation, dp.error) == (90, None, None)
    assert two.speedup == pytest.approx(2 * 11 / 12.5)
    assert two.efficiency == pytest.approx(11 / 12.5)
    assert two.forecast_ms is not None
    assert two.error == pytest.approx(two.forecast_ms / 12.5 - 1)
    assert found.knob.startswith("communication")
    assert found.about["steps"] == 16, "what the windows of the runs made of ten"
    files = write_files(found, bench.make_output_dir(str(tmp_path / "out")))
    assert json.loads(files[0].read_text())["rungs"][1]["workers"] == 2
    assert files[1].read_bytes().startswith(b"\x89PNG")
    said = "\n".join(format_benchmark(found, files))
    assert "what would help most: communication" in said
    assert "(20% of the time with 2 workers)" in said
    assert "devices busy 90 % of the time; at most 2.00 MiB of memory in a worker" in said
    assert "takes 5.00 ms; overlapped with it, 2.50 ms are left" in said
    with pytest.raises(RequestError, match="--out"):
        write_files(found, tmp_path / "gone")


@pytest.mark.parametrize(
    ("share", "given", "device", "location", "advice"),
    [
        ("data", {}, "cpu", "in host memory", "data: a larger --batch-size (90%"),
        ("data", {}, "cpu", "fetched by 2 processes", "data: more --num-workers, or a TensorDataset (90%"),
        ("data", {}, "GPU", "in host memory", "data: --data-on-device on (90%"),
        ("data", {}, "GPU", "in GPU memory", "data: a faster source (90%"),
        (
            "wire",
            {"grad_compression": "bf16"},
            "cpu",
            "",
            "communication: a larger --batch-size, --grad-accum-steps, f",
        ),
        ("wire", {"exact": True}, "cpu", "", "communication: a larger --batch-size, --grad-accum-steps, faster links"),
        ("compute", {}, "cpu", "", "the device itself: --amp, --compile, a larger --batch-size (90%"),
        ("compute", {"compile": "default", "amp": "bf16"}, "cpu", "", "the device itself: a larger --batch-size (90%"),
    ],
)
def test_advice_of_bench_has_an_effect(
    share: str, given: dict[str, Any], device: str, location: str, advice: str
) -> None:
    names = ("data", "wire", "stragglers", "compute")
    shares = {name: 0.9 if name == share else 0.03 for name in names}
    rung: Any = SimpleNamespace(strategy="ddp", shares=shares, workers=2)
    plan = SimpleNamespace(device=device, precision=given.get("amp", "off"))
    loaders = SimpleNamespace(train=SimpleNamespace(data_location=location))
    components: Any = SimpleNamespace(plan=plan, loaders=loaders)
    assert bench._choose_advice([rung], resolve(given, [], None), components).startswith(advice)


def test_sharded_workers_take_the_place_of_ddp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its wire is not measured: what is no waiting for data is compute and wire, in table, plot and advice."""
    order: list[str] = []

    def return_figures(config: Config, strategy: str, workers: int, *rest: Any) -> dict[str, float]:
        order.append(f"{strategy} {workers}")
        return {"step_ms": 10.0, "data": 0.05, "wire": 0.0, "stragglers": 0.0, "utilisation": 90.0, "memory": 2.0**21}

    monkeypatch.setattr(bench, "run_trainer", return_figures)
    monkeypatch.setattr("multigpu_cli.commands.plan.measure._SECONDS", 0)
    monkeypatch.setattr("multigpu_cli.commands.plan.measure.count_cores", lambda: 1)
    monkeypatch.setattr(bench, "measure_interconnect", lambda workers, device: Link("planted", 0.0, 1e30, "planted"))
    found = run_benchmark(resolve(OWN | {"batch_size": "20", "multi_gpu": "fsdp"}, [], None), [1, 2], 10, 1, {})
    assert order == ["single 1", "fsdp 2"]
    one, two = found.rungs
    assert list(one.shares) == ["data", "wire", "stragglers", "compute"]
    assert two.shares == pytest.approx({"data": 0.05, "compute and wire": 0.95})
    assert two.forecast_ms is not None
    files = write_files(found, bench.make_output_dir(str(tmp_path / "out")))
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "95% compute and wire; devices busy" in "\n".join(format_benchmark(found, files))
    assert found.knob.startswith("device and communication: a larger --batch-size, --reshard step, --amp, faster links")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main_multi_gpu.run(["bench", "--model", "nowhere:net", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err


def test_data_parallel_is_measured_where_it_is_possible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its request names the GPUs; whether they do it is for a machine that has some."""
    for gpus, flags, reason in (
        (0, {}, "it needs two GPUs, and there is none to use"),
        (1, {}, "it needs two GPUs, and there is 1 to use"),
        (2, {"gpu_ids": "1"}, "it needs two GPUs, and there is 1 to use"),
        (2, {"exact": True}, "it can't be --exact"),
        (2, {"multi_gpu": "fsdp"}, "--multi-gpu fsdp is measured instead"),
        (2, {"compile": "default"}, "it can't be compiled"),
        (2, {}, ""),
    ):
        monkeypatch.setattr(placement, "count_visible_gpus", lambda gpus=gpus: gpus)
        assert why_no_dp(resolve(OWN | flags, [], None)) == reason

    def started(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(bench, "run_cli", started)
    with pytest.raises(InterruptedError):
        run_trainer(resolve(OWN, [], None), "dp", 2, 8, tmp_path / "a", {})
    request = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert (request["multi_gpu"], request["gpu_ids"]) == ("dp", [0, 1])
