"""All nodes agree on where a run begins, on a shared file system and on disks of their own."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint import run_folder
from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.checkpoint.run_folder import write_note
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.launch_env import list_recorded_runs, record_run
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.mirror import restore
from multigpu_cli.run.request.prepare import agree_on_resume_point, all_ranks_see
from tests.support import ranks
from tests.support.pieces import flip_byte, save_in_pieces
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training


def holding(folder: Path, step: int) -> None:
    """A run folder with one checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    Store(folder / "checkpoints", 3).save(step, {"model": torch.zeros(1)}, {"pins": {"batch_size": 8}, "settings": {}})


def on_disks_of_their_own(tmp_path: Path, work: Callable[[World], Any]) -> list[Any]:
    """Two nodes, each in a folder of its own; what each rank says, or why it was refused."""

    def here(world: World) -> Any:
        folder = tmp_path / f"node{world.rank}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        try:
            return work(replace(world, local_rank=0, local_size=1))
        except RequestError as error:
            return error.problem

    return run_on_each_rank(2, here)


def describe_start(world: World, config: Config) -> list[Any]:
    start = agree_on_resume_point(config, world)
    return [
        start.checkpoint,
        start.checkpoint_rank,
        start.micro_batch_after_oom,
        (start.manifest or {}).get("pins"),
        start.folder,
    ]


RUN = resolve({"save_dir": "run"}, [], None)


def test_the_newest_checkpoint_counts_wherever_it_lies(tmp_path: Path) -> None:
    holding(tmp_path / "node0" / "run", 5)
    holding(tmp_path / "node1" / "run", 7)
    write_note(tmp_path / "node0" / "run", {"batch_size": 4})

    def work(world: World) -> list[Any]:
        return [*describe_start(world, RUN), all_ranks_see(agree_on_resume_point(RUN, world), world)]

    found = on_disks_of_their_own(tmp_path, work)
    assert found[0] == found[1] == ["run/checkpoints/step_00000007", 1, None, {"batch_size": 4}, "run", False]


