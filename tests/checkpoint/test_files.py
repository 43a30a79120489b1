import errno
import io
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch

from multigpu_cli.checkpoint import files
from multigpu_cli.checkpoint.files import packed, publish, unpacked
from multigpu_cli.errors import RequestError
from tests.forked import exit_code


def test_a_file_gets_its_content(tmp_path: Path) -> None:
    publish(tmp_path / "a.txt", b"first")
    publish(tmp_path / "a.txt", b"second")
    publish(tmp_path / "empty", b"")
    assert (tmp_path / "a.txt").read_bytes() == b"second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty"]


@pytest.mark.parametrize("failing", ["posix_fallocate", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_no_draft(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "a.txt", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path / "a.txt", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_the_name_appears_only_after_the_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for owner, name in ((os, "fsync"), (Path, "replace"), (files, "flush_folder")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, original=original, name=name: (order.append(name), original(*given))[1]
        )
    publish(tmp_path / "a.txt", b"bytes")
    assert order == ["fsync", "replace", "flush_folder", "fsync"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_kill_leaves_the_old_file(owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "a.txt", b"old")
    with monkeypatch.context() as deadly:
        deadly.setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert exit_code(lambda: publish(tmp_path / "a.txt", b"new" * 1000)) == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_bytes() == b"old"
    publish(tmp_path / "a.txt", b"next")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"], "the draft of the killed one is used again"


def test_a_state_comes_back() -> None:
    state = {"w": torch.arange(4.0), "n": [1, None, "x", 2.5], "deep": {"flag": True}}
    found = unpacked(packed(state), "state.pt")
    assert torch.equal(found.pop("w"), state.pop("w"))
    assert found == state


def test_the_bytes_do_not_depend_on_where_they_go() -> None:
    assert packed({"w": torch.ones(3)}) == packed({"w": torch.ones(3)})


class Evil:
    """Its pickle creates a file when it is loaded without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_no_code_runs_from_a_malicious_file(kind: str, tmp_path: Path) -> None:
    target, content = tmp_path / "attacked", io.BytesIO()
    torch.save({"model": Evil(target)}, content) if kind == "torch" else pickle.dump(Evil(target), content)
    with pytest.raises(RequestError, match=r"foreign\.pt is no file of weights that can be loaded safely"):
        unpacked(content.getvalue(), "foreign.pt")
    assert not target.exists()
    torch.load(io.BytesIO(content.getvalue()), weights_only=False) if kind == "torch" else pickle.loads(  # noqa: S301
        content.getvalue()
    )
    assert target.exists(), "the attack works on whoever is careless, so the test could fail"


@pytest.mark.parametrize("content", [b"", b"hello", packed({"w": torch.ones(100)})[:-10]])
def test_a_foreign_or_torn_file_is_named(content: bytes) -> None:
    with pytest.raises(RequestError, match=r"foreign\.pt"):
        unpacked(content, "foreign.pt")
