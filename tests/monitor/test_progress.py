import io
import sys
import threading
import time

from multigpu_cli.monitor.progress import Bar, Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_base_shows_nothing_but_knows_the_total() -> None:
    progress = Progress(40)
    progress.update(3, loss=1.0)
    with progress.out_of_the_way():
        pass
    progress.close()
    assert progress.total == 40


def test_the_bar_shows_steps_loss_and_rate_and_goes_away() -> None:
    screen = Screen()
    bar = Bar(100, 40, screen)
    time.sleep(0.25)
    bar.update(60, loss=0.51234, rate=5230.4)
    shown = screen.getvalue().split("\r")[-1]
    assert "step 60/100" in shown
    assert "loss 0.5123" in shown
    assert "5,230 samples/s" in shown
    bar.close()
    assert screen.getvalue().split("\r")[-2].strip() == ""


def test_many_steps_cost_few_redraws() -> None:
    screen = Screen()
    bar = Bar(50_000, 0, screen)
    began = time.perf_counter()
    for step in range(1, 50_001):
        bar.update(step)
    seconds = time.perf_counter() - began
    redraws = screen.getvalue().count("step ")
    assert redraws <= 2 + 5 * seconds
    assert seconds / 50_000 < 50e-6  # measured: 0.7 µs


def test_the_bar_starts_no_thread() -> None:
    before = threading.active_count()
    bar = Bar(10, 0, Screen())
    bar.update(1)
    assert threading.active_count() == before
    bar.close()


def test_a_closed_bar_stays_away() -> None:
    screen = Screen()
    bar = Bar(10, 0, screen)
    bar.close()
    length = len(screen.getvalue())
    with bar.out_of_the_way():
        pass
    bar.close()
    assert len(screen.getvalue()) == length


def test_tqdm_is_imported_late() -> None:
    import subprocess

    code = "import sys, multigpu_cli.monitor.console; print({'rich', 'tqdm', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
