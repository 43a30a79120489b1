"""What a run's weights say of each sample, as a table."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.run_request import Asked
from multigpu_cli.commands.shared_out import Pass, shared_out
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.collectives import from_main, together

Columns = dict[str, list[Any]]


class Predicted(NamedTuple):
    """What was written."""

    file: str
    split: str
    rows: int
    weights: str


def predicted(wish: Asked, target: Path, words: Sequence[str], environ: Mapping[str, str]) -> Predicted | None:
    """Write one row for each sample of the split, in order; None where others speak.

    Samples may be inputs alone: then the table has no column of targets.

    Raises:
        RequestError: the run can't be restored, or its task has no predictions.
    """

    def write(part: Pass) -> Predicted:
        columns = _gathered(part)
        if part.world.main:
            try:
                publish(target, _table(columns))
            except OSError as error:
                raise RequestError(f"--out {target}: {error.strerror or error}", remedy="another place") from error
        return Predicted(str(target), part.split, part.loader.size, part.origin)

    return shared_out(wish, words, environ, write, judged=False)


def show(found: Predicted) -> None:
    """Print what was written."""
    print(f"{found.file}  {found.rows:,} samples of the {found.split} split, weights from {found.weights}")


def _gathered(part: Pass) -> Columns:
    """Everybody's rows; ranks have contiguous shares, so their order is that of the samples."""
    mine = together(part.world, lambda: _mine(part))
    whole: Columns = {}
    for rank in range(part.world.size):
        for name, values in from_main(part.world, mine, source=rank).items():
            whole.setdefault(name, []).extend(values)
    return whole


@torch.inference_mode()
def _mine(part: Pass) -> Columns:
    found: Columns = {}
    for batch in part.loader.held_out(part.batch_size, part.world.rank, part.world.size):
        with part.precision.autocast():
            columns = part.task.predictions(part.model, batch)
        numbers = batch.indices.tolist()
        named = {} if part.names is None else {"name": [part.names[number] for number in numbers]}
        for name, values in ({"sample": numbers} | named | columns).items():
            if part.answered or not name.startswith("target"):
                found.setdefault(name, []).extend(values)
    return found


def _table(columns: Columns) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()
