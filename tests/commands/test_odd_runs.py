"""A run whose files have fields of other types than ours: it is named once, and no command ends because of it."""

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis.strategies import DataObject, data, dictionaries, floats, integers, lists, none, sampled_from, text

from multigpu_cli.checkpoint.manifest import MANIFEST, find_manifest_damage, sign_manifest
from multigpu_cli.commands.report import report
from multigpu_cli.commands.status import find_runs, watch_runs
from multigpu_cli.commands.verify import compare_runs
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.curves import list_marks, list_plots, load_runs
from multigpu_cli.monitor.journal import check_fields
from multigpu_cli.tune import driver
from multigpu_cli.tune.report import format_study, report_study
from multigpu_cli.tune.study import summarize
from tests.commands.runs import event, forecast, interrupted_run
from tests.tune.studies import FAKE, make_driver, make_study

PLAIN = none() | text(max_size=9) | floats() | integers() | sampled_from([10**400, 2**60, "NaN", "Infinity", True])
ODD = PLAIN | lists(PLAIN, max_size=3) | dictionaries(text(max_size=3), PLAIN, max_size=3) | lists(lists(PLAIN))
MORE = {
    "train": {"own_ms": [20.0, 25.0], "comm_share": 0.1, "cpu_utilisation": [50.0, None], "noise_scale": 3.0},
    "start": {"data": "in host memory"},
}
SUMMARY = {
    "train_seconds": 12.5,
    "startup_seconds": 1.5,
    "samples_per_second": 100.0,
    "precision": "off",
    "step_ms": {"p50": 1.0, "p95": 2.0},
    "peak_memory_bytes": [2**30],
    "val_accuracy": 0.9,
    "best": {"epoch": 2, "val_loss": 0.5},
}
STATE = {"phase": "training", "step": 3, "time": 1250.0, "host": "a", "pid": 1, "started": 5, "launcher": 0}
FILES = ("journal.jsonl", "summary.json", "plan.json", "logs/state.json")
often = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has all kinds of files, lines and fields, and another one beside it."""
    home = tmp_path_factory.mktemp("runs")
    run = interrupted_run(home / "odd")
    interrupted_run(home / "sound")
    forecast(run, 1)
    found = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(found | SUMMARY))
    (run / "logs").mkdir()
    (run / "logs/state.json").write_text(json.dumps(STATE))
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    events = [each | MORE.get(each["event"], {}) for each in events]
    answers = [{"prompt": "a", "answer": "b", "ended": True}]
    events.insert(-1, event(1299, "samples", step=40, epoch=10, samples=answers))
    (run / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return home


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a nested value has others: keys and indexes, from outside to inside."""
    yield from [place] if place else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from list_places(inner, (*place, name))


def replace_field(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(content)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return changed


def mutate(source: DataObject, content: Any) -> Any:
    """An object with another value in one of its fields."""
    return replace_field(content, source.draw(sampled_from([*list_places(content)])), source.draw(ODD))


def mutate_file(source: DataObject, name: str, original: str) -> str:
    """A file of a run with another value in one field; of a journal one line of each kind is as likely."""
    if not name.endswith(".jsonl"):
        return json.dumps(mutate(source, json.loads(original)))
    events = [json.loads(line) for line in original.splitlines()]
    kind = source.draw(sampled_from(sorted({each["event"] for each in events})))
    at = source.draw(sampled_from([at for at, each in enumerate(events) if each["event"] == kind]))
    events[at] = mutate(source, events[at])
    return "".join(json.dumps(each) + "\n" for each in events)


def show(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `status`, and a report's page without its pictures, which take seconds."""
    watch_runs([str(home)], as_json=False, repeat=False)
    assert str(home / "sound") in capsys.readouterr().out
    loaded = load_runs([home / "odd", home / "sound"])
    by, _ = list_plots(loaded)
    assert all(isinstance(mark.at, float) for run in loaded for mark in list_marks(run, by))
    assert "sound" in report.render_page(loaded, [])


@often
@given(source=data())
def test_odd_field_of_a_run_hides_no_other_run(
    source: DataObject, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = source.draw(sampled_from(FILES))
    file = runs / "odd" / name
    original = file.read_text()
    file.write_text(mutate_file(source, name, original))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* damaged, and not used")
            show(runs, capsys)
    finally:
        file.write_text(original)


@pytest.mark.parametrize(
    ("name", "damage", "warning"),
    [
        ("summary.json", '{"final": 3}', "summary.json is damaged, and not used: final is missing, or of another type"),
        ("summary.json", "{", "summary.json is damaged, and not used: Expecting"),
        ("journal.jsonl", '{"event": "train", "time": 1, "step": []}\n', "a line is damaged, and not used: step is"),
        ("journal.jsonl", '{"event": "train", "time": 1, "step": 4, "own_ms": {"": null}}\n', "not used: own_ms is"),
        (
            "journal.jsonl",
            json.dumps(event(9, "eval", step=1, split="val", **{"x" * 201: 1.0})) + "\n",
            "x… has too long",
        ),
        ("plan.json", '{"memory": {}}', "plan.json is damaged, and not used: "),
        ("logs/state.json", '{"time": 1, "pid": "x"}', "state.json is damaged, and not used: pid is missing"),
    ],
)
def test_damaged_file_is_named(
    name: str, damage: str, warning: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs / "odd" / name
    original = file.read_text()
    file.write_text(original + damage if name == "journal.jsonl" else damage)
    try:
        with pytest.warns(UserWarning, match="damaged") as warned:
            show(runs, capsys)
    finally:
        file.write_text(original)
    assert all(warning in str(each.message) and "odd" in str(each.message) for each in warned)


@pytest.mark.parametrize(
    "summary",
    [
        {"confusion": [[1], [2, 3]]},
        {"confusion": [[], []]},
        {"confusion": [[1, 2], [3, 4]], "per_class": [{"class": None}, {}, {"class": 3}]},
    ],
)
def test_odd_tables_of_a_run_are_drawn_or_left_out(summary: dict[str, Any], tmp_path: Path) -> None:
    run = interrupted_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps(summary))
    assert list(report._draw_confusion(load_runs([run])[0], alone=True)) or "per_class" not in summary


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "FRONT_DOOR", FAKE)
        own = make_driver(folder, make_study(trials=3, rungs=[1], generation=3))
        summarize(own, own.run())
    return folder


@often
@given(source=data())
def test_odd_field_of_a_study_is_a_refusal_or_shown(source: DataObject, study: Path) -> None:
    """A study is one thing: without one of its trials the others would be compared differently."""
    file = study / source.draw(sampled_from(["summary.json", "trials/0001/trial.json"]))
    original = file.read_text()
    file.write_text(json.dumps(mutate(source, json.loads(original))))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* damaged, and not used")
            assert list(format_study(report_study(study, 1)))
    except RequestError:
        pass
    finally:
        file.write_text(original)


def test_study_with_values_of_an_absurd_epoch_is_refused(study: Path, tmp_path: Path) -> None:
    planted = shutil.copytree(study, tmp_path / "study")
    file = planted / "trials/0001/trial.json"
    for epoch in ("9" * 400, "9" * 150, "-1"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"values": {epoch: 0.5}}))
        with pytest.raises(RequestError, match=r"trial\.json: can't be read"):
            report_study(planted, 1)


