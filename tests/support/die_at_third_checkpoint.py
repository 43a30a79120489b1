"""A death in mid-run, for the `prepare` of `run_training`."""

import os
import signal
from typing import Any

from multigpu_cli.checkpoint.store import Store


def die_at_third_checkpoint() -> None:
    """In this process, a rank of the run: SIGKILL once two checkpoints are there."""
    saved: list[int] = []

    def save_or_die(store: Store, step: int, *rest: Any, save: Any = Store.save) -> int:
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(step)
        return int(save(store, step, *rest))

    Store.save = save_or_die  # type: ignore
