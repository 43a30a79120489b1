import json
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.loggers.sender import RowFilter
from multigpu_cli.monitor.history import JournalTail
from tests.commands.runs import Event, event, interrupted_run


def select(events: list[Event], folder: Path) -> list[tuple[int, str, float]]:
    """Step, and the loss under its name, of each row."""
    (folder / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    rows, tail = RowFilter(), JournalTail(folder / "journal.jsonl")
    chosen = [row for line in tail.read() if (row := rows.select(line))]
    return [(row.step, name, row.numbers[name]) for row in chosen for name in row.numbers if name.endswith("/loss")]


def train(step: int, loss: float, **more: Any) -> Event:
    return event(1000.0 + step, "train", step=step, loss=loss, lr=0.1, **more)


def test_numbers_have_the_names_that_tensorboard_shows(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "run")
    rows, tail = RowFilter(), JournalTail(tmp_path / "run" / "journal.jsonl")
    chosen = [row for line in tail.read() if (row := rows.select(line))]
    assert {*chosen[0].numbers} >= {"train/loss", "train/lr", "system/samples_per_second", "system/memory/1"}
    assert [row.numbers["val/accuracy"] for row in chosen if "val/accuracy" in row.numbers][:1] == [0.75]
    assert [row.step for row in chosen if "train/loss" in row.numbers] == list(range(1, 41)), "24 and 23 came twice"


def test_a_step_that_was_trained_again_counts_again_only_where_it_differs(tmp_path: Path) -> None:
    again = [train(1, 2.0), train(2, 1.0), train(2, 1.0 + 1e-6, samples_per_second=9), train(1, 1.9), train(1, 2.0)]
    assert select(again, tmp_path) == [
        (step, "train/loss", loss) for step, loss in [(1, 2.0), (2, 1.0), (1, 1.9), (1, 2)]
    ]


def test_validation_and_test_of_one_step_are_two_rows(tmp_path: Path) -> None:
    both = [event(1, "eval", step=4, split=split, loss=0.5) for split in ("val", "test")]
    assert select(both, tmp_path) == [(4, "val/loss", 0.5), (4, "test/loss", 0.5)]


def test_a_line_that_is_still_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    tail = JournalTail(journal)
    assert list(tail.read()) == [], "there is no journal yet"
    text = json.dumps(train(1, 2.0)) + "\nno event\n" + json.dumps(train(2, 1.0)) + "\n"
    for cut in range(0, len(text), 7):
        journal.write_text(text[:cut])
        found = list(tail.read())
        assert all(text[: line.end].count("\n") == line.number for line in found)
    journal.write_text(text)
    assert [line.event for line in JournalTail(journal).read()] == [train(1, 2.0), None, train(2, 1.0)]
    assert tail.end in (len(text), *[line.end for line in JournalTail(journal).read()])


@pytest.mark.parametrize("damaged", [{"event": "train", "time": 1.0}, {"event": "train", "time": 1.0, "step": "x"}])
def test_a_train_line_without_a_step_is_no_row(tmp_path: Path, damaged: Event) -> None:
    with pytest.warns(UserWarning, match="a line is damaged, and not used: step is missing, or of another type"):
        assert select([damaged], tmp_path) == []
