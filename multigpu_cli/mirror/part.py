"""--mirror and `mirror RUN --to`: start the process that mirrors a run folder, pass on its troubles, end it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

from multigpu_cli.checkpoint.files import fail_on_write_error, is_locked
from multigpu_cli.checkpoint.manifest import list_checkpoint_folders
from multigpu_cli.checkpoint.run_folder import holds_run
from multigpu_cli.config.regular_files import refuse_links, without_links
from multigpu_cli.distributed.processes import Companion
from multigpu_cli.errors import RequestError, TrainingError, raise_all
from multigpu_cli.mirror import follower
from multigpu_cli.mirror.follower import Follower, explain_missing, lock_mirror, read_state
from multigpu_cli.mirror.remote import Mirror, MirrorError
from multigpu_cli.mirror.rules import find_url_errors, make_absolute
from multigpu_cli.run.part import Part
from multigpu_cli.run.run import Run

_STOP_WAIT = 10.0  # seconds that a run which was told to stop waits; the process itself goes on after that
_HANGS = 300.0  # seconds without a sign of life; until then a driver's own time limits have raised an error
_SILENT = 2.0  # seconds until the user is told what the end waits for


class MirrorProcess:
    """The process that follows a run folder, and keeps so many checkpoints in the mirror, seen from rank 0."""

    def __init__(self, run: Path, url: str, keep: int) -> None:
        self._run, self.url = run.absolute(), make_absolute(url)
        self._log = self._run / "logs" / "mirror.log"
        self._log.parent.mkdir(exist_ok=True)
        with fail_on_write_error(self._run):
            log = open(self._log, "ab", opener=without_links)  # noqa: SIM115 - the next line closes it
        with log:
            arguments = [str(self._run), self.url, str(keep), str(_HANGS)]
            self._companion = Companion(follower.__name__, arguments, self._hear, log)
        self._reported = self._note = ""
        self._last_note_at = time.monotonic()

    def read_new_fault(self) -> str:
        """Why the last upload failed, unless it was said before; "" if none did."""
        self._companion.relay()
        ended = not self._companion.running
        error = self._find_cause() if self._hangs or read_state(self._run).error else ""
        before, self._reported = self._reported, "ended" if ended else error
        if self._reported in ("", before):
            return ""
        if ended:
            return f"training continues, but {self._explain_missing()}"
        return f"{error}; training continues, and the copy is tried again"

    def finish(
        self,
        is_stopped: Callable[[], bool],
        moved: Callable[[], None],
        say: Callable[[str], None],
        *,
        wait: bool = True,
    ) -> str:
        """Let the process send what is missing, and end; returns what is missing, with the way out, or "".

        Where `is_stopped` says that a signal asks the run to end soon, the process goes on alone after some seconds; at
        once unless it is to `wait`. `moved` is called while it is at work; `say` shows what the run waits for.
        """
        began = self._last_note_at = time.monotonic()
        until, said = inf if wait else began, False

        def waits() -> bool:
            nonlocal until, said
            moved()
            now = time.monotonic()
            if until == inf and is_stopped():
                until = now + _STOP_WAIT
            if now >= until or self._hangs:
                return False
            if not said and now - began > _SILENT:
                said = True
                say(f"the training is done; waiting until all is in {self.url} (Ctrl-C: at most {_STOP_WAIT:.0f} s)")
            return True

        self._companion.end(waits)
        if self._companion.running and time.monotonic() >= until:
            return f"{self.url} is not complete yet: process {self._companion.process.pid} is still sending"
        return "" if self._companion.process.returncode == 0 else self._explain_missing()

    def _hear(self, note: str) -> None:
        """Note what keeps the process from sending, or "" as a sign of life."""
        self._last_note_at, self._note = time.monotonic(), note

    @property
    def _hangs(self) -> bool:
        """Whether the process hangs in the mirror, as it does where a network's file system is gone."""
        return self._companion.running and time.monotonic() - self._last_note_at > _HANGS

    def _find_cause(self) -> str:
        """What keeps the process from sending; "" if it has not said."""
        silence = f"it has not answered for {_HANGS:.0f} s" if self._hangs else ""
        return "; ".join(filter(None, [self._note or read_state(self._run).error, silence]))

    def _explain_missing(self) -> str:
        ended = f"its process ended with exit code {self._companion.process.returncode}: {self._log}"
        return explain_missing(self._run, self.url, self._find_cause() or ended)


class Mirroring(Part):
    """Mirrors the run folder from rank 0; a completed run waits until all is sent, but not after a signal or a hang."""

    _process: MirrorProcess

    def start(self, run: Run, stack: ExitStack) -> None:
        if not run.world.is_main:
            return
        config, console = run.config.checkpoint, run.log.console
        self._process = process = MirrorProcess(run.folder, str(config.mirror), config.keep)

        def is_stopped() -> bool:
            return not run.finished or run.control.stop.signal is not None

        def finish(kind: object, error: object, trace: object) -> None:
            mark, wait = run.observer.watchdog.mark_progress, error is None
            if missing := process.finish(is_stopped, mark, console.note, wait=wait):
                console.warn(missing)

        stack.push(finish)

    def written(self, run: Run) -> None:
        if fault := self._process.read_new_fault():
            run.log_fault("mirror", fault)


_PATIENCE = 10.0  # seconds for which the command tries again what fails
_KEEP = 10**6  # nothing is removed there


def mirror_run(run: str, url: str) -> dict[str, Any]:
    """Send what the remote folder lacks; returns the URL and the step of its newest checkpoint.

    RequestError: there is no such run, it is at work or has a link in it, or the URL is wrong. TrainingError: the
    remote folder refused it.
    """
    folder = Path(run)
    raise_all(find_url_errors(url, "--to"))
    if not holds_run(folder):
        raise RequestError(f"{run}: is not a run folder", remedy="name the folder that holds its config.yaml")
    refuse_links(folder)
    if not list_checkpoint_folders(folder / "checkpoints"):
        raise RequestError(f"{run}: has no checkpoint to send", remedy="train it until its first one")
    if is_locked(folder):
        raise RequestError(f"{run}: the run is active", remedy="wait for its end; with --mirror it sends them itself")
    ended = threading.Event()
    ended.set()
    try:
        with lock_mirror(folder, lambda busy: True):
            complete = Follower(folder, Mirror(url), _KEEP).follow(ended, _PATIENCE)
    except MirrorError as error:
        raise RequestError(error.problem, remedy="check the URL and the credentials") from error
    except BlockingIOError as error:
        raise RequestError(f"{run}: {error}", remedy="wait for its end, or end it if it hangs") from error
    except OSError as error:
        raise RequestError(f"{run}: {error}", remedy="repair or remove that file, and check the disk") from error
    if not complete:
        raise TrainingError(read_state(folder).error, remedy="repair what it names, and run the same command again")
    return {"url": read_state(folder).url, "step": read_state(folder).step}


def format_mirrored(found: dict[str, Any]) -> Iterator[str]:
    """What the remote folder holds now."""
    yield f"{found['url']} holds the checkpoint of step {found['step']} and the run's files, read back and compared"
