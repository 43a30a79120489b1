"""The pace of a run by its journal: when a step will be done, and where the time of a step goes on each rank."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import median, variance
from typing import Any, NamedTuple

from multigpu_cli.monitor.format import list_values
from multigpu_cli.monitor.history import History

_WINDOWS = 50  # of the journal's newest, which give the rate
_MUCH = 0.2  # share of a step's time


class Forecast(NamedTuple):
    """Seconds until a step: expected, and the range that holds with 9 chances in 10."""

    seconds: float
    low: float
    high: float


def forecast_step(history: History, step: int, now: float) -> Forecast | None:
    """When a step will be done, at the pace of this attempt's newest lines, evaluations and checkpoints included.

    Stretches between two lines scatter; if they are independent, the scatter of those that remain and the error of the
    mean add up. None: the attempt has no pace yet.
    """
    since = history.attempts[-1].start["time"] if history.attempts else 0.0
    lines = [event for event in history.train.values() if event["time"] >= since][-_WINDOWS - 1 :]
    if not lines:
        return None
    last, pairs = lines[-1], list(pairwise(lines))
    rates = [(b["time"] - a["time"]) / max(1, b["step"] - a["step"]) for a, b in pairs]
    steps, count = max(1, last["step"] - lines[0]["step"]), max(1, len(pairs))
    pace = (last["time"] - lines[0]["time"]) / steps if pairs else float(last.get("step_ms") or 0.0) / 1e3
    stretch = steps / count
    left = max(0, step - last["step"]) / stretch
    quantile = 1.645 + 1.524 / max(1, count - 1)  # Student's t for 95 %, to the first order in the stretches
    spread = quantile * stretch * sqrt((variance(rates) if count > 1 else 0.0) * (left + left**2 / count))
    return Forecast(*(max(0.0, left * stretch * pace + off - (now - last["time"])) for off in (0.0, -spread, spread)))


def forecast_checkpoint(history: History, every: str | None, now: float) -> tuple[int | None, Forecast | None]:
    """The next checkpoint by --checkpoint-every: its step, where steps decide on it, and when it is due."""
    if every and every.endswith("m"):
        times = [event["time"] for event in (*history.checkpoints, *(each.start for each in history.attempts))]
        due = max(0.0, max(times, default=now) + 60 * float(every[:-1]) - now)
        return None, Forecast(due, due, due)
    length = history.plan.get("steps_per_epoch") if not every else int(every) if every.isdigit() else None
    if not length:
        return None, None
    step = min((history.step // length + 1) * length, history.plan.get("total_steps") or history.step + length)
    return step, forecast_step(history, step, now)


class StepShares(NamedTuple):
    """Milliseconds of a step on each rank; of more than 64 ranks on the fastest, the mean and the slowest."""

    step_ms: float
    ranks: list[str]
    parts: list[tuple[float, float, float, float]]  # of each rank: wait for data, compute, exposed wire, wait for ranks
    says: str  # which rank is the slowest, and whether it waits for data; "" if neither
    measured: bool  # whether communication was told from compute


def divide_step(history: History) -> StepShares | None:
    """Divide the time of a step by the newest `train` line; return None if there is none.

    All ranks take equally long for a step. Their own time is what they don't wait for others; the least wait is the
    exposed communication, and the rest of a rank's wait is due to slower ranks.
    """
    last: dict[str, Any] = history.last_train or {}
    if not (step := last.get("step_ms")):
        return None
    own = list_values(last.get("own_ms") or [step])
    data = list_values(last.get("data_wait_ms") or [(last.get("data_wait_share") or 0.0) * step] * len(own))
    wire = (last.get("comm_share") or 0.0) * step
    waits = [max(0.0, step - mine - wire) for mine in own]
    parts = [(each, max(0.0, mine - each), wire, wait) for mine, each, wait in zip(own, data, waits, strict=True)]
    many = isinstance(last.get("own_ms"), dict)
    ranks = ["least", "mean", "greatest"] if many else [f"rank {rank}" for rank in range(len(own))]
    worst = f"rank {last['own_ms']['worst_rank']}" if many else ""
    remedy = advise_on_data(history.attempts[-1].start.get("data", ""), history.plan.get("device", ""))
    return StepShares(step, ranks, parts, _say(own, data, step, worst, remedy), last.get("comm_share") is not None)


def advise_on_data(location: str, device: str) -> str:
    """Return what shortens the wait for data that are at this location of the journal, "" for no setting."""
    if location == "in host memory":
        return "a larger --batch-size" if device == "cpu" else "--data-on-device on"
    return "more --num-workers, or a TensorDataset" if location.startswith("fetched") else ""


def _say(own: Sequence[float], data: Sequence[float], step: float, worst: str, remedy: str) -> str:
    slowest, usual = max(range(len(own)), key=lambda rank: own[rank]), median(own)
    found = []
    if own[slowest] > 1.05 * usual + 0.1:
        work = f"{own[slowest]:.1f} ms of its own work a step, the median is {usual:.1f} ms"
        found.append(f"{worst or f'rank {slowest}'} is the slowest: {work}")
    if (idle := max(data) / step) > _MUCH:
        found.append(f"waits for data {idle:.0%} of the time" + (remedy and f": try {remedy}"))
    return "; ".join(found)
