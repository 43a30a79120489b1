import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from multigpu_cli.checkpoint import pieces as pieces_module
from multigpu_cli.checkpoint.manifest import (
    MANIFEST,
    find_damage,
    find_damaged_piece,
    find_quick_damage,
    read_manifest,
    sign_manifest,
)
from multigpu_cli.checkpoint.pieces import Pieces, Rows, write_piece
from multigpu_cli.checkpoint.store import Checkpoint, Store
from multigpu_cli.errors import RequestError
from tests.support.pieces import divide, flip_byte, save_in_pieces

WEIGHT = torch.arange(28.0).reshape(7, 4)
STATE: dict[str, Any] = {
    "model": {"0.weight": WEIGHT, "0.bias": torch.arange(2.0)},
    "optimizer": {"state": {0: {"exp_avg": WEIGHT * 2, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
    "progress": {"step": 20},
}
FORMATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", 2)


def read(folder: Path) -> dict[str, Any]:
    return Checkpoint(folder, read_manifest(folder)).state()


@pytest.mark.parametrize("kind", FORMATS)
def test_any_rows_of_any_format_come_back(kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = list[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda file, begin, size: reserved.append(size))
    whole = (torch.arange(28) % 2 if kind == torch.bool else torch.arange(28)).reshape(7, 2, 2).to(kind)
    _, divided = divide({"a": whole, "few": whole[:2], "none": whole[:0]}, 3)
    names = []
    for rank, rows in enumerate(divided):
        names.append(f"rank_{rank}.safetensors")
        listed = write_piece(tmp_path / names[-1], rows)
        content = (tmp_path / names[-1]).read_bytes()
        assert listed == {"size": len(content), "sha256": sha256(content).hexdigest()}
        assert reserved.pop() == len(content)
    found = Pieces(tmp_path, reversed(names))
    for name, tensor in (("a", whole), ("few", whole[:2]), ("none", whole[:0])):
        outline = torch.empty_like(tensor, device="meta")
        assert have_same_bits(found.read(name, outline), tensor)
        for begin in range(len(tensor) + 1):
            for end in range(begin, len(tensor) + 1):
                assert have_same_bits(found.read(name, outline, begin, end), tensor[begin:end])


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    as_bytes = [each.contiguous().unsqueeze(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*as_bytes)


def test_the_files_are_ordinary_ones(tmp_path: Path) -> None:
    """Each tensor begins at a multiple of its elements' size, whatever lies before it."""
    rows = {"byte": Rows(torch.ones(3, dtype=torch.uint8), 4), "last": Rows(WEIGHT[3:], 3)}
    write_piece(tmp_path / "rank_0.safetensors", rows)
    found = load_file(tmp_path / "rank_0.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: each.tensor.tolist() for name, each in rows.items()
    }
    assert found["last"].data_ptr() % 4 == 0


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_piece(tmp_path / "rank_0.safetensors", {"a": Rows(WEIGHT, 0)})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_in_pieces_comes_back_whole_or_in_part(store: Store) -> None:
    folder = save_in_pieces(store, 20, STATE)
    found, skipped = store.find_newest()
    assert found is not None
    assert (found.in_pieces, skipped) == (True, [])
    state = found.state()
    assert torch.equal(state["model"]["0.weight"], WEIGHT)
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], WEIGHT * 2)
    assert [state["optimizer"]["state"][0]["step"], state["progress"]] == [torch.tensor(3.0), {"step": 20}]
    assert list(found.state("model")) == ["model"]
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST]
    assert sum(listed["size"] for listed in found.manifest["files"].values()) == sum(sizes)
    assert found.outline()["model"]["0.weight"].is_meta


def tear_file(folder: Path) -> None:
    file = folder / "rank_1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    flip_byte(folder / "rank_1.safetensors")


def remove_piece(folder: Path) -> None:
    (folder / "rank_2.safetensors").unlink()


def swap_pieces(folder: Path) -> None:
    content = (folder / "rank_0.safetensors").read_bytes()
    (folder / "rank_0.safetensors").write_bytes((folder / "rank_1.safetensors").read_bytes())
    (folder / "rank_1.safetensors").write_bytes(content)


def name_a_file_elsewhere(folder: Path) -> None:
    manifest = read_manifest(folder)
    del manifest["sha256"]
    manifest["files"]["../rank_9.safetensors"] = manifest["files"]["rank_0.safetensors"]
    (folder.parent / "rank_9.safetensors").write_bytes((folder / "rank_0.safetensors").read_bytes())
    (folder / MANIFEST).write_bytes(sign_manifest(manifest))


DAMAGE: dict[Callable[[Path], None], str] = {
    tear_file: "rank_1.safetensors has",
    flip: "rank_1.safetensors does not match its checksum",
    remove_piece: "rank_2.safetensors is missing",
    swap_pieces: "rank_0.safetensors ",
    name_a_file_elsewhere: "lists ../rank_9.safetensors, which is not a file of its folder",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_of_a_piece_is_found_and_an_older_checkpoint_is_taken(
    damage: Callable[[Path], None], store: Store
) -> None:
    save_in_pieces(store, 10, STATE)
    damage(save_in_pieces(store, 20, STATE))
    found, skipped = store.find_newest()
    assert found is not None
    assert found.step == 10
    assert DAMAGE[damage] in skipped[0]


def test_readers_share_the_work_of_looking_at_pieces(store: Store) -> None:
    folder = save_in_pieces(store, 10, STATE)
    flip(folder)
    assert find_quick_damage(folder) is None
    assert [find_damaged_piece(folder, share, 2) is None for share in range(2)] == [True, False]
    remove_piece(folder)
    assert "can't be read" in (find_damaged_piece(folder, 2, 3) or "")


def test_a_foreign_file_beside_the_pieces_is_not_read(store: Store) -> None:
    folder = save_in_pieces(store, 10, STATE)
    save_file({"model.0.weight": torch.zeros(7, 4)}, folder / "rank_7.safetensors")
    assert find_damage(folder) is None
    assert torch.equal(read(folder)["model"]["0.weight"], WEIGHT)


def overlap_rows(pieces: list[dict[str, Rows]]) -> None:
    pieces[1]["model.0.weight"] = Rows(WEIGHT[2:6], 2)


def repeat_rows(pieces: list[dict[str, Rows]]) -> None:
    pieces[1]["model.0.weight"] = pieces[0]["model.0.weight"]


def leave_gap(pieces: list[dict[str, Rows]]) -> None:
    del pieces[1]["model.0.weight"]


def drop_last_row(pieces: list[dict[str, Rows]]) -> None:
    del pieces[2]["model.0.weight"]


def exceed_the_end(pieces: list[dict[str, Rows]]) -> None:
    pieces[2]["model.0.weight"] = Rows(WEIGHT[:2], 6)


def drop_tensor(pieces: list[dict[str, Rows]]) -> None:
    for rows in pieces:
        rows.pop("model.0.weight", None)


def change_width(pieces: list[dict[str, Rows]]) -> None:
    pieces[1]["model.0.weight"] = Rows(torch.ones(3, 5), 3)


def change_format(pieces: list[dict[str, Rows]]) -> None:
    pieces[1]["model.0.weight"] = Rows(torch.ones(3, 4).half(), 3)


WRONG: dict[Callable[[list[dict[str, Rows]]], None], str] = {
    overlap_rows: "of the 7 rows of model.0.weight its files have 0 to 3, 2 to 6, 6 to 7",
    repeat_rows: "have 0 to 3, 0 to 3, 6 to 7",
    leave_gap: "have 0 to 3, 6 to 7",
    drop_last_row: "have 0 to 3, 3 to 6",
    exceed_the_end: "have 0 to 3, 3 to 6, 6 to 8",
    drop_tensor: "of the 7 rows of model.0.weight its files have none",
    change_width: "model.0.weight is of another shape or format than in state.pt",
    change_format: "model.0.weight is of another shape or format than in state.pt",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_rows_that_do_not_make_up_the_tensor_are_refused(
    change: Callable[[list[dict[str, Rows]]], None], store: Store
) -> None:
    folder = save_in_pieces(store, 10, STATE, change=change)
    assert find_damage(folder) is None, "checksums are right: nobody but a faulty writer makes this"
    with pytest.raises(RequestError) as refused:
        read(folder)
    assert WRONG[change] in refused.value.problem


@pytest.mark.parametrize("content", [b"", b"no safetensors file", None])
def test_a_file_without_rows_is_refused_in_one_message(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "rank_0.safetensors"
    save_file({"a": WEIGHT}, file) if content is None else file.write_bytes(content)
    with pytest.raises(RequestError, match=r"rank_0\.safetensors: no rows of a checkpoint can be read from it"):
        Pieces(tmp_path, [file.name])


def test_a_damaged_piece_of_an_old_checkpoint_is_kept(store: Store) -> None:
    flip(save_in_pieces(store, 10, STATE))
    for step in (20, 30, 40):
        save_in_pieces(store, step, STATE)
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["damaged_step_00000010", "step_00000030", "step_00000040"]


def test_a_draft_that_another_rank_has_begun_stays(store: Store) -> None:
    store.folder.mkdir()
    (store.folder / ".draft_step_00000005").mkdir()
    (store.open_draft(10) / "begun").write_text("")
    save_in_pieces(store, 10, STATE)
    assert [path.name for path in store.folder.iterdir()] == ["step_00000010"]
    assert (store.folder / "step_00000010" / "begun").exists()
    store.discard_draft(5)  # which is gone: so are those of a folder that somebody removed


def test_a_save_that_fails_leaves_no_draft(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_pieces(store, 10, STATE)

    def full(*_: object, **__: object) -> None:
        raise OSError("rank 1: no space")

    monkeypatch.setattr(pieces_module, "publish_stream", full)
    with pytest.raises(OSError, match="no space"):
        save_in_pieces(store, 20, STATE)
    assert [path.name for path in store.folder.iterdir()] == ["step_00000010"]


def test_a_flipped_byte_of_the_header_cannot_move_rows(store: Store) -> None:
    """Where each row belongs is in the file itself, and so under its checksum."""
    folder = save_in_pieces(store, 10, STATE)
    file = folder / "rank_1.safetensors"
    begins = json.loads(load_metadata(file)["begins"])
    assert begins["model.0.weight"] == 3
    file.write_bytes(file.read_bytes().replace(b'\\"model.0.weight\\": 3', b'\\"model.0.weight\\": 0'))
    assert "rank_1.safetensors does not match its checksum" in (find_damage(folder) or "")


def load_metadata(file: Path) -> dict[str, str]:
    size = int.from_bytes(file.read_bytes()[:8], "little")
    return dict(json.loads(file.read_bytes()[8 : 8 + size])["__metadata__"])
