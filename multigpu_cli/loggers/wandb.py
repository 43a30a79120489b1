"""Weights & Biases: one run there, whose own step counter is the line of the journal, so that no line counts twice.

W&B drops a row whose counter is not beyond the last one, so the optimizer step is a metric of its own, and all others
are drawn over it. Server, project and key come from W&B's own variables: WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE and
so on. This file is imported in the process that follows the journal, and nowhere else.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.env import get_project

from multigpu_cli.loggers.base import Ending, Row, RunIdentity

_EXIT_CODES = {"completed": 0, "stopped": 75, "failed": 1, "killed": 1}
_PATIENCE = 30.0  # seconds for the server to answer; the sender tries again


class WandbLogger:
    """A run of W&B, on its server, or offline in RUN/loggers/wandb."""

    confirms_each = False  # it sends in the background; what `finish` has returned from is there

    def __init__(self) -> None:
        self._run: Any = None
        self._id, self._folder = "", Path()

    def open(self, run: RunIdentity, sent: int) -> int:
        """Begin the run, or go on with it; the server knows which lines it has, and an offline run is written anew."""
        self._id, self._folder = run.id, Path(run.folder)
        quiet = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "save_code": False}
        settings = wandb.Settings(**quiet, x_disable_stats=True, x_disable_meta=True, init_timeout=_PATIENCE)
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            project=get_project(run.project),
            dir=str(self._folder / "loggers"),
            resume="allow",
            settings=settings,
        )
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return 0

    def send(self, rows: Sequence[Row]) -> None:
        """Hand over the rows that are not there."""
        for row in rows:
            if row.line >= self._run.step:
                self._run.log({**row.numbers, "step": row.step}, step=row.line)

    def finish(self, ending: Ending) -> None:
        """Name checkpoint and best weights by hash, without uploading them, and wait until everything has arrived."""
        if ending.files:
            weights = wandb.Artifact(f"weights-{self._id}", type="model", metadata={"sha256": dict(ending.files)})
            for name in ending.files:
                if (file := self._folder / name).is_file():
                    weights.add_reference(file.as_uri(), name=name, checksum=False)
            self._run.log_artifact(weights)
        if ending.fingerprint:
            self._run.summary["fingerprint"] = ending.fingerprint
        here = Path(self._run.settings.sync_dir)
        offline = bool(self._run.offline)
        self._run.finish(exit_code=_EXIT_CODES[ending.status])
        if offline:  # earlier attempts' folders, unless they were synced: the new one has all their rows
            for older in here.parent.glob(f"offline-run-*-{self._id}"):
                if older.name < here.name and not list(older.glob("*.synced")):
                    shutil.rmtree(older)
