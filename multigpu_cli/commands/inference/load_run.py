"""Rebuilds a trained network from a run folder: settings, dataset, model, weights."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multigpu_cli.checkpoint.trained_weights import TrainedWeights
from multigpu_cli.config.own_code import NAMING, check_code
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.vocabulary import deserialize_vocabulary
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.build_model import init_model
from multigpu_cli.run.model_code import describe_code, name_changes
from multigpu_cli.run.pretrained_base import check_base
from multigpu_cli.runtime.model_folder import TextModel, describe_tokenizer, find_model_folder, load_text_model
from multigpu_cli.tasks.open_data import open_data


@dataclass(frozen=True)
class LoadedRun:
    """A run whose weights can be used.

    Attributes:
        config: the settings of the run, without those that matter only in training.
        model: on the CPU, in evaluation mode.
    """

    config: Config
    source: DataSource
    model: nn.Module


def load_run(
    weights: TrainedWeights,
    changes: Mapping[str, Any],
    *,
    own_code: bool,
    checks_base: bool = True,
    parts: Collection[str] = NAMING,
) -> LoadedRun:
    """Open the run's dataset, build its network for it, and put the weights in.

    Args:
        changes: settings that differ from the run's, by key: where data or pretrained model are now, or other data.
        own_code: the code that the run names may be imported.
        checks_base: whether this process compares files of a pretrained model, and the network's code, with the run's.
        parts: those of the run that may be its own code, and are used.

    Raises:
        RequestError: the code is not allowed, the dataset or the pretrained model is not there, or the weights do not
            fit it.
    """
    config = _merge_config(weights, changes)
    command = _make_command_config(changes, own_code=own_code)
    check_code(config, command, str(weights.origin), environments=ENVIRONMENTS, parts=parts)
    source = open_data(config)
    if checks_base:
        check_base(weights.settings.get("base", {}), config, source, str(weights.origin))
    before = weights.settings.get("learned")
    if before is not None and before != source.signature():
        raise RequestError(
            f"--data {config.data.name}: its training split has other classes, scales or tokens than those that "
            f"{weights.origin} was trained with",
            remedy="the run's own training data, together with other test data"
            + ("; other rows: --set data.test_file=FILE or data.new=FILE" if config.data.name == "csv" else ""),
        )
    return _load_weights(config, source, weights, warns=checks_base)


def load_run_without_data(
    weights: TrainedWeights, *, own_code: bool, changes: Mapping[str, Any] = MappingProxyType({})
) -> LoadedRun:
    """Build the network from the run's record of its data, which need not be there: a source without samples.

    Args:
        changes: settings that differ from the run's, by key: where the pretrained model is now.

    Raises:
        RequestError: the code is not allowed, or the file has no record of the data.
    """
    built_for = dict(weights.settings.get("built_for", {}))
    if not built_for:
        raise RequestError(f"{weights.origin} has no record of its data's shapes", remedy="weights of a newer run")
    config = _merge_config(weights, changes)
    config = replace_settings(config, {"model": config.model.name or built_for["model"]})
    command = _make_command_config(changes, own_code=own_code)
    check_code(config, command, str(weights.origin), environments=ENVIRONMENTS, parts=["model"])
    nothing = TensorDataset(torch.empty(0), torch.empty(0))
    source = DataSource(
        train=nothing,
        val=None,
        test=None,
        input_shape=tuple(built_for["input_shape"]),
        num_classes=built_for["num_classes"],
        num_outputs=built_for.get("outputs", 1),
        vocabulary=deserialize_vocabulary(built_for["vocabulary"]) if "vocabulary" in built_for else None,
        model=built_for["model"],
        task=built_for["task"],
    )
    check_base(weights.settings.get("base", {}), config, source, str(weights.origin))
    return _load_weights(config, source, weights)


def load_text_model_of_run(weights: TrainedWeights, run: LoadedRun) -> TextModel:
    """Tokenizer and ends of the pretrained model of a run.

    Raises:
        RequestError: they are not there, or not those of the training.
    """
    model, record = load_text_model(find_model_folder(run.config.model.dir)), weights.settings.get("base", {})
    found = describe_tokenizer(model.tokenizer, record.get("template"))
    check_base(record, run.config, replace(run.source, text_model=found), str(weights.origin))
    return model


def _load_weights(config: Config, source: DataSource, weights: TrainedWeights, *, warns: bool = True) -> LoadedRun:
    model = init_model(config, source, reference="reference" in weights.settings)
    weights.load_into(model)
    if warns and (names := name_changes(weights.settings.get("code", {}), describe_code(model))):
        Console("quiet", sys.stderr).warn(f"the model's {names} changed since {weights.origin} was written")
    return LoadedRun(config, source, model.eval())


def _make_command_config(changes: Mapping[str, Any], *, own_code: bool) -> Config:
    return replace_settings(Config(), {**changes, "own_code": own_code})


def _merge_config(weights: TrainedWeights, changes: Mapping[str, Any]) -> Config:
    known = {key: value for key, value in weights.settings.items() if key in SETTINGS}
    if weights.model:
        known["model"] = weights.model
    if changes.get("data", known.get("data")) != known.get("data"):
        known["data.args"] = {}  # the run's are arguments of its own dataset
    args = known.get("data.args", {}) | changes.get("data.args", {})
    config = replace_settings(Config(), known | dict(changes) | {"data.args": args})
    plain = replace(config.model, sync_bn=False, grad_checkpointing=False, freeze=(), init_from=None)
    return replace(config, model=plain, data=replace(config.data, num_workers=0))
