import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from multigpu_cli.checkpoint import store as store_module
from multigpu_cli.checkpoint.files import compute_sha256
from multigpu_cli.checkpoint.manifest import BEST, EVALUATION, MANIFEST, find_damage, read_manifest
from multigpu_cli.checkpoint.store import BestWeights, Store
from tests.support.fork import exit_code

STATE: dict[str, Any] = {"model": {"weight": torch.arange(64.0)}, "progress": {"step": 1}}
FACTS = {"settings": {"epochs": 3}, "pins": {"lr": 0.004}, "world_size": 2}


def fill_store(folder: Path, *steps: int, keep: int = 10) -> Store:
    folder.mkdir(exist_ok=True)
    store = Store(folder / "checkpoints", keep)
    for step in steps:
        store.save(step, STATE | {"progress": {"step": step}}, FACTS)
    return store


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    store = fill_store(tmp_path)
    size = store.save(120, STATE, FACTS)
    found, skipped = store.find_newest()
    assert found is not None
    assert (found.step, skipped) == (120, [])
    assert found.folder == tmp_path / "checkpoints" / "step_00000120"
    assert torch.equal(found.state()["model"]["weight"], STATE["model"]["weight"])
    assert sorted(path.name for path in found.folder.iterdir()) == [MANIFEST, "state.pt"]
    assert (found.folder / "state.pt").stat().st_size == size


def test_the_manifest_lists_files_and_facts(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 7)
    manifest = json.loads((store.folder / "step_00000007" / MANIFEST).read_text())
    assert FACTS.items() <= manifest.items()
    assert manifest["step"] == 7
    assert set(manifest["files"]["state.pt"]) == {"size", "sha256"}


def test_nothing_is_newest_where_nothing_is(tmp_path: Path) -> None:
    assert Store(tmp_path / "checkpoints", 3).find_newest() == (None, [])


def test_the_newest_is_the_one_with_the_highest_step_not_the_latest_file(tmp_path: Path) -> None:
    found, _ = fill_store(tmp_path, 300, 20).find_newest()
    assert found is not None
    assert found.step == 300


def test_steps_are_numbers_beyond_eight_digits_too(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 99_999_998, 99_999_999, keep=2)
    (store.folder / "step_by_hand").mkdir()
    store.save(100_000_000, STATE, FACTS)
    assert names(store) == ["step_100000000", "step_99999999", "step_by_hand"]
    found, skipped = store.find_newest()
    assert found
    assert (found.step, skipped) == (100_000_000, [])
    store.discard_after(99_999_999)
    assert names(store) == ["replaced_step_100000000", "step_99999999", "step_by_hand"]
    store.save(100_000_000, STATE, FACTS)
    store.discard_after(99_999_999)
    assert names(store) == [
        "replaced_step_100000000", "replaced_step_100000000_2", "step_99999999", "step_by_hand"
    ]  # fmt: skip


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_few_stay(keep: int, tmp_path: Path) -> None:
    store = fill_store(tmp_path, 10, 20, 30, 40, 50, keep=keep)
    assert names(store) == [f"step_{step:08d}" for step in (10, 20, 30, 40, 50)[-keep:]]


def torn(folder: Path) -> None:
    content = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(content[:-1])


