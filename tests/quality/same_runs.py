"""Shows that a change of the code changed no run: short trainings of many kinds, with the code of two checkouts.

python -m tests.quality.same_runs OLD              # OLD: a checkout (git worktree add OLD COMMIT) of the code before
python -m tests.quality.same_runs OLD --only fsdp ppo --keep /tmp/old     # OLD's runs are kept there, by its commit
python -m tests.quality.same_runs OLD --ignore '*.plan.metrics' --all     # what differs on purpose; all that differs

Each kind is trained to its end by both (plain). OLD's run, cut after its first checkpoint as a kill would have left
it, is then completed by both (resumed), and must end with the weights of OLD's plain run. Compared are journal,
summary, config.yaml, manifests, and each tensor and value of checkpoints and weights; not times, speeds, memory.
"""

import argparse
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import load_file

from tests.distributed.launcher import start_command, wait_for_exit
from tests.support.site import sitecustomize  # noqa: F401 - as in the tests, for what is imported here

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "tests" / "quality" / "same_runs_code.py"
SECONDS = 420  # more than any launch takes on a busy machine
COMMON = "--log-interval 1 --keep 9 --num-workers 0 --quiet --save-dir run"
STEPS = "--max-steps 10 --checkpoint-every 4"
DIGITS = f"--data digits {STEPS} --global-batch-size 192 --batch-size 32"
MLP = f"{DIGITS} --model mlp"
CHAT = f"--model pretrained --model-dir model --max-length 64 --adapter lora --lr 3e-3 {STEPS}"
PPO = "rollout=16 passes=2 minibatches=2 normalize_observations=true evaluate_every=2 evaluate_episodes=2"
MEASURED = re.compile(
    r"(.*_)?(time|seconds|ms|memory|bytes|utilisation|versions?|hosts?|(data_wait|comm|straggler)_share)"
    r"|.*_per_second|step_p\d+_ms|sha256|size|pid|started|launcher(_started)?"
)
"""Keys of what differs from one launch of the same code to the next."""
ASYNCHRONOUS = {"checkpoint"}
"""Events that are written when a thread beside the training is done: their order counts among themselves."""
ABSENT = "(absent)"
WIDTH = 100


class Kind(NamedTuple):
    """A kind of run.

    Attributes:
        flags: of the front door; `--set` is written as NAME=VALUE.
        workers: 1 leaves the number of processes to the program.
        torchrun: launched by torchrun, in place of the front door itself.
    """

    flags: str
    workers: int = 2
    torchrun: bool = False

    def command(self, checkout: Path) -> list[str]:
        words = [each for word in self.flags.split() for each in (["--set", word] if "=" in word else [word])]
        script = str(checkout / "main_multi_gpu.py")
        if self.torchrun:
            agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.workers}"]
            return [sys.executable, *agent, script, *words, *COMMON.split()]
        several = ["--nproc-per-node", str(self.workers)] if self.workers > 1 else []
        return [sys.executable, script, *words, *COMMON.split(), *several]


