"""How a run is opened, step by step, on parts that note what is asked of them; whole runs are in other files."""

import io
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, Mock, call

import pytest
import torch

from multigpu_cli.distributed.launch_env import PreviousAttempt
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.faults.watchdog import STARTUP_TIMEOUT
from multigpu_cli.monitor.console import Console
from multigpu_cli.run import open as opening
from multigpu_cli.run import train_log
from multigpu_cli.run.part import Part
from tests.run.test_profile_micro_batch import components
from tests.support.world import CPU


def note_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> MagicMock:
    """Functions of the room in whose place their calls are noted; what rank 0 alone does is done here."""
    noted = MagicMock()
    for name in names:
        monkeypatch.setattr(opening, name, getattr(noted, name))
    monkeypatch.setattr(opening, "run_on_main_rank", lambda world, work: work())
    monkeypatch.setattr(opening, "with_notes", lambda spec, **notes: spec)
    return noted


@dataclass
class Env:
    """What a launcher says."""

    arrival: float = 0.0


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    ("given", "hang", "timeout"),
    [(None, 1.0, STARTUP_TIMEOUT), (None, STARTUP_TIMEOUT + 9, STARTUP_TIMEOUT + 9), (7.0, 1.0, 7.0)],
)
def test_collectives_wait_as_long_as_the_watchdog_does(
    given: float | None, hang: float, timeout: float, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("leave_failures_to_watchdog", "process_group", "StopRequest", "Watchdog", "prepare_spec", "load_parts")
    noted = note_calls(monkeypatch, *parts, "choose_kernels")
    spec, world = noted.prepare_spec.return_value, noted.process_group.return_value.__enter__.return_value
    spec.is_complete, spec.source.warnings = complete, ["of the data"]
    spec.plan.warnings.return_value = ["of the plan"]
    config, placement, console = Mock(), Mock(timeout=given, devices=(CPU,)), Mock()
    config.fault.hang_timeout, config.device.arrival_timeout = hang, 60.0
    for launch_env in (None, Env()):
        with opening.resolve_request(config, placement, launch_env, console, print, Mock()) as request:  # type: ignore[arg-type]
            assert request.parts == ([] if complete else noted.load_parts.return_value)
            assert (request.spec, request.world) == (spec, world)
        env = launch_env and Env(60.0)
        noted.process_group.assert_called_with(env, CPU, timeout=timeout, backend=placement.backend)
    said = [call("of the data"), *[call("of the plan")] * (not complete)]
    assert console.warn.mock_calls == said * 2


@pytest.mark.parametrize("processes", [0, 2])
def test_a_dry_run_says_what_was_tried(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["check_unlocked", "build_components", "try_micro_batch", "check_user_code", "_show_model_tables"]
    noted = note_calls(monkeypatch, *names)
    noted.check_user_code.return_value = ["of the guard"]
    made, request = noted.build_components.return_value, MagicMock()
    made.task.global_loss = None
    request.spec.is_complete, request.spec.placement.num_processes_to_launch = False, processes
    request.spec.resume_point.folder = "run"
    noted.try_micro_batch.return_value, made.state.restore_warning = (2, ["halved"]), ""
    made.plan.as_dict.return_value, made.plan.rows.return_value = {"batch_size": 5}, [("model", "net")]
    tried = "forward and backward with 2 samples: model, data and task fit" + ", in one process" * bool(processes)
    facts = {"batch_size": 5, "tried": tried}
    assert opening.try_request(request) == facts
    assert request.console.mock_calls == [
        call.warn("of the guard"),
        call.warn("halved"),
        call.plan([("model", "net"), ("tried", tried)], "Plan"),
        call.print_json(facts),
    ]
    noted.check_unlocked.assert_called_once_with(Path("run"))
    noted._show_model_tables.assert_called_once_with(made, request.console)
    made.loaders.close.assert_called_once_with()
    request.spec.is_complete, request.spec.plan.as_dict.return_value = True, {}
    assert opening.try_request(request) == {"tried": "nothing: the run is complete"}
    assert noted._show_model_tables.call_count == noted.build_components.call_count == 1


OPENING = ["build_components", "fit_batch_sizes_to_memory", "check_user_code", "_show_model_tables", "lock_folder"]
OPENING += ["assemble_run", "start_run", "finish_pending_checkpoint", "build_summary", "write_run_end"]


@pytest.mark.parametrize("written", [False, True])
def test_a_run_is_opened_and_closed_in_this_order(written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = note_calls(monkeypatch, *OPENING)
    monkeypatch.setattr(opening, "time", Mock(perf_counter=lambda: 10.0))
    monkeypatch.setattr(opening, "record_failure", lambda run: nullcontext())
    made, run, console = noted.build_components.return_value, noted.assemble_run.return_value, noted.console
    made.task.global_loss = None
    run.progress.startup_seconds, run.moments.start, run.control.summary_written = 5.0, (noted.begin,), written
    noted.check_user_code.return_value = []
    made.state.part_states = {"hooks": {"b": 1, "a": 2}} if written else {"hooks": {}}
    spec = Mock(is_complete=False)
    spec.resume_point.folder = "run"
    request = opening.ResolvedRequest(spec, Mock(), Mock(), Mock(), console, 7.0, [noted.part])
    with opening.open_run(request) as opened:
        assert opened is run
        noted.work()
    note = "--hook a, b: not in this command, so its state is left out from now on"
    assert [each for each in noted.mock_calls if "__" not in each[0] and "plan.rows" not in each[0]] == [
        call.build_components(spec, request.world, [noted.part]),
        call.fit_batch_sizes_to_memory(made),
        call.check_user_code(made),
        call.part.fitted(made),
        call.console.plan(made.plan.rows.return_value, "Plan"),
        call._show_model_tables(made, console),
        *[call.console.note(note)] * written,
        call.lock_folder(Path("run")),
        call.assemble_run(made, console, request.stop, request.watchdog, ANY, [noted.part]),
        call.start_run(run, noted.fit_batch_sizes_to_memory.return_value),
        call.begin(run, ANY),
        call.work(),
        *(() if written else (
            call.finish_pending_checkpoint(run),
            call.build_summary(run, "stopped", {}),
            call.write_run_end(run, noted.build_summary.return_value),
        )),
        call.build_components().loaders.close(),
    ]  # fmt: skip
    assert run.progress.startup_seconds == 8.0, "this attempt's and those of the ones before"
    spec.is_complete = True
    with pytest.raises(RequestError, match="run is complete"), opening.open_run(request):
        pass


@pytest.mark.parametrize("there", [True, False])
def test_tables_are_shown_of_what_there_is(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, made, console = note_calls(monkeypatch, "describe_groups", "list_unused_methods"), Mock(), Mock()
    noted.describe_groups.return_value = [("0.1", "head")] if there else []
    noted.list_unused_methods.return_value = ["loss"] if there else []
    made.config.model.init_from, weights = "base.pt", made.state.initial_weights
    made.state.initial_weights = weights if there else None
    opening._show_model_tables(made, console)
    assert (
        console.mock_calls
        == [
            call.plan([("0.1", "head")], "Learning rates"),
            call.plan(weights.rows.return_value, "Weights from base.pt"),
            call.warn("not called here: the model's loss; --task, --optimizer and --lr decide"),
        ]
        * there
    )


@pytest.mark.parametrize("own", [True, False])
def test_a_failure_is_raised_as_its_root_cause(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = note_calls(monkeypatch, "name_unused_parameters", "build_summary", "write_run_end")
    run, error, model = MagicMock(), ValueError("mine"), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    reason: Any = error if own else ValueError("rank 2: theirs")
    if not own:
        reason.rank = 2
    run.state.model, run.control.summary_written, run.world.restarts_left = model, False, 0
    run.observer.watchdog.publish_and_find_root_cause.return_value = reason
    with pytest.raises(ValueError, match="mine" if own else "theirs") as raised, opening.record_failure(run):
        raise error
    assert (raised.value, raised.value.__cause__) == (reason, None if own else error)
    noted.name_unused_parameters.assert_called_once_with(error, ["weight"])
    cause = {"cause": f"ValueError: {reason}", "rank": run.world.rank if own else 2}
    noted.build_summary.assert_called_once_with(run, "failed", {"error": f"ValueError: {reason}"} | cause)
    noted.write_run_end.assert_called_once_with(run, noted.build_summary.return_value)
    run.observer.watchdog.before_fatal_exit(TimeoutError("hangs"))
    cause = {"error": "TimeoutError: hangs", "cause": "TimeoutError: hangs", "rank": None}
    assert noted.build_summary.call_args.args == (run, "failed", cause)
    assert run.log.console.print_json.call_count == noted.write_run_end.call_count == 2
    run.control.summary_written = True
    run.observer.watchdog.before_fatal_exit(TimeoutError("hangs"))
    assert noted.write_run_end.call_count == 2


class Follower(Part):
    """Notes what is journalled."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def follow_journal(self, *_: Any) -> Any:
        return self.seen.append


@contextmanager
def assemble(folder: Path, rank: int, part: Part, precision: str = "off", **flags: Any) -> Iterator[tuple[Any, str]]:
    made = components(folder, "tests.run.test_profile_micro_batch:plain", log_interval="3", **flags)
    (folder / "run").mkdir()
    made.world = replace(made.world, rank=rank, attempt=1, previous_attempt=PreviousAttempt("gone", 3, 0.0))
    made.state.precision.name = precision
    watchdog = Mock(own=SimpleNamespace(steps=0, phase="starting"))
    with closing(made.loaders), ExitStack() as stack:
        out = io.StringIO()
        run = opening.assemble_run(made, Console("normal", out), Mock(), watchdog, stack, [part])
        yield run, out.getvalue()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("trace", "precision", "interval"), [(False, "off", 3), (True, "fp16", 0)])
def test_rank_0_opens_the_files_of_a_run(
    rank: int, trace: bool, precision: str, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, part = note_calls(monkeypatch, "NoiseMeter", "StepTimer", "SkippedStepLimit"), Follower()
    with assemble(tmp_path, rank, part, precision, trace_samples=trace) as (run, said):
        noted.NoiseMeter.assert_called_once_with(interval, run.strategy.loss_factor)
        noted.StepTimer.assert_called_once_with(device_runs_ahead=False)
        noted.SkippedStepLimit.assert_called_once_with(run.config.fault.nonfinite, CPU, fp16=precision == "fp16")
        assert said == "", "a saver without a note says nothing"
        assert run.observer.waits_for_data is not run.loaders.train.ready
        assert (run.observer.trace is not None) == trace
        assert run.log.progress_bar.read_newest == run.read_newest_numbers
        assert run.control.previous_attempt == PreviousAttempt("gone", 3, 0.0)
        assert (run.log.tensorboard is None) == bool(rank)
        run.log.journal.write("note", text="hello")
        assert [event["event"] for event in part.seen] == ["note"] * (not rank)
        assert run.log.journal._listeners == (() if rank else (run.log.tensorboard, part.seen.append))
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert ("journal.jsonl" in files) == (not rank)
    assert (run.log.state._thread is None) == bool(rank), "who writes the state"


def test_the_flops_of_a_sample_are_counted_where_a_rate_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, made = note_calls(monkeypatch, "peak_flops", "count_flops_per_sample"), Mock()
    monkeypatch.setattr(opening, "all_reduce_max", lambda world, values: values)
    for rate, counted in ((None, None), (1e12, noted.count_flops_per_sample.return_value)):
        noted.peak_flops.return_value = rate
        assert opening._count_flops(made) == counted


def make_attempt(monkeypatch: pytest.MonkeyPatch, world: World, resumed: bool) -> tuple[Any, MagicMock]:
    """Make the calls of start_run mocks, and a mock of a run's second attempt, which has faults if it is resumed."""
    names = ("record_run", "_prepare_folder", "gpu_models", "describe_unlike_gpus", "restore_best_file")
    noted, run = note_calls(monkeypatch, *names, "read_previous_cause", "disable_collective_timeout"), MagicMock()
    monkeypatch.setattr(train_log, "compiler_fields", lambda run: {"compile": {}})
    run.world, run.folder, run.progress.step, point = world, Path("run"), 6, run.spec.resume_point
    noted.gpu_models.return_value, run.spec.same_length = {0: "A", 1: "B"}, False
    noted.describe_unlike_gpus.return_value = "unlike" if resumed else ""
    noted.restore_best_file.return_value = "lost" if resumed else ""
    noted.read_previous_cause.return_value = "killed" if resumed else None
    point.manifest, point.warnings = ({"world_size": 4}, ["skipped one"]) if resumed else (None, [])
    weights = SimpleNamespace(_asdict=lambda: {"loaded": 3})
    run.state.initial_weights, run.state.restore_warning = (weights, "no optimizer") if resumed else (None, "")
    run.log.console.rank_output = Mock() if resumed else None
    run.config.model.init_from, run.plan.schedule.total_steps = "base.pt", 12
    return noted, run


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("local_rank", "size"), [(0, 1), (1, 2), (0, 2)])
def test_an_attempt_begins_with_what_came_before_it(
    local_rank: int, size: int, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(CPU, rank=local_rank, local_rank=local_rank, size=size, attempt=1)
    noted, run = make_attempt(monkeypatch, world, resumed)
    opening.start_run(run, ["out of memory: halved"] if resumed else [])
    assert noted.record_run.mock_calls == [call(run.world.agent_dir, 1, "run")] * (local_rank == 0)
    noted._prepare_folder.assert_called_once_with(run)
    noted.describe_unlike_gpus.assert_called_once_with({0: "A", 1: "B"}, "rank" if size > 1 else "GPU")
    noted.disable_collective_timeout.assert_called_once_with(run.world, run.strategy.groups)
    run.observer.watchdog.start.assert_called_once_with(6, Path("run/logs"))
    written = [(each.args, each.kwargs) for each in run.log.journal.write.mock_calls]
    assert written[0][0] == ("start",)
    assert (written[0][1]["gpus"], written[0][1]["compile"]) == (["A", "B"], {})
    assert (
        written[1:]
        == [
            (("initial_weights",), {"file": "base.pt", "loaded": 3}),
            (("resume",), {"step": 6, "from_world_size": 4, "world_size": size}),
        ]
        * resumed
    )
    assert (
        run.log_fault.mock_calls
        == [
            call("damaged checkpoint", "skipped one"),
            call("out of memory", "out of memory: halved"),
            call("restart", "attempt 2 of this launch: killed"),
            call("checkpoint", "lost"),
            call("resume", "no optimizer"),
        ]
        * resumed
    )
    said = [call.warn("unlike"), call.note("the run now has 12 steps: the schedule was recomputed")] * resumed
    assert [each for each in run.log.console.mock_calls if each[0] in ("warn", "note")] == said
    run.log.console.details.assert_called_once_with(ANY)
    if resumed:
        run.log.console.rank_output.start.assert_called_once_with(Path("run/logs"), 1)


@pytest.mark.parametrize("board", [True, False])
def test_the_folder_has_the_settings_and_nothing_of_the_attempt_before(
    board: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, run = note_calls(monkeypatch, "rewind_run", "remove_drafts"), MagicMock()
    run.folder, tables = tmp_path, run.log.tensorboard
    run.log.tensorboard = tables if board else None
    run.spec.factories.comment = "# by hand\n"
    monkeypatch.setattr("multigpu_cli.config.yaml_text.dump_config", lambda config: f"seed: {config['seed']}\n")
    run.spec.user_config = {"seed": 17}
    (tmp_path / "summary.json").write_text("{}")
    for _ in range(2):
        opening._prepare_folder(run)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.yaml": "# by hand\nseed: 17\n"}
    noted.rewind_run.assert_called_with(run.spec.resume_point, run.checkpointer.store)
    noted.remove_drafts.assert_called_with(tmp_path)
    run.checkpointer.store.sweep.assert_called_with()
    assert tables.plan.mock_calls == [call(run.plan.rows.return_value)] * 2 * board


LOGS = "print to run/logs/rank_1.log"


@pytest.mark.parametrize(
    ("size", "cap", "rows"),
    [
        (1, "auto", []),
        (2, "auto", [("gradients", "gloo"), ("other ranks", LOGS)]),
        (3, "2.5", [("gradients", "gloo, buckets of 2.5 MiB"), ("other ranks", f"{LOGS} … rank_2.log")]),
    ],
)
def test_the_details_of_several_ranks(
    size: int, cap: str, rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    run, model = MagicMock(folder=Path("run"), eval_batch_size=20), torch.nn.Linear(512, 1024)
    model.bias.requires_grad_(False)
    run.world.size, run.config.communication.bucket_cap_mb, run.state.model = size, cap, model
    run.loaders.train.size, run.loaders.val.size, run.loaders.test = 6000, 21, None
    run.loaders.train.data_location, run.spec.model = "in host memory", "net"
    run.config.checkpoint.every, run.config.checkpoint.keep = None, 3
    versions, *rest = opening._detail_rows(run)
    assert versions[0] == "versions"
    assert rest == [
        ("model", "net: 525,312 parameters, 524,288 trained, 2.0 MiB"),
        ("samples", "6,000 training, 21 validation; in host memory; evaluated in batches of 20"),
        ("checkpoints", "every epoch, 3 are kept"),
        *rows,
    ]
