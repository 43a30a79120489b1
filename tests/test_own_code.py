"""No code that is named by a file runs unasked: not by any command, not from any part of a run folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.checkpoint.manifest import MANIFEST, find_damage, read_manifest, sign_manifest
from tests.support.fork import exit_code
from tests.support.run_training import run_training

SYNTHETIC: dict[str, Any] = {"data": "synthetic", "model": "mlp", "batch_size": 8, "max_steps": 2}
SMALL = ["data.args.shape=[6]", "data.args.classes=3", "data.args.train=24", "data.args.val=6", "data.args.test=6"]
PLANTED = """open("ran", "w").close()
from multigpu_cli.models.networks.mlp import build as net
from multigpu_cli.data.builtin.synthetic import load as tensors
from multigpu_cli.tasks.supervised import Classification
"""
CHECKPOINT = "checkpoints/step_00000002"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names nothing but ours."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert run_training(save_dir=str(run), sets=SMALL, **SYNTHETIC).error == ""
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It came from somebody else, with a module beside it that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # whoever imports it: gymnasium would look nowhere else
    shutil.copytree(made, "run")
    Path("planted.py").write_text(PLANTED)
    return Path("run")


ACTING: dict[str, Any] = {"task": "ppo", "model": "actor-critic", "data.args": {}}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "planted:net"}, "--model planted:net"),
    "a command": ({"model": "subprocess:run", "model.args": {"args": ["touch", "ran"]}}, "--model subprocess:run"),
    "data": ({"data": "planted:tensors"}, "--data planted:tensors"),
    "task": ({"task": "planted:Classification"}, "--task planted:Classification"),
    "optimizer": ({"optimizer": "planted:net"}, "--optimizer planted:net"),
    "schedule": ({"schedule": "planted:net"}, "--schedule planted:net"),
    "gym": (ACTING | {"data": "gym:planted:Env-v0"}, "--data gym:planted:Env-v0"),
    "gym's id": (ACTING | {"data": "gym:A-v0", "data.args": {"id": "planted:Env-v0"}}, "data.args.id=planted:Env-v0"),
    "a library's": ({"model": "timm/planted:net"}, "--model timm/planted:net"),
    "within its network": (
        {"model": "timm/resnet10t", "model.args": {"act_layer": "planted:net"}},
        "model.args.act_layer=planted:net",
    ),
    "within": ({"task.args": {"loss": [{"of": "planted:net"}]}}, "task.args.loss.0.of=planted:net"),
}
"""What may stand in a checkpoint's settings and in the label of weights, and how it is called."""

TRAIN: list[list[str]] = [
    ["--save-dir", "run", "--max-steps", "3"],
    ["--resume", "run", "--save-dir", "new"],
    ["--resume", f"run/{CHECKPOINT}", "--save-dir", "new"],
    ["--resume", f"run/{CHECKPOINT}"],
]
USE = [
    ["evaluate", "run"],
    ["evaluate", "run/last.pt"],
    ["evaluate", f"run/{CHECKPOINT}"],
    ["predict", "run", "--out", "said.csv"],
    ["export", f"run/{CHECKPOINT}", "--to", "model.pt2"],
]
LOOK = [["status", "run"], ["report", "run"], ["verify", "run", "run"], ["checkpoints", "run"]]


def read_unsigned(run: Path) -> dict[str, Any]:
    return {name: told for name, told in read_manifest(run / CHECKPOINT).items() if name != "sha256"}


def sign(run: Path, manifest: dict[str, Any]) -> None:
    (run / CHECKPOINT / MANIFEST).write_bytes(sign_manifest(manifest))
    assert find_damage(run / CHECKPOINT) is None


def plant(run: Path, told: dict[str, Any]) -> None:
    """Write settings into every label of the run, and sign the manifest for it: every checksum is right."""

    def write(label: dict[str, Any]) -> None:
        label.update(told)
        label["built_for"]["task"] = "language-model"  # which `sample` asks for

    manifest = read_unsigned(run)
    write(manifest["settings"])
    manifest["pins"] |= {key: value for key, value in told.items() if key in ("model", "task")}
    sign(run, manifest)
    for name in ("best.pt", "last.pt"):
        weights = torch.load(run / name, weights_only=True)
        write(weights["config"])
        torch.save(weights, run / name)


