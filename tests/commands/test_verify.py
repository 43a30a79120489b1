"""Two runs compared: by fingerprint, by journal, and not at all where they were never meant to be the same."""

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.commands.verify import compare_runs, format_comparison
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.config.yaml_text import dump_config
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json

PLAN = {"global_batch_size": 64, "batch_size": 32, "learning_rate": 0.1, "total_steps": 6, "contents": "mlp on digits"}
Line = dict[str, Any]


def train(step: int, loss: float | str, **more: Any) -> Line:
    fields = {"samples": 64 * step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "step_ms": step + len(str(loss))}
    return {"event": "train", "step": step} | fields | more


def make_evaluation(step: int, loss: float, split: str = "val") -> Line:
    return {"event": "eval", "epoch": 1, "step": step, "split": split, "samples": 9, "loss": loss, "accuracy": 0.5}


def start(resumed_from: str | None = None, *, workers: int = 1, **plan: Any) -> Line:
    return {"event": "start", "plan": PLAN | plan, "world_size": workers, "resumed_from": resumed_from}


LINES = [train(2, 2.0), train(4, 1.5), make_evaluation(4, 1.4), train(6, 1.0)]


def run(
    folder: Path,
    lines: list[Line],
    *,
    fingerprint: str | None = "a" * 64,
    first: Line | None = None,
    **settings: Any,
) -> str:
    """A run folder as a training leaves it."""
    folder.mkdir()
    journal = [first or start(), *lines]
    (folder / "journal.jsonl").write_text("".join(json.dumps({"time": 1.0} | line) + "\n" for line in journal))
    (folder / "config.yaml").write_text(dump_config(replace_settings(Config(), settings)))
    status = "completed" if fingerprint else "stopped"
    (folder / "summary.json").write_text(json.dumps({"status": status, "fingerprint": fingerprint}))
    return str(folder)


def test_equal_fingerprints_are_the_same_run(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a", LINES), run(tmp_path / "b", LINES, first=start(workers=4), exact=True))
    assert (found.same, found.parting, found.lines) == (True, None, 4)
    assert found.notes[:2] == ["exact: False and True", "world_size: 1 and 4"]
    assert list(format_comparison(found))[:2] == [
        f"same: {'a' * 64}",
        "  all steps and evaluations that both logged agree (4)",
    ]


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        (train(4, 1.5000000000000002), (4, "train", "loss", (1.5, 1.5000000000000002))),
        (train(4, 1.5, grad_norm=1.25), (4, "train", "grad_norm", (1.0, 1.25))),
        (train(4, 1.5, lr=0.2), (4, "train", "lr", (0.1, 0.2))),
        (train(4, "NaN"), (4, "train", "loss", (1.5, "NaN"))),
        (make_evaluation(4, 1.3), (4, "val", "loss", (1.4, 1.3))),
    ],
)
def test_the_first_step_at_which_they_part_is_named(tmp_path: Path, changed: Line, place: tuple[Any, ...]) -> None:
    altered = [changed if (line["event"], line["step"]) == (changed["event"], 4) else line for line in LINES]
    altered[-1] = train(6, 0.5)
    found = compare_runs(run(tmp_path / "a", LINES), run(tmp_path / "b", altered, fingerprint="b" * 64))
    assert not found.same
    assert found.parting is not None
    assert astuple(found.parting)[:4] == place
    assert found.agreed_until == 2


