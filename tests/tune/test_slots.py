"""Slots: GPUs or processes of this machine, and nodes of a SLURM allocation, with a stand-in for srun and for real."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import read_events
from multigpu_cli.tune.driver import read_error
from multigpu_cli.tune.study import choose_slots
from tests.support.slurm import Cluster, cluster, missing
from tests.tune.studies import count_events, read_trials, tune

ROOT = Path(__file__).resolve().parents[2]
GPUS: dict[str, Any] = {"gpus": [0, 2], "cores": 2}
CORES: dict[str, Any] = {"gpus": [], "cores": 2}
SRUN = """#!/bin/sh
[ "$2" = --nodes=2 ] && exec printf '.\\nnode n2 9 2\\nnode n1 9 4\\n'
echo "$@" CUDA "$CUDA_VISIBLE_DEVICES" "$SLURM_NTASKS"
"""


def test_slots_are_gpus_or_as_many_processes_as_asked_for() -> None:
    assert choose_slots(None, 1, CORES, {}, srun=False).names == ["", ""]
    assert choose_slots(5, 1, CORES, {}, srun=False).names == [""] * 5
    assert choose_slots(None, 1, GPUS, {}, srun=False).names == ["0", "2"]
    assert choose_slots(1, 1, GPUS, {"CUDA_VISIBLE_DEVICES": "4,5,GPU-6"}, srun=False).names == ["4"]
    with pytest.raises(RequestError, match="--slots 3, 1 per trial: there are 2 GPUs on 1 node"):
        choose_slots(3, 1, GPUS, {}, srun=False)
    with pytest.raises(RequestError, match="--slots 2, 4 per trial: there are 2 cores on 1 node"):
        choose_slots(None, 4, CORES, {}, srun=False)


def test_an_allocation_has_the_slots_of_its_nodes_and_a_step_asks_for_its_own_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "5"}
    slots = choose_slots(None, 2, CORES, environ, srun=True)
    assert slots.nodes == ["n1"] * 4 + ["n2"] * 2
    assert [slots.pick({2, 3, 4, 5}, 3), slots.pick({3, 4, 5}, 9), slots.pick({}, 1)] == [[2, 3], [4, 5], []]
    with slots.start(["train"], [4, 5], stdout=subprocess.PIPE, text=True) as process:
        (said,) = process.communicate()[0].splitlines()
    assert "--exact" in said
    assert "--nodelist=n2 --cpus-per-task=4 --gres=gpu:2" in said
    assert "main_multi_gpu.py train CUDA" in said
    assert not said.endswith("5")
    with pytest.raises(RequestError, match="--slots 7, 1 per trial: there are 6 GPUs on 2 nodes"):
        choose_slots(7, 1, CORES, environ, srun=True)
    with pytest.raises(RequestError, match="--slots 6, 5 per trial: there are 6 GPUs on 2 nodes"):
        choose_slots(None, 5, CORES, environ, srun=True)
    with pytest.raises(RequestError, match=r"--srun: this is no SLURM allocation.*\n.*sbatch or salloc"):
        choose_slots(None, 1, CORES, {"PATH": environ["PATH"]}, srun=True)
    (tmp_path / "srun").write_text("#!/bin/sh\necho node n1 1 2\n")
    with pytest.raises(RequestError, match="n1 has fewer cores than GPUs"):
        choose_slots(None, 1, CORES, environ, srun=True)
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'srun: error: Invalid job id specified' >&2; exit 1\n")
    with pytest.raises(RequestError, match="--srun: Invalid job id specified"):
        choose_slots(None, 1, CORES, environ, srun=True)


def test_the_last_error_is_that_of_the_run_and_not_what_srun_says_of_its_exit_code() -> None:
    noted = "srun: error: n1: task 0: Exited with exit code 1\n"
    assert read_error(f"error: first\nerror: no such file\n  try: another\n{noted}") == "no such file\n  try: another"
    assert read_error(noted) == read_error("") == ""
    assert read_error("srun: error: Unable to create step\n") == "Unable to create step"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(params=[("--ntasks-per-node=2",), ("--ntasks-per-node=2", "--gpus-per-node=2")], ids=["cores", "gpus"])
def allocation(slurm: Cluster, request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """The environment of a process in an allocation of two nodes with two slots each; its GPUs no program finds."""
    slurm.ask("salloc", "--no-shell", "--nodes=2", "--quiet", "--job-name=study", *request.param)
    job = slurm.ask("squeue", "--noheader", "--name=study", "--format=%i")
    yield slurm.environ | {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2"}
    slurm.ask("scancel", job)
    slurm.wait(job, 60, "CANCELLED")


CODE = """
import os, sys
from pathlib import Path
from multigpu_cli.tune import driver
from multigpu_cli.tune.driver import Driver
from multigpu_cli.tune.study import choose_slots, summarize
from tests.tune.studies import FAKE, make_driver, make_study
driver.FRONT_DOOR = FAKE
own = make_driver(Path(sys.argv[1]), make_study(trials=6, generation=3, rungs=[1, 3, 9]), 2, {"FAKE_EPOCH": "0.2"})
if "SLURM_JOB_ID" in os.environ:
    there = choose_slots(None, 1, {"gpus": [], "cores": 2}, dict(os.environ, FAKE_EPOCH="0.2"), srun=True)
    own = Driver(own.path, own.space, there, print)
