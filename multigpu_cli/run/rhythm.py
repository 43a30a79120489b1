"""When checkpoints are due."""

import time

from multigpu_cli.config.schema import CheckpointConfig


class Rhythm:
    """When checkpoints are due: at the end of each epoch, or every so many steps or minutes."""

    def __init__(self, config: CheckpointConfig) -> None:
        text = config.every or ""
        self._minutes = float(text[:-1]) if text.endswith("m") else None
        self._steps = int(text) if text.isdigit() else None
        self._last, self._waits = time.monotonic(), False

    def due(self, before: int, step: int, *, epoch_ended: bool) -> bool:
        """By step number, and so the same on every rank: from when it is, until one is saved."""
        now = step // self._steps > before // self._steps if self._steps else epoch_ended and self._minutes is None
        self._waits |= now
        return self._waits

    def overdue(self) -> bool:
        """By this rank's clock: the ranks have to agree on it."""
        return self._minutes is not None and time.monotonic() - self._last >= 60 * self._minutes

    def saved(self) -> None:
        self._last, self._waits = time.monotonic(), False
