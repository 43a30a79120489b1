"""The predictions of a run's weights for each sample, as a table."""

import csv
import io
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.commands.inference.distributed_pass import InferencePass, run_distributed
from multigpu_cli.commands.output import writing_to
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.runtime.collectives import broadcast_object
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks

Columns = dict[str, list[Any]]


class Prediction(NamedTuple):
    """The table that was written."""

    file: str
    split: str
    rows: int
    weights: str


def predict_run(request: InferenceRequest, target: Path) -> Prediction | None:
    """Write one row for each sample of the split, in order; None on ranks above 0.

    Samples may be inputs alone: then the table has no column of targets.

    Raises:
        RequestError: the run can't be loaded, or its task has no predictions.
    """
    return run_distributed(request, partial(_write_predictions, target), needs_targets=False)


def _write_predictions(target: Path, part: InferencePass) -> Prediction:
    columns = _gather_columns(part)
    if part.world.is_main:
        with writing_to("--out", target):
            publish(target, _format_csv(columns))
    return Prediction(str(target), part.split, part.loader.size, part.origin)


def format_prediction(prediction: Prediction) -> str:
    """The file, and which samples and weights it is from."""
    samples = f"{prediction.rows:,} samples of the {prediction.split} split"
    return f"{prediction.file}  {samples}, weights from {prediction.weights}"


def _gather_columns(part: InferencePass) -> Columns:
    """All ranks' rows; ranks have contiguous shares, so the rows are in the order of the samples."""
    share = run_on_all_ranks(part.world, lambda: _predict_share(part))
    whole: Columns = {}
    for rank in range(part.world.size):
        for name, values in broadcast_object(part.world, share, source=rank).items():
            whole.setdefault(name, []).extend(values)
    return whole


@torch.inference_mode()
def _predict_share(part: InferencePass) -> Columns:
    rows: Columns = {}
    for batch in part.loader.eval_batches(part.batch_size, part.world.rank, part.world.size):
        with part.precision.autocast():
            columns = part.task.predictions(part.model, batch)
        numbers = batch.sample_indices.tolist()
        named = {} if part.names is None else {"name": [part.names[number] for number in numbers]}
        for name, values in ({"sample": numbers} | named | columns).items():
            if part.has_targets or not name.startswith("target"):
                rows.setdefault(name, []).extend(values)
    return rows


def _format_csv(columns: Columns) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()
