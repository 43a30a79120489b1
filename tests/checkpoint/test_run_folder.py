import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint import manifest, run_folder
from multigpu_cli.checkpoint.files import compute_sha256, lock_folder
from multigpu_cli.checkpoint.run_folder import (
    NoIntactCheckpoint,
    ResumePoint,
    choose_resume_point,
    holds_run,
    read_summary,
    resolve_folder,
    rewind_run,
    write_summary,
)
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.paths import find_path_errors
from multigpu_cli.config.regular_files import UnsafeFolder
from multigpu_cli.config.resume_rules import flatten_settings, replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, TrainingError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def make_config(save_dir: str | None = None, resume: str = "auto", recipe: str | None = None, **changed: Any) -> Config:
    config = replace_settings(Config(recipe=recipe), changed)
    return replace(config, checkpoint=replace(config.checkpoint, save_dir=save_dir, resume=resume))


def run_in(folder: Path, *steps: int, config: Config | None = None, status: str | None = None) -> Path:
    """A run folder as training leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("data: digits\n")
    store = Store(folder / "checkpoints", 10)
    for step in steps:
        store.save(
            step,
            {"w": torch.ones(2)},
            {"settings": flatten_settings(config or make_config()), "pins": {}, "world_size": 1},
        )
    if status:
        write_summary(folder, json.dumps({"status": status}))
    return folder


def set_age(folder: Path, seconds: int) -> None:
    os.utime(folder, (1e9 - seconds, 1e9 - seconds))


def damage(checkpoint: Path) -> None:
    (checkpoint / "state.pt").write_bytes(b"torn")


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_start_is_plain_values(tmp_path: Path) -> None:
    run_in(tmp_path / "run", 10)
    start = choose_resume_point(make_config("run"), attempt=0)
    assert ResumePoint(**json.loads(json.dumps(vars(start)))) == start


# -- without --save-dir


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_where_nothing_is_a_new_run_gets_a_new_folder(resume: str, tmp_path: Path) -> None:
    starts = [choose_resume_point(make_config(resume=resume), attempt=0) for _ in range(5)]
    assert len({start.folder for start in starts}) == 5
    assert all(re.fullmatch(r"checkpoints/digits/\d{8}-\d{6}-[0-9a-f]{4}", start.folder) for start in starts)
    assert all((start.checkpoint, start.reason) == (None, "a new run") for start in starts)
    assert tree(tmp_path) == set(), "nothing is written"


@pytest.mark.parametrize(
    ("config", "home"),
    [
        (make_config(recipe="har"), "checkpoints/har"),
        (make_config(data="synthetic"), "checkpoints/synthetic"),
        (make_config(data="my.module:load"), "checkpoints/my.module-load"),
    ],
)
def test_the_folder_is_named_after_recipe_or_data(config: Config, home: str) -> None:
    assert str(Path(choose_resume_point(config, attempt=0).folder).parent) == home


def test_the_newest_unfinished_run_of_the_same_configuration_goes_on() -> None:
    home = Path("checkpoints/digits")
    for age, name in enumerate(("newest", "older", "oldest")):
        run_in(home / name, 10, 20)
        set_age(home / name, age)
    start = choose_resume_point(make_config(), attempt=0)
    assert start.folder == str(home / "newest")
    assert start.checkpoint == str(home / "newest/checkpoints/step_00000020")
    assert start.manifest is not None
    assert start.manifest["step"] == 20
    assert "resumes from step 20" in start.reason


def test_what_may_not_go_on_is_passed_over() -> None:
    home = Path("checkpoints/digits")
    run_in(home / "e_completed", 10, status="completed")
    run_in(home / "d_other_rate", 10, config=make_config(lr=0.5))
    run_in(home / "c_without_checkpoint")
    run_in(home / "b_longer", 10, config=make_config(epochs=99))
    (home / "a_no_run").mkdir()
    run_in(home / "right", 10, config=make_config(log_interval=7, multi_gpu="ddp"), status="stopped")
    for age, folder in enumerate(sorted(home.iterdir())):
        set_age(folder, age)
    assert choose_resume_point(make_config(), attempt=0).folder == str(home / "right")


def test_only_the_checkpoint_that_is_meant_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of a hundred runs may have gigabytes each."""
    read: list[str] = []
    monkeypatch.setattr(manifest, "compute_sha256", lambda *file: read.append(str(file[0])) or compute_sha256(*file))
    home = Path("checkpoints/digits")
    run_in(home / "d_completed", 10, status="completed")
    run_in(home / "c_other_rate", 10, config=make_config(lr=0.5))
    state = run_in(home / "b_damaged", 10) / "checkpoints/step_00000010/state.pt"
    state.write_bytes(bytes(state.stat().st_size))
    run_in(home / "a_meant", 10, 20, status="stopped")
    for age, folder in enumerate(sorted(home.iterdir(), reverse=True)):
        set_age(folder, age)
    assert choose_resume_point(make_config(), attempt=0).folder == str(home / "a_meant")
    assert read == [
        f"{home}/{there}/state.pt"
        for there in ("b_damaged/checkpoints/step_00000010", "a_meant/checkpoints/step_00000020")
    ]


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_stopped_and_failed_runs_are_unfinished(status: str) -> None:
    run_in(Path("checkpoints/digits/x"), 10, status=status)
    start = choose_resume_point(make_config(), attempt=0)
    assert start.folder == "checkpoints/digits/x"
    assert start.summary == {"status": status}


