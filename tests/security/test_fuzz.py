"""Random damage to all files of a run, a study and datasets: no traceback, no hang, no write outside, no process.

Each mutant damages one file, and now and then a second one, and runs a command that reads the file: which commands do
that is observed on undamaged folders. With the default number of mutants each kind of file gets each kind of damage;
fewer are spread evenly over the kinds of files. FUZZ_SEED repeats the mutants of a session, whose seed a failure names;
FUZZ_MUTANTS sets their number.
"""

import importlib
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import main_multi_gpu
from multigpu_cli.tune import driver
from tests.support.forked_command import NOTES, SECONDS, ForkedCommand, Outcome
from tests.support.row_files import ROWS, make_samples, write_arrow, write_jsonl, write_tar
from tests.support.run_training import run_training
from tests.tune.studies import FAKE, make_driver, make_study

SEED = int(os.environ.get("FUZZ_SEED", time.time_ns() % 10**6))
MUTANTS = int(os.environ.get("FUZZ_MUTANTS", "500"))
_SECONDS = SECONDS  # of a command
_FORKS = 2  # commands at a time
_SECOND_CHANGES = 0.25  # of the mutants
_QUICK = 4  # chances of a command that takes a moment, against one that trains or draws
# what commands import, which takes longer than most of them run; matplotlib looks for fonts by a process, once
_IMPORTS = (
    "matplotlib.backends.backend_agg",
    "matplotlib.font_manager",
    "matplotlib.pyplot",
    "multigpu_cli.commands.clean",
    "multigpu_cli.commands.inference",
    "multigpu_cli.commands.report.report",
    "multigpu_cli.commands.status",
    "multigpu_cli.commands.verify",
    "multigpu_cli.data.rows.source",
    "multigpu_cli.data.tables.table",
    "multigpu_cli.tune.report",
    "multigpu_cli.tune.sampler",
    "multigpu_cli.watch.server",
    "pyarrow.ipc",
)
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
_FOLLOWED = "precious"  # a file next to the damaged folder, to which planted links lead
_TEXTS = (".json", ".jsonl", ".yaml", ".journal", ".index", ".lock", ".csv", ".log")
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


def link_to_victim(file: Path) -> None:
    home = next(folder for folder in file.parents if folder.name == "in").parent
    file.symlink_to(home / _FOLLOWED)


CHANGES: dict[str, Change] = {
    "cut": cut,
    "flip": flip,
    "control characters": put_control_characters,
    "nest": nest,
    "grow": grow,
    "empty": lambda _, file: file.write_bytes(b""),
    "remove": lambda _, file: file.unlink(),
    "link": replace_by(lambda file: file.symlink_to(file.parents[-1] / "etc" / "hostname")),
    "link to a victim": replace_by(link_to_victim),
    "link to itself": replace_by(lambda file: file.symlink_to(file.name)),
    "FIFO": replace_by(os.mkfifo),
    "folder": replace_by(lambda file: file.mkdir()),
    "socket or device": replace_by(lambda file: os.mknod(file, stat.S_IFSOCK | 0o600)),
}
_OF_TEXTS = {f"retype {number}": retype for number in range(1, 7)}  # one field of many at a time
_OF_OTHERS = {f"flip {number}": flip for number in range(2, 4)}


def list_changes(name: str) -> dict[str, Change]:
    """Return the kinds of damage to a file of this name."""
    return CHANGES | (_OF_TEXTS if name.endswith(_TEXTS) else _OF_OTHERS)


class Subject(NamedTuple):
    """A folder that is damaged, and commands that read it, with `{}` for the folder that contains it.

    Attributes:
        quick: commands that take a moment.
        slow: those that train or draw, which are drawn less often.
    """

    folder: str
    quick: tuple[tuple[str, ...], ...]
    slow: tuple[tuple[str, ...], ...] = ()


