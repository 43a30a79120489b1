"""--exact: the same bits however many ranks share the work, for a GPT and for a convolutional network."""

import json
from pathlib import Path
from typing import Any

from tests.gpu.checks.attention import SIZE, TOKENS
from tests.gpu.front_door import ALONE, Run, figures, launcher, run, run_command, same_weights, sets, words
from tests.gpu.machine import is_simulated

_STEPS = "8" if is_simulated() else "40"
_SHARED: dict[str, Any] = {"global_batch_size": "64", "max_steps": _STEPS, "epochs": "1000"}
_RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt": (TOKENS | _SHARED | {"batch_size": "4"}, SIZE),
    "convnet": (_SHARED | {"model": "convnet", "batch_size": "4"}, ()),
}


def two_ranks_on_one_gpu(folder: Path) -> dict[str, Any]:
    """One process, and two with gloo between them on the same GPU: the one proof that one GPU is enough for."""
    found = {}
    for name, (flags, more) in _RUNS.items():
        whole = _train(folder / name / "whole", name, *ALONE)
        told = json.dumps([{key: str(value) for key, value in (flags | {"exact": "true"}).items()}, list(more)])
        shared = folder / name / "shared"
        both = run_command([*launcher(2), "-m", "tests.gpu.checks.strategies", str(shared), told], shared)
        assert both.summary["world_size"] == 2, both.summary
        same_weights(whole, both)
        found[name] = figures(both)
    return found


def two_gpus(folder: Path) -> dict[str, Any]:
    return _compare(folder, 2)


def four_gpus(folder: Path) -> dict[str, Any]:
    return _compare(folder, 4)


def eight_gpus(folder: Path) -> dict[str, Any]:
    return _compare(folder, 8)


def _compare(folder: Path, count: int) -> dict[str, Any]:
    """So many GPUs, with ddp and with fsdp, have the bits of one GPU."""
    found = {}
    for name in _RUNS:
        whole = _train(folder / name / "1", name, *ALONE)
        for strategy in ("ddp", "fsdp"):
            how = ("--multi-gpu", strategy, "--nproc-per-node", str(count))
            done = _train(folder / name / strategy, name, *how)
            assert done.summary["world_size"] == count, done.summary
            same_weights(whole, done)
            found[f"{name}, {strategy} on {count}"] = done.summary["samples_per_second"]
    return {"samples_per_second": found}


def compiled_twice(folder: Path) -> dict[str, Any]:
    """With --compile default too: the compiler decides alike in two processes; its kernels round as no others do."""
    one, other = (_train(folder / each, "gpt", *ALONE, "--compile", "default") for each in ("one", "other"))
    same_weights(one, other)
    plain = _train(folder / "plain", "gpt", *ALONE)
    assert plain.summary["fingerprint"] != one.summary["fingerprint"], "what was compiled was not used"
    return figures(one)


def _train(folder: Path, name: str, *how: str) -> Run:
    flags, more = _RUNS[name]
    return run(folder, *words(flags), *sets(*more), "--exact", *how)
