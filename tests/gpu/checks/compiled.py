"""torch.compile: the same losses as without it, or a refusal."""

from pathlib import Path
from typing import Any

from tests.gpu.checks.attention import LENGTH, SIZE, TOKENS
from tests.gpu.front_door import ALONE, command, figures, losses, run, run_command, sets, words

_STEPS = 30
_NEAR = 2e-2  # relative; other kernels round differently, wrong gradients are further off
_FLAGS = (*ALONE, "--model", "mlp", "--set", "model.args.dropout=0.0", "--amp", "off", "--max-steps", str(_STEPS))
_SAID = ("--base-lr", "3e-3", "--log-interval", "1")


def default(folder: Path) -> dict[str, Any]:
    return _compare_losses(folder, "default")


def reduce_overhead(folder: Path) -> dict[str, Any]:
    return _compare_losses(folder, "reduce-overhead")


def loss_in_the_graph(folder: Path) -> dict[str, Any]:
    """The GPT with its loss in one graph: the first losses are those without."""
    size, flags = sets(*SIZE, "data.args.vocabulary=8000"), (*words(TOKENS | LENGTH), "--amp", "bf16", *ALONE)
    plain = run(folder / "off", *flags, *size)
    compiled = run(folder / "default", *flags, *size, "--compile", "default")
    found = compiled.of("start")[-1].get("compile")
    assert found, "nothing was compiled"
    assert not found["graph_breaks"], found
    one, other = losses(plain), losses(compiled)
    furthest = max(abs(one[step] - other[step]) / one[step] for step in range(1, 11))
    assert furthest < _NEAR, f"losses differ by up to {furthest:.1%}"
    return figures(compiled) | {"largest_difference": furthest, "compile": found, "plain": figures(plain)}


def accumulating(folder: Path) -> dict[str, Any]:
    """CUDA graphs write each micro-batch's gradient to the same place: refused, or right."""
    flags = ("--grad-accum-steps", "4", "--batch-size", "8")
    refused = run_command(
        command(folder / "looked", *_FLAGS, *flags, "--compile", "reduce-overhead", "--dry-run"), folder, code=None
    )
    if refused.code == 2:
        assert "reduce-overhead" in refused.said, f"refused for another reason: {refused.said[-1000:]}"
        return {"refused": refused.said.strip().splitlines()[-1]}
    return _compare_losses(folder, "reduce-overhead", *flags)


def _compare_losses(folder: Path, mode: str, *flags: str) -> dict[str, Any]:
    """Train with and without; the losses of the steps stay together."""
    plain = run(folder / "off", *_FLAGS, *_SAID, *flags)
    compiled = run(folder / mode, *_FLAGS, *_SAID, *flags, "--compile", mode)
    found = compiled.of("start")[-1].get("compile")
    assert found, "nothing was compiled"
    one, other = losses(plain), losses(compiled)
    assert len(one) == len(other) == _STEPS, f"{len(one)} and {len(other)} steps were logged"
    furthest = max(abs(one[step] - other[step]) / one[step] for step in one)
    assert furthest < _NEAR, f"losses differ by up to {furthest:.1%}: {one} and {other}"
    assert one[_STEPS] < 0.9 * one[1], f"nothing was learned: {one}"
    return figures(compiled) | {"largest_difference": furthest, "compile": found}