SUBJECTS = (
    Subject(
        "runs/a",
        (
            ("status", "{}/runs"),
            ("status", "{}/runs/a", "--json"),
            ("verify", "{}/runs/a", "{}/runs/b"),
            ("checkpoints", "{}/runs/a"),
            ("watch", "{}/runs", "--export", "{}/runs/a/page.html"),
        ),
        (
            ("report", "{}/runs/a"),
            ("report", "{}/runs/a", "{}/runs/b", "--out", "{}/runs/a/compared"),
            ("evaluate", "{}/runs/a"),
            ("evaluate", "{}/runs/a/last.pt"),
            ("--save-dir", "{}/runs/a", "--max-steps", "5", "--quiet", "--multi-gpu", "none"),
        ),
    ),
    Subject(
        "study",
        (
            ("status", "{}/study"),
            ("watch", "{}/study", "--export", "{}/study/page.html"),
        ),
        (("tune", "report", "{}/study"),),
    ),
    Subject(
        "data",
        (),
        (
            ("--data", "{}/data/arrays.npz", *_TRAIN),
            ("--data", "{}/data/table.csv", "--set", "data.target=label", *_TRAIN),
            ("--config", "{}/data/recipe.yaml", *_TRAIN),
            ("--data", "tar", "--data-dir", "{}/data/tar", "--set", "data.target=cls", *_TRAIN),
            ("--data", "jsonl", "--data-dir", "{}/data/rows.jsonl", "--set", "data.target=label", *_TRAIN),
            ("--data", "arrow", "--data-dir", "{}/data/arrow", "--set", "data.target=label", *_TRAIN),
        ),
    ),
)


class Originals(NamedTuple):
    """The undamaged folders, and for each of their files the commands that read it."""

    root: Path
    readers: dict[str, list[tuple[str, ...]]]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    """Two equal runs of four steps, a study of fake trials, and datasets with their indexes."""
    for module in _IMPORTS:
        importlib.import_module(module)
    root = tmp_path_factory.mktemp("fuzz") / "in"
    root.mkdir()
    small = {"data": "digits", "model": "mlp", "batch_size": 32, "global_batch_size": 32, "num_workers": 0}
    for name in "ab":
        flags: dict[str, Any] = small | {"max_steps": 4, "checkpoint_every": 2, "save_dir": str(root / "runs" / name)}
        assert not run_training(**flags).error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "FRONT_DOOR", FAKE)
        make_driver(root / "study", make_study(trials=3, rungs=[1], generation=3)).run()
    _make_datasets(root / "data")
    for words in SUBJECTS[-1].slow:  # which leave indexes next to the data
        outcome = finish(start(words, root.parent, "data"))
        assert outcome.code == 0, outcome
        shutil.rmtree(root / "data/run")
    readers: dict[str, list[tuple[str, ...]]] = {}
    for subject in SUBJECTS:
        readers |= _find_readers(subject, root)
    return Originals(root, readers)


