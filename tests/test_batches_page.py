"""docs/howto/sample-shapes.md: every row of its table runs as it is typed, and calls the model as it says."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import main_multi_gpu
from tests.support.run_training import run_training

PAGE = Path(__file__).resolve().parents[1] / "docs/howto/sample-shapes.md"
SHARED = (1, 4, 5, 6, 8, 9, 10, 11)  # rows that are also run on two and three workers
OFTEN = (0, 3, 9)
FLAT = "evaluate run1 --data my_batches:Flat --set data.inputs=2"  # other data of another form


class Row(NamedTuple):
    call: str
    flags: dict[str, Any]
    sets: list[str]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| `"):
            words = shlex.split(cells[3].removesuffix(" |").strip("`"))
            pairs = list(zip(words[::2], words[1::2], strict=True))
            flags: dict[str, Any] = {flag[2:].replace("-", "_"): value for flag, value in pairs if flag != "--set"}
            found.append(Row(cells[2].strip("`"), flags, [value for flag, value in pairs if flag == "--set"]))
    return found


ROWS = rows()
RUN: dict[str, Any] = {"epochs": 1, "num_workers": 0, "global_batch_size": 12, "batch_size": 4}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copy(PAGE.parents[2] / "examples/own/my_batches.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_batches", None)


def test_there_are_twelve_rows() -> None:
    assert len(ROWS) == 12
    assert len({(row.flags["data"], row.flags["model"]) for row in ROWS}) == 12


@pytest.mark.parametrize(
    "number", [pytest.param(row, marks=[pytest.mark.slow] * (row not in OFTEN)) for row in range(12)]
)
def test_a_row_trains_and_the_model_is_called_as_it_says(number: int) -> None:
    row = ROWS[number]
    ends = []
    for workers in (1, 2, 3) if number in SHARED else (1,):
        ended = run_training(workers, sets=row.sets, save_dir=f"{workers}", exact=True, **row.flags, **RUN)
        assert not ended.error, ended.error
        ends.append(ended.summary)
    journal = (json.loads(line) for line in Path("1/journal.jsonl").read_text().splitlines())
    call = next(line["plan"]["model_call"] for line in journal if line["event"] == "start")
    assert call.partition(": ")[0] or row.call == "model(x)"
    assert ends[0]["final"]["train_loss"] > 0
    assert len({end["fingerprint"] for end in ends}) == 1
    assert len({str(end["final"]) for end in ends}) == 1


@pytest.mark.parametrize("number", [*(pytest.param(row, marks=pytest.mark.slow) for row in (1, 4, 10)), 11])
def test_with_ddp_too_the_number_of_workers_changes_nothing(number: int) -> None:
    """Its outputs go through DDP, which has to pass them on: tuples, dicts, objects."""
    row = ROWS[number]
    losses = []
    for workers in (1, 2, 3):
        ended = run_training(workers, sets=row.sets, save_dir=f"{workers}", **row.flags, **RUN)
        assert not ended.error, ended.error
        losses.append([ended.summary["final"][name] for name in ("train_loss", "val_loss", "test_loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_the_commands_that_call_a_model_know_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 6, 11):
        ended = run_training(1, sets=ROWS[number].sets, save_dir=f"run{number}", epochs=1, **ROWS[number].flags)
        assert not ended.error, ended.error
    for command in (
        "evaluate run1",
        "predict run1 --out said.csv",
        "export run1 --to net.onnx",
        "evaluate run11",
        FLAT,
    ):
        assert main_multi_gpu.run([*command.split(), "--own-code"]) == 0, capsys.readouterr().err
    assert len(Path("said.csv").read_text().splitlines()) == 41
    for command, named in (
        ("predict run11 --out x.csv", "has no tensor with a row for each sample"),
        ("export run11 --to x.onnx", "from-model"),
        ("sample run6 --prompt 1", "its network also needs attention_mask"),
    ):
        assert main_multi_gpu.run([*command.split(), "--own-code"]) == 2
        assert named in capsys.readouterr().err
