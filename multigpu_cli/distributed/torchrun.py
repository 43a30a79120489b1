"""torchrun for schedulers that stop jobs by signals: `python -m multigpu_cli.distributed.torchrun …` in its place.

torchrun exits with 1 and a traceback after a stop, and further signals make it kill workers during their checkpoint.
"""

import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from multigpu_cli.distributed.launch_env import read_exit_codes
from multigpu_cli.errors import STOPPED

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the signals that workers handle
_TORCHS_OWN = "SIGHUP,SIGQUIT"


def run_agent(words: Sequence[str]) -> int:
    """Run torchrun with these arguments; returns 75 if the workers stopped with a checkpoint, 128 + N after signal N.

    ChildFailedError: a worker failed.
    """
    with tempfile.TemporaryDirectory(prefix="multigpu-") as logs:
        try:
            for number in _SIGNALS:
                signal.signal(number, _stop_once)
            run(parse_args([f"--signals-to-handle={_TORCHS_OWN}", f"--log-dir={logs}", *words]))
        except (ChildFailedError, SignalException) as ended:
            if read_exit_codes(Path(logs)) == {STOPPED}:
                return STOPPED
            if isinstance(ended, SignalException):
                return 128 + ended.sigval
            raise
    return 0


def _stop_once(number: int, frame: FrameType | None) -> None:
    """Make the agent forward the first signal and wait; SLURM sends two or three for one stop."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # torch logs a line per worker
    raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))


if __name__ == "__main__":
    sys.exit(run_agent(sys.argv[1:]))