def test_rank_0_has_it_where_all_have_the_same(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        holding(tmp_path / node / "run", 5)
    assert on_disks_of_their_own(tmp_path, lambda world: describe_start(world, RUN))[1][:2] == [
        "run/checkpoints/step_00000005",
        0,
    ]


def test_a_new_run_is_rank_0s_choice_and_knows_of_small_memory_elsewhere(tmp_path: Path) -> None:
    for node, note in (("node0", {"batch_size": 8, "eval_batch_size": 5}), ("node1", {"batch_size": 4})):
        (tmp_path / node / "run").mkdir(parents=True)
        write_note(tmp_path / node / "run", {"global_batch_size": 64, "eval_batch_size": 9} | note)

    def work(world: World) -> list[Any]:
        start = agree_on_resume_point(RUN, world)
        return [*describe_start(world, RUN), start.global_batch, start.eval_batch_after_oom, start.warnings]

    found = on_disks_of_their_own(tmp_path, work)
    warnings = [
        "out of memory in an evaluation of an earlier attempt: batches of 5",
        "out of memory in an earlier attempt: micro-batches of 4",
    ]
    assert found[0] == found[1] == [None, 0, 4, None, "run", 64, 5, warnings]
    write_note(tmp_path / "node1" / "run", {"batch_size": 2})
    assert on_disks_of_their_own(tmp_path, work)[0][5] is None, "the smallest has none"
    named = on_disks_of_their_own(tmp_path, lambda world: describe_start(world, resolve({}, [], None))[4])
    assert named[0] == named[1]


def test_a_checkpoint_that_is_copied_for_long_from_a_mirror_ends_no_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_slowly(*_: Any, **__: Any) -> tuple[str, list[str]]:
        time.sleep(3 * brief.total_seconds())
        return "", ["came late"]

    brief = timedelta(seconds=1)
    monkeypatch.setattr(restore, "restore_from_mirror", copy_slowly)
    monkeypatch.setattr(ranks, "TIMEOUT", brief)
    mirrored = resolve({"save_dir": str(tmp_path / "run"), "mirror": f"file:{tmp_path}/mirror"}, [], None)
    found = run_on_each_rank(2, lambda world: agree_on_resume_point(mirrored, world).warnings)
    assert found == [["came late"]] * 2


@pytest.mark.parametrize("save_dir", [None, "new"])
@pytest.mark.parametrize("path", ["run", "run/checkpoints/step_00000005"])
def test_word_of_small_memory_is_heard_whichever_way_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, save_dir: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    holding(Path("run"), 5)
    Path("new").mkdir()
    write_note(Path(save_dir or "run"), {"batch_size": 4, "global_batch_size": 8})
    start = agree_on_resume_point(resolve({"resume": path, "save_dir": save_dir}, [], None), World(torch.device("cpu")))
    assert (start.manifest or {})["pins"] == {"batch_size": 4}
    assert start.warnings == ["out of memory in an earlier attempt: micro-batches of 4"]


def test_a_link_in_the_folder_of_any_node_is_refused_on_all(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        holding(tmp_path / node / "run", 5)
    (tmp_path / "node1" / "run" / "journal.jsonl").symlink_to(tmp_path / "precious")
    found = on_disks_of_their_own(tmp_path, lambda world: describe_start(world, RUN))
    assert found[0] == found[1]
    assert "run/journal.jsonl is a symbolic link" in found[0]


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("damaged", ["node0", "node1"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_checkpoints_of_which_no_node_has_a_whole_one_are_refused(
    tmp_path: Path, damaged: str, elsewhere: bool, attempt: int
) -> None:
    holding(tmp_path / damaged / "run", 9)
    (tmp_path / damaged / "run/checkpoints/step_00000009/state.pt").write_bytes(b"torn")
    if elsewhere:
        holding(tmp_path / ("node1" if damaged == "node0" else "node0") / "run", 5)
    found = on_disks_of_their_own(tmp_path, lambda world: describe_start(replace(world, attempt=attempt), RUN))
    assert found[0] == found[1]
    if elsewhere:
        assert found[0][:2] == ["run/checkpoints/step_00000005", int(damaged == "node0")]
    else:
        assert "run has 1 checkpoint, and none is intact" in found[0]


def test_pieces_are_looked_at_before_a_checkpoint_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped byte is found by whichever rank reads that file, and counts for all."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for step in (5, 7):
        folder = save_in_pieces(Store(Path("run/checkpoints"), 3), step, {"model": {"weight": torch.arange(6.0)}})
    Path("run/config.yaml").write_text("")
    flip_byte(folder / "rank_1.safetensors")
    point = resolve({"resume": str(folder)}, [], None)

    def work(world: World) -> list[Any]:
        start = agree_on_resume_point(RUN, world)
        try:
            agree_on_resume_point(point, world)
        except RequestError as refused:
            return [start.checkpoint, *start.warnings, all_ranks_see(start, world), refused.problem]
        return [start.checkpoint]

    damage = "rank_1.safetensors does not match its checksum"
    expected = ["run/checkpoints/step_00000005", f"skipped {folder}: {damage}", True, f"--resume {folder}: {damage}"]
    assert run_on_each_rank(2, work) == [expected, expected]


@pytest.mark.parametrize(("resume", "refused"), [("run", False), ("elsewhere", True)])
def test_a_place_to_resume_from_may_be_on_one_node_alone(tmp_path: Path, resume: str, refused: bool) -> None:
    holding(tmp_path / "node1" / "run", 7)
    found = on_disks_of_their_own(tmp_path, lambda world: describe_start(world, resolve({"resume": resume}, [], None)))
    if refused:
        assert found[0] == found[1]
        assert "--resume elsewhere: contains no checkpoint" in found[0]
    else:
        assert found[0][:2] == found[1][:2] == ["run/checkpoints/step_00000007", 1]


def test_a_run_that_came_from_another_node_goes_on_where_it_is(tmp_path: Path) -> None:
    """The place to resume from has its checkpoints on node 1 alone, and the run that was made of it is on node 0."""
    holding(tmp_path / "node0" / "run", 15)
    (tmp_path / "node0" / "there").mkdir()
    holding(tmp_path / "node1" / "there", 10)
    wish = resolve({"save_dir": "run", "resume": "there"}, [], None)
    found = on_disks_of_their_own(tmp_path, lambda world: describe_start(world, wish))
    assert found[0][:2] == found[1][:2] == ["run/checkpoints/step_00000015", 0]


def test_a_place_without_checkpoints_on_any_node_is_refused(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        holding(tmp_path / node / "run", 15)
        (tmp_path / node / "there").mkdir()
    wish = resolve({"save_dir": "run", "resume": "there"}, [], None)
    found = on_disks_of_their_own(tmp_path, lambda world: describe_start(world, wish))
    assert found[0] == found[1]
    assert "--resume there: contains no checkpoint" in found[0]


def test_what_rank_0_may_not_begin_nobody_does(tmp_path: Path) -> None:
    holding(tmp_path / "node0" / "run", 5)
    holding(tmp_path / "node1" / "run", 7)
    never = resolve({"save_dir": "run", "resume": "never"}, [], None)
    told = on_disks_of_their_own(tmp_path, lambda world: describe_start(world, never))
    assert told[0] == told[1]
    assert "already holds a run" in told[0]


@pytest.mark.parametrize("again", [False, True])
def test_a_process_of_an_earlier_attempt_is_waited_for_and_never_a_wrong_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Rank 0 on a node that was cut off may hold a folder that all nodes share; a first attempt meets another run."""
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.3)

    def work(world: World) -> list[Any]:
        world = replace(world, local_rank=0, local_size=1, attempt=int(again))
        with pytest.raises(TrainingError) as raised:
            agree_on_resume_point(resolve({"save_dir": str(tmp_path)}, [], None), world)
        return [raised.value.exit_code, raised.value.caused_by_peer]

    with lock_folder(tmp_path):
        assert run_on_each_rank(2, work) == [[1, True] if again else [2, False]] * 2


def make_agent_environ(agent: Path, attempt: int) -> dict[str, str]:
    """What torchrun's agent says of an attempt, beside the ranks."""
    return {
        "TORCHELASTIC_RUN_ID": "a-test",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_ERROR_FILE": str(agent / f"attempt_{attempt}" / "0" / "error.json"),
    }


def test_a_restart_of_never_goes_on_with_its_own_run_and_leaves_a_strangers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt ends before its first checkpoint; beside it lies an unfinished run of the same settings."""
    monkeypatch.chdir(tmp_path)
    home, agent = Path("checkpoints/tests.support.user_code-tensors"), tmp_path / "agent"
    agent.mkdir()
    flags: dict[str, Any] = {"batch_size": 10, "max_steps": 4}
    assert run_training(2, save_dir=str(home / "stranger"), **flags).error == ""
    (home / "stranger/summary.json").unlink()
    strangers = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    deed = {"OWN_DEED": "1:2:SIGKILL"}
    assert run_training(2, resume="never", environ=make_agent_environ(agent, 0) | deed, **flags).killed
    (begun,) = (folder for folder in home.iterdir() if folder.name != "stranger")
    ended = run_training(2, resume="never", environ=make_agent_environ(agent, 1), attempt=1, **flags)
    assert ended.summary["save_dir"] == str(begun)
    assert {path: path.read_bytes() for path in strangers} == strangers
    assert len(list(home.iterdir())) == 2


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_any_node_that_remembers_says_which_run_this_launch_began(tmp_path: Path, resume: str) -> None:
    """Rank 0 may be on a node that is new."""
    run = Path("checkpoints/digits/begun")
    holding(tmp_path / "node1" / run, 1)

    def work(world: World) -> list[Any]:
        world = replace(world, attempt=1, agent_dir=tmp_path)
        if world.rank == 1:
            record_run(tmp_path / "node1", 0, str(run))
            world = replace(world, agent_dir=tmp_path / "node1")
        found = describe_start(world, resolve({"resume": resume}, [], None))
        return [*found[:2], list_recorded_runs(world.agent_dir, [1])]

    found = on_disks_of_their_own(tmp_path, work)
    assert found == [[str(run / "checkpoints/step_00000001"), 1, [str(run)]]] * 2


@pytest.mark.parametrize(("local_rank", "earlier"), [(0, "another"), (1, "run"), (0, "run")])
def test_one_process_of_a_node_records_that_it_goes_on_with_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int, earlier: str
) -> None:
    monkeypatch.chdir(tmp_path)
    holding(Path("run"), 5)
    record_run(tmp_path, 0, earlier)
    world = World(torch.device("cpu"), local_rank=local_rank, attempt=1, agent_dir=tmp_path)
    assert agree_on_resume_point(RUN, world).folder == "run"
    assert list_recorded_runs(tmp_path, [1]) == (["run"] if (local_rank, earlier) == (0, "run") else [])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_of_which_no_checkpoint_is_whole_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """best.pt is the last good thing in it."""
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Any] = {"batch_size": 30, "save_dir": "run"}
    assert run_training(epochs=2, **flags).error == ""
    for state in Path("run/checkpoints").glob("*/state.pt"):
        state.write_bytes(state.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    refused = run_training(workers, epochs=4, **flags)
    assert refused.kind in ("RequestError", "NoIntactCheckpoint")
    assert "run has 2 checkpoints, and none is intact" in refused.error
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert run_training(epochs=2, **flags | {"save_dir": "new"}, resume="never", init_from="run/best.pt").error == ""
