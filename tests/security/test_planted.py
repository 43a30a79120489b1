"""What a stranger plants in or next to a run: nothing is written through it or imported; pages hold it as text."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from multigpu_cli.mirror.follower import lock_mirror
from tests.commands.runs import interrupted_run
from tests.distributed.launcher import alone, run_command
from tests.support.forked_command import ForkedCommand, call
from tests.support.run_training import run_training
from tests.support.wait_until import wait_until
from tests.test_printable import ESCAPES

MARKUP = "</script><script>alert(1)</script><!--\u2028\u2029{{SCRIPT}}{{DATA}}]]>\x00"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("entry", ["step_00000001", "checkpoints", "config.yaml", "journal.jsonl", "best.pt"])
def test_mirror_writes_nothing_through_planted_links(entry: str, tmp_path: Path) -> None:
    mirror, precious = tmp_path / "mirror", tmp_path / "precious"
    (mirror / "checkpoints").mkdir(parents=True)
    precious.mkdir()
    (precious / "state.pt").write_text("untouched")
    link = mirror / "checkpoints" / entry if entry.startswith("step") else mirror / entry
    if entry == "checkpoints":
        link.rmdir()
    link.symlink_to(precious if link.suffix == "" else precious / "state.pt")
    flags: dict[str, Any] = {"max_steps": 6, "checkpoint_every": 2, "keep": 1, "mirror": f"file:{mirror}"}
    ended = run_training(save_dir=str(tmp_path / "run"), **flags)
    assert (ended.error, ended.summary["status"]) == ("", "completed")
    assert (precious / "state.pt").read_text() == "untouched"


def test_exported_page_holds_markup_of_a_journal_as_text(tmp_path: Path) -> None:
    run, page = interrupted_run(tmp_path / "runs/a"), tmp_path / "page.html"
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "start":
            event["host"] = MARKUP
            event["plan"] |= dict.fromkeys(("contents", "because", "strategy", "device"), MARKUP)
        event[MARKUP] = 0.5
    (run / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main_multi_gpu.run(["watch", str(tmp_path / "runs"), "--export", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text
    assert len(re.findall("<script", text)) == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])


def test_run_follows_no_links_planted_while_it_trains(tmp_path: Path) -> None:
    """Not under the names that it writes, nor under those that its drafts once had."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("untouched")
    flags = ["--model", "mlp", "--max-steps", "200", "--checkpoint-every", "20", "--multi-gpu", "none", "--quiet"]
    command = ForkedCommand([*flags, "--num-workers", "0", "--save-dir", str(run)], tmp_path, tmp_path)
    wait_until((run / "checkpoints/step_00000020/manifest.json").exists, "a checkpoint")
    names = ("summary.json", "last.pt", "best.pt", "logs/state.json")
    drafts = (f".{name}.{suffix}" for name in names[:3] for suffix in (f"{command.pid}.draft", "draft"))
    for name in (*names, *drafts, "logs/.state.json.draft"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    outcome = command.wait()
    assert outcome.is_clear(), outcome
    assert outcome.code == 0, outcome
    assert victim.read_text() == "untouched"
    assert [name for name in names if (run / name).is_symlink()] == []


@pytest.mark.parametrize("trap", ["link", "fifo"])
def test_mirror_sends_nothing_planted_while_the_run_trains(trap: str, tmp_path: Path) -> None:
    """Neither what a link leads to, nor does the command wait for a FIFO; it says that the mirror is not complete."""
    run, mirror, secret = tmp_path / "run", tmp_path / "mirror", tmp_path / "secret"
    secret.write_text("password: hush\n")
    flags = ["--model", "mlp", "--max-steps", "200", "--checkpoint-every", "20", "--multi-gpu", "none", "--quiet"]
    words = [*flags, "--num-workers", "0", "--mirror", f"file:{mirror}", "--save-dir", str(run)]
    command = ForkedCommand(words, tmp_path, tmp_path)
    wait_until((run / "checkpoints/step_00000020/manifest.json").exists, "a checkpoint")
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml") if trap == "fifo" else (run / "config.yaml").symlink_to(secret)
    outcome = command.wait()
    assert "Traceback" not in outcome.text
    assert outcome.code == 0, outcome
    assert f"file:{mirror} lacks" in outcome.text
    assert "not a regular file" in outcome.text
    assert "has not answered" not in outcome.text
    assert [file for file in mirror.rglob("*") if file.is_file() and b"hush" in file.read_bytes()] == []
    with lock_mirror(run, lambda busy: True):
        pass  # the process that sends has ended


PACKAGES: tuple[str, ...] = (
    "sitecustomize",
    "usercustomize",
    "numpy",
    "torch",
    "yaml",
    "typer",
    "optuna",
    "matplotlib",
    "tensorboard",
)
PACKAGES += ("safetensors", "transformers", "sklearn", "pandas", "multigpu_cli", "train_multi_gpu", "tests")
TRAIN = ("--model", "mlp", "--max-steps", "2", "--global-batch-size", "64", "--batch-size", "16", "--quiet")


@pytest.mark.parametrize(
    "words",
    [
        (*TRAIN, "--multi-gpu", "none", "--num-workers", "2", "--mirror", "file:mirror", "--save-dir", "run"),
        *((*TRAIN, "--multi-gpu", "ddp", "--nproc-per-node", "2", "--save-dir", "run"), ("recipes",), ("doctor",)),
        *(("status", "made"), ("report", "made"), ("evaluate", "made"), ("watch", "made", "--export", "page.html")),
    ],
    ids=lambda words: " ".join(words[-2:]),
)
def test_command_imports_nothing_planted_where_it_works(words: tuple[str, ...], tmp_path: Path) -> None:
    for name in ({*sys.stdlib_module_names} - {"__main__"}) | {*PACKAGES}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    if "made" in words:
        assert run_training(save_dir=str(tmp_path / "made"), max_steps=2, data="digits", model="mlp").error == ""
    ended = run_command(alone(*words), tmp_path, PYTHONPATH="")
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert ended.returncode == 0, ended


@pytest.mark.parametrize(
    "words", [("export", "{}", "--to", "{}/model.pt"), ("--save-dir", "{}", "--max-steps", "5", "--quiet")]
)
def test_command_shows_no_escapes_of_a_real_run(words: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run\x1b[2J"
    flags: dict[str, Any] = {"max_steps": 4, "data": "digits", "model": "mlp", "num_workers": 0, "multi_gpu": "none"}
    assert run_training(save_dir=str(run), **flags).error == ""
    config, journal = run / "config.yaml", run / "journal.jsonl"
    config.write_text(config.read_text().replace("recipe: null", 'recipe: "\\e]0;owned\\a"'))
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    for event in events:
        event |= {"host": ESCAPES} if event["event"] == "start" else {ESCAPES: 0.5}
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    outcome = call([word.format(run) for word in words], tmp_path, tmp_path)
    assert outcome.is_clear(), outcome
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(outcome.text)
