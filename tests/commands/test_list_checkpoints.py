import json
from pathlib import Path
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZipFile

import pytest
import torch

from multigpu_cli.checkpoint.files import lock_folder
from multigpu_cli.checkpoint.manifest import MANIFEST
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.weights import save_weights
from multigpu_cli.commands.clean import CheckpointEntry, _find_obstacle, list_checkpoints
from multigpu_cli.errors import RequestError
from tests.support.malicious_files import poison, poison_and_sign
from tests.support.pieces import flip_byte, save_in_pieces

STATE = {"model": {"weight": torch.arange(64.0)}, "progress": {"step": 1, "best": {}}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store(folder / "checkpoints", 10)
    for step in (10, 20, 30):
        store.save(step, STATE, {"world_size": 2})
    save_weights(folder / "best.pt", {"weight": torch.arange(64.0), "count": torch.tensor(3)}, {"lr": 0.1}, {"loss": 1})
    return folder


def states(run: Path) -> dict[str, str]:
    return {entry.name.removeprefix("checkpoints/"): entry.state for entry in list_checkpoints(run)}


def reason(run: Path, name: str) -> str:
    return next(entry.reason for entry in list_checkpoints(run) if entry.name.endswith(name))


def test_whole_ones_are_listed_and_the_newest_is_marked(run: Path) -> None:
    entries = list_checkpoints(run)
    assert [(entry.step, entry.world_size, entry.resumes) for entry in entries] == [
        (10, 2, False),
        (20, 2, False),
        (30, 2, True),
        (None, None, False),
    ]
    folder = run / "checkpoints/step_00000030"
    assert entries[2].bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert entries[2].written == (folder / MANIFEST).stat().st_mtime
    assert set(states(run).values()) == {"whole"}


def test_steps_are_listed_in_order_beyond_eight_digits(run: Path) -> None:
    for step in (99_999_999, 100_000_000):
        Store(run / "checkpoints", 10).save(step, STATE, {"world_size": 2})
    steps = [(entry.step, entry.resumes) for entry in list_checkpoints(run) if entry.step]
    assert steps == [(10, False), (20, False), (30, False), (99_999_999, False), (100_000_000, True)]


def test_pieces_are_counted_and_looked_at(run: Path) -> None:
    folder = save_in_pieces(Store(run / "checkpoints", 10), 40, {"model": {"weight": torch.arange(64.0)}})
    entry = next(entry for entry in list_checkpoints(run) if entry.step == 40)
    assert (entry.state, entry.resumes, entry.world_size) == ("whole", True, 3)
    assert entry.bytes == sum(file.stat().st_size for file in folder.iterdir())
    flip_byte(folder / "rank_2.safetensors")
    assert reason(run, "40") == "rank_2.safetensors does not match its checksum"
    assert [entry.step for entry in list_checkpoints(run) if entry.resumes] == [30]


def test_a_damaged_one_says_why_and_an_older_one_is_marked(run: Path) -> None:
    file = run / "checkpoints/step_00000030/state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoints/step_00000010" / MANIFEST).unlink()
    assert states(run) == {
        "step_00000010": "damaged",
        "step_00000020": "whole",
        "step_00000030": "damaged",
        "best.pt": "whole",
    }
    assert "state.pt has" in reason(run, "30")
    assert [entry.name for entry in list_checkpoints(run) if entry.resumes] == ["checkpoints/step_00000020"]


def test_what_is_left_of_other_attempts_is_no_checkpoint(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000030").rename(checkpoints / "replaced_step_00000030")
    (checkpoints / "step_00000020").rename(checkpoints / "damaged_step_00000020")
    (checkpoints / "damaged_step_00000020/state.pt").write_bytes(b"torn")
    (checkpoints / ".draft_step_00000040").mkdir()
    assert [(entry.name.split("/")[-1], entry.state, entry.reason[:17]) for entry in list_checkpoints(run)][:4] == [
        ("step_00000010", "whole", ""),
        (".draft_step_00000040", "draft", "never finished"),
        ("damaged_step_00000020", "aside", "damaged: state.pt"),
        ("replaced_step_00000030", "aside", "replaced"),
    ]
    with lock_folder(run):
        assert reason(run, ".draft_step_00000040") == "being written"


def test_a_changed_or_torn_file_of_weights_is_found_by_torchs_own_checksums(run: Path) -> None:
    whole = (run / "best.pt").read_bytes()
    at = whole.index(torch.arange(64.0).numpy().tobytes()) + 17
    (run / "best.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "best.pt does not match its checksum" in reason(run, "best.pt")
    (run / "best.pt").write_bytes(whole[:-30])
    assert "best.pt is not a torch.save file (BadZipFile)" in reason(run, "best.pt")


def test_a_malicious_pickle_is_named_and_not_run(run: Path, tmp_path: Path) -> None:
    """All its checksums are right."""
    target = tmp_path / "attacked"
    poison_and_sign(run / "checkpoints/step_00000030", target)
    poison(run / "best.pt", target, {})
    assert states(run)["step_00000030"] == states(run)["best.pt"] == "damaged"
    assert "would run posix.mkdir when loaded" in reason(run, "30")
    assert not target.exists()


def test_every_kind_of_state_that_torch_loads_safely_is_plain(run: Path) -> None:
    kinds = {str(kind): torch.ones(2, dtype=kind) for kind in (torch.float16, torch.bfloat16, torch.int64, torch.bool)}
    others = {"parameter": torch.nn.Parameter(torch.ones(2)), "dtype": torch.float32, "size": torch.Size([2])}
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    save_weights(run / "best.pt", kinds | network.state_dict(), others, {})
    assert reason(run, "best.pt") == ""


def test_a_checkpoint_that_the_run_lets_go_meanwhile_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention works on while somebody looks."""

    def vanishing(folder: Path) -> str | None:
        if folder.name == "step_00000010" and folder.exists():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
            return "manifest.json can't be read"
        return None

    monkeypatch.setattr("multigpu_cli.commands.clean.find_damage", vanishing)
    with lock_folder(run):
        assert list(states(run)) == ["step_00000020", "step_00000030", "best.pt"]
    (run / "checkpoints/step_00000010").mkdir()
    with pytest.raises(FileNotFoundError):
        list_checkpoints(run)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RequestError, match="is not a run folder"):
            list_checkpoints(folder)


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps({}))
    assert list_checkpoints(tmp_path) == []


def test_an_entry_is_plain_values(run: Path) -> None:
    entry = list_checkpoints(run)[0]
    assert CheckpointEntry(**json.loads(json.dumps(entry.__dict__))) == entry


@pytest.mark.parametrize("method", [ZIP_DEFLATED, ZIP_BZIP2, ZIP_LZMA])
def test_weights_with_a_damaged_stream_are_named(method: int, run: Path) -> None:
    with ZipFile(run / "best.pt", "w", method) as archive:
        archive.writestr("best/data.pkl", bytes(range(250)) * 20)
    content = bytearray((run / "best.pt").read_bytes())
    content[50:90] = b"\xff" * 40
    (run / "best.pt").write_bytes(content)
    assert "best.pt is not a torch.save file" in reason(run, "best.pt")
    (run / "summary.json").write_text('{"status": "completed"}')
    assert "best.pt is missing or damaged" in _find_obstacle(run)
