"""Run folders as trainings leave them, for the commands that read them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import Config
from multigpu_cli.config.yaml_text import dump_config

PLAN = {
    "strategy": "ddp",
    "workers": 2,
    "device": "cpu",
    "batch_size": 16,
    "global_batch_size": 32,
    "samples": 100,
    "steps_per_epoch": 4,
    "total_steps": 40,
    "learning_rate": 0.1,
    "precision": "off",
    "contents": "mlp on digits",
}
SUMMARY = {
    "status": "completed",
    "final": {"test_accuracy": 0.975, "val_loss": 0.5},
    "fingerprint": "ab" * 32,
    "confusion": [[9, 1], [0, 10]],
    "per_class": [{"class": "cat", "f1": 0.947, "support": 10}, {"class": "<dog>", "f1": 0.952, "support": 10}],
}
Event = dict[str, Any]


def event(time: float, name: str, **fields: Any) -> Event:
    return {"event": name, "time": time} | fields


def lines(first: int, last: int, begun: float, *, scale: float = 1.0, **changed: Any) -> Iterable[Event]:
    """Training from one step to another, a second each, evaluated every fourth step."""
    for step in range(first, last + 1):
        learnt = {"loss": scale * 2.0 / step, "lr": scale * 0.1, "grad_norm": scale, "epoch": -(-step // 4)}
        speed = {
            "samples_per_second": scale * 1000.0 + step,
            "step_ms": scale * 30.0,
            "step_p50_ms": scale * 30.0,
            "data_wait_share": scale * 0.05,
        }
        rest = {"samples": 25 * step, "comm_share": None, "memory": [2**30, 2**31]}
        yield event(begun + step - first + 1, "train", step=step, **learnt | speed | rest | changed)
        if step % 4 == 0:
            found = {"split": "val", "samples": 9, "loss": 2.5 / step, "accuracy": 1 - 1 / step}
            yield event(begun + step, "eval", epoch=step // 4, step=step, **found)


def run_folder(
    folder: Path, events: Iterable[Event], summary: Mapping[str, Any] | None = None, **settings: Any
) -> Path:
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (folder / "config.yaml").write_text(dump_config(replace_settings(Config(), settings)))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def interrupted_run(folder: Path, *, scale: float = 1.0, **settings: Any) -> Path:
    """Forty steps in two attempts: the first was killed after step 24, two steps beyond its checkpoint."""
    events = [
        event(1000, "start", plan=PLAN, host="node7", versions={"torch": "2"}),
        *lines(1, 24, 1000, scale=scale),
        event(1023, "checkpoint", step=22),
        event(1200, "start", plan=PLAN | {"workers": 1}, resumed_from="x", host="node8", versions={"torch": "2"}),
        event(1200, "resume", step=22, from_world_size=2, world_size=1),
        *lines(23, 40, 1200, scale=scale),
        event(1201, "recovery", step=23, seconds=177.0, lost_steps=2, cause="rank 1 was killed by SIGKILL"),
        event(1210, "fault", kind="nonfinite", action="1 step skipped", step=30),
        event(1300, "end", status="completed", step=40, fingerprint="ab" * 32),
    ]
    return run_folder(folder, events, SUMMARY, **settings)


def forecast(folder: Path, workers: int) -> None:
    """What `plan --save-dir` leaves: 24 ms a step of 32 samples, 0.5 GiB."""
    memory = {"weights": 2**28, "gradients": 2**27, "optimizer": 0, "fixed": 0.0, "per_sample": 2**23}
    row = {"workers": workers, "global_batch": 32, "step": 0.024, "waiting": 0.001}
    row |= {"samples_per_second": 1333.0, "seconds": 1.0}
    (folder / "plan.json").write_text(json.dumps({"memory": memory, "micro_batch": 16, "rows": [row]}))
