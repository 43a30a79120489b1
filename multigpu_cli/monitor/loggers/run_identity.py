"""What loggers are told of a run, read from its folder: id, settings, and the hashes of its files; without torch."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from multigpu_cli.config.addresses import hide_passwords
from multigpu_cli.monitor.history import JOURNAL, read_json
from multigpu_cli.monitor.journal import Event
from multigpu_cli.monitor.loggers.base import Ending, RunIdentity


def identify_run(run: Path) -> RunIdentity | None:
    """The identity of the run in a folder; None before the first line of its journal.

    The id is a hash of that line, which names host and time: it stays with the journal, wherever the folder goes.
    """
    try:
        with open(run / JOURNAL, "rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return None
    if not first.endswith(b"\n"):
        return None
    config = dict(_flatten(_read_config(run / "config.yaml")))
    folder = run.resolve()
    return RunIdentity(
        id=sha256(first).hexdigest()[:16],
        name=folder.name,
        folder=str(folder),
        project=str(config.get("recipe") or config.get("data.name") or "multigpu"),
        config=config,
        began=float(json.loads(first).get("time", 0)),
    )


def describe_ending(run: Path, end: Event | None) -> Ending:
    """How the last attempt ended, and which files it left.

    Args:
        end: its `end` event, if there is one.
    """
    checkpoints = sorted(run.glob("checkpoints/step_*/manifest.json"))
    manifest = read_json(checkpoints[-1]) if checkpoints else {}
    place = f"checkpoints/{checkpoints[-1].parent.name}" if checkpoints else ""
    files = {f"{place}/{name}": str(listed["sha256"]) for name, listed in manifest.get("files", {}).items()}
    if best := manifest.get("best"):
        files["best.pt"] = str(best["sha256"])
    end = end or {}
    return Ending(str(end.get("status", "killed")), str(end.get("fingerprint") or ""), place, files)


def _read_config(file: Path) -> Mapping[str, Any]:
    content = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return content if isinstance(content, dict) else {}


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hide_passwords(value) if isinstance(value, str) else value
