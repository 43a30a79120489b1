"""deploy/slurm.sbatch under a real SLURM: the ways in which a job ends there."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.launcher import options
from tests.support.slurm import Cluster, cluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(reason := missing()), reason=reason)]
FLAGS = {
    "data": "tests.support.user_code:tensors",
    "model": "tests.support.user_code:net",
    "set": "guard=off",  # the network counts its passes
    "exact": True,
    "epochs": 24,
    "batch_size": 5,
}
WORDS = options(FLAGS | {"global_batch_size": 20, "log_interval": 1, "quiet": True})
"""72 steps; with OWN_PAUSE=0.5 they take a minute and more."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(slurm: Cluster) -> dict[str, Any]:
    """The summary of a job that nothing disturbed."""
    number = slurm.submit(*WORDS, "--save-dir", str(slurm.folder / "whole"))
    assert slurm.wait(number, 120, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", slurm.output(number)
    return summary(slurm, "whole")


def summary(slurm: Cluster, run: str) -> dict[str, Any]:
    return dict(json.loads((slurm.folder / run / "summary.json").read_text()))


def trains(slurm: Cluster, run: str, *flags: str) -> str:
    """The number of a job that has begun to train, slowly, and would take a minute and more."""
    folder = slurm.folder / run
    number = slurm.submit(*WORDS, "--save-dir", str(folder), flags=flags, OWN_PAUSE="0.5")
    journal = folder / "journal.jsonl"
    begun = lambda: journal.exists() and '"train"' in journal.read_text()  # noqa: E731
    slurm.wait_for(begun, 90, "the first step", number)
    return number


def is_saved(slurm: Cluster, run: str, number: str) -> None:
    found, said = summary(slurm, run), slurm.output(number)
    newest = max((slurm.folder / run / "checkpoints").iterdir()).name
    assert (found["status"], newest) == ("stopped", f"step_{found['steps']:08d}"), said
    assert "Traceback" not in said
    assert said.count("stopped with a checkpoint") == 1, said


def goes_on_to_the_same_end(slurm: Cluster, run: str, number: str, whole: dict[str, Any]) -> None:
    """SLURM lets a job that is queued again wait for two minutes; here a few seconds, which its credentials need."""
    assert slurm.wait(number, 120, "PENDING")["Restarts"] == "1"
    is_saved(slurm, run, number)
    slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now+5", "TimeLimit=30")
    assert slurm.wait(number, 240, "COMPLETED", "FAILED", "TIMEOUT")["JobState"] == "COMPLETED", slurm.output(number)
    found = summary(slurm, run)
    assert found["fingerprint"] == whole["fingerprint"]
    assert found["resumed_from"] is not None


def test_a_cancelled_job_saves_and_stays_away(slurm: Cluster) -> None:
    number = trains(slurm, "cancelled")
    slurm.ask("scancel", number)
    slurm.wait(number, 60, "CANCELLED", "PENDING")
    slurm.wait_for(lambda: "stopped with" in slurm.output(number), 60, "the script's last words", number)
    found = slurm.job(number)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0"), slurm.output(number)
    is_saved(slurm, "cancelled", number)
    assert found["ExitCode"] == "75:0"


def test_at_the_time_limit_it_is_queued_again(slurm: Cluster, whole: dict[str, Any]) -> None:
    """The limit is lowered when training has begun; SLURM looks at the clock every half a minute."""
    number = trains(slurm, "limited", "--time=30", "--signal=B:USR1@170")
    slurm.ask("scontrol", "update", f"JobId={number}", "TimeLimit=3")
    goes_on_to_the_same_end(slurm, "limited", number, whole)
    assert f"job {number} is queued again" in slurm.output(number)


@pytest.mark.parametrize("partition", ["usual", "patient"])
def test_a_preempted_job_goes_on_when_the_nodes_are_free(slurm: Cluster, whole: dict[str, Any], partition: str) -> None:
    """One partition tells script and workers at once, and kills after KillWait; the other warns the workers alone."""
    number = trains(slurm, partition, f"--partition={partition}")
    urgent = ("--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=true")
    other = slurm.ask("sbatch", "--parsable", *urgent)
    slurm.wait(other, 90, "COMPLETED")
    goes_on_to_the_same_end(slurm, partition, number, whole)
