"""Disks that are full and folders that vanish: the run goes on where it can, and nothing written before is harmed."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.commands.clean import list_checkpoints
from multigpu_cli.monitor import journal
from tests.support import disk_fault_model
from tests.support.fork import exit_code, write_output_to
from tests.support.run_training import Ended, run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {"save_dir": "run", "batch_size": 10, "epochs": 4, "checkpoint_every": "3", "log_interval": 1}
STEPS = 24
NET = {"model": "tests.support.disk_fault_model:net"}


def under(deeds: str, workers: int = 1, **flags: Any) -> Ended:
    """A run with these deeds."""
    return run_training(workers, **RUN | NET | flags, environ={"FAULTS": deeds})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the same run where nothing goes wrong, and its best weights."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    summary = under("", save_dir=str(run)).summary
    return summary | {"best.pt": torch.load(run / "best.pt", weights_only=True)["model"]}


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in journal.read_events("run/journal.jsonl") if event["event"] == kind]


def states() -> dict[str, str]:
    return {entry.name: entry.state for entry in list_checkpoints(Path("run"))}


def steps_traced() -> Counter[int]:
    return Counter(int(line.split(":")[1].split(",")[0]) for line in Path("run/samples.jsonl").read_text().splitlines())


def leftovers(run: Path = Path("run")) -> list[str]:
    return [str(path) for path in run.rglob("*") if "draft" in path.name]


def same_best(undisturbed: dict[str, Any]) -> bool:
    found = torch.load("run/best.pt", weights_only=True)["model"]
    return all(torch.equal(found[name], value) for name, value in undisturbed["best.pt"].items())


def test_a_disk_that_is_full_for_a_while_costs_the_checkpoints_of_that_while(undisturbed: dict[str, Any]) -> None:
    """Not a line of the journal or of samples.jsonl, and not the best weights, though they came meanwhile."""
    best = undisturbed["best"]["step"]
    ended = under(f"{best}:full,{best + 5}:room", keep="9", trace_samples=True)
    assert ended.error == ""
    assert ended.summary["fingerprint"] == undisturbed["fingerprint"]
    assert (
        [fault["kind"] for fault in ended.summary["faults"]]
        == ["checkpoint"] * 2
        == [event["kind"] for event in events("fault")]
    )
    assert [event["step"] for event in events("train")] == list(range(1, STEPS + 1))
    assert steps_traced() == Counter(range(1, STEPS + 1))
    written = {event["step"] for event in events("checkpoint")}
    assert set(range(3, STEPS + 1, 3)) - written == {best, best + 3}
    assert states() == {f"checkpoints/step_{step:08d}": "whole" for step in written} | {
        "best.pt": "whole",
        "last.pt": "whole",
    }
    assert same_best(undisturbed)
    assert leftovers() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_where_it_stays_full_the_run_fails_and_goes_on_later(workers: int, undisturbed: dict[str, Any]) -> None:
    ended = under("8:full", workers)
    assert ended.kind == "TrainingError"
    assert ended.error.startswith("the last checkpoint could not be written to run: ")
    assert "run the same command again" in ended.error
    assert set(states().values()) == {"whole"}, "what was written before is as it was"
    assert leftovers() == []
    before = max(name for name in states() if "step" in name)
    again = under("", workers)
    assert again.error == ""
    assert again.summary["resumed_from"] == f"run/{before}"
    if workers == 1:
        assert again.summary["fingerprint"] == undisturbed["fingerprint"]
        assert same_best(undisturbed)


def test_a_full_disk_ends_in_one_message_and_no_traceback() -> None:
    """Through the front door, with TensorBoard at work."""
    flags = ["--data", "tests.support.user_code:tensors", *(word for name in NET for word in (f"--{name}", NET[name]))]
    flags += [word for name in RUN for word in (f"--{name.replace('_', '-')}", str(RUN[name]))]
    pipes = [os.pipe() for _ in range(2)]  # since no file takes what is said then

    def start() -> None:
        os.environ["FAULTS"] = "8:full"
        write_output_to(*(os.fdopen(write, "w") for _, write in pipes))
        main_multi_gpu.leave(main_multi_gpu.run([*flags, "--quiet"]))

    assert exit_code(start) == 1
    said = []
    for read, write in pipes:
        os.close(write)
        with open(read) as file:
            said.append(file.read())
    out, err = said
    assert err.startswith("error: the last checkpoint could not be written to run: [Errno 27] File too large")
    assert err.count("error") == 1
    assert "Traceback" not in err + out
    warnings = [line.split("(")[0] for line in out.splitlines() if line.startswith("warning: ")]
    assert "warning: run/journal.jsonl can't be written " in warnings
    assert len(warnings) == len(set(warnings)), "each once"


def test_a_disk_that_is_full_before_the_start_is_a_wrong_request() -> None:
    """Nothing can be read from a process that can't write; so it says by its exit code that it was refused."""

    def start() -> None:
        from multigpu_cli.checkpoint.files import lock_folder
        from multigpu_cli.errors import RequestError

        disk_fault_model.full()
        with (
            pytest.raises(RequestError, match=r"--save-dir run: File too large\n  try: free some space"),
            lock_folder(Path("run")),
        ):
            pass

    assert exit_code(start) == 0