@given(odd=ODD)
@example(odd={"state.pt": {"size": "9"}})
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_odd_manifest_is_damage(odd: Any, tmp_path: Path) -> None:
    """Though its checksum is right, which anybody can write."""
    if not isinstance(odd, dict) or odd:
        (tmp_path / MANIFEST).write_bytes(sign_manifest({"step": 3, "files": odd}))
        assert find_manifest_damage(tmp_path) == f"{MANIFEST} can't be read (ValueError)"


def plant_link(run: Path) -> None:
    """Put a link to another regular file in place of the journal."""
    (run / "journal.jsonl").rename(run / "other.jsonl")
    (run / "journal.jsonl").symlink_to("other.jsonl")


def plant_settings(run: Path) -> None:
    (run / "config.yaml").write_text("a: [")


def plant_huge_number(run: Path) -> None:
    (run / "summary.json").write_text(f'{{"val_accuracy": {10**400}}}')


def plant_odd_start(run: Path) -> None:
    with (run / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(event(1400, "start", world_size=[])) + "\n")


def show_all(home: Path) -> str:
    """Print the status of all runs of a folder, as text and as JSON, and return the page of their report."""
    for as_json in (False, True):
        watch_runs([str(home)], as_json=as_json, repeat=False, sort_by="val_loss")
    loaded = load_runs(find_runs([str(home)]))
    return report.render_page(report._sort_runs(loaded, "val_loss")[0], [])


def plant_nested_host(run: Path) -> None:
    """Add a line that JSON can read, and that recursive code can't walk."""
    with (run / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "start", "time": 1400, "host": ' + "[" * 700 + "]" * 700 + "}\n")


@pytest.mark.parametrize("plant", [plant_link, plant_settings, plant_huge_number, plant_odd_start, plant_nested_host])
def test_odd_run_is_named_and_hides_no_other(
    plant: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, odd = interrupted_run(tmp_path / "sound"), interrupted_run(tmp_path / "odd")

    plant(odd)
    with pytest.warns(UserWarning, match="damaged, and not used") as warned:
        page = show_all(tmp_path)
    assert "sound" in page
    assert capsys.readouterr().out.count(str(sound)) == 2
    assert {str(odd) in str(each.message) for each in warned} == {True}
    assert len({str(each.message) for each in warned}) == 1


def test_best_run_with_damaged_settings_has_no_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant_settings(interrupted_run(tmp_path / "odd"))
    with pytest.warns(UserWarning, match="config.yaml is damaged, and not used: .*malformed YAML"):
        watch_runs([str(tmp_path)], as_json=False, repeat=False, sort_by="val_loss")
    assert "main_multi_gpu.py" not in capsys.readouterr().out


def test_verify_refuses_a_journal_that_is_a_link(tmp_path: Path) -> None:
    sound, odd = interrupted_run(tmp_path / "sound"), interrupted_run(tmp_path / "odd")
    plant_link(odd)
    with pytest.raises(RequestError, match=r"odd/journal\.jsonl can't be read: a symbolic link"):
        compare_runs(str(sound), str(odd))


def test_verify_compares_a_run_with_an_odd_start(tmp_path: Path) -> None:
    sound, odd = interrupted_run(tmp_path / "sound"), interrupted_run(tmp_path / "odd")
    plant_odd_start(odd)
    with pytest.warns(UserWarning, match="world_size is missing, or of another type"):
        assert compare_runs(str(sound), str(odd)).lines


def test_kind_without_types_may_be_any_object() -> None:
    check_fields({"a": [1]}, "of nobody")
    with pytest.raises(ValueError, match="the object"):
        check_fields([], "of nobody")
