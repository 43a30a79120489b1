"""Trained weights, or the whole network, as a file that other programs read."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from multigpu_cli.checkpoint.export import RawInputs, export_network, export_weights
from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.trained_weights import TrainedWeights, load_trained_weights
from multigpu_cli.commands.inference.load_run import LoadedRun, load_run
from multigpu_cli.commands.output import writing_to
from multigpu_cli.config.schema import Config
from multigpu_cli.data.batch_stream_protocol import first_batch
from multigpu_cli.data.csv_reader import list_missing_words
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.table_features import TableFeatures
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.tasks.open_data import FROM_MODEL, check_has_samples

_SAMPLES = 9
_RAW = "takes raw columns, an array (n,) each; scaling, missing values and one-hot columns are computed inside"


@dataclass(frozen=True)
class Export:
    """The file, or folder, that was written.

    Attributes:
        origin: the file that the weights come from.
        difference: greatest difference of an output from the original's, 0 where bits were compared.
        checked: how the file was checked.
        takes: which inputs the file takes, where that is not what the network itself takes.
    """

    file: str
    bytes: int
    origin: str
    difference: float
    checked: str
    takes: str = ""


def export_run(
    checkpoint: str,
    target: Path,
    *,
    format: str | None = None,
    data_dir: str | None = None,
    model_dir: str | None = None,
    own_code: bool = False,
) -> Export:
    """Write the file, or folder, and check it.

    Args:
        format: hf, adapter or merged: a folder for transformers and peft; None: a file, by its ending.
        data_dir: where the dataset is now; the network is built for its shapes, and run on its samples.
        model_dir: where the pretrained model is now.
        own_code: the code that the checkpoint names may be imported.

    Raises:
        RequestError: nothing was written.
        TrainingError: the file failed its check, and was removed.
    """
    if format:
        return _export_folder(checkpoint, target, format, model_dir, own_code=own_code)
    weights, takes = load_trained_weights(Path(checkpoint)), ""
    if target.suffix in (".safetensors", ".pt"):
        with writing_to("--to", target):
            left_out = export_weights(weights.state, target)
        difference, checked = 0.0, "read back: every bit is the same"
        if left_out:
            checked += f"; left out, since only .pt takes more than tensors: {', '.join(left_out)}"
    else:
        run, inputs = _rebuild_run(weights, data_dir, own_code=own_code)
        with writing_to("--to", target):
            difference, takes = _export_run(run, inputs, target)
        checked = f"run on {_count(inputs)} samples and on one: greatest difference {difference:.2g}"
    return Export(str(target), target.stat().st_size, str(weights.origin), difference, checked, takes)


def format_export(export: Export) -> Iterator[str]:
    """The file, its origin, how it was checked, and which inputs it takes."""
    yield f"{export.file}  {export.bytes / 1e6:.1f} MB, weights from {export.origin}"
    yield export.checked
    if export.takes:
        yield export.takes


def _export_folder(checkpoint: str, target: Path, format: str, model_dir: str | None, *, own_code: bool) -> Export:
    from multigpu_cli.commands.inference.export_folder import write_model_folder  # late: transformers' models only

    changes = {"model_dir": model_dir} if model_dir else {}
    written = write_model_folder(Path(checkpoint), target, format, changes, own_code=own_code)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    checked = f"loaded again: greatest difference of a logit {written.difference:.2g} of the largest one"
    return Export(str(target), size, written.origin, written.difference, checked)


def _export_run(run: LoadedRun, inputs: Any, target: Path) -> tuple[float, str]:
    """Write the network; a table's preprocessing becomes part of an .onnx, and a file beside a .pt2.

    Returns:
        The greatest difference of an output, and which inputs the file takes.

    Raises:
        RequestError: the network can't be exported, or the file beside it exists already.
    """
    if run.source.table is None:
        return export_network(run.model, inputs, target), ""
    if target.suffix == ".onnx":
        return export_network(run.model, inputs, target, _make_raw_inputs(run, run.source.table)), _RAW
    beside = target.with_name(f"{target.name}.json")
    if beside.exists():
        raise RequestError(f"--to {target}: {beside} exists already", remedy="another name, or remove it")
    difference = export_network(run.model, inputs, target)
    publish(beside, dump_json(_describe_preprocessing(run.source, run.source.table)).encode())
    return difference, f"takes features, not rows: {beside} describes how features are computed from rows"


def _make_raw_inputs(run: LoadedRun, table: TableFeatures) -> RawInputs:
    from multigpu_cli.commands.inference.table_onnx import add_preprocessing, list_raw_inputs  # needs an extra

    task = run.config.task.name or run.source.task
    return RawInputs(lambda network: add_preprocessing(network, run.source, task), list_raw_inputs(table))


def _describe_preprocessing(source: DataSource, table: TableFeatures) -> dict[str, Any]:
    mean, scale = source.target_scale or (0.0, 1.0)
    target = {"mean": mean, "scale": scale}
    return {**table.describe(), "missing": list_missing_words(), "classes": source.class_names, "target": target}


def _rebuild_run(weights: TrainedWeights, data_dir: str | None, *, own_code: bool) -> tuple[LoadedRun, Any]:
    """The run with these weights, and samples of its dataset as the network takes them."""
    run = load_run(weights, {"data_dir": data_dir} if data_dir else {}, own_code=own_code)
    check_has_samples(run.config, "export to this format (.safetensors and .pt do not)")
    weights_alone = "--to ….safetensors, for the weights alone"
    if run.config.task.name == FROM_MODEL:
        raise RequestError("--task from-model: its network takes targets, and returns a loss", remedy=weights_alone)
    inputs = _load_samples(run.config, run.source)
    if not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == _count(inputs) for leaf in tree_leaves(inputs)):
        raise RequestError("the model's input is no batch of tensors", remedy=weights_alone)
    return run, inputs


def _count(inputs: Any) -> int:
    """Samples: the first dimension of the first tensor."""
    return next((len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def _load_samples(config: Config, source: DataSource) -> object:
    seed = config.reproducibility.seed
    cpu = torch.device("cpu")
    with closing(Loader(source.train, source, config.data, device=cpu, seed=seed, workers_here=1)) as loader:
        return first_batch(loader, min(_SAMPLES, loader.size)).inputs
