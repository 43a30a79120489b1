"""How far the mirror of a run has come: a small file in the run folder, without torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from multigpu_cli.checkpoint.files import publish
from multigpu_cli.checkpoint.manifest import list_checkpoint_folders, parse_step

STATE_FILE = "mirror.json"


@dataclass(frozen=True)
class MirrorState:
    """What mirror.json holds.

    Attributes:
        id: of the run, which its mirror holds too; "" before the first contact.
        url: of the mirror.
        step: of the newest checkpoint in the mirror.
        content: checksum of that checkpoint's manifest.
        complete: all files of the ended run are there.
        error: why the last try failed; "" after one that did not.
    """

    id: str = ""
    url: str = ""
    step: int | None = None
    content: str = ""
    complete: bool = False
    error: str = ""


def read_state(run: Path) -> MirrorState:
    """The state of a run folder's mirror; an empty one where it has none."""
    try:
        found = json.loads((run / STATE_FILE).read_text())
    except FileNotFoundError:
        return MirrorState()
    return MirrorState(**{name: found[name] for name in asdict(MirrorState())})


def write_state(run: Path, state: MirrorState) -> None:
    publish(run / STATE_FILE, json.dumps(asdict(state), indent=1).encode())


def explain_missing(run: Path, url: str, reason: str) -> str:
    """What the mirror of a run lacks, why, and what sends it; the run folder has all of it."""
    state = read_state(run)
    newest = next(map(parse_step, list_checkpoint_folders(run / "checkpoints")), None)
    sent = state.step if state.url == url else None
    lacks = "the last files of the run" if newest is None or newest == sent else f"the checkpoint of step {newest}"
    return f"{url} lacks {lacks} ({reason}); {run} has all of it; multigpu mirror {run} --to {url} sends it"
