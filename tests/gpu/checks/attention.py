"""The GPT, and the kernel that its attention runs on."""

from importlib import import_module
from math import log
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from multigpu_cli.language.hugging_face import Logits, build_pretrained
from multigpu_cli.models.token_losses import check_packing
from tests.gpu.front_door import ALONE, figures, losses, run, sets, words
from tests.gpu.in_process import check_device, train
from tests.support.tiny_language_models import make_model_folder

TOKENS: dict[str, Any] = {
    "data": "tests.gpu.networks:tokens",
    "model": "gpt",
    "task": "language-model",
    "batch_size": "16",
}
LENGTH: dict[str, Any] = {"epochs": "1000", "max_steps": "60", "base_lr": "3e-3", "log_interval": "1"}
SIZE = ("model.args.width=256", "model.args.depth=2", "model.args.heads=4")
START = log(64)  # the loss of guessing


def flash(folder: Path) -> dict[str, Any]:
    """With every other kernel forbidden: what flash attention can't do is an error."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        summary = train(folder, sets=SIZE, **TOKENS, **LENGTH, amp="bf16")
    check_device(summary, "single", "bf16")
    loss = summary["final"]["train_loss"]
    assert loss < START / 2, f"loss {loss:.2f}, by guessing it is {START:.2f}"
    return {"train_loss": loss, "samples_per_second": summary["samples_per_second"]}


def gpt(folder: Path) -> dict[str, Any]:
    """As users run it."""
    done = run(folder, *ALONE, *words(TOKENS | LENGTH), *sets(*SIZE))
    seen = losses(done)
    assert seen[60] < START / 2, f"loss {seen[60]:.2f}, by guessing it is {START:.2f}"
    assert "tokens_per_second" in done.of("train")[-1], done.of("train")[-1]
    return figures(done) | {"train_loss": seen[60]}


def flash_packing(folder: Path) -> dict[str, Any]:
    """Packed texts with the kernels of flash-attn: the logits of sdpa, with one row and with two."""
    flash_attn = import_module("flash_attn")

    make_model_folder(folder, "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=4)
    flash, sdpa = (
        build_pretrained(str(folder), "bfloat16", attention).to("cuda", torch.bfloat16)
        for attention in ("flash", "sdpa")
    )
    places = torch.cat([torch.arange(length) for length in (20, 7, 37)])
    found = {}
    for rows in (1, 2):
        inputs = {"input_ids": torch.randint(200, (rows, 64)), "position_ids": places.repeat(rows, 1)}
        on_gpu = {name: value.cuda() for name, value in inputs.items()}
        difference = (Logits(flash)(on_gpu) - Logits(sdpa)(on_gpu)).abs().max()
        found[f"{rows} rows"] = float(difference)
        assert difference < 2e-2, f"{rows} rows: logits differ by {difference:.2g}"
    check_packing(Logits(flash), 200, torch.device("cuda"))
    return {"largest_difference": found, "flash_attn": flash_attn.__version__}
