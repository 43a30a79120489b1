import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multigpu_cli.checkpoint.snapshot import Snapshot, Writer
from multigpu_cli.run.run import use_published_weights
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until


def nothing() -> None:
    """Nothing to copy, or to write."""


def test_the_copy_comes_first_and_can_be_waited_for_while_writing_goes_on() -> None:
    order, may_write = [], threading.Event()

    def copy() -> None:
        time.sleep(0.05)
        order.append("copied")

    def write() -> None:
        may_write.wait(10)
        order.append("written")

    with Writer() as writer:
        began = time.perf_counter()
        writer.submit(copy, write)
        writer.wait_for_staging()
        order.append("the weights move")
        assert 0.01 < writer.waited <= time.perf_counter() - began
        assert not writer.is_done
        may_write.set()
        wait_until(lambda: writer.is_done, "the job ends")
        assert writer.wait() is None
        writer.submit(nothing, nothing)
        assert writer.waited == 0.0, "each job is waited for by itself"
        assert writer.wait() is None
        writer.submit(nothing, lambda: time.sleep(0.05) or order.append("and before the end"))
    assert order == ["copied", "the weights move", "written", "and before the end"]


def test_weights_for_use_take_the_place_of_others_only_once_a_checkpoint_has_copied_these() -> None:
    """The case of a schedule-free optimizer, whose two kinds of weights lie in the same tensors."""
    order, may_copy = [], threading.Event()

    def copy() -> None:
        may_copy.wait(10)
        order.append("copied")

    @contextmanager
    def turn_weights() -> Iterator[None]:
        order.append("turned")
        yield

    with Writer() as writer:
        state = SimpleNamespace(optimizer=SimpleNamespace(train=nothing, eval=nothing), eval_weights=turn_weights)
        run: Any = SimpleNamespace(state=state, checkpointer=SimpleNamespace(writer=writer))
        writer.submit(copy, nothing)
        threading.Timer(0.1, may_copy.set).start()
        with use_published_weights(run):
            assert order == ["copied", "turned"]


def test_waiting_costs_nothing_where_nothing_is_being_copied() -> None:
    with Writer() as writer:
        writer.wait_for_staging()
        assert writer.waited == 0.0


def test_a_copy_that_fails_lets_training_go_on_and_is_told_when_the_job_is_settled() -> None:
    def fail() -> None:
        raise MemoryError("no room for a copy")

    with Writer() as writer:
        writer.submit(fail, nothing)
        writer.wait_for_staging()
        with pytest.raises(MemoryError):
            writer.wait()


def test_the_complaint_of_the_file_system_is_given_back_once() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with Writer() as writer:
        writer.submit(nothing, full)
        assert isinstance(writer.wait(), OSError)
        assert writer.wait() is None


def test_a_slow_copy_is_still_one_of_the_step_it_belongs_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from a checkpoint whose weights were copied while the next step was being computed."""
    finish = Snapshot.finish

    def slowly(self: Snapshot) -> dict[str, Any]:
        time.sleep(0.1)
        return finish(self)

    flags: dict[str, Any] = {"max_steps": 6, "checkpoint_every": 1, "keep": 9}
    whole = run_training(save_dir=str(tmp_path / "whole"), **flags)
    monkeypatch.setattr(Snapshot, "finish", slowly)
    assert run_training(save_dir=str(tmp_path / "slow"), **flags).summary["fingerprint"] == whole.summary["fingerprint"]
    for step in (2, 4):
        start = tmp_path / "slow" / "checkpoints" / f"step_{step:08d}"
        again = run_training(save_dir=str(tmp_path / f"from_{step}"), resume=str(start), max_steps=6)
        assert again.summary["fingerprint"] == whole.summary["fingerprint"], again.error