def test_a_folder_of_checkpoints_that_vanishes_is_made_again(undisturbed: dict[str, Any]) -> None:
    ended = under("8:emptied", keep="9")
    assert ended.error == ""
    assert ended.summary["fingerprint"] == undisturbed["fingerprint"]
    assert [name for name in states() if "step" in name] == [
        f"checkpoints/step_{step:08d}" for step in range(9, STEPS + 1, 3)
    ]


def test_a_run_folder_that_vanishes_is_named_and_one_that_comes_back_is_used(undisturbed: dict[str, Any]) -> None:
    ended = under("8:gone,14:back", keep="9", trace_samples=True)
    assert ended.error == ""
    assert ended.summary["fingerprint"] == undisturbed["fingerprint"]
    assert ["the run folder was removed" in fault["action"] for fault in ended.summary["faults"][:2]] == [True, True]
    assert [event["step"] for event in events("train")] == list(range(1, STEPS + 1)), "the journal is whole again"
    assert steps_traced() == Counter(range(1, STEPS + 1))
    assert set(states().values()) == {"whole"}
    assert "best.pt" in states()


def test_a_run_folder_that_stays_away_is_named_at_the_end() -> None:
    ended = under("8:gone")
    assert ended.kind == "TrainingError"
    assert "could not be written to run: [Errno 2] the run folder was removed" in ended.error
    assert not Path("run").exists(), "it is not ours to make"


def test_another_run_in_the_place_of_ours_is_left_alone() -> None:
    ended = under("8:taken")
    assert "run now belongs to another run" in ended.error
    there = {path.name for path in Path("run").iterdir()} - {"logs"}  # the crash report, in a file of its own
    assert there == {".lock", "journal.jsonl"}
    assert Path("run/journal.jsonl").read_text() == ""


def test_drafts_of_a_killed_run_are_gone_at_the_next_start() -> None:
    assert run_training(**RUN | {"epochs": 1}).error == ""
    Path("run/.best.pt.123.draft").write_text("half")
    Path("run/checkpoints/.draft_step_00000099").mkdir()
    assert leftovers()
    assert run_training(**RUN, environ={"OWN_DEED": "0:4:SIGKILL"}).killed == [0]
    assert leftovers() == [], "also where no checkpoint is written any more"


@contextmanager
def mount(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_a_real_disk_that_is_full_in_the_middle(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """It has room for what the run leaves with the usual three checkpoints, not for eight."""
    page, files = 4096, (path for path in Path(undisturbed["save_dir"]).rglob("*") if path.is_file())
    size = sum(-(-path.stat().st_size // page) * page for path in files)
    with mount(tmp_path / "disk", f"size={size}") as disk:
        ended = under("", save_dir=str(disk / "run"), keep="99")
        assert f"could not be written to {disk}/run: [Errno 28] No space left on device" in ended.error
        entries = list_checkpoints(disk / "run")
        assert {entry.state for entry in entries} == {"whole"}
        assert len(entries) > 2
        assert leftovers(disk / "run") == []
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        again = under("", save_dir=str(disk / "run"))
        assert again.error == ""
        assert again.summary["fingerprint"] == undisturbed["fingerprint"]


@pytest.mark.root
def test_a_disk_that_is_read_only_is_a_wrong_request(tmp_path: Path) -> None:
    with mount(tmp_path / "disk", "ro") as disk:
        ended = under("", save_dir=str(disk / "run"))
        assert (ended.kind, "no permission to write in" in ended.error) == ("RequestError", True)
