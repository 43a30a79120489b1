"""Fine-tuning on conversations: the gradient of a full batch, and the same run on any number of workers."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor
from torch.nn.functional import cross_entropy

from multigpu_cli.checkpoint.weights import read_weights
from multigpu_cli.language.chat import chat
from multigpu_cli.models import token_losses
from multigpu_cli.monitor.journal import read_events
from tests.support.die_at_third_checkpoint import die_at_third_checkpoint
from tests.support.run_training import run_training
from tests.support.tiny_language_models import make_model_folder, make_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ANSWERS = ["Paris, of course.", "4", "The quick brown fox", "no", "1 2 3", "x", "dogs", "of course", "jumps", "What?"]
TALKS: list[list[dict[str, Any]]] = [
    [
        {"role": "user", "content": "What is " * (n % 3 + 1) + "2?"},
        {"role": "assistant", "content": answer, **({"weight": 0} if n == 4 else {})},
        *([{"role": "user", "content": "And?"}, {"role": "assistant", "content": "7 8"}] if n % 4 == 0 else []),
    ]
    for n, answer in enumerate(ANSWERS)
]
_TOKENIZER = cache(make_tokenizer)
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


def load_model(adapter: str = "none", dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """By transformers and peft alone; an adapter that has learned something already is written to init.pt."""
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=dtype)
    if adapter == "none":
        return model
    import peft

    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=hasattr(model, "transformer")
    )
    model = peft.get_peft_model(model, settings)
    dice = torch.Generator().manual_seed(0)
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in learning.values():
        weight.data = torch.randn(weight.shape, generator=dice, dtype=torch.float64).to(dtype) / 8
    torch.save({f"network.{name}": weight.data.clone() for name, weight in learning.items()}, "init.pt")
    return model


def compute_losses(model: torch.nn.Module, talks: Iterable[list[dict[str, Any]]] = TALKS) -> Tensor:
    """Of each learned token; each conversation by itself, with masks written by hand."""
    tokenizer = _TOKENIZER()
    losses = []
    for talk in talks:
        ids: list[int] = []
        learned: list[bool] = []
        for message in talk:
            head = tokenizer(f"<|im_start|>{message['role']}\n").input_ids
            said = tokenizer(f"{message['content']}<|im_end|>").input_ids
            after = tokenizer("\n").input_ids
            ids += head + said + after
            counts = message["role"] == "assistant" and message.get("weight", 1) == 1
            learned += [False] * len(head) + [counts] * len(said) + [False] * len(after)
        tokens = torch.tensor(ids)
        logits = model(tokens[None]).logits[0, :-1]
        losses.append(cross_entropy(logits, tokens[1:], reduction="none")[torch.tensor(learned[1:])])
    return torch.cat(losses)


def check_token_rates(events: Iterable[dict[str, Any]], *, pads: bool) -> None:
    """One step took all conversations, each with its newline at the end."""
    line = next(event for event in events if event["event"] == "train")
    tokenizer = make_tokenizer()
    tokens = sum(len(tokenizer.apply_chat_template(talk, return_dict=False)) for talk in TALKS)
    assert line["all_tokens_per_second"] == pytest.approx(line["samples_per_second"] * tokens / len(TALKS))
    assert line["tokens_per_second"] < line["all_tokens_per_second"]
    assert (line["padding_share"] > 0) == pads


USUAL = (("gpt2", "on", "lora"), ("gpt2", "off", "none"), ("llama", "on", "none"))
GRADIENTS = [
    pytest.param(architecture, dtype, close, packing, adapter, marks=[pytest.mark.slow] if rare else [])
    for architecture, dtype, close in (("gpt2", "float64", 1e-9), ("llama", "float32", 1e-5))
    for packing in ("on", "off")
    for adapter in ("none", "lora")
    for rare in ((architecture, packing, adapter) not in USUAL,)
]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # between peft and transformers
@pytest.mark.parametrize(("architecture", "dtype", "close", "packing", "adapter"), GRADIENTS)
def test_the_gradient_is_that_of_the_full_batch_in_float64(
    architecture: str, dtype: str, close: float, packing: str, adapter: str, here: Path
) -> None:
    """Of 1, 2 and 3 workers, with and without accumulation; Llama has steps in float32 inside."""
    make_model_folder(here / "model", architecture, places=128)
    model = load_model(adapter)
    compute_losses(model).mean().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    before = model.state_dict()
    flags = STEP | ({"adapter": adapter, "init_from": "init.pt"} if adapter != "none" else {})
    sets = [] if adapter == "none" else ["adapter.r=4", "adapter.alpha=8"]
    for workers, batch in ((1, 2), (2, 1), (3, 3)):
        ended = run_training(
            workers,
            **flags,
            packing=packing,
            batch_size=batch,
            global_batch_size=-(-len(TALKS) // (batch * workers)) * batch * workers,  # as many as there are, or more
            save_dir=str(workers),
            sets=[f"model.dtype={dtype}", "optimizer.momentum=0", "optimizer.nesterov=false", "data.val=0", *sets],
        )
        assert not ended.error, ended.error
        assert ended.summary["steps"] == 1
        if packing == "off":
            check_token_rates(read_events(Path(str(workers), "journal.jsonl")), pads=batch > 1)
        after = read_weights(Path(str(workers), "last.pt"))
        for name, gradient in expected.items():
            moved = before[name] - after[f"network.{name}"]
            difference = float((moved / RATE - gradient).norm() / gradient.norm())
            assert difference < close, f"{workers} workers, {name}: {difference}"


def trace() -> None:
    """Have torch trace and differentiate as always, and note each graph in a file; no code is generated."""
    from torch._dynamo.backends.debugging import aot_eager

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with Path("graphs").open("a") as file:
            file.write("one\n")
        return aot_eager(graph, inputs)

    real = torch.compile
    torch.compile = lambda model, **options: real(model, **options | {"backend": compile_graph})  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless it is an error
@pytest.mark.parametrize(("packing", "most"), [("on", 1), ("off", 2)])
def test_compile_takes_few_graphs_and_padding_changes_nothing(
    packing: str, most: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of few lengths: the same training as uncompiled, to rounding."""
    monkeypatch.setattr(chat, "_FILL", 8)
    make_model_folder(here / "model", "llama", places=256)
    sizes = {"max_length": 150, "batch_size": 2, "global_batch_size": 2, "epochs": 4, "lr": 0.1, "packing": packing}
    for name, flags in {"plain": {}, "compiled": {"compile": "default", "prepare": trace}}.items():
        ended = run_training(1, **STEP | sizes, **flags, sets=["data.val=0"], save_dir=name)  # type: ignore[arg-type]
        assert not ended.error, ended.error
    lines = [line for line in read_events(Path("compiled/journal.jsonl")) if line["event"] in ("fault", "start")]
    assert [line["event"] for line in lines] == ["start"], lines
    assert "compile" in lines[0]
    assert Path("graphs").read_text().count("one") == most
    plain, compiled = (read_weights(Path(name, "last.pt")) for name in ("plain", "compiled"))
    torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize(
    ("architecture", "settings", "packing", "said"),
    [
        ("bert", {}, "off", "sees the tokens that it has to predict"),
        ("bert", {}, "on", "a model made to write text"),
        ("mixtral", {"num_local_experts": 2, "output_router_logits": True}, "on", '"output_router_logits": false'),
    ],
)
def test_a_network_with_more_to_learn_than_the_next_token_is_refused(
    architecture: str, settings: dict[str, Any], packing: str, said: str, here: Path
) -> None:
    make_model_folder(here / "model", architecture, places=128, **settings)
    ended = run_training(1, **STEP, packing=packing, batch_size=2, sets=["data.val=0"], save_dir="run")
    assert ended.kind == "RequestError", ended.error or ended.summary
    assert said in ended.error
    assert "--packing" not in ended.error
    assert not Path("run").exists()
    if architecture == "mixtral":
        config = Path("model/config.json")
        config.write_text(config.read_text().replace('"output_router_logits": true', '"output_router_logits": false'))
        assert not run_training(1, **STEP, packing=packing, batch_size=2, sets=["data.val=0"], save_dir="run").error


