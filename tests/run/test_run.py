"""What a run counts from step to step, and how its ranks agree on what comes next."""

from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from multigpu_cli.run import run as run_module
from multigpu_cli.run.run import StepEnd, use_published_weights
from tests.run.test_lifecycle import prepare_run


def test_a_run_counts_its_steps_and_agrees_after_each(tmp_path: Path) -> None:
    """Steps of 25, 25 and 10 samples make an epoch; the second epoch is cut short, and every other step is logged."""
    with prepare_run(tmp_path, epochs="2", global_batch_size="25", max_steps="5", log_interval="2") as run:
        log, timer, checkpointer, control = run.log, run.observer.timer, run.checkpointer, run.control
        assert (log.allocator_retries, log.at_last_epoch, control.summary_written) == (0, (0, 0.0), False)
        assert max(checkpointer.in_flight, checkpointer.written) < 0, "no checkpoint yet"
        assert (run.epoch, run.folder) == (0, tmp_path)
        empty = {"epoch": 1, "epochs": 2, "loss": None, "samples_per_second": None}
        assert run.read_newest_numbers() == empty
        log.progress_bar, run.observer.loss.peek = Mock(wraps=log.progress_bar), lambda: 0.5  # type: ignore[method-assign]
        seen = [(run.complete_step(), run.epoch, run.finished) for _ in range(5)]
        assert seen == [
            (StepEnd(0, 1, at_log_interval=False, at_epoch_end=False, savable=True), 1, False),
            (StepEnd(1, 2, at_log_interval=True, at_epoch_end=False, savable=True), 1, False),
            (StepEnd(2, 3, at_log_interval=False, at_epoch_end=True, savable=True), 1, False),
            (StepEnd(3, 4, at_log_interval=True, at_epoch_end=False, savable=True), 2, False),
            (StepEnd(4, 5, at_log_interval=True, at_epoch_end=True, savable=True), 2, True),
        ]
        assert [call.args for call in log.progress_bar.update.call_args_list] == [(1,), (2,), (3,), (4,), (5,)]
        assert (timer.steps, timer.samples) == (5, 25 + 25 + 10 + 25 + 25)
        rate = timer.samples_per_second
        assert run.read_newest_numbers() == empty | {"epoch": 2, "loss": 0.5, "samples_per_second": rate}
        run.loaders.train.resumable_only_at_epoch, run.progress.step = True, 0
        assert [run.complete_step().savable for _ in range(3)] == [False, False, True], "as rollouts are"

        end = StepEnd(2, 3, at_log_interval=False, at_epoch_end=False, savable=True)
        assert run.agree_on_requests(end) == (False, False, False, False)
        assert (run.observer.watchdog.own.steps, run.observer.watchdog.own.phase) == (3, "agreeing")
        for pause, stops in ((2, True), (3, True), (4, False)):
            control.pause_at = pause
            assert run.agree_on_requests(end) == (False, stops, False, False)
            assert not any(run.agree_on_requests(end._replace(savable=False)))
        control.pause_at, checkpointer.schedule.overdue = None, lambda: True  # type: ignore[method-assign]
        assert run.agree_on_requests(end) == (False, False, True, False)
        control.stop.signal, log.state.asked = "SIGTERM", True
        assert run.agree_on_requests(end) == (True, False, True, True)
        assert not any(run.agree_on_requests(end._replace(savable=False)))


@pytest.mark.parametrize("swaps", [True, False])
def test_weights_that_are_swapped_wait_for_a_checkpoint_to_copy_them(
    swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "is_schedule_free", lambda _: swaps)
    run = MagicMock()
    with use_published_weights(run) as model:
        assert model is run.state.eval_weights().__enter__()
    assert run.checkpointer.writer.wait_for_staging.called == swaps
