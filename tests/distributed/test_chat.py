"""Fine-tuning on conversations: the gradient of a full batch, and the same run on any number of workers."""

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor
from torch.nn.functional import cross_entropy

from multigpu_cli.checkpoint.store import Store
from multigpu_cli.checkpoint.weights import read_weights
from multigpu_cli.models import token_losses
from multigpu_cli.monitor.journal import read_events
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder, make_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ANSWERS = ["Paris, of course.", "4", "The quick brown fox", "no", "1 2 3", "x", "dogs", "of course", "jumps", "What?"]
TALKS = [
    [
        {"role": "user", "content": "What is " * (n % 3 + 1) + "2?"},
        {"role": "assistant", "content": answer},
        *([{"role": "user", "content": "And?"}, {"role": "assistant", "content": "7 8"}] if n % 4 == 0 else []),
    ]
    for n, answer in enumerate(ANSWERS)
]
RATE = 100.0  # so large that rounding of the weights does not count
STEP: dict[str, Any] = {  # one step of plain gradient descent: the weights move by the gradient
    "optimizer": "sgd",
    "lr": RATE,
    "weight_decay": 0.0,
    "max_grad_norm": "off",
    "schedule": "constant",
    "warmup_epochs": 0,
    "epochs": 1,
    "num_workers": 0,
    "data": "chat",
    "data_dir": "talks.jsonl",
    "model": "pretrained",
    "model_dir": "model",
    "max_length": 100,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(token_losses, "_LOGITS", 1000)  # three tokens at a time
    lines = [json.dumps({"messages": talk}) + "\n" for talk in TALKS]
    Path("talks.jsonl").write_text("".join(lines))
    return tmp_path


def compute_full_batch_gradient() -> dict[str, Tensor]:
    """In float64, each conversation by itself, with masks written by hand: the mean over all learned tokens."""
    tokenizer = make_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    losses = []
    for talk in TALKS:
        ids: list[int] = []
        learned: list[bool] = []
        for message in talk:
            head = tokenizer(f"<|im_start|>{message['role']}\n").input_ids
            said = tokenizer(f"{message['content']}<|im_end|>").input_ids
            after = tokenizer("\n").input_ids
            ids += head + said + after
            learned += [False] * len(head) + [message["role"] == "assistant"] * len(said) + [False] * len(after)
        tokens = torch.tensor(ids)
        logits = model(tokens[None]).logits[0, :-1]
        losses.append(cross_entropy(logits, tokens[1:], reduction="none")[torch.tensor(learned[1:])])
    torch.cat(losses).mean().backward()
    return {f"network.{name}": weight.grad for name, weight in model.named_parameters()}


def check_token_rates(events: Iterable[dict[str, Any]], *, pads: bool) -> None:
    """One step took all conversations, each with its newline at the end."""
    line = next(event for event in events if event["event"] == "train")
    tokenizer = make_tokenizer()
    tokens = sum(len(tokenizer.apply_chat_template(talk, return_dict=False)) for talk in TALKS)
    assert line["all_tokens_per_second"] == pytest.approx(line["samples_per_second"] * tokens / len(TALKS))
    assert line["tokens_per_second"] < line["all_tokens_per_second"]
    assert (line["padding_share"] > 0) == pads


@pytest.mark.parametrize(("architecture", "dtype", "close"), [("gpt2", "float64", 1e-9), ("llama", "float32", 1e-5)])
@pytest.mark.parametrize("packing", ["on", "off"])
def test_the_gradient_is_that_of_the_full_batch_in_float64(
    architecture: str, dtype: str, close: float, packing: str, here: Path
) -> None:
    """Of 1, 2 and 3 workers, with and without accumulation; Llama has steps in float32 inside."""
    make_model_folder(here / "model", architecture, places=128)
    expected = compute_full_batch_gradient()
    before = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64).state_dict()
    for workers, batch in ((1, 2), (2, 1), (3, 3)):
        ended = run_training(
            workers,
            **STEP,
            packing=packing,
            batch_size=batch,
            global_batch_size=-(-len(TALKS) // (batch * workers)) * batch * workers,  # as many as there are, or more
            save_dir=str(workers),
            sets=[f"model.dtype={dtype}", "optimizer.momentum=0", "optimizer.nesterov=false", "data.val=0"],
        )
        assert not ended.error, ended.error
        assert ended.summary["steps"] == 1
        if packing == "off":
            check_token_rates(read_events(Path(str(workers), "journal.jsonl")), pads=batch > 1)
        after = read_weights(Path(str(workers), "last.pt"))
        for name, gradient in expected.items():
            moved = before[name.removeprefix("network.")] - after[name]
            difference = float((moved / RATE - gradient).norm() / gradient.norm())
            assert difference < close, f"{workers} workers, {name}: {difference}"


def die_at_third_checkpoint() -> None:
    """In this process, a rank of the run: SIGKILL once two checkpoints are there."""
    saved: list[int] = []

    def save_or_die(store: Store, step: int, *rest: Any, save: Any = Store.save) -> int:
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(step)
        return int(save(store, step, *rest))

    Store.save = save_or_die  # type: ignore


def test_a_run_that_is_killed_goes_on_elsewhere_with_the_same_bits(here: Path) -> None:
    make_model_folder(here / "model", places=128)
    flags: dict[str, Any] = STEP | {
        "optimizer": "adamw",
        "lr": 1e-2,
        "epochs": 3,
        "max_length": 80,
        "exact": True,
        "sets": ["data.val=0.2"],
    }
    flags |= {"batch_size": 1, "global_batch_size": 3, "checkpoint_every": 1}
    whole = run_training(1, **flags, save_dir="whole")
    assert not whole.error, whole.error
    killed = run_training(3, **flags, save_dir="killed", prepare=die_at_third_checkpoint)
    assert killed.killed
    ended = run_training(2, **flags, save_dir="killed")
    assert not ended.error, ended.error
    assert ended.summary["resumed_from"]
    assert ended.summary["fingerprint"] == whole.summary["fingerprint"]
    assert ended.summary["final"] == whole.summary["final"]
    sharded = run_training(2, **flags | {"multi_gpu": "fsdp"}, save_dir="sharded")
    assert not sharded.error, sharded.error
    assert sharded.summary["fingerprint"] == whole.summary["fingerprint"]
    start = next(read_events(Path("sharded/journal.jsonl")))
    assert start["plan"]["first_weights"].startswith("rank 0 builds the weights")
    assert start["plan"]["logits"].startswith("of the learned tokens alone, at most 3 at once")


def test_another_tokenizer_or_template_is_refused_on_resume(here: Path) -> None:
    make_model_folder(here / "model", places=128)
    flags: dict[str, Any] = STEP | {"max_length": 80, "batch_size": 3, "max_steps": 1, "sets": ["data.val=0"]}
    ended = run_training(1, **flags, save_dir="run")
    assert not ended.error, ended.error
    template = Path("model/chat_template.jinja")
    template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    ended = run_training(1, **flags | {"max_steps": 2}, save_dir="run")
    assert ended.kind == "RequestError"
    assert "tokens" in ended.error
