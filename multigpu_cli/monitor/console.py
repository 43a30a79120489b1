"""The output of a run: tables and a progress bar on a terminal, plain lines elsewhere."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from threading import RLock
from typing import Any, Literal, TextIO

from multigpu_cli.distributed.processes import RankOutput
from multigpu_cli.errors import make_printable
from multigpu_cli.monitor import format
from multigpu_cli.monitor.journal import dump_json

_NARROWEST = 3  # columns of the bar itself


class ProgressDisplay:
    """Shows nothing; the base of displays that do."""

    read_newest: Callable[[], Mapping[str, Any]] = dict
    """Reads epoch, loss and rate between two `train` events; called five times a second at most."""

    def __init__(self, total_steps: int) -> None:
        self.total = total_steps

    def update(self, step: int, fields: Mapping[str, Any] | None = None) -> None:
        """Show the number of steps done, and the numbers of a `train` event."""

    def close(self) -> None:
        """Remove the bar from the screen."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar, so that text can be written inside."""
        yield


class TqdmDisplay(ProgressDisplay):
    """A tqdm bar, after a delay (seconds): epoch, steps, time left, and as many numbers as fit."""

    def __init__(
        self, total_steps: int, initial: int, stream: TextIO, *, unit: str = "step", delay: float = 0.0
    ) -> None:
        super().__init__(total_steps)
        self._stream = stream
        from tqdm import tqdm

        self._fields: Mapping[str, Any] = {}
        self._newest: Mapping[str, Any] = {}
        self._stepping = False
        describe = self._describe

        class Quiet(tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
            monitor_interval = 0  # no thread of its own

            def display(self, *args: Any, **named: Any) -> Any:
                self.desc, self.postfix = describe()
                return super().display(*args, **named)

        Quiet.set_lock(RLock())  # tqdm's default makes a semaphore for bars in several processes
        self._bar = Quiet(
            total=total_steps,
            initial=initial,
            file=stream,
            mininterval=0.2,
            dynamic_ncols=True,
            leave=False,
            delay=delay,
            bar_format=f"{{desc}}|{{bar}}| {unit} " + "{n_fmt}/{total_fmt}, {remaining} left{postfix}",
        )

    def update(self, step: int, fields: Mapping[str, Any] | None = None) -> None:
        self._fields, self._stepping = fields or self._fields, True
        self._bar.update(step - self._bar.n)
        self._stepping = False

    def _describe(self) -> tuple[str, str]:
        """What stands before the bar and after the time left: the latest loss, and the rates of the last event."""
        if self._stepping:  # any other time may be that of a watchdog's message, which no device may delay
            self._newest = self.read_newest()
        newest = self._newest
        fields = {**newest, **self._fields} | ({"loss": newest["loss"]} if newest.get("loss") is not None else {})
        epoch = f"epoch {newest['epoch']}/{newest['epochs']} " if newest else ""
        room = self._columns() - len(f"{epoch}|{'#' * _NARROWEST}| step , 0:00:00 left") - 2 * len(str(self.total))
        shown = format.format_bar_facts(fields)
        while shown and len(", ".join(shown)) + 2 > room:
            shown.pop()
        return epoch, ", ".join(shown)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):  # the stream is no terminal of the operating system
            return sys.maxsize

    def close(self) -> None:
        self._bar.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()


Level = Literal["silent", "quiet", "normal", "verbose"]
_MOMENT = 1.0  # seconds
_LEVELS: tuple[Level, ...] = ("silent", "quiet", "normal", "verbose")


