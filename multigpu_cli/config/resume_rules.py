"""Which settings a checkpoint pins, and how a new command's settings are merged with those of the run."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from multigpu_cli.config.schema import LENGTH, SETTINGS, Config
from multigpu_cli.config.types import Setting
from multigpu_cli.errors import RequestError, raise_all

OF_THE_COMMAND = {"save_dir", "resume", "own_code", "tune.pause_at"}
PRIVATE = {"notify"}
"""Settings that may hold secrets: they are in config.yaml alone, which only its owner can read then."""


def choose_mode(get: Callable[[str], Any]) -> int:
    """Return the permissions, less the umask, of a file with the settings that `get` returns by key, None without."""
    return 0o600 if any(map(get, PRIVATE)) else 0o666


def flatten_settings(config: Config) -> dict[str, Any]:
    """Return every setting by key, as plain values for JSON, except private ones: weights and tables show these."""
    return {key: _plain(config.get(key)) for key in SETTINGS if key not in OF_THE_COMMAND | PRIVATE}


def is_same_run(config: Config, stored: Mapping[str, Any]) -> bool:
    """Whether two commands describe the same run; settings of devices, speed, logging and saving may differ."""
    compared = [key for key, entry in SETTINGS.items() if not entry.free or key in (*LENGTH, "data_dir")]
    before = {key: _plain(SETTINGS[key].default) for key in compared} | dict(stored)  # an older version lacked some
    return all(_plain(config.get(key)) == before[key] for key in compared if key not in OF_THE_COMMAND)


def merge_with_checkpoint(
    config: Config,
    stored: Mapping[str, Any],
    explicit_keys: Collection[str],
    pinned_values: Mapping[str, Any],
    where: str,
) -> Config:
    """Apply a new command to a stored run: settings that the command does not give are taken from the run.

    A command that repeats all pinned settings of the first one gets the defaults for the free settings that it leaves
    out (--max-steps, for instance); a command that repeats only some of them gets the stored run's. `stored` is the
    first command's `flatten_settings`; the values that were resolved at the start (batch_size, lr, …) are pinned, by
    key. RequestError: explicit settings differ from the run's; each is named with both values.
    """
    differing, adopted = [], {}
    pinned = {key for key in explicit_keys if key in SETTINGS and not SETTINGS[key].free}
    restated = pinned <= config.explicit and bool(set(explicit_keys) & config.explicit)
    for key, entry in SETTINGS.items():
        if key in OF_THE_COMMAND or key not in stored or _plain(config.get(key)) == stored[key]:
            continue
        if entry.free:
            if key not in config.explicit and not restated:
                adopted[key] = stored[key]
        elif key in config.explicit and _plain(config.get(key)) != pinned_values.get(key, stored[key]):
            differing.append(_difference(entry, config.get(key), pinned_values.get(key, stored[key]), where))
        else:
            adopted[key] = stored[key]
    raise_all(differing)
    explicit = config.explicit if restated else config.explicit | frozenset(explicit_keys)
    return replace(replace_settings(config, adopted), explicit=explicit)


def replace_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of the config with some settings changed, parsed as if they stood in YAML; RequestError: one is wrong."""
    for key, value in values.items():
        entry, remedy = SETTINGS[key], "use a checkpoint that was not edited by hand"
        usual = value is None or value == _plain(entry.default)
        parsed = entry.default if usual else entry.kind.read(value, f"{key}:", remedy)
        section = replace(getattr(config, entry.section), **{entry.attribute: parsed})
        config = replace(config, **{entry.section: section})
    return config


def without_setting(config: Config, key: str) -> Config:
    """A copy of the config in which this setting has its default and is not explicit."""
    return replace(replace_settings(config, {key: None}), explicit=config.explicit - {key})


def _difference(entry: Setting, new: Any, old: Any, where: str) -> RequestError:
    name = entry.flag or entry.key
    if entry.default is False:
        problem = f"{name} is {'on' if new else 'off'}, and {where} was started with it {'on' if old else 'off'}"
    elif old in (None, [], {}):
        problem = f"{name} {_quote_setting(new)}, and {where} was started without it"
    else:
        problem = f"{name} {_quote_setting(new)} differs from {_quote_setting(old)}, with which {where} was started"
    return RequestError(problem, remedy=f"leave {name} out to resume, or start a new run with another --save-dir")


def _quote_setting(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_quote_setting(entry)}" for name, entry in value.items()) or "without any"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
