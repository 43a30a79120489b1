"""How figures of a GPU are gathered: with processes that were played, and tiny ones on the CPU."""

import json
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_side, gpu_workloads
from benchmarks.gpu import Turn
from benchmarks.gpu_side import Kernels, idle_share
from benchmarks.gpu_workloads import CannotRun, data_dir, jobs, resnet50
from benchmarks.paired_timing import ROOT
from tests.benchmarks.forked import run_module
from tests.monitor.test_meters import Clock

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """A call of the command on a machine with a GPU: its exit code, the JSON on stdout, and what went to stderr."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA played")
    monkeypatch.setattr(gpu_workloads, "has_triton_package", lambda: True)
    for folder in ("har", "fashion-mnist"):
        (tmp_path / "data" / folder).mkdir(parents=True)

    def made(measure: Measure, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        monkeypatch.setattr(gpu, "measure", measure)
        code = gpu.main([*words, "--into", str(tmp_path / "rows"), "--data", str(tmp_path / "data")])
        out, err = capsys.readouterr()
        return code, list(map(json.loads, out.splitlines())), err

    return made


def good(turn: Turn, data: Any, seconds: float, *, tiny: bool) -> dict[str, Any]:
    if turn.job == "fashion-mnist":
        return {"value": 20.0 + turn.number, "unit": "s", "steps": 4, "peak_memory_bytes": 2**30}
    rate = 99.0 if turn.side == "ours" else 100.0
    found = {"value": rate, "unit": "samples/s", "steps": 4, "peak_memory_bytes": 2**31}
    return found | {"kernel_gaps": 0.02, "mfu": 0.4} if turn.side == "ours" else found


def broken(turn: Turn, *about: Any, **more: Any) -> dict[str, Any]:
    return {"error": "RequestError: no data"} if turn.job == "har" else good(turn, *about, **more)


def test_a_job_that_fails_costs_no_other_its_rows_and_may_be_tried_again(call: Any) -> None:
    code, rows, _ = call(broken)
    of_har = [each for each in rows if each.get("job") == "har"]
    assert (code, len(of_har)) == (1, 6)
    assert all(each["error"] == "RequestError: no data" for each in of_har)
    found = {each["figure"]: each for each in rows if "figure" in each}
    share = found["GPT-2 124M, bf16, 1,024 tokens, --compile off: ours / limit"]
    assert (share["value"], share["verdict"]) == (0.99, "≥ 0.98")
    assert found["GPT-2 124M, bf16, 1,024 tokens, --compile off: ours, peak memory"]["value"] == 2
    assert found["GPT-2 124M, bf16, 1,024 tokens, --compile off: ours, time without a kernel"]["value"] == 2
    assert found["GPT-2 124M, bf16, 1,024 tokens, --compile off: ours, MFU"]["value"] == 40
    assert found["Fashion-MNIST, seconds to 94% on the validation part"]["value"] == 21
    asked: list[Turn] = []

    def noted(turn: Turn, *about: Any, **more: Any) -> dict[str, Any]:
        asked.append(turn)
        return good(turn, *about, **more)

    assert (call(noted)[0], asked) == (1, []), "what is in the file is not measured again"
    code, rows, _ = call(noted, "--again")
    assert code == 0
    assert asked == [Turn("har", side, number) for number in range(3) for side in ("ours", "limit")]
    assert "HAR convnet, batch 64, --compile off: ours / limit" in [each.get("figure") for each in rows]


def test_figures_are_of_the_code_that_they_were_measured_with(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    for code in ("a", "a", "b"):
        monkeypatch.setattr(gpu, "code_mark", lambda *patterns, code=code: code)
        measured.append(sum("job" in each for each in call(good, "gpt2", "--turns", "1")[1]))
    assert measured == [2, 0, 2]


def test_a_call_ends_in_time_and_the_next_one_goes_on(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement takes 100 s, that of ResNet for ever."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)

    def slow(turn: Turn, data: Any, seconds: float, *, tiny: bool) -> dict[str, Any]:
        clock.pass_by(100 if turn.job == "gpt2" else seconds)
        if turn.job == "resnet50" or seconds < 100:
            raise subprocess.TimeoutExpired("", seconds)
        return good(turn, data, seconds, tiny=tiny)

    codes, seen = [], []
    for _ in range(4):
        began = clock.now
        code, rows, err = call(slow, "gpt2", "resnet50", "--turns", "1")
        assert clock.now - began <= 570
        codes.append(code)
        seen.append([(each["job"], each["side"], "error" in each) for each in rows if "job" in each])
        assert ("goes on" in err) == (code == gpu.STOPPED)
    assert seen == [
        [("gpt2", "ours", False), ("gpt2", "limit", False)],
        [("resnet50", "ours", True)],
        [("resnet50", "limit", True)],
        [],
    ]
    assert codes == [gpu.STOPPED, gpu.STOPPED, 1, 1]


def test_data_that_is_not_there_is_said_and_an_archive_is_unpacked_once(tmp_path: Path) -> None:
    har = jobs()["har"]
    with pytest.raises(CannotRun, match=f"no folder har in {tmp_path}: --data names another place"):
        data_dir(har, [tmp_path], tmp_path)
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    (home / "har").mkdir(parents=True)
    assert data_dir(har, [tmp_path / "nowhere", home], scratch) == {"data_dir": str(home / "har")}
    (tmp_path / "labels.txt").write_text("1 WALKING")
    with tarfile.open(home / "har" / "uci-har.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "labels.txt", "UCI HAR Dataset/labels.txt")
    for _ in range(2):
        found = data_dir(har, [home], scratch)
        assert Path(found["data_dir"], "UCI HAR Dataset", "labels.txt").read_text() == "1 WALKING"
    assert data_dir(jobs()["gpt2"], [], scratch) == {}


def test_a_compiled_job_without_triton_is_left_out_and_fails_nothing(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_workloads, "has_triton_package", lambda: False)
    code, rows, _ = call(good, "har", "har-compiled", "--turns", "1")
    skipped = "Triton is not installed, and torch.compile needs it for a GPU"
    said = [(each["job"], each.get("skipped")) for each in rows if "job" in each]
    assert (code, said) == (0, [("har", None)] * 2 + [("har-compiled", skipped)] * 2)


def test_the_share_of_time_without_a_kernel() -> None:
    assert idle_share([]) is None
    assert idle_share([(0, 4), (2, 6), (8, 10)]) == pytest.approx(0.2)
    assert idle_share([(5, 6), (0, 10)]) == 0


def test_kernels_are_counted_for_each_step_and_the_slowest_come_first() -> None:
    kernels = Kernels(10, 12)
    kernels.note([("gemm", 0, 4), ("copy", 4, 5), ("gemm", 6, 8), *((f"small {n}", 8, 8.2) for n in range(11))])
    assert (kernels.launches, len(kernels.slowest)) == (7, 10)
    assert kernels.slowest[:3] == [("gemm", 3.0), ("copy", 0.5), ("small 0", 0.1)]
    assert kernels.gaps == pytest.approx(1 / 8.2)


def test_resnet50_is_torchvisions() -> None:
    with torch.device("meta"):
        model = resnet50((3, 224, 224), 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


@pytest.mark.parametrize("side", ["ours", pytest.param("limit", marks=pytest.mark.slow)])
def test_a_side_measures_in_a_process_of_its_own_and_counts_no_warm_up(side: str) -> None:
    found = gpu.measure(Turn("gpt2", side, 0), {}, 240, tiny=True)
    assert (found.get("error"), found["unit"], found["steps"]) == (None, "samples/s", 4)
    assert found["value"] == pytest.approx(4 * 2 / found["seconds"])
    assert found["peak_memory_bytes"] > 0
    assert found["kernel_gaps"] is found["launches"] is None, "there is no GPU to look at"
    assert found["host_seconds"] > 0


def test_the_limit_has_what_ours_sets_and_warms_up_outside_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    job, cpu = jobs(tiny=True)["gpt2"], torch.device("cpu")
    monkeypatch.setattr(gpu_side, "enable_fast_kernels", lambda device: done.append("fast"))
    monkeypatch.setattr(gpu_side, "_plain_step", lambda *_: lambda: done.append("step"))
    monkeypatch.setattr(time, "perf_counter", lambda: done.append("clock") or float(len(done)))
    assert gpu_side._limit(job, cpu)["steps"] == 4
    timed = done[len(done) - done[::-1].index("clock") - 6 :][:6]
    assert (done[0], timed) == ("fast", ["clock", *["step"] * 4, "clock"])
    assert done.index("step") < len(done) - done[::-1].index("clock") - 6, "the first steps come before"


def test_the_limit_of_a_compiled_job_has_its_loss_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, torch.Size]] = []

    def compile(function: Callable[..., torch.Tensor], mode: str) -> Callable[..., torch.Tensor]:
        def call(*given: Any) -> torch.Tensor:
            found = function(*given)
            compiled.append((mode, found.shape))
            return found

        return call

    monkeypatch.setattr(torch, "compile", compile)
    for name in ("gpt2", "gpt2-compiled"):
        gpu_side._plain_step(jobs(tiny=True)[name], torch.device("cpu"))()
    assert compiled == [("default", torch.Size([]))]


def test_the_data_is_copied_to_where_git_ignores_it(tmp_path: Path) -> None:
    """For a machine that has this folder alone; also from files that nobody may write."""
    (project := tmp_path / "project").mkdir()
    for name in ("Makefile", ".gitignore"):
        (project / name).write_text((ROOT / name).read_text())
    for folder in ("har", "fashion-mnist"):
        file = tmp_path / "shared" / "data" / folder / "file"
        file.parent.mkdir(parents=True)
        file.write_text(folder)
        file.chmod(0o444)
    for _ in range(2):
        subprocess.run(["make", "--silent", "gpu-data"], cwd=project, check=True)
    copied = [project / "shared" / "data" / folder / "file" for folder in ("har", "fashion-mnist")]
    assert [(file.read_text(), file.stat().st_mode & 0o200) for file in copied] == [
        ("har", 0o200),
        ("fashion-mnist", 0o200),
    ]
    assert "/shared/" in (project / ".gitignore").read_text().splitlines()


def test_a_side_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", run_module)
    found = gpu.measure(Turn("har", "ours", 0), {"data_dir": "nowhere"}, 240, tiny=True)
    assert "nowhere" in found["error"]


def test_without_a_gpu_it_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().err.count("skipped") == len(jobs())