print(summarize(own, own.run())["status"])
"""


@pytest.mark.slurm
def test_steps_stop_with_their_driver_and_a_killed_study_ends_as_one_on_this_machine(
    slurm: Cluster, allocation: Mapping[str, str], tmp_path: Path
) -> None:
    def start(folder: Path, environ: Mapping[str, str]) -> "subprocess.Popen[str]":
        own = [sys.executable, "-c", CODE, str(folder)]
        return subprocess.Popen(own, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def trains() -> bool:
        return process.poll() is not None or count_events(tmp_path) >= before + 3

    steps = ("squeue", "--steps", "--noheader", f"--job={allocation['SLURM_JOB_ID']}", "--format=%i")
    for number, ends in ((signal.SIGTERM, "stopped\n"), (signal.SIGKILL, "")):
        before = count_events(tmp_path)
        process = start(tmp_path, allocation)
        slurm.wait_for(trains, 60, "starts")
        process.send_signal(number)
        said = process.communicate()[0]
        assert said.endswith(ends), said
        slurm.wait_for(lambda: not slurm.ask(*steps), 60, "the end of the steps")
    said = start(tmp_path, allocation).communicate()[0]
    assert said.endswith("completed\n"), said
    assert start(tmp_path / "local", slurm.environ).communicate()[0] == "completed\n"
    assert read_trials(tmp_path) == read_trials(tmp_path / "local")
    journals = (read_events(file) for file in tmp_path.glob("trials/*/journal.jsonl"))
    starts = [event for events in journals for event in events if event["event"] == "start"]
    assert {event["world_size"] for event in starts} == {1, 2}  # the last of a generation inherits, on its own node
    if slurm.ask("squeue", "--noheader", "--format=%b", f"--job={allocation['SLURM_JOB_ID']}") != "N/A":
        assert all(len(event["gpus"].split(",")) == event["world_size"] for event in starts)
    else:
        assert {event["gpus"] for event in starts} == {""}


@pytest.mark.slurm
@pytest.mark.parametrize("allocation", [("--ntasks-per-node=2",)], indirect=True)
def test_a_study_in_an_allocation_is_that_of_local_slots_to_the_bit(
    slurm: Cluster, allocation: Mapping[str, str], tmp_path: Path
) -> None:
    def run(name: str, *words: str, slots: int) -> "subprocess.CompletedProcess[str]":
        own = tune(tmp_path / name, "--trials", "2", "--generation", "2", "--json", *words, slots=slots)
        return subprocess.run(own, env=allocation, capture_output=True, text=True, check=False)

    refused = run("steps", "--srun", slots=5)
    assert refused.returncode == 2
    assert "--slots 5, 1 per trial: there are 4 cores on 2 nodes" in refused.stderr
    assert not (tmp_path / "steps").exists()
    found = [run("local", slots=2), run("steps", "--srun", slots=4)]
    assert [each.returncode for each in found] == [0, 0], found
    assert read_trials(tmp_path / "steps") == read_trials(tmp_path / "local")
    assert json.loads(found[0].stdout)["best"] == json.loads(found[1].stdout)["best"]
    assert (slurm.folder / "slurmd-n2.log").read_text().count("launch task") > 1