class Console:
    """Writes all output of a run for people, to stdout where no stream is given. Ranks other than 0 get a 'silent' one.

    The level is 'silent' (nothing at all), 'quiet' (warnings and one line of result), 'normal' or 'verbose' (every
    number). With `json` the summary, as one JSON object, is the only thing on the stream; all else goes to stderr.
    `rank_output` is the file for other output of this process during a run; None leaves it on the screen.
    """

    def __init__(
        self,
        level: Level = "normal",
        stream: TextIO | None = None,
        *,
        json: bool = False,
        rank_output: RankOutput | None = None,
    ) -> None:
        self._level = _LEVELS.index(level)
        self._results = sys.stdout if stream is None else stream
        self._stream = sys.stderr if json else self._results
        self._json = json
        self.rank_output = rank_output
        self._progress = ProgressDisplay(0)
        self._widths: dict[str, int] = {}  # columns of the epochs, by label

    def plan(self, rows: Sequence[tuple[str, str]], title: str = "") -> None:
        """A table of label → value, wrapped to the width of a terminal."""
        if self._shows("normal"):
            self._table(rows, title)

    def progress(self, total_steps: int, initial: int = 0) -> ProgressDisplay:
        """Show the steps of a run: a bar on a terminal, elsewhere only the total in `train` lines."""
        wanted = self._shows("normal") and self._is_terminal()
        self._progress = TqdmDisplay(total_steps, initial, self._stream) if wanted else ProgressDisplay(total_steps)
        return self._progress

    @contextmanager
    def evaluation_progress(self, split: str, batches: int) -> Iterator[ProgressDisplay]:
        """A bar of an evaluation's batches in the place of the run's, where that is one; shown if it takes a moment."""
        steps = self._progress
        if not isinstance(steps, TqdmDisplay):
            yield ProgressDisplay(batches)
            return
        with steps.hidden():
            self._progress = TqdmDisplay(batches, 0, self._stream, unit=f"evaluating {split}: batch", delay=_MOMENT)
            try:
                yield self._progress
            finally:
                self._progress.close()
                self._progress = steps

    def train(self, fields: Mapping[str, Any]) -> None:
        """The numbers of a `train` event: into the bar where there is one, else as a line."""
        if not self._shows("normal"):
            return
        self._progress.update(fields["step"], fields)
        if self._shows("verbose") or not isinstance(self._progress, TqdmDisplay):
            self._line(format.format_train_line(fields, self._progress.total))
        self.detail(f"  {format.format_other_numbers(fields)}")

    def eval(self, fields: Mapping[str, Any]) -> None:
        """The numbers of an `eval` event, as a line."""
        if self._shows("normal"):
            self._line(format.format_eval_line(fields))

    def epoch(self, cells: Sequence[tuple[str, str]], *, best: bool) -> None:
        """The numbers of an epoch, as label and text, in the columns of the epochs before it."""
        if not self._shows("normal"):
            return
        tabular, labels = self._is_terminal(), [label for label, _ in cells]
        if labels != list(self._widths):
            self._widths = {label: max(len(label), 8) if tabular else 8 for label in labels}
            if tabular:
                self._line("  ".join(label.rjust(width) for label, width in self._widths.items()))
        aligned = [(label, text.rjust(self._widths[label])) for label, text in cells]
        row = [text if tabular else f"{label} {text}" for label, text in aligned]
        self._line("  ".join([*row, *(["best"] if best else [])]))

    def note(self, text: str) -> None:
        """A line about an event, such as a checkpoint found or a step skipped."""
        if self._shows("normal"):
            self._line(text)

    def detail(self, text: str) -> None:
        """Like `note`, for --verbose only; on a terminal folded at double spaces."""
        if self._shows("verbose"):
            unbroken = re.sub(r"(?<! ) (?! )", "\xa0", text)
            indent = " " * (len(text) - len(text.lstrip()))
            folded = wrap(unbroken, self._width() or sys.maxsize, subsequent_indent=indent, break_on_hyphens=False)
            self._lines(line.replace("\xa0", " ") for line in folded)

    def details(self, rows: Callable[[], Sequence[tuple[str, str]]]) -> None:
        """A table for --verbose only."""
        if self._shows("verbose"):
            self._table(rows(), "Details")

    def warn(self, text: str) -> None:
        """A problem that the user should act on; shown with --quiet too."""
        if self._shows("quiet"):
            self._line(f"warning: {text}")

    def error(self, text: str) -> None:
        """Why the process ends; shown at every level."""
        self._line(text)

    def print_json(self, content: Mapping[str, Any]) -> None:
        """One JSON object, with --json only."""
        if self._json and self._level:
            self._write(self._results, dump_json(content) + "\n")

    def report(self, summary: Mapping[str, Any], class_names: Sequence[str] = ()) -> None:
        """How the run ended: what summary.json holds, with its tables of classes, whose names may be given."""
        per_class, confusion = summary.get("per_class"), summary.get("confusion")
        if self._json:
            self.print_json(summary)
        elif self._shows("normal"):
            self._table(format.format_result_rows(summary), "Result")
            self._lines(format.format_class_table(per_class, class_names) if per_class else ())
            self._lines(format.format_confusion_table(confusion, class_names, self._width()) if confusion else ())
        elif self._shows("quiet"):
            self._line(format.format_result_line(summary))

    def _shows(self, level: Level) -> bool:
        return self._level >= _LEVELS.index(level)

    def _is_terminal(self) -> bool:
        return self._stream.isatty()

    def _width(self) -> int | None:
        """Columns of the terminal; None where lines may be of any length."""
        if not self._is_terminal():
            return None
        from rich.console import Console as Terminal

        return Terminal(file=self._stream).width

    def _table(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        if self._is_terminal():
            self._write(self._stream, _render_table(rows, title, self._stream))
        else:
            widest = max((len(label) for label, _ in rows), default=0)
            self._lines([*([title] if title else []), *(f" {label:<{widest}}  {value}" for label, value in rows)])

    def _line(self, text: str) -> None:
        self._lines([text])

    def _lines(self, lines: Iterable[str]) -> None:
        self._write(self._stream, "".join(make_printable(line) + "\n" for line in lines))

    def _write(self, stream: TextIO, text: str) -> None:
        """The only write. A closed reader (`| head`, a closed window) must not end the training."""
        encoding = stream.encoding or "utf-8"
        try:
            with self._progress.hidden():
                stream.write(text.encode(encoding, "replace").decode(encoding))
                stream.flush()
        except OSError:  # the journal has all the same numbers
            self._level = 0
            _silence(stream)


def reserve_stdout() -> TextIO:
    """A stream to standard output for the summary alone: other output to it goes to standard error from now on."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def _render_table(rows: Sequence[tuple[str, str]], title: str, stream: TextIO) -> str:
    """The table as rich draws it: faint labels, and values wrapped beside them."""
    from rich.console import Console as Terminal
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)  # no colour: each is hard to read on some background
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(f" {make_printable(label)}"), Text(make_printable(value)))
    terminal = Terminal(file=stream, highlight=False)
    with terminal.capture() as drawn:
        if title:
            terminal.print(Text(make_printable(title), style="bold"))
        terminal.print(table)
    return drawn.get()


def _silence(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that other writers, such as plug-ins, do not fail either."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, stream.fileno())
    finally:
        os.close(nothing)
