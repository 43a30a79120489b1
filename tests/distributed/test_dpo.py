"""DPO: the curve of plain float64 steps, and the same run on any number of workers."""

import json
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor
from torch.nn.functional import cross_entropy

import main_multi_gpu
from multigpu_cli.checkpoint.weights import read_weights
from multigpu_cli.config.schema import AdapterConfig
from multigpu_cli.language.adapter import add_adapter
from multigpu_cli.monitor.journal import read_events
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder, make_tokenizer

pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ANSWERS = ["Paris, of course.", "4", "The quick brown fox", "no", "1 2 3", "x", "dogs", "of course", "jumps", "What?"]
ROWS = [
    {"prompt": f"What is {'2' * (n % 3 + 1)}?", "chosen": answer, "rejected": ANSWERS[(3 * n + 1) % len(ANSWERS)]}
    for n, answer in enumerate(ANSWERS)
]
RATE = 10.0
FLAGS: dict[str, Any] = {
    "num_workers": 0,
    "data": "chat",
    "data_dir": "pairs.jsonl",
    "model": "pretrained",
    "model_dir": "model",
    "adapter": "lora",
    "warmup_epochs": 0,
    "schedule": "constant",
}
DESCENT: dict[str, Any] = FLAGS | {  # two steps of plain gradient descent on all pairs
    "optimizer": "sgd",
    "lr": RATE,
    "weight_decay": 0.0,
    "max_grad_norm": "off",
    "epochs": 2,
    "log_interval": 1,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def descend_by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """In float64, an answer at a time, with masks written by hand: weights before and after, and the losses."""
    tokenizer = make_tokenizer()
    network = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    model: Any = add_adapter(network, AdapterConfig(kind="lora", r=4), seed=42)

    def score(row: dict[str, str], side: str) -> Tensor:
        prompt, answer = tokenizer(row["prompt"]).input_ids, tokenizer(row[side] + "<|im_end|>").input_ids
        tokens = torch.tensor(prompt + answer)
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
        return -cross_entropy(logits, tokens[len(prompt) :], reduction="sum")

    with torch.no_grad(), model.disable_adapter():
        reference = [score(row, "chosen") - score(row, "rejected") for row in ROWS]
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in weights.items()}
    losses = []
    for _ in range(2):
        margins = [
            score(row, "chosen") - score(row, "rejected") - then for row, then in zip(ROWS, reference, strict=True)
        ]
        loss = (1 + (-0.2 * torch.stack(margins)).exp()).log().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= RATE * gradient
        losses.append(loss.item())
    return before, {name: p.detach() for name, p in weights.items()}, losses


def read_losses(folder: str) -> Iterator[float]:
    return (event["loss"] for event in read_events(Path(folder, "journal.jsonl")) if event["event"] == "train")