def _make_datasets(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    np.savez(folder / "arrays.npz", X=rng.normal(size=(60, 4)).astype("f4"), y=np.arange(60) % 3)
    rows = [{key: value for key, value in row.items() if key != "kind"} for row in ROWS]
    write_tar(folder / "tar", [{key: row[key] for key in ("npy", "cls")} for row in make_samples()])
    write_jsonl(folder / "rows.jsonl", rows)
    write_arrow(folder / "arrow", rows)
    lines = [",".join(map(str, line)) for line in (rows[0], *(row.values() for row in rows))]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(
        "data: digits\nbatch_size: 32\nmodel:\n  name: mlp\n  args:\n    width: 8\nseed: 3\n"
    )


def _find_readers(subject: Subject, root: Path) -> dict[str, list[tuple[str, ...]]]:
    """Run each command on an undamaged copy, and return the commands that open each file, the quick ones repeatedly.

    Libraries open some files unseen, and some are opened by no command: for these, all commands that name a folder
    above the file are returned.
    """
    readers: dict[str, list[tuple[str, ...]]] = {
        path.relative_to(root).as_posix(): []
        for path in (root / subject.folder).rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    commands = (*subject.quick * _QUICK, *subject.slow)
    for words in dict.fromkeys(commands):
        home = root.with_name("undamaged")
        copy_folder(root, home, subject.folder)
        outcome = finish(start(words, home, subject.folder))
        assert outcome.code == 0, (words, outcome)
        assert not outcome.describe_failure(), (words, outcome)
        for name in readers.keys() & outcome.opened:
            readers[name] += [words] * commands.count(words)
        shutil.rmtree(home)
    for name, found in readers.items():
        if not found:
            found += [
                words for words in commands if any(f"{{}}/{name}".startswith(word) for word in words if "{}" in word)
            ]
    return readers


def copy_folder(root: Path, home: Path, folder: str) -> None:
    """Copy a subject's folder with those next to it into `home`/in, and make the file to which planted links lead."""
    top = Path(folder).parts[0]
    shutil.copytree(root / top, home / "in" / top)
    (home / _FOLLOWED).write_text("untouched")


class Fork(NamedTuple):
    """A running command; `before` is what `_list_outside` returned when it started."""

    command: ForkedCommand
    home: Path
    folder: str
    before: dict[str, tuple[int, ...]]


def start(words: Sequence[str], home: Path, folder: str) -> Fork:
    """Run a command in a fork, in which starts of processes, and writes outside `home`/in/`folder`, are noted."""
    root = home / "in"
    argv = [word.replace("{}", str(root)) for word in words]
    before = _list_outside(home, folder)
    command = ForkedCommand(argv, home, root / folder, seconds=_SECONDS, noted=root)
    return Fork(command, home, folder, before)


def finish(fork: Fork) -> Outcome:
    """Wait until the command has ended."""
    outcome = fork.command.wait()
    after = _list_outside(fork.home, fork.folder)
    changed = sorted(name for name in after.keys() | fork.before if after.get(name) != fork.before.get(name))
    return outcome._replace(violations=outcome.violations + "".join(f"changed {name}\n" for name in changed))


def _list_outside(home: Path, folder: str) -> dict[str, tuple[int, ...]]:
    """Return mode, size and time of the files outside the damaged folder, by name."""
    found = {}
    for place, folders, files in os.walk(home):
        folders[:] = [name for name in folders if Path(place, name) != home / "in" / folder]
        for path in (Path(place, name) for name in (*folders, *files)):
            status = path.lstat()
            facts = () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
            found[path.relative_to(home).as_posix()] = (status.st_mode, *facts)
    return {name: facts for name, facts in found.items() if name not in NOTES}


class Mutant(NamedTuple):
    """What is damaged, by file name and name of the change, and the command that reads it."""

    damage: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def plan_mutants(readers: dict[str, list[tuple[str, ...]]], seed: int, number: int) -> list[Mutant]:
    """Return mutants in which, round by round, each kind of file gets another kind of damage."""
    rng = random.Random(seed)
    kinds: dict[str, list[str]] = {}
    for name in sorted(readers):
        kinds.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    mutants: list[Mutant] = []
    while len(mutants) < number:
        decks = [[(names, change) for change in list_changes(names[0])] for names in kinds.values()]
        for deck in decks:
            rng.shuffle(deck)
        for names, change in filter(None, (pair for pairs in zip_longest(*decks) for pair in pairs)):
            name = rng.choice(names)
            damage = [(name, change)]
            if rng.random() < _SECOND_CHANGES:
                top = name.partition("/")[0]
                other = rng.choice([each for each in sorted(readers) if each.startswith(f"{top}/") and each != name])
                damage.append((other, rng.choice(list(list_changes(other)))))
            mutants.append(Mutant(tuple(damage), rng.choice(readers[name])))
    return mutants[:number]


def _run_mutants(mutants: Sequence[Mutant], folder: str, root: Path, place: Path) -> Iterator[tuple[Mutant, Outcome]]:
    """Run the commands of mutants, some at a time, each in a damaged copy of its own."""
    running: deque[tuple[Mutant, Fork]] = deque()
    rng = random.Random(f"{SEED} {folder}")
    for number, mutant in enumerate((*mutants, *[None] * _FORKS)):
        if mutant is not None:
            home = place / f"mutant{number}"
            copy_folder(root, home, folder)
            for name, change in mutant.damage:
                list_changes(name)[change](rng, home / "in" / name)
            running.append((mutant, start(mutant.words, home, folder)))
        if len(running) == _FORKS or (mutant is None and running):
            ended, fork = running.popleft()
            yield ended, finish(fork)
            shutil.rmtree(fork.home)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [subject.folder for subject in SUBJECTS])
def test_command_survives_any_damage(
    folder: str, originals: Originals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command ends with 0, 1 or 2 and a message, and touches nothing else."""
    print(f"FUZZ_SEED={SEED}")
    monkeypatch.chdir(tmp_path)
    mutants = [
        mutant
        for mutant in plan_mutants(originals.readers, SEED, MUTANTS)
        if mutant.damage[0][0].startswith(f"{folder}/")
    ]
    failures = [
        f"{' '.join(mutant.words)} after {mutant.damage}: {problem}\n  {outcome.text.strip()[-400:]!r}"
        for mutant, outcome in _run_mutants(mutants, folder, originals.root, tmp_path)
        if (problem := outcome.describe_failure())
    ]
    assert not failures, f"FUZZ_SEED={SEED}: {len(failures)} failures\n" + "\n".join(failures)


def test_mutants_damage_each_kind_of_file_in_each_way() -> None:
    words: list[tuple[str, ...]] = [("status", "{}/runs")]
    readers = dict.fromkeys(["runs/a/journal.jsonl", "runs/a/best.pt", "data/tar/0000.tar", "data/tar/0001.tar"], words)
    pairs = {(name, change) for name in readers for change in list_changes(name)}
    mutants = plan_mutants(readers, seed=1, number=len(pairs))
    assert {name.replace("0001", "0000") for name, _ in (mutant.damage[0] for mutant in mutants[:3])} == {*readers} - {
        "data/tar/0001.tar"
    }
    damage = {(name.replace("0001", "0000"), change) for name, change in (mutant.damage[0] for mutant in mutants)}
    assert damage == {pair for pair in pairs if pair[0] != "data/tar/0001.tar"}


def _raise() -> None:
    raise OSError("no message")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda folder: (folder / "report.png").write_text("inside"), "^$"),
    "a traceback": (lambda _: print("Traceback (most recent call last):"), "prints 'Traceback'"),
    "an internal error": (lambda _: print("internal error: x"), "prints 'internal error'"),
    "an exception": (lambda _: _raise(), "ends with 99"),
    "another exit code": (lambda _: os._exit(3), "ends with 3"),
    "a crash": (lambda _: os.kill(os.getpid(), signal.SIGKILL), "ends with -9"),
    "a hang": (lambda _: time.sleep(60), "hangs"),
    "an escape": (lambda _: print("\x1b[2J"), r"prints '\\x1b'"),
    "a process": (lambda _: subprocess.run(["true"], check=True), "subprocess.Popen"),
    "a program": (lambda _: os.execv("/bin/true", ["true"]), "os.exec"),
    "a write above": (lambda folder: (folder / "../x").write_text(""), "open .*changed in/runs/x"),
    "a write by a link": (lambda folder: (folder / "link").write_text(""), f"open .*changed {_FOLLOWED}"),
    "a write by a library": (lambda folder: os.mkfifo(folder.parent / "x"), "^changed in/runs/x"),
    "a removal": (lambda folder: (folder / "../../../precious").unlink(), f"os.remove .*changed {_FOLLOWED}"),
    "a folder": (lambda folder: (folder / "../x").mkdir(), "os.mkdir .*changed in/runs/x"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fuzzer_notices(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in/runs/a"
    folder.mkdir(parents=True)
    (tmp_path / _FOLLOWED).write_text("untouched")
    (folder / "link").symlink_to(tmp_path / _FOLLOWED)
    act, expected = FAULTS[fault]
    monkeypatch.setattr(main_multi_gpu, "run", lambda argv: (act(Path(argv[0])), 0)[1])
    monkeypatch.setattr(f"{__name__}._SECONDS", 1)
    assert re.search(expected, finish(start(["{}/runs/a"], tmp_path, "runs/a")).describe_failure(), re.DOTALL)
