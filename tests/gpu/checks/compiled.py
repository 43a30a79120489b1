"""torch.compile: the same losses as without it, or a refusal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from multigpu_cli import engine
from tests.gpu.checks.attention import LENGTH, SIZE, TOKENS
from tests.gpu.checks.memory import little_memory
from tests.gpu.front_door import ALONE, command, figures, losses, run, run_command, sets, words
from tests.gpu.in_process import ONE, train

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
    assert 0 < furthest < _NEAR, f"losses differ by up to {furthest:.1%}; by nothing: what was compiled was not used"
    return figures(compiled) | {"largest_difference": furthest, "compile": found, "plain": figures(plain)}


def steady_steps(folder: Path) -> dict[str, Any]:
    """The last step of a run has Triton's kernels, also where FLOPs were counted before the first one."""
    found = {}
    for mode in ("default", "reduce-overhead"):
        for amp in ("bf16", "off"):
            flags = TOKENS | LENGTH | {"max_steps": str(_STEPS), "compile": mode, "amp": amp}
            with _last_kernels() as names:
                train(folder / mode / amp, ONE, SIZE, **flags)
            found[f"{mode}, {amp}"] = sum("triton" in name for name in names)
    assert all(found.values()), f"Triton's kernels in the last step: {found}"
    return {"kernels": found}


@contextmanager
def _last_kernels() -> Iterator[list[str]]:
    """The names of the kernels of a run's last step."""
    real, names = engine.train_step, list[str]()

    def step(run: Any, layout: Any, work: Any) -> Any:
        if layout.step < _STEPS - 1:
            return real(run, layout, work)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            done = real(run, layout, work)
            torch.cuda.synchronize()
        names.extend(event.name for event in seen.events() or () if event.device_type.name == "CUDA")
        return done

    with patch.object(engine, "train_step", step):
        yield names


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
    assert 0 < furthest < _NEAR, f"losses differ by up to {furthest:.1%}: {one} and {other}"  # 0: it was not used
    assert one[_STEPS] < 0.9 * one[1], f"nothing was learned: {one}"
    return figures(compiled) | {"largest_difference": furthest, "compile": found}


def checkpointing(folder: Path) -> dict[str, Any]:
    """Both flags together, for blocks without buffers, which are compiled as a whole, and for those with BatchNorm."""
    flags = (*ALONE, "--amp", "off", "--max-steps", str(_STEPS), *_SAID)
    found = {}
    for model in ("checkpointed", "checkpointed_with_batchnorm"):
        network = ("--model", f"tests.gpu.networks:{model}")
        plain = losses(run(folder / model / "off", *flags, *network))
        both = run(folder / model / "both", *flags, *network, "--compile", "default", "--grad-checkpointing")
        compiled = losses(both)
        furthest = max(abs(plain[step] - compiled[step]) / plain[step] for step in plain)
        assert 0 < furthest < _NEAR, f"{model}: losses differ by up to {furthest:.1%}"  # 0: it was not used
        found[model] = figures(both) | {"largest_difference": furthest}
    return found


def texts_of_many_lengths(folder: Path) -> dict[str, Any]:
    """A second graph serves all lengths, also as CUDA graphs, and nothing is warned of."""
    flags = TOKENS | LENGTH | {"data": "tests.gpu.networks:texts", "amp": "bf16"}
    plain, found = losses(run(folder / "off", *ALONE, *words(flags), *sets(*SIZE))), {}
    for mode in ("default", "reduce-overhead"):
        done = run(folder / mode, *ALONE, *words(flags), *sets(*SIZE), "--compile", mode)
        assert not done.of("fault"), done.of("fault")
        compiled = losses(done)
        furthest = max(abs(plain[step] - compiled[step]) / plain[step] for step in range(1, 11))
        assert 0 < furthest < _NEAR, f"{mode}: losses differ by up to {furthest:.1%}"
        found[mode] = figures(done) | {"largest_difference": furthest}
    return found


def measured_batch(folder: Path) -> dict[str, Any]:
    """--batch-size auto tries the compiled network, also with CUDA graphs, and the run goes well with it."""
    found = {}
    for mode in ("default", "reduce-overhead"):
        with little_memory():
            flags = ("--model", "tests.gpu.networks:wide", "--amp", "off", "--max-steps", "5", "--batch-size", "auto")
            done = run(folder / mode, *ALONE, *flags, "--compile", mode)
        assert done.summary["status"] == "completed", done.summary
        assert not done.summary["faults"], done.summary["faults"]
        found[mode] = figures(done) | {"batch_size": done.of("start")[-1]["plan"]["batch_size"]}
    return found