KINDS = {
    "mlp": Kind(f"{MLP} --batch-size 96 --multi-gpu ddp --trace-samples", torchrun=True),
    "convnet": Kind(f"{DIGITS} --model convnet model.args.width=8"),
    "exact": Kind(f"{MLP} --exact"),
    "ema": Kind(f"{MLP} --ema 0.9 --optimizer sgd"),
    "accumulation": Kind(f"--data user_code:dataset --model user_code:network {STEPS} --epochs 4 "
                         "--batch-size 16 --global-batch-size 200 --num-workers 1"),
    "bf16": Kind(f"{DIGITS} --model convnet --amp bf16 model.args.width=8"),
    "fsdp": Kind(f"{MLP} --multi-gpu fsdp", torchrun=True),
    "fsdp-exact": Kind(f"{MLP} --multi-gpu fsdp --exact"),
    "dp": Kind(f"{MLP} --multi-gpu dp", workers=1),
    "ppo": Kind("--data gym:CartPole-v1 --task ppo --model actor-critic --num-envs 8 --env-group 4 --env-steps 640 "
                "--checkpoint-every 4 " + " ".join(f"task.args.{word}" for word in PPO.split())),
    "chat-lora": Kind(f"{CHAT} --data chat --data-dir talks.jsonl --batch-size 2 --prompts prompts.jsonl"),
    "dpo": Kind(f"{CHAT} --data chat --data-dir pairs.jsonl --batch-size 2"),
    "hooks": Kind(f"{MLP} --hook user_code:Notes"),
    "metrics": Kind(f"{MLP} --metric macro_f1 --metric user_code:margin --metric user_code:Kappa "
                    "--metric user_code:Spread --best val_kappa:max"),
    "mixture": Kind(f"--config mixture.yaml --model mlp {STEPS} --batch-size 16 --global-batch-size 96"),
    "csv": Kind(f"--data table.csv data.target=kind --epochs 4 {STEPS} --global-batch-size 64 --batch-size 16"),
    "parts": Kind(f"{DIGITS} --model convnet --freeze features.0.* --mirror file:mirror --logger user_code:Lines "
                  "--label-smoothing 0.1 model.args.width=8"),
}  # fmt: skip


def make_inputs(folder: Path, kind: Kind) -> None:
    """What a kind's command finds in the folder it is called in."""
    folder.mkdir(parents=True)
    shutil.copy(CODE, folder / "user_code.py")
    rows = [(n % 7 - 3.0, n * 37 % 11 / 5, ("red", "blue", "green")[n % 3]) for n in range(400)]
    kinds = ["a" if heat + wind > 1 else "b" for heat, wind, _ in rows]
    table = [
        f"{heat},{'' if n % 9 == 0 else wind},{colour},{kinds[n]}\n" for n, (heat, wind, colour) in enumerate(rows)
    ]
    (folder / "table.csv").write_text("heat,wind,colour,kind\n" + "".join(table))
    records = [{"heat": heat, "wind": wind, "label": int(kinds[n] == "a")} for n, (heat, wind, _) in enumerate(rows)]
    write_lines(folder / "day" / "rows.jsonl", records[:300])
    write_lines(folder / "night" / "rows.jsonl", records[300:])
    sources = [{"data": "jsonl", "data_dir": name, "args": {"target": "label"}} for name in ("day", "night")]
    mix = [source | {"weight": weight} for weight, source in zip((1, 3), sources, strict=True)]
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"data": {"mix": mix, "args": {"samples": 600}}}))
    if "--model-dir" in kind.flags:
        from transformers.utils.logging import disable_progress_bar

        from tests.support.tiny_language_models import make_model_folder

        disable_progress_bar()
        make_model_folder(folder / "model", places=128)
        asked = [f"What is {n} + {n % 5}?" for n in range(120)]
        talks = [({"role": "user", "content": text}, {"role": "assistant", "content": f"{n + n % 5}"})
                 for n, text in enumerate(asked)]  # fmt: skip
        write_lines(folder / "talks.jsonl", [{"messages": talk} for talk in talks])
        write_lines(folder / "prompts.jsonl", [{"prompt": text} for text in asked[:2]])
        wrong = {"role": "assistant", "content": "None."}
        write_lines(folder / "pairs.jsonl", [{"prompt": [a], "chosen": [b], "rejected": [wrong]} for a, b in talks])


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def launch(kind: Kind, checkout: Path, folder: Path) -> None:
    """Train in a folder with a checkout's code.

    Raises:
        SubprocessError: it failed, or took too long.
    """
    places = os.pathsep.join([str(checkout), str(ROOT / "tests" / "support" / "site")])
    begun = start_command(kind.command(checkout), folder, PYTHONPATH=places, HF_HOME=str(folder.parent / "hf"))
    ended = wait_for_exit(begun, SECONDS)
    if ended.returncode:
        raise subprocess.SubprocessError(
            f"exit code {ended.returncode}: {' '.join(ended.args)}\n{ended.stderr[-2000:]}"
        )