def test_both_values_and_their_distance_are_shown(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a", LINES), run(tmp_path / "b", [train(2, 2.5)], fingerprint="b" * 64))
    out = "\n".join(format_comparison(found))
    assert "they first differ at step 2: train loss\n" in out
    assert f"{tmp_path}/a  2.0\n" in out
    assert f"{tmp_path}/b  2.5\n    relative difference 0.2" in out
    assert not found.notes
    parting = json.loads(dump_json(found))["parting"]
    assert parting == {"step": 2, "what": "train", "name": "loss", "values": [2.0, 2.5], "relative": 0.2}


@pytest.mark.parametrize(
    ("loss", "exact", "notes"),
    [(2.0 + 1e-6, False, 1), (2.001, False, 2), (2.001, True, 0)],
    ids=["1e-6", "1e-3", "exact"],
)
def test_more_than_rounding_on_other_workers_has_a_usual_cause(
    tmp_path: Path, loss: float, exact: bool, notes: int
) -> None:
    other = run(tmp_path / "b", [train(2, loss)], fingerprint="b" * 64, first=start(workers=2), exact=exact)
    found = compare_runs(run(tmp_path / "a", LINES, exact=exact), other).notes[1:]
    assert (len(found), "a bias before BatchNorm" in "".join(found)) == (notes, notes == 2)


@pytest.mark.parametrize(("digest", "says"), [("a", "identical here"), ("b", "equal only to rounding")])
def test_verify_promises_nothing_that_it_did_not_see(digest: str, says: str, tmp_path: Path) -> None:
    """Two workers without --exact, whose logged lines agree: the note does not contradict the verdict."""
    other = run(tmp_path / "b", LINES, fingerprint=digest * 64, first=start(workers=2))
    shown = list(format_comparison(compare_runs(run(tmp_path / "a", LINES), other)))
    notes = [line for line in shown if "--exact" in line]
    assert (len(notes), says in notes[0]) == (1, True)


def test_after_a_resume_only_the_steps_that_count_are_compared(tmp_path: Path) -> None:
    again = [
        {"event": "resume", "step": 2, "from_world_size": 2, "world_size": 1},
        train(4, 1.5),
        make_evaluation(4, 1.4),
    ]
    lost = [train(2, 2.0), train(3, 9.0), train(4, 9.0), start("…"), *again, train(6, 1.0)]
    assert compare_runs(run(tmp_path / "a", LINES), run(tmp_path / "b", lost)).parting is None
    from_scratch = [train(2, 9.0), train(6, 9.0), start(None), *LINES]
    assert compare_runs(run(tmp_path / "c", from_scratch), str(tmp_path / "a")).parting is None


def test_only_steps_that_both_wrote_are_compared(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a", LINES), run(tmp_path / "b", [train(3, 1.7), train(6, 1.0)]))
    assert (found.parting, found.lines, found.agreed_until) == (None, 1, 6)


def test_equal_journals_with_other_weights_ask_for_more_lines(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a", LINES), run(tmp_path / "b", LINES, fingerprint="b" * 64))
    shown = "  all steps and evaluations that both logged agree (4): --log-interval 1 shows where they differ"
    assert shown in format_comparison(found)


@pytest.mark.parametrize(
    ("plan", "settings", "said"),
    [
        ({"global_batch_size": 128}, {}, "global_batch_size: 64 and 128"),
        ({"batch_size": 16}, {}, "batch_size: 32 and 16"),
        ({"total_steps": 9}, {}, "total_steps: 6 and 9"),
        ({"contents": "mlp on har"}, {}, "contents: mlp on digits and mlp on har"),
        ({}, {"seed": 7}, "seed: 42 and 7"),
        ({}, {"optimizer": "sgd"}, "optimizer: adamw and sgd"),
        ({}, {"model.args": {"width": 8}}, "model.args: {} and {'width': 8}"),
    ],
)
def test_runs_of_other_settings_are_not_compared(
    tmp_path: Path, plan: Line, settings: dict[str, Any], said: str
) -> None:
    other = run(tmp_path / "b", LINES, first=start(**plan), **settings)
    with pytest.raises(RequestError) as refused:
        compare_runs(run(tmp_path / "a", LINES), other)
    assert said in refused.value.problem.splitlines()[1]
    assert len(refused.value.problem.splitlines()) == 2


def test_the_same_batch_in_other_words_is_compared(tmp_path: Path) -> None:
    other = run(tmp_path / "b", LINES, global_batch_size=64, log_interval=2, num_workers=3, compile="default")
    assert compare_runs(run(tmp_path / "a", LINES, grad_accum_steps=2), other).same


def test_a_run_that_is_not_over_can_only_be_told_to_be_different(tmp_path: Path) -> None:
    unfinished = run(tmp_path / "b", LINES[:1], fingerprint=None)
    with pytest.raises(RequestError, match=r"is stopped; so far all steps .* agree \(1\)"):
        compare_runs(run(tmp_path / "a", LINES), unfinished)
    other = run(tmp_path / "c", [train(2, 7.0)], fingerprint=None)
    assert not compare_runs(str(tmp_path / "a"), other).same


def test_a_folder_without_a_run_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no run: there is no journal\.jsonl"):
        compare_runs(str(tmp_path), str(tmp_path))


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run(tmp_path / "a", LINES), run(tmp_path / "b", LINES[:2], fingerprint="b" * 64)
    assert main_multi_gpu.run(["verify", a, a]) == 0
    assert main_multi_gpu.run(["verify", a, b, "--json"]) == 1
    capsys.readouterr()
    assert main_multi_gpu.run(["verify", a, str(tmp_path)]) == 2
    assert main_multi_gpu.run(["verify", a]) == 2
    assert "RUN_B" in capsys.readouterr().err


def test_torch_is_not_needed() -> None:
    code = "import sys, multigpu_cli.commands.verify; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
