"""Rates by pattern and by depth, and parameters that learn later, as a user asks for them, on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank

from multigpu_cli.checkpoint.manifest import read_manifest
from multigpu_cli.checkpoint.store import Checkpoint
from multigpu_cli.monitor import journal
from tests.support.run_training import run_training

RUN: dict[str, Any] = {"save_dir": "run", "global_batch_size": 20, "batch_size": 5, "epochs": 4, "log_interval": 1}
RATES = ["optimizer.rates={6.*: 10, '*.bias': 0.5}", "optimizer.layer_decay=0.8"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def curve(folder: str, key: str = "loss") -> dict[int, float]:
    """The figure of each step; after a resume the last line of a step counts."""
    events = journal.read_events(f"{folder}/journal.jsonl")
    return {event["step"]: event[key] for event in events if event["event"] == "train"}


def test_rates_are_shown_take_effect_and_are_alike_on_two_workers(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_training(**RUN, lr=0.01, screen="normal", sets=RATES).error == ""
    shown = capfd.readouterr().out
    assert "\nLearning rates\n 0.1 (× 10)       1 tensor, 48 parameters: 6.weight\n" in shown
    assert "\n 0.0064 (× 0.64)  1 tensor, 96 parameters: 2.weight\n" in shown
    assert max(curve("run", "lr").values()) == pytest.approx(0.01), "the journal shows the schedule's rate"
    assert run_training(2, **RUN | {"save_dir": "two"}, lr=0.01, sets=RATES).error == ""
    assert curve("two") == pytest.approx(curve("run"), rel=1e-4)
    assert run_training(**RUN | {"save_dir": "plain"}, lr=0.01).error == ""
    assert curve("plain")[2] != pytest.approx(curve("run")[2], rel=1e-3)


def test_rates_stay_as_the_run_was_started_with() -> None:
    assert run_training(**RUN | {"epochs": 1}, sets=RATES).error == ""
    ended = run_training(**RUN, sets=["optimizer.rates={6.*: 3}"])
    assert "optimizer.rates 6.*=3 differs from 6.*=10 *.bias=0.5, with which" in ended.error
    assert run_training(**RUN).error == ""
    state = torch.load("run/checkpoints/step_00000012/state.pt", weights_only=True)["optimizer"]
    factors = sorted({group["rate_factor"] for group in state["param_groups"]})
    assert factors == pytest.approx([0.4, 0.64, 0.8, 5, 10])


# -- parameters that learn later: 2.* and 3.* from epoch 3 on, of 3 steps each

LATER = {"freeze": ["2.*", "3.*"], "epochs": 3}
AT = ["model.unfreeze_at=3"]
BODY = ["2.weight", "3.weight", "3.bias"]


def weights(folder: str, step: int) -> dict[str, torch.Tensor]:
    saved = Path(folder, "checkpoints", f"step_{step:08d}")
    model: dict[str, torch.Tensor] = Checkpoint(saved, read_manifest(saved)).state("model")["model"]
    return model


def find_changed_weights(folder: str, before: int, after: int) -> set[str]:
    one, other = weights(folder, before), weights(folder, after)
    return {name for name in [*BODY, "6.weight", "6.bias"] if not torch.equal(one[name], other[name])}


ITEMS = {"data": "tests.support.user_code:Items", "num_workers": 1}  # from a loader process, also amid the run


@pytest.mark.parametrize("flags", [ITEMS, {"optimizer": "sgd", "lr": 0.05}, {"ema": 0.9}], ids=str)
def test_what_is_frozen_learns_from_its_epoch_on(flags: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    ended = run_training(**RUN | LATER | flags | {"keep": 9}, sets=AT, screen="normal")
    assert ended.error == ""
    assert find_changed_weights("run", 3, 6) == {"6.weight", "6.bias"}, "in epoch 2"
    assert find_changed_weights("run", 6, 9) == {*BODY, "6.weight", "6.bias"}, "in epoch 3"
    [told] = [event for event in journal.read_events("run/journal.jsonl") if event["event"] == "unfreeze"]
    assert (told["step"], told["tensors"], told["parameters"]) == (6, 3, 128)
    shown = capfd.readouterr().out
    assert "\n frozen until epoch 3  3 tensors, 128 parameters: 2.weight, 3.weight, 3.bias\n" in shown
    said = shown.index("epoch 3: 3 tensors of --freeze are trained from here on")
    assert shown.index("step 6/9") < said < shown.index("step 7/9")


FSDP = {"multi_gpu": "fsdp"}


@pytest.mark.parametrize(
    ("workers", "flags"), [*(pytest.param(n, {}, marks=pytest.mark.slow) for n in (2, 4)), (3, {}), (3, FSDP)], ids=str
)
def test_the_curve_is_the_same_on_any_number_of_workers(workers: int, flags: dict[str, Any]) -> None:
    flags = {"keep": 9} | flags
    for count, folder, more in ((1, "run", {"multi_gpu": "auto"}), (workers, "several", {})):
        assert run_training(count, **RUN | LATER | {"save_dir": folder} | flags | more, sets=AT).error == ""
    assert curve("several") == pytest.approx(curve("run"), rel=1e-4)
    assert find_changed_weights("several", 3, 6) == {"6.weight", "6.bias"}, "in epoch 2"
    assert find_changed_weights("several", 6, 9) == {*BODY, "6.weight", "6.bias"}, "in epoch 3"


def test_gathered_weights_that_an_evaluation_leaves_learn_from_their_epoch_on_too() -> None:
    """Without a checkpoint in between, which would free them."""
    flags = {"checkpoint_every": "1000"}
    for count, folder, more in ((1, "run", {}), (2, "two", FSDP | {"reshard": "step"})):
        assert run_training(count, **RUN | LATER | flags | {"save_dir": folder} | more, sets=AT).error == ""
    assert curve("two") == pytest.approx(curve("run"), rel=1e-4)


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, {"ema": 0.9}), (2, {"optimizer": "sgd"}), (3, {}))
        ),
        (2, {"exact": True, "ema": 0.9}),
        (2, FSDP | {"ema": 0.9}),
    ],
)
def test_a_resume_goes_on_to_the_bit_before_and_after_that_epoch(workers: int, flags: dict[str, Any]) -> None:
    flags = RUN | LATER | flags | {"checkpoint_every": "1", "keep": 99, "max_steps": 8}
    whole = run_training(workers, **flags | {"save_dir": "whole"}, sets=AT).summary
    for step in (5, 6, 7):
        start = f"whole/checkpoints/step_{step:08d}"
        ended = run_training(workers, **flags | {"save_dir": f"from{step}"}, sets=AT, resume=start)
        assert (ended.error, ended.summary["resumed_from"]) == ("", start)
        assert ended.summary["fingerprint"] == whole["fingerprint"], step


def test_exact_gives_the_same_bits_on_any_number_of_workers() -> None:
    marks = {
        run_training(count, **RUN | LATER | {"exact": True, "save_dir": f"on{count}"}, sets=AT).summary["fingerprint"]
        for count in (1, 2, 3)
    }
    assert len(marks) == 1
