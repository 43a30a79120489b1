"""Studies for tests: small ones with defaults, a driver whose trials are those of fake_trainer.py, and kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from multigpu_cli.monitor.journal import read_events
from multigpu_cli.tune import driver
from multigpu_cli.tune.driver import Driver, Slots
from multigpu_cli.tune.space import parse_search
from multigpu_cli.tune.trials import Study, Trial

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).parent / "fake_trainer.py"
SEARCH = ("--search", "lr=log(1e-3,1e-1)")
PARAMS = {"lr": 0.01, "model.args.width": 16}
"""A point of the space of `make_study`."""

GOAL = ("--objective", "val_accuracy:max")


def make_study(**given: Any) -> Study:
    usual: dict[str, Any] = {
        "search": {"lr": "log(1e-4,1e-1)", "model.args.width": "choice(16,32,64)"},
        "objectives": ["val_accuracy:max"],
        "trials": 20,
        "rungs": [1, 3, 9],
        "generation": 8,
        "sampler": "tpe",
        "order": "fixed",
        "seed": 1,
        "seeds": 1,
        "gpus_per_trial": 1,
        "multi_gpu": "auto",
        "budget": None,
        "versions": {},
        "settings": {"epochs": 9, "batch_size": 8, "global_batch_size": 32},
    }
    usual |= given
    return Study(**{"best": usual["objectives"][0]} | usual)


def make_trials(*stands: tuple[int, str, float | None]) -> list[Trial]:
    """Trials by rung, state and newest value."""
    return [
        Trial(number, dict(PARAMS), rung, state, {} if value is None else {rung: [value]})
        for number, (rung, state, value) in enumerate(stands)
    ]


def make_driver(
    folder: Path, study: Study, slots: int = 1, environ: Mapping[str, str] | None = None, said: list[str] | None = None
) -> Driver:
    """A driver of fake trials; `driver.FRONT_DOOR` has to be FAKE."""
    assert driver.FRONT_DOOR == FAKE
    folder.mkdir(parents=True, exist_ok=True)
    study.write(folder)
    space = parse_search([f"{key}={text}" for key, text in study.search.items()])
    here = Slots([""] * slots, [""] * slots, {**os.environ, **(environ or {})})
    return Driver(folder, space, here, (said if said is not None else []).append)


def read_trials(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("trials/*/trial.json"))]


def tune(folder: Path, *words: str, slots: int = 1) -> list[str]:
    usual = ["--model", "mlp", "--set", "model.args.width=8", "--batch-size", "64", "--global-batch-size", "128"]
    usual += ["--exact", "--trials", "4", "--generation", "4", "--rungs", "1,2", "--epochs", "2"]
    own = [sys.executable, str(ROOT / "main_multi_gpu.py"), "tune", *usual, *SEARCH, *GOAL]
    return [*own, *words, "--slots", str(slots), "--save-dir", str(folder)]


def kill_at_random(folder: Path, random: Random, kills: int) -> None:
    """Kill a trial, and then the driver, after some events each time; then let the study end."""
    for number in range(kills + 1):
        process = subprocess.Popen(tune(folder, slots=2), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wanted = count_events(folder) + (random.randrange(2, 5) if number < kills else 10**9)
        while process.poll() is None and count_events(folder) < wanted:
            time.sleep(0.02)
        if process.poll() is not None:
            break
        children = find_children(process.pid)
        if children and random.random() < 0.5:
            os.kill(random.choice(children), signal.SIGKILL)
        time.sleep(random.uniform(0, 2))
        children = find_children(process.pid) or children
        process.kill()
        process.communicate()
        for child in children:
            wait_until_gone(child)
    complaint = process.communicate()[1]
    assert process.returncode == 0, complaint


def count_events(folder: Path) -> int:
    file = folder / "study.jsonl"
    return sum(event["event"] != "beat" for event in read_events(file)) if file.is_file() else 0


def find_children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
