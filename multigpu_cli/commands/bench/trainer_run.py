"""One run of a benchmark: the real trainer in its own process, and what its journal says of its speed."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, nan
from pathlib import Path
from typing import Any

import yaml

from multigpu_cli.config.resume_rules import replace_settings, without_setting
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import explicit_dump
from multigpu_cli.launch import run_cli
from multigpu_cli.monitor.history import load_history
from multigpu_cli.runtime.choose_strategy_and_devices import MULTI_PROCESS

WINDOWS = 8  # of a run, the first of which is warm-up
_ENDLESS = 1_000_000  # epochs
_FIELDS = {"step_ms": "step_ms", "data": "data_wait_share", "wire": "comm_share", "stragglers": "straggler_share"}


def window_steps(steps: int) -> int:
    """Steps of one window, so that all windows together have at least the number that was asked for."""
    return ceil(steps / WINDOWS)


def run_trainer(
    config: Config, strategy: str, workers: int, steps: int, folder: Path, environ: Mapping[str, str]
) -> dict[str, float]:
    """Run the real trainer for some steps; medians over its journal's windows without the first one.

    Returns:
        step_ms, the shares data, wire and stragglers, memory of the fullest worker in bytes, and utilisation in per
        cent, NaN where it is unknown.
    """
    config = without_setting(config, "nproc_per_node")
    interval = window_steps(steps)
    changes: dict[str, Any] = {
        "multi_gpu": "none" if strategy == "single" else strategy,
        "epochs": _ENDLESS,
        "max_steps": interval * WINDOWS,
        "log_interval": interval,
        "logger": [],
        "save_dir": str(folder),
        "resume": "never",
        "mirror": None,
        "checkpoint_every": str(_ENDLESS),
        "warmup_epochs": 0.0,
    }
    if strategy in MULTI_PROCESS:
        changes["nproc_per_node"] = workers
    if ids := config.device.gpu_ids or (range(workers) if strategy == "dp" else ()):
        changes["gpu_ids"] = list(ids[:workers])
    changed = replace(replace_settings(config, changes), explicit=config.explicit | changes.keys())
    request = folder.with_suffix(".yaml")
    request.write_text(yaml.safe_dump(explicit_dump(changed)))
    run_cli(["--config", str(request), "--quiet"], environ)
    lines = [line for _, line in sorted(load_history(folder).train.items())][1:]
    medians = {name: statistics.median(line.get(field) or 0.0 for line in lines) for name, field in _FIELDS.items()}
    busy = []
    for line in lines:
        known = [value for value in line.get("gpu_utilisation") or line["cpu_utilisation"] if value is not None]
        busy += [statistics.fmean(known)] if known else []
    return medians | {"memory": max(lines[-1]["memory"]), "utilisation": statistics.median(busy) if busy else nan}