def run_apart(words: list[str]) -> int:
    """The exit code of a command, in a process of its own: some of these would train."""
    return exit_code(lambda: os._exit(main_multi_gpu.run(words)))


def everything() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


ONLY_TRAINED = ("optimizer", "schedule")
"""Kinds of code that who uses a run's weights has no need of."""


@pytest.mark.parametrize(
    ("words", "kind"),
    [(words, kind) for words in [*TRAIN, *USE] for kind in KINDS if words in TRAIN or kind not in ONLY_TRAINED],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_what_only_a_file_names_is_refused_by_name(
    run: Path, words: list[str], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    told, called = KINDS[kind]
    plant(run, told)
    before = everything()
    code = main_multi_gpu.run(words)  # here, as one that is refused goes no further
    assert not Path("ran").exists()
    assert code == 2
    said = capfd.readouterr().err
    assert f"names code that this command does not name: {called}\n" in said
    assert "--own-code" in said
    assert everything() == before, "and nothing was touched"


def test_own_code_of_the_command_is_not_handed_the_name_of_another(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That network makes the one within it by name."""
    plant(run, {"model": "tests.support.user_code:Double", "model.args": {"network": "planted:net"}})
    code = run_apart(["--save-dir", "run", "--max-steps", "3", "--model", "tests.support.user_code:Double"])
    assert not Path("ran").exists()
    assert code == 2
    assert "names code that this command does not name: model.args.network=planted:net\n" in capfd.readouterr().err


@pytest.mark.parametrize("words", [TRAIN[0], *USE[:1]], ids=" ".join)
def test_a_librarys_network_is_no_strangers_code_and_downloads_nothing(
    run: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    plant(run, {"model": "timm/resnet10t", "model.args": {"pretrained": True}})
    assert run_apart(words) == 2
    assert "model.pretrained=True names weights to download" in capfd.readouterr().err


FOLLOWING: dict[str, dict[str, Any]] = {
    "--metric f=planted:net": {"metric": ["f=planted:net"]},
    "metric.args.macro_f1.of=planted:net": {"metric": ["macro_f1"], "metric.args": {"macro_f1": {"of": "planted:net"}}},
    "--hook planted:Classification": {"hook": ["planted:Classification"]},
}


@pytest.mark.parametrize("called", FOLLOWING)
def test_metrics_and_hooks_that_only_a_file_names_are_refused_where_they_would_run(
    run: Path, called: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plant(run, FOLLOWING[called])
    hook = "hook" in called
    assert [run_apart(words) for words in (TRAIN[0], TRAIN[3])] == [2, 2]
    assert f"names code that this command does not name: {called}\n" in capfd.readouterr().err
    assert run_apart(["evaluate", "run"]) == (0 if hook else 2), "an evaluation has metrics, and no hooks"
    assert run_apart(["predict", "run", "--out", "said.csv"]) == 0
    assert not Path("ran").exists()
    assert run_apart([*TRAIN[0], "--set", "hook=[]"]) == (0 if hook else 2), "hooks may change, metrics not"


@pytest.mark.parametrize("kind", ONLY_TRAINED)
def test_who_evaluates_imports_neither_optimizer_nor_schedule(run: Path, kind: str) -> None:
    plant(run, KINDS[kind][0])
    assert run_apart(["evaluate", "run"]) == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize("words", LOOK, ids=" ".join)
def test_who_only_looks_runs_nothing(run: Path, words: list[str]) -> None:
    everywhere = {"model": "planted:net", "data": "planted:tensors", "task": "planted:Classification"}
    plant(run, everywhere)
    words_of_the_run = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(words_of_the_run.replace("name: synthetic", "name: planted:tensors"))
    assert run_apart(words) == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize("place", ["run", "run/last.pt", f"run/{CHECKPOINT}"])
def test_a_network_that_writes_is_no_other(run: Path, place: str, capfd: pytest.CaptureFixture[str]) -> None:
    plant(run, {"model": "planted:net"})
    assert run_apart(["sample", place, "--prompt", "a"]) == 2
    assert "names code that this command does not name: --model planted:net\n" in capfd.readouterr().err
    assert not Path("ran").exists()


def test_the_network_that_weights_say_they_were_built_for_is_named_by_a_file_too(run: Path) -> None:
    weights = torch.load(run / "last.pt", weights_only=True)
    weights["config"]["built_for"] |= {"model": "planted:net", "task": "language-model"}
    torch.save(weights | {"config": weights["config"] | {"model": None}}, run / "last.pt")
    assert run_apart(["sample", "run/last.pt", "--prompt", "a"]) == 2
    assert not Path("ran").exists()


def test_a_pin_can_name_no_more_than_the_settings(run: Path) -> None:
    manifest = read_unsigned(run)
    manifest["pins"] |= {"model": "planted:net", "own_code": True}
    sign(run, manifest)
    for words in ([], ["--model", "mlp"]):
        assert run_apart(["--save-dir", "run", *words]) == 2
    assert not Path("ran").exists()


def test_a_pin_does_not_hide_what_the_settings_name(run: Path) -> None:
    manifest = read_unsigned(run)
    manifest["settings"] |= {"data": "planted:tensors"}
    manifest["pins"] |= {"data": "synthetic"}
    sign(run, manifest)
    run_apart(["--save-dir", "run", "--dry-run"])
    assert not Path("ran").exists()


@pytest.mark.parametrize("words", [["--own-code"], ["--model", "planted:net"]])
def test_what_the_command_names_or_allows_runs(run: Path, words: list[str]) -> None:
    plant(run, {"model": "planted:net"})
    assert run_apart(["--save-dir", "run", "--max-steps", "3", *words]) == 0
    assert Path("ran").exists()
    assert "own_code" not in Path("run/config.yaml").read_text(), "it is of one command"
    Path("ran").unlink()
    assert run_apart(["--save-dir", "run", "--max-steps", "4"]) == 2
    assert run_apart(["--config", "run/config.yaml", "--save-dir", "run", "--max-steps", "4"]) == 0, (
        "a file of the command"
    )


@pytest.mark.parametrize("words", [["--save-dir", "typo"], ["--save-dir", "empty", "--epochs", "3"], []], ids=" ".join)
def test_own_code_alone_starts_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert run_apart([*words, "--own-code", "--nproc-per-node", "1"]) == 2
    said = capfd.readouterr().err
    assert (words or ["", "--own-code"])[1] in said
    assert "has no checkpoint" in said
    assert "--data" in said
    assert everything() == {}
    assert [path.name for path in Path().iterdir()] == ["empty"]


@pytest.mark.parametrize("named", [["--data", "synthetic"], ["--model", "planted:net"], ["--metric", "planted:net"]])
def test_own_code_with_data_or_code_starts_a_run(run: Path, named: list[str], capfd: Any) -> None:
    assert run_apart(["--save-dir", "new", "--own-code", "--dry-run", *named]) in (0, 2)
    assert "has no checkpoint" not in capfd.readouterr().err


def test_a_logger_that_only_a_file_names_is_refused_by_a_training_and_no_matter_to_others(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plant(run, {"logger": ["planted:Log"]})
    assert run_apart(TRAIN[0]) == 2
    assert "names code that this command does not name: --logger planted:Log\n" in capfd.readouterr().err
    assert run_apart(USE[0]) == 0
    assert run_apart([*TRAIN[0], "--logger", "none"]) == 0, "loggers are free on resume"
    assert not Path("ran").exists()


def test_all_workers_refuse_it(run: Path) -> None:
    plant(run, {"task": "planted:Classification"})
    refused = run_training(2, save_dir="run", data="synthetic", model="mlp")
    assert refused.kind == "RequestError"
    assert "--task planted:Classification" in refused.error
    assert not Path("ran").exists()
