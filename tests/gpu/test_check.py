"""The runner of make gpu-check: one line for each check, whatever becomes of it, and a call that goes on."""

import json
import os
import runpy
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import check, runner
from tests.gpu.machine import describe_machine
from tests.gpu.registry import CHECKS, Check
from tests.gpu.results import Results
from tests.gpu.trial_checks import STARTED

HERE = {"device": "a GPU", "code": "1"}
TRIALS = {name: Check(f"tests.gpu.trial_checks:{name}", limit=20) for name in ("passes", "fails", "breaks", "dies")}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results.jsonl", HERE)


def lines(results: Results, budget: float = 60, simulated: bool = False) -> dict[str, dict[str, Any]]:
    names = results.left(runner.CHECKS)
    return {line["check"]: line for line in runner.run_all(names, results, budget, simulated=simulated)}


def test_each_check_leaves_a_line_whatever_becomes_of_it(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = TRIALS | {"real": Check("tests.gpu.trial_checks:dies", real=True)}
    monkeypatch.setattr(runner, "CHECKS", trials)
    found = lines(results, simulated=True)
    verdicts = {name: line["verdict"] for name, line in found.items()}
    failed = dict.fromkeys(("fails", "breaks", "dies"), "failed")
    assert verdicts == {"passes": "passed"} | failed | {"real": "unverified"}
    assert found["passes"]["facts"]["empty"]
    assert found["passes"]["facts"]["process"] != os.getpid()
    said = {"fails": "one is not two", "breaks": "unspecified launch failure", "dies": "ended with 3", "real": "simul"}
    assert [name for name, words in said.items() if words not in found[name]["said"]] == []
    assert "a last word" in found["dies"]["said"]
    end, code = results.end(list(trials))
    assert (end["end"], end["passed"], end["failed"], code) == ("failed", 1, ["fails", "breaks", "dies"], 1)


def goes_on(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone
        return False


def test_a_check_that_hangs_is_ended_with_all_that_it_started(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHECKS", {"hangs": Check("tests.gpu.trial_checks:hangs", limit=3)})
    monkeypatch.setenv(STARTED, str(tmp_path / "started"))
    found = lines(results)["hangs"]
    assert (found["verdict"], found["said"].splitlines()[0]) == ("failed", "not done after 3 s")
    started, until = Path("/proc", (tmp_path / "started").read_text(), "stat"), time.monotonic() + 30
    while goes_on(started) and time.monotonic() < until:  # a killed process ends when a processor has time for it
        time.sleep(0.01)
    assert not goes_on(started)


def test_a_call_whose_time_is_over_stops_and_the_next_goes_on(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHECKS", TRIALS)
    found = {name: line["verdict"] for name, line in lines(results, budget=0).items()}
    assert found == {"passes": "passed"}, "the first of a call has all of its time, others need theirs"
    end, code = results.end(list(TRIALS))
    assert (end["end"], end["left"], code) == ("unfinished", ["fails", "breaks", "dies"], 75)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"check": "fails", "verd')  # a call that was killed
    again = Results(tmp_path / "results.jsonl", HERE)
    assert again.left(TRIALS) == ["fails", "breaks", "dies"]
    assert Results(tmp_path / "results.jsonl", HERE | {"code": "2"}).left(TRIALS) == list(TRIALS)


def test_green_is_green_with_what_only_a_real_gpu_shows_left_unverified(results: Results) -> None:
    results.add("one", "failed", "", 1, {})
    results.add("one", "passed", "", 1, {})
    results.add("two", "unverified", "simulated", 0, {})
    assert results.end(["one", "two"]) == (
        {"end": "green", "passed": 1, "failed": [], "unverified": ["two"], "skipped": [], "left": []},
        0,
    )


def test_what_needs_more_gpus_is_skipped_by_name(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = {name: Check("tests.gpu.trial_checks:passes", needs=needs) for name, needs in (("two", 2), ("eight", 8))}
    monkeypatch.setattr(runner, "CHECKS", trials)
    found = []
    for line in runner.run_all(list(trials), results, 60, simulated=True, devices=4):
        found.append(line)
        written = (tmp_path / "results.jsonl").read_text().splitlines()
        assert list(map(json.loads, written)) == found, "as each one ends"
    assert [(line["check"], line["verdict"]) for line in found] == [("two", "passed"), ("eight", "skipped")]
    assert found[1]["said"] == "8 GPUs are needed, and 4 here"
    end, code = results.end(list(trials))
    assert (end["end"], end["passed"], end["skipped"], code) == ("green", 1, ["eight"], 0)


def test_every_check_is_there_and_says_so_if_asked_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    functions = [check.function.partition(":") for check in CHECKS.values()]
    assert all(callable(getattr(import_module(module), name)) for module, _, name in functions)
    with pytest.raises(SystemExit) as refused:
        check.main(["--only", "bf16,bf17"])
    assert refused.value.code == 2
    assert "no check bf17" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "about", describe_machine)  # in this process
    monkeypatch.setattr(sys, "argv", ["check", "--results", str(tmp_path / "results.jsonl")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(check.__file__, run_name="__main__")
    assert (json.loads(capsys.readouterr().out)["end"], ended.value.code) == ("no CUDA device here", 2)
    assert not (tmp_path / "results.jsonl").exists()
