"""Random damage to all files of a run, a study and datasets: no traceback, no hang, no write outside, no process.

FUZZ_SEED repeats the mutants of a session, whose seed a failure names; FUZZ_MUTANTS says how many there are.
"""

import json
import os
import random
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from multigpu_cli.tune import driver
from tests.support.forked_command import call
from tests.support.row_files import ROWS, make_samples, write_arrow, write_jsonl, write_tar
from tests.support.run_training import run_training
from tests.tune.studies import FAKE, make_driver, make_study

SEED = int(os.environ.get("FUZZ_SEED", time.time_ns() % 10**6))
MUTANTS = int(os.environ.get("FUZZ_MUTANTS", "500"))
_TRAIN = (
    "--model",
    "mlp",
    "--max-steps",
    "2",
    "--multi-gpu",
    "none",
    "--num-workers",
    "0",
    "--quiet",
    "--save-dir",
    "{}/data/run",
)
VALUES: tuple[Any, ...] = (
    *([], {}, "", "x", None, True, -1, 0, 1.5, 10**30, 1e308, float("nan"), float("inf"), [[]], [{}], {"a": {}}),
    *(
        "\x1b]0;owned\x07\r\x00",
        "<script>alert(1)</script>",
        "../../outside/precious",
        "\ud800",
        "9" * 5000,
        "a" * 10**5,
    ),
)
Change = Callable[[random.Random, Path], object]


def cut(rng: random.Random, file: Path) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(max(1, file.stat().st_size))])