def test_a_run_at_work_is_left_alone() -> None:
    home = Path("checkpoints/digits")
    run_in(home / "idle", 10)
    run_in(home / "at_work", 10)
    set_age(home / "idle", 100)
    with lock_folder(home / "at_work"):
        assert choose_resume_point(make_config(), attempt=0).folder == str(home / "idle")
    set_age(home / "at_work", 0)
    assert choose_resume_point(make_config(), attempt=0).folder == str(home / "at_work")


def test_never_starts_afresh_beside_an_unfinished_run() -> None:
    run_in(Path("checkpoints/digits/x"), 10)
    for attempt in (0, 1):
        assert choose_resume_point(make_config(resume="never"), attempt=attempt).checkpoint is None


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_restart_goes_on_with_the_run_that_its_launch_began(resume: str) -> None:
    """A younger one of the same configuration is somebody else's."""
    begun, stranger = (run_in(Path("checkpoints/digits", name), 10) for name in ("begun", "stranger"))
    set_age(begun, 100)
    start = choose_resume_point(make_config(resume=resume), attempt=1, begun=[str(begun)])
    assert start.folder == str(begun)
    assert str(start.checkpoint).startswith(str(begun))
    gone = choose_resume_point(make_config(resume=resume), attempt=1, begun=["checkpoints/digits/gone"])
    assert (gone.folder, gone.checkpoint) == ("checkpoints/digits/gone", None)
    assert stranger.exists()


# -- with --save-dir


