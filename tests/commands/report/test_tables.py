import json
from pathlib import Path

from multigpu_cli.commands.report import data
from multigpu_cli.monitor.curves import load_runs
from tests.commands.runs import forecast, interrupted_run, run_folder


def test_plan_against_reality(tmp_path: Path) -> None:
    rows = dict(data.tabulate_plan(load_runs([interrupted_run(tmp_path / "a")])[0]).rows)
    assert rows["workers"] == ["2", "2 → 1"]
    assert rows["optimizer steps"] == ["40", "40"]
    assert rows["steps done twice after a restart"] == ["0", "2"]
    assert rows["greatest learning rate, of the steps logged"] == ["0.1", "0.1"]


def test_the_forecast_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder = interrupted_run(tmp_path / "a")
    rows = dict(data.tabulate_plan(load_runs([folder])[0]).rows)
    assert rows["samples per second"] == ["", "1040"], "measured all the same"
    forecast(folder, workers=1)
    rows = dict(data.tabulate_plan(load_runs([folder])[0]).rows)
    assert rows["samples per second"] == ["1333", "1040 (-22%)"]
    assert rows["step, median"] == ["24.00 ms", "30.00 ms (+25%)"]
    assert rows["memory per worker (tensors; the process)"] == ["512.0 MiB", "2048 MiB (+300%)"]
    plan = json.loads((folder / "plan.json").read_text())
    sharded = [{"workers": count, "memory": plan["memory"] | {"weights": 0}} for count in (2, 1)]
    (folder / "plan.json").write_text(json.dumps(plan | {"sharded": sharded}))
    rows = dict(data.tabulate_plan(load_runs([folder])[0]).rows)
    assert rows["memory per worker (tensors; the process)"][0] == "256.0 MiB", "weights on other workers"
    forecast(folder, workers=8)
    rows = dict(data.tabulate_plan(load_runs([folder])[0]).rows)
    assert rows["forecast"] == ["of other numbers: 8 workers", ""]
    assert rows["step, median"] == ["", "30.00 ms"]


def test_what_happened_is_told_in_order(tmp_path: Path) -> None:
    table = data.tabulate_events(load_runs([interrupted_run(tmp_path / "a")])[0])
    assert [(when, what[0].partition(":")[0]) for when, what in table.rows] == [
        ("+ 0 s", "attempt 1 starts"),
        ("+ 24 s", "the last line of this attempt"),
        ("+ 3 min 20 s", "attempt 2 starts"),
        (
            "+ 3 min 21 s",
            "at work again, 2 min 57 s after the previous attempt had stopped, 2 steps done again (rank 1 was "
            "killed by SIGKILL)",
        ),
        ("+ 3 min 30 s", "nonfinite at step 30"),
        ("+ 5 min 0 s", "completed at step 40"),
    ]
    assert table.rows[2][1][0].endswith("1 worker, resumes from step 22")


def test_settings_are_compared_with_the_defaults_and_each_other(tmp_path: Path) -> None:
    runs = load_runs([interrupted_run(tmp_path / "a", seed=7), interrupted_run(tmp_path / "b", epochs=3)])
    table, rest = data.tabulate_settings(runs)
    assert table.columns == ["a", "b", "default"]
    assert dict(table.rows) == {"seed": ["7", "42", "42"], "epochs": ["20", "3", "20"]}
    assert "log_interval 50" in rest
    assert "seed" not in rest


def test_the_result_leaves_out_what_no_run_has(tmp_path: Path) -> None:
    runs = load_runs([interrupted_run(tmp_path / "a"), run_folder(tmp_path / "b", [])])
    rows = dict(data.tabulate_outcome(runs).rows)
    assert rows["test accuracy"] == ["97.50 %", ""]
    assert rows["status"] == ["completed", "not over"]
    assert rows["attempts"] == ["2", "0"]
    assert "peak memory per worker" not in rows
    assert data.pick_headline(runs[0])[:2] == [("status", "completed"), ("test accuracy", "97.50 %")]
    cells = dict(data.tabulate_environment(runs).rows)
    assert (cells["host"], cells["torch"]) == (["node8", ""], ["2", ""])
    assert [row[0] for row in data.tabulate_classes(runs[0]).rows] == ["cat", "<dog>"]