def count_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    assert outputs.shape[:2] == targets.shape
    return (targets != -100).sum(1)


def test_a_metric_sees_the_logits_of_all_tokens_and_the_plan_says_so(here: Path) -> None:
    make_model_folder(here / "model", places=128)
    flags: dict[str, Any] = STEP | {"sets": ["data.val=0.2"], "batch_size": 2, "max_steps": 1, "save_dir": "run"}
    ended = run_training(**flags, metric=[f"{__name__}:count_tokens"])
    assert not ended.error, ended.error
    assert ended.summary["final"]["val_count_tokens"] >= 1
    logits = next(read_events(Path("run/journal.jsonl")))["plan"]["logits"]
    assert logits.endswith("at most 3 at once; in evaluations all of a batch, for --metric")


@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), "lora"])
def test_a_run_that_is_killed_goes_on_elsewhere_with_the_same_bits(adapter: str, here: Path) -> None:
    make_model_folder(here / "model", places=128)
    flags: dict[str, Any] = STEP | {
        "optimizer": "adamw",
        "lr": 1e-2,
        "epochs": 2,
        "max_steps": 4,
        "max_length": 80,
        "exact": True,
        "adapter": adapter,
        "sets": ["data.val=0.2", *(["adapter.r=4", "adapter.dropout=0.1"] if adapter != "none" else [])],
    }
    flags |= {"batch_size": 1, "global_batch_size": 3, "checkpoint_every": 1}
    whole = run_training(1, **flags, save_dir="whole")
    assert not whole.error, whole.error
    killed = run_training(3, **flags, save_dir="killed", prepare=die_at_third_checkpoint)
    assert killed.killed
    ended = run_training(1, **flags, save_dir="killed")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "architecture", "dtype", "learns"),
    [("lora", "llama", "float32", "lm_head"), ("dora", "gpt2", "float64", "ln_f")],
)
def test_a_sharded_run_with_an_adapter_is_killed_and_goes_on_elsewhere_with_the_same_bits(
    kind: str, architecture: str, dtype: str, learns: str, here: Path
) -> None:
    make_model_folder(here / "model", architecture, places=128)
    flags: dict[str, Any] = STEP | {
        "optimizer": "adamw",
        "lr": 1e-2,
        "epochs": 3,
        "max_length": 80,
        "exact": True,
        "adapter": kind,
        "ema": 0.9,
        "batch_size": 1,
        "global_batch_size": 3,
        "checkpoint_every": 1,
        "sets": [
            "data.val=0.2",
            "adapter.r=4",
            "adapter.dropout=0.1",
            f"adapter.modules_to_save={learns}",
            f"model.dtype={dtype}",
        ],
    }
    whole = run_training(1, **flags, save_dir="whole")
    assert not whole.error, whole.error
    killed = run_training(3, **flags, multi_gpu="fsdp", save_dir="killed", prepare=die_at_third_checkpoint)
    assert killed.killed
    start = next(read_events(Path("killed/journal.jsonl")))
    assert start["plan"]["first_weights"].startswith("rank 0 builds the weights")
    ended = run_training(2, **flags, multi_gpu="fsdp", save_dir="killed")
    assert not ended.error, ended.error
    assert ended.summary["resumed_from"]
    assert ended.summary["fingerprint"] == whole.summary["fingerprint"]
    assert ended.summary["final"] == whole.summary["final"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # between peft and transformers
@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), "lora"])
def test_the_loss_curve_is_that_of_a_loop_written_by_hand(adapter: str, here: Path) -> None:
    make_model_folder(here / "model", places=128)
    model = load_model(adapter, torch.float32)
    flags: dict[str, Any] = STEP | {"optimizer": "adamw", "lr": 3e-3, "max_grad_norm": 1.0, "epochs": 100}
    flags |= {"adapter": adapter, "init_from": "init.pt"} if adapter != "none" else {}
    ended = run_training(
        1,
        **flags,
        packing="off",
        batch_size=4,
        max_steps=25,
        log_interval=1,
        trace_samples=True,
        checkpoint_every=1000,
        save_dir="run",
        sets=["data.val=0", *(["adapter.r=4", "adapter.alpha=8"] if adapter != "none" else [])],
    )
    assert not ended.error, ended.error
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    expected = []
    for line in Path("run/samples.jsonl").read_text().splitlines():
        loss = compute_losses(model, [TALKS[number] for number in json.loads(line)["samples"]]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    losses = [line["loss"] for line in read_events(Path("run/journal.jsonl")) if line["event"] == "train"]
    assert len(losses) == 25
    assert losses[-1] < 0.98 * losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