def test_all_restarts_of_a_launch_get_one_folder_to_go_on_in(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[Config]()
    monkeypatch.setattr(run_folder, "load_given", lambda entries, config: [checked.append])
    run_in(Path("checkpoints/digits/unfinished"), 5)
    resolved = resolve_folder(make_config(resume="never"))
    assert resolve_folder(resolved) == resolved
    assert checked == [make_config(resume="never"), resolved]
    assert resolved.checkpoint.save_dir != "checkpoints/digits/unfinished"
    assert resolved.checkpoint.resume == "auto"
    assert resolved.explicit == {"save_dir", "resume"}


def test_an_empty_or_missing_folder_is_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing", "deep/er"):
        start = choose_resume_point(make_config(name), attempt=0)
        assert (start.folder, start.checkpoint, start.reason) == (name, None, "a new run")
    assert tree(tmp_path) == {tmp_path / "empty"}


def test_a_folder_with_a_run_goes_on_whatever_its_configuration() -> None:
    """Whether the words agree is judged later, against what the checkpoint pins."""
    run_in(Path("mine"), 10, config=make_config(lr=0.5), status="completed")
    start = choose_resume_point(make_config("mine"), attempt=0)
    assert start.checkpoint == "mine/checkpoints/step_00000010"
    assert start.summary == {"status": "completed"}


def test_a_folder_whose_run_has_no_checkpoint_yet_starts_over() -> None:
    run_in(Path("mine"))
    start = choose_resume_point(make_config("mine"), attempt=0)
    assert start.checkpoint is None
    assert start.reason == "from the beginning: the folder has no checkpoint"


def test_never_into_a_folder_that_holds_a_run_is_refused_unless_this_launch_began_it() -> None:
    run_in(Path("mine"), 10)
    for attempt in (0, 1):
        with pytest.raises(RequestError, match="--resume never, but mine already holds a run"):
            choose_resume_point(make_config("mine", "never"), attempt=attempt)
    assert choose_resume_point(make_config("mine", "never"), attempt=1, begun=["mine"]).checkpoint is not None
    assert choose_resume_point(make_config("other", "never"), attempt=0).reason == "a new run"


def test_damaged_checkpoints_are_named_and_older_ones_used() -> None:
    run_in(Path("mine"), 10, 20, 30)
    damage(Path("mine/checkpoints/step_00000030"))
    damage(Path("mine/checkpoints/step_00000020"))
    start = choose_resume_point(make_config("mine"), attempt=0)
    assert start.checkpoint == "mine/checkpoints/step_00000010"
    assert len(start.warnings) == 2
    assert "step_00000030: state.pt has 4 bytes" in start.warnings[0]


@pytest.mark.parametrize("attempt", [0, 1])
def test_where_every_checkpoint_is_damaged_the_request_is_wrong(attempt: int) -> None:
    run_in(Path("mine"), 10, 20)
    damage(Path("mine/checkpoints/step_00000010"))
    shutil.rmtree(Path("mine/checkpoints/step_00000020"))
    Path("mine/checkpoints/step_00000020").mkdir()
    Path("mine/best.pt").write_bytes(b"the last good thing")
    run_in(Path("elsewhere"), 5)
    wishes = [{}, {"resume": "elsewhere"}, {"resume": "elsewhere/checkpoints/step_00000005"}]
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for wish in wishes:
        with pytest.raises(NoIntactCheckpoint, match="mine has 2 checkpoints, and none is intact") as refused:
            choose_resume_point(make_config("mine", **wish), attempt=attempt)
        assert refused.value.folder == Path("mine")
        told = str(refused.value)
        assert "mine/checkpoints/step_00000010: state.pt has 4 bytes instead of" in told
        assert "mine/checkpoints/step_00000020: manifest.json can't be read" in told
        for way_out in ("--resume never and another --save-dir", "--resume PATH", "--init-from mine/best.pt"):
            assert way_out in told
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert choose_resume_point(make_config("other", "elsewhere"), attempt=attempt).checkpoint, "the ways out are open"
    assert choose_resume_point(make_config("other", "never"), attempt=attempt).checkpoint is None


def test_a_completed_run_without_its_checkpoints_is_not_begun_again() -> None:
    run_in(Path("mine"), status="completed")
    told = "mine is complete, and its checkpoints were removed.*\n.*another --save-dir; --init-from mine/best.pt starts"
    with pytest.raises(RequestError, match=told):
        choose_resume_point(make_config("mine"), attempt=0)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_draft_is_no_checkpoint(attempt: int) -> None:
    run_in(Path("mine"))
    Path("mine/checkpoints/.draft_step_00000010").mkdir(parents=True)
    assert choose_resume_point(make_config("mine"), attempt=attempt).checkpoint is None


def test_a_folder_at_work_is_refused_before_its_checkpoints_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run in it lets old checkpoints go while we would look at them."""
    run_in(Path("mine"), 10)
    monkeypatch.setattr(Store, "find_newest", lambda self: pytest.fail("read"))
    with lock_folder(Path("mine")), pytest.raises(RequestError, match="another run is using mine"):
        choose_resume_point(make_config("mine"), attempt=0)
    with lock_folder(Path("mine")), pytest.raises(RequestError, match="another run is using mine"):
        resolve_folder(make_config("mine"))
    with lock_folder(Path("checkpoints/digits/x")):
        Path("checkpoints/digits/x/config.yaml").write_text("")
        assert choose_resume_point(make_config(), attempt=0).reason == "a new run"


def test_only_a_restart_waits_for_another_process_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr(run_folder, "wait_until_unlocked", lambda folder, *, patience: waited.append(patience))
    for attempt, said in enumerate(("another run is using mine", "an earlier attempt is still using mine")):
        with pytest.raises(TrainingError, match=said) as refused:
            choose_resume_point(make_config("mine"), attempt=attempt)
        assert refused.value.caused_by_peer is bool(attempt)
    assert waited == [0, run_folder._PATIENCE]


def test_a_link_in_the_folder_is_refused_whichever_way_it_is_named() -> None:
    run_in(Path("there"), 10)
    Path("there/journal.jsonl").symlink_to("precious")
    for save_dir, resume in (("there", "auto"), (None, "there"), (None, "there/checkpoints/step_00000010")):
        with pytest.raises(UnsafeFolder, match=r"there/journal\.jsonl is a symbolic link"):
            choose_resume_point(make_config(save_dir, resume), attempt=0)


def test_a_save_dir_that_cannot_be_one_is_refused() -> None:
    Path("file").write_text("")
    for name in ("file", "file/inside"):
        with pytest.raises(RequestError, match=rf"--save-dir {name}: .*file"):
            choose_resume_point(make_config(name), attempt=0)


# -- --resume PATH


@pytest.mark.parametrize("path", ["there", "there/checkpoints/step_00000020"])
def test_resume_names_a_run_or_a_checkpoint(path: str) -> None:
    run_in(Path("there"), 10, 20, status="stopped")
    start = choose_resume_point(make_config(resume=path), attempt=0)
    assert (start.folder, start.checkpoint) == ("there", "there/checkpoints/step_00000020")
    assert start.summary == ({"status": "stopped"} if path == "there" else None)


def test_resume_can_go_back_to_an_older_checkpoint() -> None:
    run_in(Path("there"), 10, 20, status="completed")
    start = choose_resume_point(make_config(resume="there/checkpoints/step_00000010"), attempt=0)
    assert start.checkpoint == "there/checkpoints/step_00000010"
    assert start.summary is None, "so it is not taken for complete"


@pytest.mark.parametrize("path", ["there", "there/checkpoints/step_00000010"])
def test_with_a_save_dir_the_run_goes_on_in_another_folder(path: str) -> None:
    run_in(Path("there"), 10, status="completed")
    start = choose_resume_point(make_config("fresh", path), attempt=0)
    assert (start.folder, start.checkpoint) == ("fresh", "there/checkpoints/step_00000010")
    assert (start.summary, start.rewind_from) == (None, None)


@pytest.mark.parametrize("save_dir", [None, "there"])
def test_resume_can_go_back_in_its_own_folder_by_either_name(save_dir: str | None) -> None:
    """Once: the same command again, or a restart, goes on where it was."""
    store = Store(run_in(Path("there"), 10, 20) / "checkpoints", 3)
    wish = make_config(save_dir, "there/checkpoints/step_00000010")
    start = choose_resume_point(wish, attempt=0)
    assert (start.folder, start.checkpoint) == ("there", "there/checkpoints/step_00000010")
    rewind_run(start, store)
    store.save(15, {"w": torch.ones(2)}, {"settings": {}, "pins": {}})
    shutil.rmtree("there/checkpoints/step_00000010")  # as --keep does in time
    assert list(find_path_errors(wish)) == []
    for attempt in (0, 1):
        assert choose_resume_point(wish, attempt=attempt).checkpoint == "there/checkpoints/step_00000015"


@pytest.mark.parametrize("path", ["there", "there/checkpoints/step_00000010"])
def test_the_same_command_again_goes_on_where_it_was_stopped(path: str) -> None:
    """Not from the other run's checkpoint once more: exit code 75 promises it."""
    run_in(Path("there"), 10)
    run_in(Path("fresh"), 15, status="stopped")
    assert choose_resume_point(make_config("fresh", path), attempt=0).checkpoint == "fresh/checkpoints/step_00000015"


def test_resume_of_a_damaged_checkpoint_is_refused() -> None:
    run_in(Path("there"), 10, 20)
    damage(Path("there/checkpoints/step_00000020"))
    with pytest.raises(RequestError, match=r"step_00000020: state\.pt has 4 bytes") as refused:
        choose_resume_point(make_config(resume="there/checkpoints/step_00000020"), attempt=0)
    assert "an older checkpoint" in refused.value.remedy
    start = choose_resume_point(make_config(resume="there"), attempt=0)
    assert start.checkpoint == "there/checkpoints/step_00000010"


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_resume_of_nothing_is_refused(path: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(RequestError, match=f"--resume {path}: contains no checkpoint"):
        choose_resume_point(make_config(resume=path), attempt=0)


@pytest.mark.parametrize("path", ["empty", "file", "mine/journal.jsonl", "begun"])
def test_a_wrong_resume_is_refused_whatever_the_save_dir_holds(path: str) -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    run_in(Path("begun"))
    run_in(Path("mine"), 10, status="completed")
    Path("mine/journal.jsonl").write_text("")
    with pytest.raises(RequestError, match=f"--resume {path}: contains no checkpoint") as refused:
        choose_resume_point(make_config("mine", path), attempt=0)
    remedy = "--resume mine" if path.startswith("mine/") else "name a run folder, or one of its checkpoints/step_"
    assert refused.value.remedy.startswith(remedy)


def test_what_the_run_came_from_may_be_damaged_by_now() -> None:
    run_in(Path("there"), 10)
    run_in(Path("fresh"), 15, status="stopped")
    damage(Path("there/checkpoints/step_00000010"))
    assert choose_resume_point(make_config("fresh", "there"), attempt=0).checkpoint == "fresh/checkpoints/step_00000015"


def test_resume_of_damaged_checkpoints_only_says_why() -> None:
    run_in(Path("there"), 10)
    damage(Path("there/checkpoints/step_00000010"))
    with pytest.raises(RequestError, match=r"contains no checkpoint\n.*step_00000010: state\.pt has"):
        choose_resume_point(make_config(resume="there"), attempt=0)


# -- small files


def test_a_folder_holds_a_run_once_its_settings_are_there(tmp_path: Path) -> None:
    assert not holds_run(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    assert holds_run(tmp_path)


@pytest.mark.filterwarnings("ignore:.*summary.json is damaged, and not used")
@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\udcff".encode("utf-8", "surrogateescape")])
def test_a_summary_that_cannot_be_read_is_none(content: str | bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_bytes(content.encode() if isinstance(content, str) else content)
    assert read_summary(tmp_path) is None


def test_a_summary_says_where_the_folder_is_now(tmp_path: Path) -> None:
    run_in(Path("original"), 10)
    write_summary(Path("original"), '{"status": "completed", "save_dir": "original"}')
    shutil.copytree("original", "copy")
    assert choose_resume_point(make_config("copy"), attempt=0).summary == {"status": "completed", "save_dir": "copy"}


def test_a_summary_is_read_back(tmp_path: Path) -> None:
    write_summary(tmp_path, '{"status": "completed"}')
    assert read_summary(tmp_path) == {"status": "completed"}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
