"""Whether a pretrained model fits here, by its config.json alone: before its weights are downloaded."""

from pathlib import Path

from torch import nn

from multigpu_cli.config.adapter_rules import is_pretrained
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError
from multigpu_cli.models.build import build_model
from multigpu_cli.models.on_meta import build_on_meta
from multigpu_cli.runtime.model_folder import find_model_folder, has_weights


def find_folder_without_weights(config: Config) -> Path | None:
    """The folder of --model-dir, if it has the configuration of the model to train and nothing else of it."""
    if not is_pretrained(config) or config.model.dir is None:
        return None
    folder = find_model_folder(config.model.dir)
    return None if has_weights(folder) else folder


def outline_model(config: Config) -> nn.Module:
    """The network that would be trained, with its adapter, on the meta device: it takes no memory.

    Raises:
        RequestError: it can't be built there.
    """
    offered = {"model_dir": config.model.dir, "seed": config.reproducibility.seed}
    model, reason = build_on_meta(lambda: build_model(config.model, "pretrained", offered, adapter=config.adapter))
    if model is None:
        raise RequestError(
            f"--model-dir {config.model.dir} has no weights, and its size can't be told without: {reason}",
            remedy="the folder with the model's weights",
        )
    return model
