"""What a step asks of a GPU, counted: kernels by operator. No time is meant by it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from multigpu_cli import engine
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import fit_standardised
from multigpu_cli.language.hugging_face import Logits
from multigpu_cli.language.task import try_chunks
from multigpu_cli.models import token_losses
from multigpu_cli.models.networks.gpt import GPT
from multigpu_cli.models.networks.mlp import build as build_mlp
from multigpu_cli.models.token_losses import TokenTargets
from multigpu_cli.monitor import journal
from tests.gpu.simulated.gpus import alone, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import Machine
from tests.support.op_counter import Operations

STEADY = 3
TOKENS_RUN: dict[str, Any] = {
    "data": "tests.support.user_code:sentences",
    "model": "gpt",
    "task": "language-model",
    "sets": ["model.args.depth=1", "model.args.heads=2", "model.args.width=16"],
    "batch_size": 4,
    "max_steps": 4,
    "epochs": 5,
}


def record_kernels(file: Path) -> Callable[[Simulated], None]:
    """Write down the launches of one steady step."""

    def prepare(sim: Simulated) -> None:
        real = engine.train_step

        def step(run: Any, layout: Any, work: Any) -> Any:
            sim.device.kernels()
            outcome = real(run, layout, work)
            if layout.step == STEADY:
                file.write_text(json.dumps([sim.device.kernels(), run.plan.notes["compiled"]]))
            return outcome

        engine.train_step = step

    return prepare


def count_kernels(folder: Path, **flags: Any) -> tuple[dict[str, int], str]:
    """The launches of a steady step by operator, and what the plan says of the compiler."""
    file = folder / "kernels.json"
    flags = TOKENS_RUN | {"save_dir": str(folder / "run")} | flags
    ended = train_on_gpus(1, machine=Machine.of(1), prepare=record_kernels(file), **flags)
    assert (ended.error, ended.killed) == ("", [])
    kernels, compiler = json.loads(file.read_text())
    return kernels, compiler


def windows() -> DataSource:
    """512 stored windows of float32, standardised and not augmented, as UCI HAR's are without augmentation."""
    signals, classes = torch.arange(512 * 64.0).view(512, 2, 32).sin(), torch.arange(512) % 4
    train = TensorDataset(signals, classes)
    prepare = fit_standardised(signals, "flatten")
    return DataSource(train=train, val=None, test=None, input_shape=(2, 32), num_classes=4, prepare=prepare)


BEYOND_A_PLAIN_LOOP = Counter(
    {
        "aten::_foreach_norm": 1,  # of each gradient, for clipping and to notice NaN
        "aten::cat": 1,
        "aten::linalg_vector_norm": 1,
        "aten::add": 1,  # what the gradients are divided by: the norm and a little, and at least 1
        "aten::clamp_": 1,
        "aten::threshold_backward": 1,  # whether the step is skipped
        "aten::_foreach_sub_": 1,  # a skipped step is not counted
        "aten::_fused_adamw_": 1,  # biases do not decay
    }
)
"""What a steady step launches that one without clipping, skipping and data launches not."""


def test_a_steady_step_launches_little_that_a_plain_loop_does_not(tmp_path: Path) -> None:
    data = {"data": "tests.gpu.simulated.test_launches:windows", "model": "mlp", "task": "classification"}
    shape: dict[str, Any] = {"sets": [], "batch_size": 64}

    def work(sim: Simulated) -> Any:
        model = build_mlp((2, 32), 4).cuda()
        inputs, classes = torch.randn(64, 2, 32, device="cuda"), torch.arange(64, device="cuda") % 4
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(STEADY):
            sim.device.kernels()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(inputs)
            cross_entropy(logits.float(), classes).backward()
            optimizer.step()
        return sim.device.kernels()

    ours, plain = Counter(count_kernels(tmp_path, **data, **shape)[0]), Counter(alone(work, Machine.of(1)))
    assert ours - plain == BEYOND_A_PLAIN_LOOP


@pytest.mark.parametrize(("flags", "passes"), [({}, 0), ({"max_grad_norm": "off"}, 0), ({"exact": True}, 1)])
def test_the_optimizers_kernel_sets_the_mean_over_tokens_right(
    flags: dict[str, Any], passes: int, tmp_path: Path
) -> None:
    """No pass over the gradients of its own; --exact keeps the one whose rounding it has."""
    kernels, compiler = count_kernels(tmp_path, **flags)
    assert kernels["aten::_fused_adamw_"] > 0
    assert kernels.get("aten::_foreach_mul_", 0) == passes
    assert compiler.startswith("off: --compile default") == (not passes), "recommended without --exact"


VOCABULARY, TOKENS = 1001, 256


def make_gpt(device: str) -> tuple[GPT, Tensor, Tensor]:
    """The same network on any device, with tokens and targets."""
    torch.manual_seed(0)
    model = GPT((TOKENS,), VOCABULARY, depth=1, heads=1, width=8)
    assert isinstance(model, GPT)
    tokens = torch.arange(TOKENS)[None] * 5 % VOCABULARY
    targets = tokens.roll(-1).masked_fill(tokens % 3 == 0, -100)
    return model.to(device), tokens.to(device), targets.to(device)


