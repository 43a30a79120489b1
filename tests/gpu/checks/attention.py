"""The GPT, and the kernel that its attention runs on."""

from math import log
from pathlib import Path
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.front_door import ALONE, figures, losses, run, sets, words
from tests.gpu.in_process import check_device, train

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