def compile_cheaply() -> None:
    """torch finds the graphs, and nothing is generated for them."""
    real = torch.compile
    torch.compile = lambda model, **options: real(model, **options | {"backend": "eager"})  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("strategy", "dtype", "close", "compiled"),
    [
        ("auto", "float64", 1e-9, "off"),
        pytest.param("auto", "float64", 1e-9, "default", marks=pytest.mark.slow),
        pytest.param("fsdp", "float32", 1e-3, "off", marks=pytest.mark.slow),
    ],
)
def test_two_steps_are_those_of_the_full_batch_in_float64(
    strategy: str, dtype: str, close: float, compiled: str, here: Path
) -> None:
    """On 1, 2 and 3 workers, with and without accumulation, with uneven shares; Llama has steps in float32 inside."""
    make_model_folder(here / "model", "gpt2", places=128)
    before, expected, losses = descend_by_hand()
    assert losses[0] == pytest.approx(log(2), rel=1e-12)
    for workers, batch in ((1, 2), (2, 1), (3, 3))[strategy == "fsdp" :]:
        ended = run_training(
            workers,
            **DESCENT,
            multi_gpu=strategy,
            compile=compiled if workers == 1 else "off",
            prepare=compile_cheaply,
            batch_size=batch,
            global_batch_size=-(-len(ROWS) // (batch * workers)) * batch * workers,  # as many as there are, or more
            save_dir=str(workers),
            sets=[
                *(f"model.dtype={dtype}", "adapter.r=4", "task.beta=0.2", "data.val=0"),
                *("optimizer.momentum=0", "optimizer.nesterov=false"),
            ],
        )
        assert not ended.error, ended.error
        assert list(read_losses(str(workers))) == pytest.approx(losses, rel=1e-5)
        after = {
            name.removeprefix("network."): weight
            for name, weight in read_weights(Path(str(workers), "last.pt")).items()
        }
        assert after.keys() == expected.keys()
        for name, weight in expected.items():
            difference = float((after[name] - weight).norm() / (weight - before[name]).norm())
            assert difference < close, f"{workers} workers, {name}: {difference}"
    if compiled == "default":
        assert "compile" in next(read_events(Path("1/journal.jsonl"))), "a pair is two rows of a full micro-batch"
    start = next(read_events(Path("3/journal.jsonl")))
    assert "(preference)" in start["plan"]["contents"]
    assert "10 training pairs), dpo; " in start["plan"]["contents"]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_elsewhere_with_the_same_bits(here: Path) -> None:
    make_model_folder(here / "model", places=128)
    flags: dict[str, Any] = FLAGS | {"lr": 1e-2, "epochs": 2, "batch_size": 1, "global_batch_size": 3, "exact": True}
    flags |= {"checkpoint_every": 1, "sets": ["data.val=0.2", "adapter.dropout=0.1"]}
    whole = run_training(1, **flags, save_dir="whole")
    assert not whole.error, whole.error
    killed = run_training(2, **flags, save_dir="killed", prepare=die_at_third_checkpoint)
    assert killed.killed
    ended = run_training(1, **flags, save_dir="killed")
    assert not ended.error, ended.error
    assert ended.summary["resumed_from"]
    assert ended.summary["fingerprint"] == whole.summary["fingerprint"]
    assert ended.summary["final"] == whole.summary["final"]


def write_adapter(file: Path) -> None:
    """One that has learned something already."""
    network = transformers.AutoModelForCausalLM.from_pretrained("model")
    weights = add_adapter(network, AdapterConfig(kind="lora", modules_to_save=("lm_head",)), seed=7).state_dict()
    dice = torch.Generator().manual_seed(0)
    torch.save({name: torch.randn(weight.shape, generator=dice) / 8 for name, weight in weights.items()}, file)


def test_the_reference_is_the_adapter_of_init_from_also_when_that_is_gone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model_folder(here / "model", places=128)
    write_adapter(here / "init.pt")
    flags: dict[str, Any] = FLAGS | {"lr": 1e-2, "epochs": 1, "batch_size": 1, "global_batch_size": 3, "exact": True}
    flags |= {"checkpoint_every": 1, "init_from": "init.pt", "log_interval": 1}
    flags |= {"sets": ["data.val=0.2", "adapter.modules_to_save=lm_head"]}
    whole = run_training(1, **flags, save_dir="whole")
    assert not whole.error, whole.error
    assert {"val_accuracy", "val_margin", "val_chosen_reward", "val_rejected_reward"} <= whole.summary["final"].keys()
    losses = list(read_losses("whole"))
    assert losses[0] == pytest.approx(log(2), rel=1e-6)
    assert losses[1] != pytest.approx(log(2), rel=1e-3)
    assert next(read_events(Path("whole/journal.jsonl")))["plan"]["adapter"].endswith("is that of --init-from")
    sharded = run_training(2, **flags | {"multi_gpu": "fsdp"}, save_dir="sharded")
    assert not sharded.error, sharded.error
    assert sharded.summary["fingerprint"] == whole.summary["fingerprint"]
    killed = run_training(2, **flags, save_dir="killed", prepare=die_at_third_checkpoint)
    assert killed.killed
    Path("init.pt").unlink()
    del flags["init_from"]
    ended = run_training(1, **flags, save_dir="killed")
    assert not ended.error, ended.error
    assert ended.summary["resumed_from"]
    assert ended.summary["fingerprint"] == whole.summary["fingerprint"]
    assert ended.summary["final"] == whole.summary["final"]
    export, evaluate = ["export", "killed", "--to", "merged", "--format", "merged"], ["evaluate", "killed"]
    assert main_multi_gpu.run(export) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main_multi_gpu.run([*evaluate, "--split", "val", "--json"]) == 0, capsys.readouterr().err
    best = whole.summary["best"]
    assert json.loads(capsys.readouterr().out)["loss"] == best["loss"], best
    again = run_training(1, **flags | {"init_from": "whole/best.pt", "max_steps": 1}, save_dir="again")
    assert not again.error, again.error
    assert list(read_losses("again")) == [pytest.approx(log(2), rel=1e-6)]


def test_what_can_not_be_a_preference_run_ends_before_the_first_step(here: Path) -> None:
    make_model_folder(here / "model", places=128)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"adapter": "none"}, "--adapter lora"),
        ({"task": "language-model"}, "--task dpo"),
        ({"data": "tests.support.user_code:tensors", "data_dir": None, "task": "dpo"}, "the data are no preferences"),
    ]
    for changes, message in cases:
        sets = ["data.val=0"] if "data" not in changes else ["model.dtype=float64"]
        ended = run_training(1, **FLAGS | {"epochs": 1, "save_dir": "run"} | changes, sets=sets)
        assert ended.kind == "RequestError"
        assert message in ended.error
        assert not Path("run").exists()