def cut(plain: Path, folder: Path) -> None:
    """A copy of a complete run as a kill right after its first checkpoint would have left it."""
    run = Path(shutil.copytree(plain / "run", folder / "run"))
    first, *later = sorted((run / "checkpoints").iterdir())
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    for name in ("summary.json", "best.pt", "last.pt"):
        (run / name).unlink(missing_ok=True)
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    wanted = ("checkpoint", int(first.name.removeprefix("step_")))
    end = next(
        n for n, line in enumerate(lines, 1) if (json.loads(line)["event"], json.loads(line).get("step")) == wanted
    )
    (run / "journal.jsonl").write_text("".join(lines[:end]))


def read_run(folder: Path, inputs: Container[str] = ()) -> dict[str, Any]:
    """All that a run left in the folder it was started in (its own is `run`), without what was measured."""
    run = folder / "run"
    events, summary = (READERS[Path(name).suffix](run / name) for name in _OWN)
    found: dict[str, Any] = {
        "fingerprint": summary.get("fingerprint"),
        "journal": [event for event in events if event["event"] not in ASYNCHRONOUS],
        "beside": [event for event in events if event["event"] in ASYNCHRONOUS],
        "summary": summary,
        "config": yaml.safe_load((run / "config.yaml").read_text()),
        "files": sorted(re.sub(r"events\.out\..*", "events", str(file.relative_to(run))) for file in run.rglob("*")),
    }
    for file in sorted(run.rglob("*")):
        if file.suffix in READERS and file.name not in _OWN + _BYTES_SENT and file.parent.name != "loggers":
            found[str(file.relative_to(run))] = READERS[file.suffix](file)
    for file in sorted(folder.glob("*")):
        if file.is_file() and file.name not in inputs:
            found[file.name] = file.read_text().splitlines()
    kept: dict[str, Any] = normalise(found, str(folder.resolve()))
    return kept


_OWN = ("journal.jsonl", "summary.json")
_BYTES_SENT = ("mirror.json",)  # and what loggers keep: how far they are, in bytes of a journal with times
READERS: dict[str, Callable[[Path], Any]] = {
    ".pt": lambda file: torch.load(file, weights_only=True),
    ".safetensors": load_file,
    ".json": lambda file: json.loads(file.read_text()),
    ".jsonl": lambda file: [json.loads(line) for line in file.read_text().splitlines()],
}


def normalise(value: Any, folder: str) -> Any:
    """Without what was measured; tensors as type, shape and a digest of their bytes, paths without the folder."""
    match value:
        case dict():
            kept = {str(name): each for name, each in value.items() if not MEASURED.fullmatch(str(name))}
            return {name: normalise(each, folder) for name, each in kept.items()}
        case list() | tuple():
            return [normalise(each, folder) for each in value]
        case torch.Tensor() if value.is_meta:  # of a divided model: its rows are in files of their own
            return f"{value.dtype} {list(value.shape)}"
        case torch.Tensor():
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
        case str():
            return value.replace(folder, ".")
        case _:
            return value


