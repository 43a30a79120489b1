"""A trained network made anew from what a run has left: settings, dataset, model, weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from multigpu_cli.checkpoint.export import Trained
from multigpu_cli.checkpoint.weights import check_fit
from multigpu_cli.config.pinned import with_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.data.base import Source
from multigpu_cli.data.source import open_source
from multigpu_cli.errors import RequestError
from multigpu_cli.run.learner import fresh_model


@dataclass(frozen=True)
class Restored:
    """What is needed to use a run's weights.

    Attributes:
        config: the settings of the run, without what only matters while it learns.
        model: on the CPU, in evaluation mode.
    """

    config: Config
    source: Source
    model: nn.Module


def restored(found: Trained, changes: Mapping[str, Any], *, own_code: bool) -> Restored:
    """Open the run's dataset, build its network for it, and put the weights in.

    Args:
        changes: settings that differ from the run's, by key: where the data lies now, or other data.
        own_code: the user knows the code that the run names, and lets it run.

    Raises:
        RequestError: code that nobody has allowed, a dataset that is not there, or one that the weights don't fit.
    """
    config = _config(found, changes)
    named = [name for name in (config.model.name, found.settings.get("data"), config.task.name) if name and ":" in name]
    if named and not own_code:
        raise RequestError(
            f"{found.origin} names code that is not ours: {', '.join(named)}",
            remedy="--own-code, if you know it and want it to run",
        )
    source = open_source(config.data, config.reproducibility.seed)
    before = found.settings.get("learned")
    if before is not None and before != source.learned():
        raise RequestError(
            f"--data {config.data.name}: its training part gives other classes, scales or tokens than those that "
            f"{found.origin} was trained with",
            remedy="the training data of the run, beside other test data",
        )
    model = fresh_model(config, source)
    check_fit(model, found.state, str(found.origin))
    model.load_state_dict(found.state)
    return Restored(config, source, model.eval())


def _config(found: Trained, changes: Mapping[str, Any]) -> Config:
    known = {key: value for key, value in found.settings.items() if key in SETTINGS}
    if found.model:
        known["model"] = found.model
    if changes.get("data", known.get("data")) != known.get("data"):
        known["data.args"] = {}  # they were meant for the run's own dataset
    args = known.get("data.args", {}) | changes.get("data.args", {})
    config = with_settings(Config(), known | dict(changes) | {"data.args": args})
    plain = replace(config.model, sync_bn=False, grad_checkpointing=False, freeze=(), init_from=None)
    return replace(config, model=plain, data=replace(config.data, num_workers=0))
