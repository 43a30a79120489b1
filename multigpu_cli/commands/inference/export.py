"""Trained weights, or the whole network, as a file that other programs read."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.export import TrainedWeights, export_network, export_weights, load_trained_weights
from multigpu_cli.commands.inference.load_run import load_run
from multigpu_cli.config.schema import Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.loader import Loader
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.journal import dump_json
from multigpu_cli.run.build import first_batch
from multigpu_cli.tasks.open_data import check_has_samples

_SAMPLES = 9


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        origin: the file that the weights come from.
        difference: greatest difference of an output from the original's, 0 where bits were compared.
        checked: how.
    """

    file: str
    bytes: int
    origin: str
    difference: float
    checked: str


def export_run(checkpoint: str, target: Path, *, data_dir: str | None = None, own_code: bool = False) -> Export:
    """Write the file and check it.

    Args:
        data_dir: where the dataset is now; the network is built for its shapes, and run on its samples.
        own_code: the user knows the code that the checkpoint names, and lets it run.

    Raises:
        RequestError: nothing was written.
        TrainingError: the file was not what it should be, and is gone.
    """
    weights = load_trained_weights(Path(checkpoint))
    weights_only = target.suffix in (".safetensors", ".pt")
    model, inputs = (None, None) if weights_only else _rebuild_model(weights, data_dir, own_code=own_code)
    try:
        if model is None or inputs is None:
            left_out = export_weights(weights.state, target)
            difference, checked = 0.0, "read back: every bit is the same"
            if left_out:
                checked += f"; left out, since only .pt takes more than tensors: {', '.join(left_out)}"
        else:
            difference = export_network(model, inputs, target)
            checked = f"run on {len(inputs)} samples and on one: greatest difference {difference:.2g}"
    except OSError as error:
        raise RequestError(f"--to {target}: {error.strerror or error}", remedy="another place") from error
    return Export(str(target), target.stat().st_size, str(weights.origin), difference, checked)


def print_export(export: Export, *, as_json: bool) -> None:
    """Print what was written and how it was checked."""
    if as_json:
        print(dump_json(asdict(export), indent=2))
        return
    print(f"{export.file}  {export.bytes / 1e6:.1f} MB, weights from {export.origin}")
    print(export.checked)


def _rebuild_model(weights: TrainedWeights, data_dir: str | None, *, own_code: bool) -> tuple[nn.Module, Tensor]:
    """The network with these weights, ready for use, and samples of the run's dataset as it meets them."""
    run = load_run(weights, {"data_dir": data_dir} if data_dir else {}, own_code=own_code)
    check_has_samples(run.config, "export to this format (.safetensors and .pt do not)")
    inputs = _load_samples(run.config, run.source)
    if not isinstance(inputs, Tensor):
        raise RequestError("the model's input is not one tensor", remedy="--to ….safetensors, for the weights alone")
    return run.model, inputs


def _load_samples(config: Config, source: DataSource) -> object:
    seed = config.reproducibility.seed
    loader = Loader(source.train, source, config.data, device=torch.device("cpu"), seed=seed, workers_here=1)
    try:
        return first_batch(loader, _SAMPLES).inputs
    finally:
        loader.close()