def flip_byte(folder: Path) -> None:
    content = bytearray((folder / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "state.pt").write_bytes(bytes(content))


def without_state(folder: Path) -> None:
    (folder / "state.pt").unlink()


def without_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def torn_manifest(folder: Path) -> None:
    content = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(content[: len(content) // 2])


def other_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"step": 30, "files": {"state.pt": {}}}')


def list_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1, 2, 3]")


DAMAGE = {
    torn: "state.pt has",
    flip_byte: "state.pt does not match its checksum",
    without_state: "state.pt is missing",
    without_manifest: "manifest.json can't be read (FileNotFoundError)",
    torn_manifest: "manifest.json can't be read",
    other_manifest: "manifest.json does not match its own checksum",
    list_manifest: "manifest.json can't be read",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_skipped_and_named_and_stays(damage: Any, tmp_path: Path) -> None:
    store = fill_store(tmp_path, 10, 20, 30)
    damage(store.folder / "step_00000030")
    left = sorted((store.folder / "step_00000030").iterdir())
    found, skipped = store.find_newest()
    assert found is not None
    assert found.step == 20
    assert len(skipped) == 1
    assert f"skipped {store.folder / 'step_00000030'}: {DAMAGE[damage]}" in skipped[0]
    assert sorted((store.folder / "step_00000030").iterdir()) == left


def test_where_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 10, 20, 30)
    for folder, damage in zip(sorted(store.folder.iterdir()), (torn, flip_byte, without_manifest), strict=True):
        damage(folder)
    found, skipped = store.find_newest()
    assert found is None
    assert [note.split("step_")[1][:8] for note in skipped] == ["00000030", "00000020", "00000010"]


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    """It holds what the run was started with: a wrong digit there would be another run."""
    folder = fill_store(tmp_path, 30).folder / "step_00000030"
    whole = (folder / MANIFEST).read_bytes()
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1
        (folder / MANIFEST).write_bytes(bytes(content))
        assert find_damage(folder), bytes(content[max(0, at - 20) : at + 20])
    (folder / MANIFEST).write_bytes(whole)
    assert find_damage(folder) is None


def test_damaged_ones_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    """After falling back, the fresh checkpoint has a lower number than the damaged one that was passed over."""
    store = fill_store(tmp_path, 10, 20)
    flip_byte(store.folder / "step_00000020")
    store.keep = 1
    store.save(15, STATE | {"progress": {"step": 15}}, FACTS)
    found, skipped = store.find_newest()
    assert found is not None
    assert found.step == 15
    assert len(skipped) == 1, "and it is still there to be looked at"


def test_going_on_from_an_older_checkpoint_keeps_what_is_saved_then(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 10, 20, 30, keep=2)
    store.save(25, STATE, FACTS)
    assert "step_00000025" in names(store)


def test_the_same_step_can_be_saved_once_more(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 10, 20)
    store.save(20, STATE | {"progress": {"step": 999}}, FACTS)
    found, skipped = store.find_newest()
    assert found is not None
    assert (found.state()["progress"]["step"], skipped) == (999, [])
    assert len(names(store)) == 2
    shutil.copytree(found.folder, store.folder / "step_00000020_earlier")  # of a save that was killed
    assert [folder.name[5:] for folder in store.list_folders()] == ["00000020", "00000020_earlier", "00000010"]


def test_drafts_of_a_killed_run_are_no_checkpoints_and_are_swept(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 10)
    shutil.copytree(store.folder / "step_00000010", store.folder / ".draft_step_00000020")
    found, skipped = store.find_newest()
    assert found is not None
    assert (found.step, skipped) == (10, [])
    store.save(20, STATE, FACTS)
    assert names(store) == ["step_00000010", "step_00000020"]


STEPS_ON_DISK = (
    (os, "fsync"),
    (Path, "mkdir"),
    (Path, "replace"),
    (Path, "rename"),
    (Path, "unlink"),
    (shutil, "rmtree"),
)


def kill_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process that comes to this one of its steps on disk."""
    left = moment

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        return call

    for owner, name in STEPS_ON_DISK:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize(
    ("steps", "keep"),
    [((10,), 2), ((10, 20), 2), ((20,), 1)],
    ids=["a new step", "the same step once more", "the only one once more"],
)
def test_whenever_a_save_is_killed_a_whole_checkpoint_is_left(
    steps: tuple[int, ...], keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first step on disk, before its second, … until it comes through; the next one tidies up."""
    for moment in range(40):
        store = fill_store(tmp_path / str(moment), *steps, keep=keep)
        with monkeypatch.context() as deadly:
            kill_at(moment, deadly)
            ended = exit_code(partial(store.save, 20, STATE, FACTS))
        found, skipped = store.find_newest()
        assert found is not None
        assert skipped == []
        assert found.step >= steps[-1]
        if ended == 0:
            break
        store.save(20, STATE, FACTS)
        assert names(store) == [f"step_{step:08d}" for step in sorted({*steps, 20})]
        assert ended == -signal.SIGKILL
    assert ended == 0
    assert found is not None
    assert found.step == 20
    assert moment > 6, "and there were moments at which it was killed"


@pytest.mark.parametrize("links", [True, False], ids=["links", "a disk without hard links"])
def test_evaluation_is_added_to_the_checkpoint_of_its_step(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill_store(tmp_path, 10, 20)
    best = tmp_path / "best.pt"
    best.write_bytes(b"weights")
    inode = (store.folder / "step_00000020/state.pt").stat().st_ino
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(95, "Operation not supported")))
    store.add_evaluation(20, {"progress": {"step": 20, "score": 1}}, BestWeights(best, compute_sha256(best)))
    found, skipped = store.find_newest()
    assert found is not None
    assert (found.step, skipped, find_damage(found.folder)) == (20, [], None)
    assert found.state("progress") == {"progress": {"step": 20, "score": 1}}
    assert torch.equal(found.state()["model"]["weight"], STATE["model"]["weight"])
    assert FACTS.items() <= read_manifest(found.folder).items()
    assert ((found.folder / "state.pt").stat().st_ino == inode) is links
    assert (found.folder / BEST).read_bytes() == b"weights"
    assert names(store) == ["step_00000010", "step_00000020"]
    (found.folder / EVALUATION).write_bytes(b"torn")
    assert EVALUATION in str(find_damage(found.folder))


