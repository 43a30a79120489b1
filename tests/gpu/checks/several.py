"""What several GPUs show: weights that are shared out, a rank that dies, slower ways between GPUs, and speed."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks.attention import LENGTH, SIZE, TOKENS
from tests.gpu.front_door import DIGITS, Run, figures, holds, run, same_weights, sets, words
from tests.gpu.machine import is_simulated

_BOTH = ("--multi-gpu", "ddp", "--nproc-per-node", "2")


def sharded(folder: Path) -> dict[str, Any]:
    """Two GPUs share the weights of the digits' network; the GPT's memory per GPU is below that of ddp."""
    done = run(folder / "digits", *words(DIGITS), *_share(2), "--amp", "bf16")
    wide = sets("model.args.width=512", "model.args.depth=4", "model.args.heads=4")
    peaks = {}
    for strategy in ("ddp", "fsdp"):
        how = ("--multi-gpu", strategy, "--nproc-per-node", "2", "--amp", "bf16")
        short = TOKENS | LENGTH | {"max_steps": "8", "batch_size": "1"}
        peaks[strategy] = run(folder / strategy, *words(short), *wide, *how).summary["peak_memory_bytes"]
    assert max(peaks["fsdp"]) < max(peaks["ddp"]), f"peak memory {peaks}"
    return holds(done, "fsdp", "bf16", ["cuda:0"]) | {"peaks": peaks}


def sharded_in_groups(folder: Path) -> dict[str, Any]:
    """Two groups of four, which replicate each other."""
    done = run(folder, *words(DIGITS), *_share(8), "--shard-size", "4", "--amp", "bf16")
    plan = done.of("start")[-1]["plan"]["sharding"]
    assert " within groups of 4 workers; " in plan, plan
    return holds(done, "fsdp", "bf16", ["cuda:0"])


def _share(workers: int) -> tuple[str, ...]:
    share = ("--global-batch-size", "64", "--batch-size", str(64 // workers))
    return ("--multi-gpu", "fsdp", "--nproc-per-node", str(workers), *share)


def killed_rank(folder: Path) -> dict[str, Any]:
    """SIGKILL to rank 1 within a step: the others end, the message names it, and a restart completes the run."""
    flags = ("--model", "tests.gpu.networks:at_pass", "--epochs", "3", "--checkpoint-every", "10", *_BOTH)
    deed = sets("model.args.deed=kill", "model.args.at=30")
    ended = run(folder / "ends", *flags, *deed, code=1)
    assert "rank 1" in ended.said, f"it does not name rank 1: {ended.said[-1000:]}"
    again = run(folder / "restarts", *flags, *deed, "--max-restarts", "1")
    assert again.summary["status"] == "completed", again.summary
    assert again.of("resume"), "the restart began afresh"
    starts = [event["time"] for event in again.events if event["event"] == "start"]
    last = max(event["time"] for event in again.events if event["time"] < starts[-1])
    # ranks that waited for the agent's SIGKILL would take 30 s alone
    assert starts[-1] - last < 30, f"the restart came {starts[-1] - last:.0f} s after the last line"
    return figures(again) | {"said": ended.said[-500:], "seconds_to_restart": round(starts[-1] - last, 1)}


def without_peer_to_peer(folder: Path) -> dict[str, Any]:
    """NCCL_P2P_DISABLE=1, which some machines need: the same bits with --exact, at another speed."""
    flags = (*words(DIGITS), "--exact", "--global-batch-size", "64", *_BOTH)
    direct = run(folder / "direct", *flags)
    os.environ["NCCL_P2P_DISABLE"] = "1"  # this process is this check's alone
    around = run(folder / "around", *flags)
    same_weights(direct, around)
    return {"samples_per_second": [done.summary["samples_per_second"] for done in (direct, around)]}


def scaling(folder: Path) -> dict[str, Any]:
    """The rate of a GPT on 1, 2, 4, … GPUs, with as much work for each."""
    count, rates = torch.cuda.device_count(), {}
    size = SIZE if is_simulated() else ("model.args.width=1024", "model.args.depth=12", "model.args.heads=16")
    steps = "8" if is_simulated() else "120"
    for workers in [2**n for n in range(count.bit_length()) if 2**n <= count]:
        how = ("--multi-gpu", "ddp", "--nproc-per-node", str(workers)) if workers > 1 else ("--multi-gpu", "none")
        flags = TOKENS | LENGTH | {"max_steps": steps, "log_interval": "20"}
        done: Run = run(folder / str(workers), *words(flags), *sets(*size), *how, "--amp", "bf16")
        rates[workers] = done.of("train")[-1]["samples_per_second"]
    shares = {workers: rate / workers / rates[1] for workers, rate in rates.items()}
    assert is_simulated() or shares[2] > 0.5, f"two GPUs are no faster than one: {rates}"
    return {"samples_per_second": rates, "share_of_linear": shares}
