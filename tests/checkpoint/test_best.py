"""The best weights beside a checkpoint: shared where the file system can, never taken from a file that is another."""

import os
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.checkpoint.manifest import BEST, read_manifest
from multigpu_cli.checkpoint.store import BestWeights, Store, read_best, restore_file

STATE: dict[str, Any] = {"progress": {}}


def save_checkpoint(run: Path, step: int, content: bytes = b"best") -> Path:
    """A checkpoint, written while these are the best weights."""
    (run / "best.pt").write_bytes(content)
    Store(run / "checkpoints", 9).save(step, STATE, {}, BestWeights(run / "best.pt", sha256(content).hexdigest()))
    return run / f"checkpoints/step_{step:08d}"


def read_weights(checkpoint: Path, step: int = 1) -> bytes | None:
    return read_best(checkpoint, read_manifest(checkpoint), step)


@pytest.mark.parametrize("links", [True, False])
def test_each_checkpoint_has_the_best_of_its_time(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links here")))
    first, second, third = (
        save_checkpoint(tmp_path, 1),
        save_checkpoint(tmp_path, 2),
        save_checkpoint(tmp_path, 3, b"better"),
    )
    assert [read_weights(each) for each in (first, second, third)] == [b"best", b"best", b"better"]
    assert (first / BEST).samefile(second / BEST) is links
    assert not (third / BEST).samefile(tmp_path / "best.pt"), "whoever writes into best.pt must not reach it"
    shutil.rmtree(first)
    before = BestWeights(tmp_path / "best.pt", sha256(b"best").hexdigest())
    Store(tmp_path / "checkpoints", 9).save(4, STATE, {}, before)
    fourth = tmp_path / "checkpoints/step_00000004"
    assert "best" in read_manifest(fourth) if links else "best" not in read_manifest(fourth), "an older one has them"
    assert (read_weights(fourth) == b"best") is links


def test_what_has_another_sum_is_not_taken(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, 1)
    (checkpoint / BEST).write_bytes(b"torn")
    assert read_weights(checkpoint) == b"best", "from the run folder"
    (tmp_path / "best.pt").write_bytes(b"another's")
    assert read_weights(checkpoint) is None
    best = BestWeights(tmp_path / "best.pt", sha256(b"best").hexdigest())
    Store(tmp_path / "elsewhere", 9).save(2, STATE, {}, best)
    other = tmp_path / "elsewhere/step_00000002"
    assert ("best" in read_manifest(other), (other / BEST).exists()) == (False, False), "nothing is kept under its name"


def test_the_first_file_is_brought_back_from_another(tmp_path: Path) -> None:
    checkpoint, best = save_checkpoint(tmp_path, 1), tmp_path / "best.pt"
    wanted = sha256(b"best").hexdigest()
    best.unlink()
    assert restore_file([best, checkpoint / BEST], wanted)
    assert best.read_bytes() == b"best"
    before = best.stat()
    assert restore_file([best, checkpoint / BEST], wanted)
    assert best.stat() == before, "what is right is left as it is"
    assert not restore_file([best, checkpoint / BEST], sha256(b"lost").hexdigest())
