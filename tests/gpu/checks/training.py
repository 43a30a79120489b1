"""Number formats, optimizers and averages: each learns the digits, on the device and in the way that was asked for."""

from pathlib import Path
from typing import Any

import torch

from tests.gpu.front_door import ALONE, DIGITS, holds, run, words


def bf16(folder: Path) -> dict[str, Any]:
    return holds(run(folder, *ALONE, *words(DIGITS), "--amp", "bf16"), "single", "bf16")


def fp16(folder: Path) -> dict[str, Any]:
    done = run(folder, *ALONE, *words(DIGITS), "--amp", "fp16")
    nonfinite = [fault for fault in done.summary["faults"] if fault["kind"] == "nonfinite"]
    assert len(nonfinite) < 10, f"steps skipped again and again: {nonfinite}"
    return holds(done, "single", "fp16")


def fp32(folder: Path) -> dict[str, Any]:
    return holds(run(folder, *ALONE, *words(DIGITS), "--amp", "off"), "single", "off")


def chosen_by_itself(folder: Path) -> dict[str, Any]:
    """Without a flag: all GPUs that there are, in the format that they have."""
    count, native = torch.cuda.device_count(), torch.cuda.is_bf16_supported(including_emulation=False)
    devices = [f"cuda:{number}" for number in range(count)]
    done = run(folder, *words(DIGITS), "--global-batch-size", "32")
    own = ["cuda:0"] if count > 1 else devices  # under our own launcher each rank names its own
    return holds(done, "ddp" if count > 1 else "single", "bf16" if native else "fp16", own)


def sgd_and_batchnorm(folder: Path) -> dict[str, Any]:
    flags = ("--optimizer", "sgd", "--model", "resnet18", "--set", "model.args.width=16", "--batch-size", "64")
    return holds(run(folder, *ALONE, *words(DIGITS), *flags, "--amp", "bf16"), "single", "bf16")


def averaged_weights(folder: Path) -> dict[str, Any]:
    return holds(run(folder, *ALONE, *words(DIGITS), "--ema", "0.98", "--amp", "bf16"), "single", "bf16")


def checkpointing_and_accumulation(folder: Path) -> dict[str, Any]:
    flags = ("--grad-checkpointing", "--grad-accum-steps", "2", "--batch-size", "16", "--amp", "bf16")
    return holds(run(folder, *ALONE, *words(DIGITS), *flags), "single", "bf16")
