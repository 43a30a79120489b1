"""The check of a search space before its first trial, in a separate process, because it needs torch."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multigpu_cli.commands.plan.measure import measure_worker
from multigpu_cli.commands.plan.plan import NO_WIRE, forecast_rows
from multigpu_cli.config.schema import Config
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import choose_placement, count_cores, count_visible_gpus, usable_gpus
from multigpu_cli.errors import TrainingError
from multigpu_cli.monitor.console import Console
from multigpu_cli.planning.speedup import Interconnect
from multigpu_cli.run.open import resolve_request, try_request
from multigpu_cli.run.request.spec import FromConfig


def main(name: str) -> None:
    """Read check.json in the folder, and write found.json: the error, GPUs and cores, and the forecast.

    A trial's start is forecast by that of this process, up to the first batch.
    """
    folder, sets = Path(name), []
    wanted, base = json.loads((folder / "check.json").read_text()), str(folder / "base.yaml")
    found: dict[str, Any] = {"error": "", "cores": count_cores(), "gpus": []}
    try:
        found["gpus"] = list(usable_gpus(resolve({"gpu_ids": wanted["gpu_ids"]}, [], None).device))
        for goal in wanted["objectives"]:  # which --best takes as well
            _try_corner(resolve({"best": goal}, wanted["corners"][0], base), found["gpus"], wanted["gpus_per_trial"])
            found.setdefault("start", time.time() - wanted["began"])
        for sets in wanted["corners"]:
            _try_corner(resolve({}, sets, base), found["gpus"], wanted["gpus_per_trial"])
        if wanted["measure"]:
            ends = (wanted["corners"][0], wanted["corners"][-1])
            found["forecast"] = [_forecast(resolve({}, corner, base)) for corner in ends]
    except TrainingError as error:
        found["corner"] = sets or wanted["corners"][0]
        found["error"] = f"{', '.join(sets)}: {error}" if sets else str(error).replace("--best ", "--objective ")
    (folder / "found.json").write_text(json.dumps(found))


def _try_corner(config: Config, gpus: Sequence[int], workers: int) -> None:
    """Build the model and try a batch, as --dry-run does; TrainingError: the trial would raise it."""
    where: dict[str, Any] = {"multi_gpu": "ddp", "nproc_per_node": workers} if workers > 1 else {"multi_gpu": "none"}
    device = replace(config.device, gpu_ids=tuple(gpus[:workers]) or None, **where)
    placement = choose_placement(device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=None)
    with resolve_request(config, placement, None, Console("silent"), lambda error: None, FromConfig()) as request:
        try_request(request)


def _forecast(config: Config) -> dict[str, float]:
    """Return seconds per planned epoch on one worker, also of a run that another limit ends, and bytes of a folder."""
    alone = measure_worker(config, [1])
    (row,) = forecast_rows(alone, config, [1], Interconnect(NO_WIRE))
    weights = 2 * alone.memory.weights  # each checkpoint has the best ones too
    kept = config.checkpoint.keep * (weights + alone.memory.optimizer) + weights
    return {"epoch": row.seconds / config.length.epochs, "bytes": kept}