def test_evaluation_of_an_unsaved_step_changes_nothing(tmp_path: Path) -> None:
    """The folder may hold a damaged checkpoint of that step, from an earlier attempt."""
    before = fill_store(tmp_path, 10, 20)
    manifest = (before.folder / "step_00000020" / MANIFEST).read_bytes()
    Store(before.folder).add_evaluation(20, {"progress": {}})
    assert (before.folder / "step_00000020" / MANIFEST).read_bytes() == manifest


def test_killed_addition_of_an_evaluation_leaves_an_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = set()
    for moment in range(40):
        store = fill_store(tmp_path / str(moment), 20)
        with monkeypatch.context() as deadly:
            kill_at(moment, deadly)
            ended = exit_code(partial(store.add_evaluation, 20, {"progress": {"step": 20, "score": 1}}))
        found, skipped = store.find_newest()
        assert found is not None
        assert (found.step, skipped) == (20, [])
        scores.add(found.state("progress")["progress"].get("score"))
        if ended == 0:
            break
        store.save(30, STATE, FACTS)
        assert [name.removesuffix("_earlier") for name in names(store)] == ["step_00000020", "step_00000030"]
    assert ended == 0
    assert scores == {None, 1}


def test_a_save_that_fails_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "publish", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        fill_store(tmp_path, 20)
    assert list(tmp_path.rglob("*step*")) == []


def test_a_checkpoint_gets_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        seen.append((self.parent == target.parent, find_damage(self), target.exists()))
        return original(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    fill_store(tmp_path, 20)
    assert seen == [(True, None, False)]


def test_the_name_is_flushed_to_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut might otherwise take a checkpoint away that the journal has already named."""
    flushed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        store_module,
        "flush_folder",
        lambda folder: flushed.append((folder.name, [path.name for path in folder.iterdir()])),
    )
    fill_store(tmp_path, 20)
    assert flushed == [("checkpoints", ["step_00000020"])]


def test_a_manifest_is_read_back(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 3)
    assert read_manifest(store.folder / "step_00000003")["pins"] == {"lr": 0.004}
