"""From the values of the options to a checked Config; every command that takes train options goes through here."""

from collections.abc import Mapping
from typing import Any

from multigpu_cli.config import rules
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import gather
from multigpu_cli.data.registry import DATASETS
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.errors import RequestError, all_wrong
from multigpu_cli.models.registry import MODELS
from multigpu_cli.tasks.registry import TASKS


def requested(values: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """The settings that the options ask for.

    Args:
        values: option → value; None, False and [] where it was not given.
        environ: the process environment.

    Raises:
        RequestError: all that is wrong with the request, as far as that shows without torch.
    """
    flags = {key: values[key] for key in SETTINGS if values.get(key) not in (None, False, [])}
    wrong = []
    if values.get("no_amp"):
        if flags.get("amp", "off") != "off":
            wrong.append(RequestError(f"--no-amp together with --amp {flags['amp']}", remedy="one of them"))
        flags["amp"] = "off"
    config, faults, broken, filed, readable = gather(flags, values.get("set") or (), values.get("config"))
    if readable:
        config = rules.yielding(config, filed, environ)
        names = {"datasets": DATASETS, "environments": ENVIRONMENTS, "models": MODELS, "tasks": TASKS}
        faults += rules.broken(config, **names, environ=environ, untold=broken)
    if wrong or faults:
        raise all_wrong([*wrong, *faults])
    return config
