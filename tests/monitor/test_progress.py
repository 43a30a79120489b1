import io
import sys
import threading
import time
from typing import Any

import pytest

from multigpu_cli.monitor.console import ProgressDisplay, TqdmDisplay


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_base_shows_nothing_but_knows_the_total() -> None:
    progress = ProgressDisplay(40)
    progress.update(3, {"loss": 1.0})
    with progress.hidden():
        pass
    progress.close()
    assert progress.total == 40


FIELDS = {"loss": 0.5123, "samples_per_second": 5230.0, "memory": [13_207_024_435], "memory_reserved": [1]}
FACTS = ["loss 0.5123", "5,230 samples/s", "GPU 12.3 GiB"]


@pytest.mark.parametrize(
    ("columns", "total", "known"), [(120, 100, 3), (80, 10_000, 3), (80, 1_000_000, 2), (60, 100, 1), (40, 100, 0)]
)
def test_the_bar_shows_what_fits_and_goes_away(
    columns: int, total: int, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TqdmDisplay, "_columns", lambda bar: columns)
    screen = Screen()
    bar = TqdmDisplay(total, 40, screen)
    time.sleep(0.25)
    bar.update(60, FIELDS)
    shown = screen.getvalue().split("\r")[-1]
    bar.close()
    assert f"| step 60/{total}, " in shown
    assert shown.endswith(" left" + "".join(f", {fact}" for fact in FACTS[:known]))
    assert screen.getvalue().split("\r")[-2].strip() == ""


def test_epoch_loss_and_rate_are_there_before_the_first_train_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TqdmDisplay, "_columns", lambda bar: 80)
    screen = Screen()
    bar = TqdmDisplay(400, 0, screen)
    newest: dict[str, Any] = {"epoch": 1, "epochs": 20, "loss": 2.25, "samples_per_second": 980.0}
    bar.read_newest = lambda: newest
    time.sleep(0.25)
    bar.update(3)
    shown = screen.getvalue().split("\r")[-1]
    assert shown.startswith("epoch 1/20 |")
    assert shown.endswith(" left, loss 2.250, 980 samples/s")
    assert len(shown) <= 80
    bar.update(4, {"loss": 2.0, "tokens_per_second": 700.0})
    newest["loss"] = 1.5
    time.sleep(0.25)
    bar.update(40)
    shown = screen.getvalue().split("\r")[-1]
    assert shown.endswith(" left, loss 1.500, 700 tokens/s"), "the newest loss, and the rate as the event has it"
    bar.read_newest = lambda: pytest.fail("a device that hangs would delay the watchdog's message")
    with bar.hidden():
        pass
    bar.close()


def test_many_steps_cost_few_redraws() -> None:
    screen = Screen()
    bar = TqdmDisplay(50_000, 0, screen)
    began = time.perf_counter()
    for step in range(1, 50_001):
        bar.update(step)
    seconds = time.perf_counter() - began
    redraws = screen.getvalue().count("step ")
    assert redraws <= 2 + 5 * seconds
    assert seconds / 50_000 < 50e-6  # measured: 0.7 µs


def test_the_bar_starts_no_thread() -> None:
    before = threading.active_count()
    bar = TqdmDisplay(10, 0, Screen())
    bar.update(1)
    assert threading.active_count() == before
    bar.close()


def test_a_closed_bar_stays_away() -> None:
    screen = Screen()
    bar = TqdmDisplay(10, 0, screen)
    bar.close()
    length = len(screen.getvalue())
    with bar.hidden():
        pass
    bar.close()
    assert len(screen.getvalue()) == length


def test_tqdm_is_imported_late() -> None:
    import subprocess

    code = "import sys, multigpu_cli.monitor.console; print({'rich', 'tqdm', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
