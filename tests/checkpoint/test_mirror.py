"""The remote folder: what is there is whole, whenever a transfer is cut; on disk, and on a local S3 server."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from multigpu_cli.checkpoint.files import PIECE, ignore_progress
from multigpu_cli.checkpoint.manifest import BEST, MANIFEST, find_damage, read_manifest, sign_manifest
from multigpu_cli.mirror import remote
from multigpu_cli.mirror.remote import Mirror, MirrorError
from tests.support.mirrors import CutMirror, s3_server, write_checkpoint


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as name:
        yield f"s3://{name}"


@pytest.fixture(params=["file", "s3"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Mirror:
    if request.param == "file":
        return Mirror(f"file:{tmp_path}/mirror")
    return Mirror(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


def test_what_was_uploaded_comes_back(mirror: Mirror, tmp_path: Path) -> None:
    assert (mirror.list_steps(), mirror.read_owner()) == ([], "")
    mirror.write_owner("a run")
    for step in (0, 100):
        mirror.upload_checkpoint(write_checkpoint(tmp_path / "run", step), ignore_progress)
    assert (mirror.list_steps(), mirror.read_owner()) == ([100, 0], "a run")
    mirror.download_checkpoint(100, tmp_path / "other")
    (folder,) = (tmp_path / "other" / "checkpoints").iterdir()
    assert find_damage(folder) is None
    assert (folder / BEST).read_bytes() == b"best of 100"
    mirror.discard(lambda step: step < 100)
    assert (mirror.list_steps(), mirror.measure_checkpoint(0)) == ([100], 0)
    assert [path.name for path in tmp_path.glob("mirror/checkpoints/*")] == ["step_00000100"] * mirror._on_disk


def test_other_files_follow_both_ways_but_never_over_others_and_a_summary_that_is_gone_leaves(
    mirror: Mirror, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    mirror.upload_checkpoint(write_checkpoint(run, 1), ignore_progress)
    for name in ("journal.jsonl", "summary.json", "best.pt"):
        (run / name).write_text(name)
        mirror.upload_file(run / name, ignore_progress)
    (run / "summary.json").unlink()  # the run goes on
    (run / "journal.jsonl").write_text("later")
    for name in ("journal.jsonl", "summary.json"):
        mirror.upload_file(run / name, ignore_progress)
    (run / "config.yaml").touch()
    mirror.upload_file(run / "config.yaml", ignore_progress)
    other.mkdir()
    (other / "best.pt").write_text("its own")
    mirror.download_checkpoint(1, other)
    found = {file.name: file.read_text() for file in other.iterdir() if file.is_file()}
    assert found == {"journal.jsonl": "later", "best.pt": "its own", "config.yaml": ""}


def test_a_large_file_is_sent_in_pieces_and_each_counts_as_progress(tmp_path: Path) -> None:
    moves: list[None] = []
    (tmp_path / "best.pt").write_bytes(b"x" * (2 * PIECE + 1))
    mirror = Mirror(f"file:{tmp_path}/mirror")
    for _ in range(2):  # the second time it is there
        mirror.upload_file(tmp_path / "best.pt", lambda: moves.append(None))
    assert (tmp_path / "mirror" / "best.pt").stat().st_size == 2 * PIECE + 1
    assert len(moves) == 17


def test_a_large_checkpoint_comes_back_in_pieces_and_each_counts_as_progress(tmp_path: Path) -> None:
    moves: list[None] = []
    content = b"x" * (2 * PIECE + 1)
    mirror = Mirror(f"file:{tmp_path}/mirror")
    mirror.upload_checkpoint(write_checkpoint(tmp_path / "run", 5, content), ignore_progress)
    assert mirror.measure_checkpoint(5) > len(content)
    mirror.download_checkpoint(5, tmp_path / "other", lambda: moves.append(None))
    assert len(moves) == 8, "three as it is copied, three as it is verified"


def test_a_checkpoint_that_the_run_removes_while_it_is_sent_arrives_whole(mirror: Mirror, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run", 5)
    mirror.upload_checkpoint(folder, lambda: shutil.rmtree(folder, ignore_errors=True))
    assert not folder.exists()
    mirror.download_checkpoint(5, tmp_path / "other")


def test_a_damaged_checkpoint_of_the_run_folder_is_replaced_by_that_of_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mirror = write_checkpoint(tmp_path / "run", 5), Mirror(f"file:{tmp_path}/mirror")
    mirror.upload_checkpoint(folder, ignore_progress)
    (folder / "state.pt").write_bytes(b"torn")
    (folder.parent / ".draft_mirror_step_00000005").mkdir()  # of a copy that was killed
    flushed: list[Path] = []
    monkeypatch.setattr(remote, "flush_folder", flushed.append)
    mirror.download_checkpoint(5, tmp_path / "run")
    assert (find_damage(folder), flushed) == (None, [folder.parent])


def test_best_weights_go_along_where_file_and_manifest_have_them(tmp_path: Path) -> None:
    named, there = (write_checkpoint(tmp_path / "run", step) for step in (1, 2))
    (named / BEST).unlink()
    manifest = read_manifest(there)
    del manifest["best"], manifest["sha256"]
    (there / MANIFEST).write_bytes(sign_manifest(manifest))
    for folder in (named, there):
        Mirror(f"file:{tmp_path}/mirror").upload_checkpoint(folder, ignore_progress)
    assert not list((tmp_path / "mirror").rglob(BEST))
    assert len(list((tmp_path / "mirror").rglob("state.pt"))) == 2


def test_a_folder_with_brackets_in_its_name_is_no_pattern(tmp_path: Path) -> None:
    mirror = Mirror(f"file:{tmp_path}/run[1]*")
    for step in (1, 2):
        mirror.upload_checkpoint(write_checkpoint(tmp_path, step), ignore_progress)
    mirror.discard(lambda step: step == 1)
    assert mirror.list_steps() == [2]


def test_wherever_an_upload_is_cut_only_whole_checkpoints_are_there(tmp_path: Path) -> None:
    run, cuts = tmp_path / "run", 0
    old, new = (write_checkpoint(run, step) for step in (1, 2))
    while True:
        mirror = CutMirror(f"file:{tmp_path}/mirror{cuts}", after=cuts)
        try:
            for folder in (old, new):
                mirror.upload_checkpoint(folder, ignore_progress)
            mirror.discard(lambda step: step == 1)
        except MirrorError:
            cuts += 1
        else:
            break
        whole = Mirror(mirror.url)
        for step in whole.list_steps():
            whole.download_checkpoint(step, tmp_path / f"back{cuts}")  # raises where it is damaged
        whole.upload_checkpoint(new, ignore_progress)
        assert whole.list_steps()[0] == 2
    assert cuts > 8


def test_what_an_interrupted_upload_left_is_not_sent_again_unless_it_differs(tmp_path: Path) -> None:
    folder, mirror = write_checkpoint(tmp_path, 5), CutMirror(f"file:{tmp_path}/mirror")
    mirror.upload_checkpoint(folder, ignore_progress)
    (tmp_path / "mirror" / "checkpoints" / folder.name / "state.pt").write_bytes(b"torn")
    mirror.sent.clear()
    mirror.upload_checkpoint(folder, ignore_progress)
    assert mirror.sent == ["state.pt"]
    assert find_damage(tmp_path / "mirror" / "checkpoints" / folder.name) is None


def test_the_same_step_of_a_later_attempt_replaces_the_old_one(tmp_path: Path) -> None:
    folder, mirror = write_checkpoint(tmp_path, 5), Mirror(f"file:{tmp_path}/mirror")
    mirror.upload_checkpoint(folder, ignore_progress)
    again = write_checkpoint(tmp_path, 5, content=b"of two workers")
    mirror.upload_checkpoint(again, ignore_progress)
    mirror.download_checkpoint(5, tmp_path / "other")
    assert (tmp_path / "other" / "checkpoints" / folder.name / "state.pt").read_bytes() == b"of two workers"


def test_wherever_the_upload_of_another_attempts_step_is_cut_no_manifest_stands_over_other_files(
    tmp_path: Path,
) -> None:
    cuts = 0
    while True:
        mirror = CutMirror(f"file:{tmp_path}/mirror{cuts}", after=cuts)
        Mirror(mirror.url).upload_checkpoint(write_checkpoint(tmp_path, 5), ignore_progress)
        again = write_checkpoint(tmp_path, 5, content=b"of two workers")
        try:
            mirror.upload_checkpoint(again, ignore_progress)
        except MirrorError:
            cuts += 1
        else:
            break
        for step in mirror.list_steps():
            mirror.download_checkpoint(step, tmp_path / f"back{cuts}")  # raises where it is damaged
    assert cuts == 3, "the old manifest goes, the state and the new manifest come"


def test_a_store_that_changes_content_is_noticed(tmp_path: Path) -> None:
    class Lossy(Mirror):
        def _send(self, file: Path, moved: Callable[[], None], *names: str) -> None:
            super()._send(file, moved, *names)
            self._system.pipe_file(self._path(*names), b"x")

    with pytest.raises(MirrorError, match=r"step_00000005/state.pt came back with other content"):
        Lossy(f"file:{tmp_path}/mirror").upload_checkpoint(write_checkpoint(tmp_path, 5), ignore_progress)


def test_a_damaged_checkpoint_is_not_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mirror = write_checkpoint(tmp_path, 5), Mirror(f"file:{tmp_path}/mirror")
    mirror.upload_checkpoint(folder, ignore_progress)
    (tmp_path / "mirror" / "checkpoints" / folder.name / "state.pt").write_bytes(b"torn")
    with pytest.raises(MirrorError, match=r"step_00000005 is damaged: state.pt has 4 bytes instead of"):
        mirror.download_checkpoint(5, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr(remote, "find_damage", lambda draft, moved: shutil.rmtree(draft) or "gone")
    with pytest.raises(MirrorError, match=r"step_00000005 is damaged: gone"):
        mirror.download_checkpoint(5, tmp_path / "other")


def test_a_manifest_that_lists_a_file_elsewhere_is_damaged(tmp_path: Path) -> None:
    folder, mirror = write_checkpoint(tmp_path, 5), Mirror(f"file:{tmp_path}/mirror")
    mirror.upload_checkpoint(folder, ignore_progress)
    manifest: dict[str, Any] = {"step": 5, "files": {"../../run.json": {"size": 1, "sha256": ""}}}
    (tmp_path / "mirror" / "checkpoints" / folder.name / MANIFEST).write_bytes(sign_manifest(manifest))
    with pytest.raises(MirrorError, match="not a file of its folder"):
        mirror.download_checkpoint(5, tmp_path / "other")


def test_a_server_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    logging.getLogger("gcsfs").setLevel(logging.NOTSET)
    mirror = Mirror("s3://bucket/run")
    assert mirror._system.retries == 1, "of the driver, beside those of a request"
    assert mirror._system.config_kwargs == remote._S3_LIMITS
    assert not logging.getLogger("gcsfs").isEnabledFor(logging.ERROR), "what is raised is not logged as well"
    with pytest.raises(MirrorError, match=r"mirror s3://bucket/run: listing failed \(EndpointConnectionError"):
        mirror.list_steps()


def test_an_error_names_no_password_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("https://me:geheim7@host/ refuses key-of-env")

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key-of-env")
    mirror = Mirror(f"file:{tmp_path}")
    monkeypatch.setattr(mirror._system, "find", refuse)
    with pytest.raises(MirrorError, match=r"listing failed \(OSError: https://…@host/ refuses …\)"):
        mirror.list_steps()
    monkeypatch.setattr(mirror._system, "find", Mock(side_effect=OSError("x" * 999)))
    with pytest.raises(MirrorError) as long:
        mirror.list_steps()
    assert len(long.value.problem) == len(f"mirror {mirror.url}: listing failed ()") + 300
