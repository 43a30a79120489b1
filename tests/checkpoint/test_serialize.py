import io
import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.checkpoint import files
from multigpu_cli.checkpoint.pieces import count_tensor_bytes, deserialize, serialize, write_state
from multigpu_cli.errors import RequestError
from tests.support.malicious_files import Evil


def test_a_state_comes_back() -> None:
    state: dict[str, Any] = {"w": torch.arange(4.0), "n": [1, None, "x", 2.5], "deep": {"flag": True}}
    found = deserialize(serialize(state), "state.pt")
    assert torch.equal(found.pop("w"), state.pop("w"))
    assert found == state


def test_the_bytes_do_not_depend_on_where_they_go() -> None:
    assert serialize({"w": torch.ones(3)}) == serialize({"w": torch.ones(3)})


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_no_code_runs_from_a_malicious_file(kind: str, tmp_path: Path) -> None:
    target, content = tmp_path / "attacked", io.BytesIO()
    torch.save({"model": Evil(target)}, content) if kind == "torch" else pickle.dump(Evil(target), content)
    with pytest.raises(RequestError, match=r"foreign\.pt can't be loaded safely as weights"):
        deserialize(content.getvalue(), "foreign.pt")
    with pytest.raises(RequestError, match="it is a pickle of Python objects"):
        deserialize(pickle.dumps([1]), "foreign.pt")
    assert not target.exists()
    torch.load(io.BytesIO(content.getvalue()), weights_only=False) if kind == "torch" else pickle.loads(  # noqa: S301
        content.getvalue()
    )
    assert target.exists(), "the attack works on whoever is careless, so the test could fail"


@pytest.mark.parametrize("content", [b"", b"hello", serialize({"w": torch.ones(100)})[:-10]])
def test_a_foreign_or_torn_file_is_named(content: bytes) -> None:
    with pytest.raises(RequestError, match=r"foreign\.pt"):
        deserialize(content, "foreign.pt")


class Watched(io.FileIO):
    longest = 0

    def write(self, piece: Any) -> int:
        Watched.longest = max(Watched.longest, len(piece))
        return super().write(piece)


class Full(io.FileIO):
    def write(self, piece: Any) -> int:
        if self.tell():  # not at once: torch then tells what it makes of it
            raise OSError(28, "No space left on device")
        return super().write(piece)


def test_a_state_goes_into_a_file_piece_by_piece_as_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "open_new", lambda path, mode: Watched(path, "xb"))
    state = {str(number): torch.full((1000,), float(number)) for number in range(50)}
    written = write_state(tmp_path / "state.pt", state, files.ignore_progress)
    assert (tmp_path / "state.pt").read_bytes() == serialize(state)
    assert written == {"size": len(serialize(state)), "sha256": sha256(serialize(state)).hexdigest()}
    assert 4000 <= Watched.longest <= 4000 + 1000, "never more than a tensor at once"


def test_a_full_disk_is_named_by_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "open_new", lambda path, mode: Full(path, "xb"))
    with pytest.raises(OSError, match="No space left on device"):
        write_state(tmp_path / "state.pt", {"w": torch.ones(1000)}, files.ignore_progress)
    assert list(tmp_path.iterdir()) == []


def test_tied_tensors_take_their_memory_once() -> None:
    weight = torch.ones(100)
    assert count_tensor_bytes({"a": weight, "b": [weight, (weight[:50], 3)], "c": torch.ones(10)}) == 440
    assert count_tensor_bytes({}) == 0
