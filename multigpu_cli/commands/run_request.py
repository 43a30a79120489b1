"""What evaluate, predict and sample ask of a run, checked before torch is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu_cli.config.kinds import Kind, choice, integer
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError

_DATA = {"data", "data.args", "data_dir"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A wish about a run.

    Attributes:
        run: folder, best.pt, last.pt or checkpoint.
        changes: settings of the data that differ from the run's, by key.
        split: train, val or test; None takes the last of them that there is.
        batch_size: samples at once; None as the run evaluated.
        workers: processes to start; None one for each GPU.
        own_code: code that the run names may be imported.
        words: the same on a command line, for workers.
    """

    run: Path
    changes: Mapping[str, Any]
    split: str | None
    batch_size: int | None
    workers: int | None
    own_code: bool
    words: tuple[str, ...]


def asked(run: str, given: Mapping[str, Any], *, own_code: bool) -> Asked:
    """Read the values of the options.

    Args:
        given: data, data_dir, set, split, batch_size, nproc_per_node; None where it was not given.

    Raises:
        RequestError: there is no such run, or a value is unfit.
    """
    if not Path(run).exists():
        raise RequestError(f"{run}: there is no such file or folder", remedy="the --save-dir of a run")
    sets = list(given.get("set") or ())
    config = resolve({name: given.get(name) for name in ("data", "data_dir")}, sets, None)
    if others := sorted(config.explicit - _DATA):
        raise RequestError(f"--set {others[0]}: only the data can differ from the run's", remedy="data.args.NAME=…")
    words = [run, *(word for setting in sets for word in ("--set", setting))]
    for name, value in given.items():
        if name != "set" and value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return Asked(
        run=Path(run),
        changes={key: config.get(key) for key in config.explicit},
        split=parsed(choice("train", "val", "test"), "--split", given.get("split")),
        batch_size=parsed(integer(1, 2**31), "--batch-size", given.get("batch_size")),
        workers=parsed(integer(1, 1024), "--nproc-per-node", given.get("nproc_per_node")),
        own_code=own_code,
        words=(*words, *(["--own-code"] if own_code else [])),
    )


def parsed(kind: Kind, flag: str, value: str | None) -> Any:
    """The value of an option, None where it was not given."""
    if value is None:
        return None
    try:
        return kind.parse(value)
    except ValueError as error:
        raise RequestError(f"{flag} {error}") from error


def target_of(out: str) -> Path:
    """The table that shall be written.

    Raises:
        RequestError: it is no .csv, or is there already, or its folder is not.
    """
    target = Path(out)
    if target.suffix != ".csv":
        raise RequestError(f"--out {out}: a file of what kind?", remedy="a name that ends in .csv")
    if target.exists():
        raise RequestError(f"--out {out}: there is such a file already", remedy="another name, or remove it")
    if not target.parent.is_dir():
        raise RequestError(f"--out {out}: there is no folder {target.parent}", remedy="make it, or another place")
    return target