@pytest.mark.parametrize("at_once", [TOKENS, 48])
def test_the_head_of_the_gpt_is_padded_on_a_gpu_and_says_the_same(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, losses and gradients, in weights of the old size; with --exact the product is the plain one."""
    monkeypatch.setattr(token_losses, "_LOGITS", at_once * VOCABULARY)

    def measure(device: str) -> tuple[list[Tensor], set[int]]:
        model, tokens, targets = make_gpt(device)
        found = [model(tokens)]
        with Operations() as seen:
            for smoothing, summed in ((0.0, False), (0.1, False), (0.0, True), (0.1, True)):
                losses = model(TokenTargets(tokens, targets, None, smoothing, summed)).losses
                losses.sum().backward()
                found += [losses, *(weight.grad for weight in model.parameters() if weight.grad is not None)]
        assert [tuple(each.shape) for name, each in model.state_dict().items() if "tokens" in name] == [(VOCABULARY, 8)]
        heads = [each.shape for name, inputs in seen.inputs if "mm" in name for each in inputs if each.ndim == 2]
        return [each.detach().cpu() for each in found], {max(shape) for shape in heads if max(shape) > 4 * TOKENS - 100}

    def work(sim: Simulated) -> None:
        (expected, plain), (found, padded) = measure("cpu"), measure("cuda")
        assert (plain, padded) == ({VOCABULARY}, {1024})
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert try_chunks(make_gpt("cuda")[0])[0]
        torch.use_deterministic_algorithms(True)
        assert measure("cuda")[1] == {VOCABULARY}
        assert not try_chunks(make_gpt("cuda")[0])[0]

    alone(work, Machine.of(1))


def test_the_logits_of_all_tokens_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_losses, "_LOGITS", 16 * VOCABULARY)

    def work(sim: Simulated) -> list[int]:
        peaks = []
        for summed in (False, True, None):
            model, tokens, targets = make_gpt("cuda")
            before = sim.device.memory(0)["allocated"]
            sim.device.reset_peak(0)
            if summed is not None:
                model(TokenTargets(tokens, targets, None, 0.0, summed)).losses.sum().backward()
            else:
                cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum").backward()
            peaks.append(sim.device.memory(0)["peak"] - before)
        return peaks

    *chunked, whole = alone(work, Machine.of(1))
    logits = 4 * TOKENS * VOCABULARY
    assert whole > 2 * logits
    assert max(chunked) < logits


def test_a_step_computes_the_logits_of_each_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own task, whose loss is a sum, in bf16: no kernel of a second head or softmax, nor of one backward."""
    steps = []
    for at_once in (2**26, 40):
        monkeypatch.setattr(token_losses, "_LOGITS", at_once)
        steps.append(count_kernels(tmp_path / str(at_once), amp="bf16")[0])
    once, chunks = (kernels["aten::_log_softmax"] for kernels in steps)
    assert (once, steps[0]["aten::_log_softmax_backward_data"]) == (1, 1)
    assert chunks > 2
    assert "aten::_log_softmax_backward_data" not in steps[1]
    assert steps[1]["aten::mm"] - steps[0]["aten::mm"] == 3 * (chunks - 1)


def test_replicas_of_a_network_of_transformers_give_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of nn.DataParallel's replicas are no leaves of the graph."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, use_cache=False, **sizes)))
    monkeypatch.setattr(token_losses, "_LOGITS", 4 * 50)
    tokens = torch.arange(27).view(3, 9)

    def work(sim: Simulated) -> None:
        model.cuda()
        found = []
        for each in (model, torch.nn.DataParallel(model)):
            each(TokenTargets(tokens.cuda(), tokens.cuda(), summed=True)).losses.sum().backward()
            found.append([weight.grad.cpu() for weight in model.parameters() if weight.grad is not None])
            model.zero_grad()
        torch.testing.assert_close(found[1], found[0])

    alone(work, Machine.of(2))


def test_the_curve_is_the_same_on_two_gpus_with_a_padded_head_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_losses, "_LOGITS", 40)  # eight tokens
    curves = []
    for strategy, ranks, gpus in (("none", 1, 1), ("ddp", 2, 2), ("dp", 1, 2), ("fsdp", 2, 2)):
        folder = tmp_path / strategy
        shared = {"batch_size": 5, "global_batch_size": 20, "amp": "off", "log_interval": 1, "save_dir": str(folder)}
        shared |= {"max_steps": 3, "multi_gpu": strategy}
        ended = train_on_gpus(ranks, machine=Machine.of(gpus), **TOKENS_RUN | shared)
        assert ended.error == ""
        curves.append([event["loss"] for event in journal.read_events(folder / "journal.jsonl") if "loss" in event])
    assert len(curves[0]) >= 5
    assert curves[1:] == [pytest.approx(curves[0], rel=1e-4)] * 3