def differences(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two normalised values differ: the place, and both; keys in the order in which the old ones were written."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            below = f"{place}.{name}" if place else name
            if name not in old or name not in new:
                yield below, old.get(name, ABSENT), new.get(name, ABSENT)
            else:
                yield from differences(old[name], new[name], below)
    elif isinstance(old, list) and isinstance(new, list):
        for at in range(max(len(old), len(new))):
            below = f"{place}[{at}]"
            if at >= min(len(old), len(new)):
                yield below, *((old[at], ABSENT) if at < len(old) else (ABSENT, new[at]))
            else:
                yield from differences(old[at], new[at], below)
    elif repr(old) != repr(new):  # so NaN equals itself, and 1 is not 1.0
        yield place, old, new


def compare(name: str, old: Path, homes: Path, asked: argparse.Namespace) -> list[tuple[str, Any, Any]]:
    """Run one kind with both checkouts, the old one only where `old` is not complete yet; where they differ."""
    kind, new = KINDS[name], homes / name
    if not (old / "complete").exists():
        shutil.rmtree(old, ignore_errors=True)
        make_inputs(old / "inputs", kind)
        play(kind, asked.old, old, old)
        (old / "complete").touch()
    play(kind, ROOT, new, old)
    inputs = {file.name for file in (old / "inputs").iterdir()}
    one, other = ({name: read_run(home / name, inputs) for name in ("plain", "resumed")} for home in (old, new))
    found = [*differences(one, other)]
    whole, resumed = one["plain"]["fingerprint"], other["resumed"]["fingerprint"]
    if whole != resumed:
        found.insert(0, ("resumed by the new code, as if never stopped", whole, resumed))
    return [each for each in found if not any(fnmatchcase(each[0], pattern) for pattern in asked.ignore)]


def play(kind: Kind, checkout: Path, home: Path, old: Path) -> None:
    """The plain run, and the one that goes on where OLD's was cut; in the folders `plain` and `resumed`."""
    shutil.copytree(old / "inputs", home / "plain")
    launch(kind, checkout, home / "plain")
    shutil.copytree(old / "inputs", home / "resumed")
    cut(old / "plain", home / "resumed")
    launch(kind, checkout, home / "resumed")


def describe(checkout: Path) -> str:
    """The commit of a checkout, with a mark if it was changed since.

    Raises:
        SystemExit: it is none of this project.
    """
    if not (checkout / "main_multi_gpu.py").is_file():
        sys.exit(f"{checkout} is no checkout of this project: git worktree add {checkout} COMMIT makes one")
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return commit.strip() + ("+" if changed else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.same_runs", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of the code before")
    parser.add_argument("--only", nargs="+", default=[*KINDS], choices=[*KINDS], metavar="NAME", help=", ".join(KINDS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="OLD's runs stay there, for the next call")
    parser.add_argument("--ignore", nargs="+", default=[], metavar="GLOB", help="places that may differ")
    parser.add_argument("--all", action="store_true", help="show every difference")
    asked = parser.parse_args()
    asked.old = asked.old.resolve()
    commits = describe(asked.old), describe(ROOT)
    if asked.keep and commits[0].endswith("+"):
        sys.exit(f"--keep: {asked.old} has changes that are not committed, so no commit names its runs")
    print(f"old {commits[0]}, new {commits[1]}\n{'kind':<14}{'':<11}first difference", flush=True)
    differing = 0
    with tempfile.TemporaryDirectory(prefix="same-runs-") as home:
        for name in asked.only:
            made_of = repr(KINDS[name]) + COMMON + inspect.getsource(make_inputs) + CODE.read_text()
            digest = hashlib.sha256(made_of.encode()).hexdigest()[:8]
            kept = asked.keep and asked.keep.resolve() / commits[0] / f"{name}-{digest}"
            try:
                found = compare(name, kept or Path(home, "old", name), Path(home, "new"), asked)
            except subprocess.SubprocessError as error:
                found = [("failed", "", "")]
                print(error)
            differing += bool(found)
            print(f"{name:<14}{'different' if found else 'same':<11}{f'{len(found)}: ' if found else ''}", end="")
            for place, one, other in found if asked.all else found[:1]:
                print(f"{place}: {repr(one)[:WIDTH]} → {repr(other)[:WIDTH]}", end="\n" + " " * 25 if asked.all else "")
            print(flush=True)
    print(f"{len(asked.only) - differing} of {len(asked.only)} kinds are the same")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