def flip(rng: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes() or b"a")
    for _ in range(rng.choice((1, 1, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def put_control_characters(rng: random.Random, file: Path) -> None:
    content = file.read_bytes()
    at = rng.randrange(len(content) + 1)
    file.write_bytes(content[:at] + rng.choice((b"\x1b[2J\x07", b"\r\n\r", b"\x00" * 9, b"\xff\xfe")) + content[at:])


def nest(rng: random.Random, file: Path) -> None:
    depth = rng.choice((900, 100_000))
    file.write_text('{"a": ' + rng.choice(("[", '{"a":')) * depth)


def replace_by(make: Callable[[Path], object]) -> Change:
    def change(_: random.Random, file: Path) -> None:
        file.unlink()
        make(file)

    return change


def grow(_: random.Random, file: Path) -> None:
    os.truncate(file, 70 * 2**20)  # sparse: it takes no room


def retype(rng: random.Random, file: Path) -> None:
    """Give one field of a JSON file, of a line of JSON, or of a line of YAML another value."""
    value = rng.choice(VALUES)
    lines = file.read_bytes().decode(errors="replace").splitlines()
    at = rng.randrange(max(1, len(lines)))
    for text, before, after in (("\n".join(lines), [], []), ("".join(lines[at : at + 1]), lines[:at], lines[at + 1 :])):
        try:
            tree: Any = json.loads(text)
        except ValueError:
            continue
        node: Any = tree
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
                node[key] = value
                break
            node = node[key]
        file.write_text("\n".join([*before, json.dumps(tree), *after]) + "\n", errors="replace")
        return
    if file.suffix == ".yaml":
        lines[at : at + 1] = [f"{''.join(lines[at : at + 1]).partition(':')[0]}: {json.dumps(value)}"]
        file.write_text("\n".join(lines), errors="replace")
    else:
        flip(rng, file)


CHANGES: dict[str, Change] = {
    "cut": cut,
    "flip": flip,
    "control characters": put_control_characters,
    "nest": nest,
    "grow": grow,
    "empty": lambda _, file: file.write_bytes(b""),
    "remove": lambda _, file: file.unlink(),
    "link": replace_by(lambda file: file.symlink_to(file.parents[-1] / "etc" / "hostname")),
    "link to a victim": replace_by(lambda file: file.symlink_to(os.environ["FUZZ_VICTIM"])),
    "link to itself": replace_by(lambda file: file.symlink_to(file.name)),
    "FIFO": replace_by(os.mkfifo),
    "folder": replace_by(lambda file: file.mkdir()),
    "socket or device": replace_by(lambda file: os.mknod(file, stat.S_IFSOCK | 0o600)),
    **{f"retype {number}": retype for number in range(12)},  # more often than the others
}


class Subject(NamedTuple):
    """A folder that is damaged, and commands that read it, with `{}` for the folder that it is in."""

    folder: str
    commands: tuple[tuple[str, ...], ...]


SUBJECTS = (
    Subject(
        "runs/a",
        (
            ("status", "{}/runs"),
            ("status", "{}/runs/a", "--json"),
            ("report", "{}/runs/a"),
            ("report", "{}/runs/a", "{}/runs/b", "--out", "{}/runs/a/compared"),
            ("verify", "{}/runs/a", "{}/runs/b"),
            ("checkpoints", "{}/runs/a"),
            ("watch", "{}/runs", "--export", "{}/runs/a/page.html"),
            ("evaluate", "{}/runs/a"),
            ("--save-dir", "{}/runs/a", "--max-steps", "5", "--quiet", "--multi-gpu", "none"),
        ),
    ),
    Subject(
        "study",
        (
            ("tune", "report", "{}/study"),
            ("status", "{}/study"),
            ("watch", "{}/study", "--export", "{}/study/page.html"),
        ),
    ),
    Subject(
        "data",
        (
            ("--data", "{}/data/arrays.npz", *_TRAIN),
            ("--data", "tar", "--data-dir", "{}/data/tar", "--set", "data.target=cls", *_TRAIN),
            ("--data", "jsonl", "--data-dir", "{}/data/rows.jsonl", "--set", "data.target=label", *_TRAIN),
            ("--data", "arrow", "--data-dir", "{}/data/arrow", "--set", "data.target=label", *_TRAIN),
        ),
    ),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal runs of four steps, a study of fake trials, and datasets with their indexes."""
    root = tmp_path_factory.mktemp("originals")
    small: dict[str, Any] = {
        "data": "digits",
        "model": "mlp",
        "batch_size": 32,
        "global_batch_size": 32,
        "num_workers": 0,
    }
    for name in "ab":
        flags = small | {"max_steps": 4, "checkpoint_every": 2, "save_dir": str(root / "runs" / name)}
        assert not run_training(**flags).error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "FRONT_DOOR", FAKE)
        make_driver(root / "study", make_study(trials=3, rungs=[1], generation=3)).run()
    rng = np.random.default_rng(0)
    (root / "data").mkdir()
    np.savez(root / "data/arrays.npz", X=rng.normal(size=(60, 4)).astype("f4"), y=np.arange(60) % 3)
    rows = [{key: value for key, value in row.items() if key != "kind"} for row in ROWS]
    write_tar(root / "data/tar", [{key: row[key] for key in ("npy", "cls")} for row in make_samples()])
    write_jsonl(root / "data/rows.jsonl", rows)
    write_arrow(root / "data/arrow", rows)
    for argv in SUBJECTS[-1].commands:  # which leave indexes beside the data
        assert call([word.replace("{}", str(root)) for word in argv], root, root).code == 0, (
            root / "output"
        ).read_text()
        shutil.rmtree(root / "data/run")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.folder)
def test_command_survives_any_damage(
    subject: Subject, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mutant has one to three changes; a command ends with 0, 1 or 2 and a message, and touches nothing else."""
    print(f"FUZZ_SEED={SEED}")
    victim = tmp_path / "precious"
    victim.write_text("untouched")
    monkeypatch.setenv("FUZZ_VICTIM", str(victim))
    monkeypatch.chdir(tmp_path)
    rng, failures = random.Random(f"{SEED} {subject.folder}"), []
    names = sorted(
        file.relative_to(originals).as_posix()
        for file in (originals / subject.folder).rglob("*")
        if file.is_file() and not file.is_symlink()
    )
    for number in range(MUTANTS // len(SUBJECTS)):
        home = tmp_path / "home"
        shutil.copytree(originals, home / "in")
        changes = [(rng.choice(names), rng.choice(list(CHANGES))) for _ in range(rng.choice((1, 1, 2, 3)))]
        for name, change in changes:
            file = home / "in" / name
            if file.is_file() and not file.is_symlink():
                CHANGES[change](rng, file)
        words = rng.choice(subject.commands)
        argv = [word.replace("{}", str(home / "in")) for word in words]
        outcome = call(argv, home, home / "in" / subject.folder)
        if not outcome.is_clear() or victim.read_text() != "untouched":
            tail = outcome.text.strip()[-400:]
            failures.append(
                f"mutant {number}: {' '.join(words)} after {changes}: {outcome.code} {outcome.violations} {tail!r}"
            )
        shutil.rmtree(home)
    assert not failures, f"FUZZ_SEED={SEED}: {len(failures)} failures\n" + "\n".join(failures)
