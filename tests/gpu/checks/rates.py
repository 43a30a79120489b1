"""What a run says of its GPU, against what this process measures."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.monitor.gpu import peak_flops
from tests.gpu.front_door import ALONE, Run, figures, run, sets
from tests.gpu.machine import is_simulated

_WIDTH, _DEPTH, _BATCH = 4096, 4, 8192
_STEPS = 1200
_OF_A_GPU = ("gpu_utilisation", "gpu_temperature", "gpu_power", "gpu_memory_used")


def sampler(folder: Path) -> dict[str, Any]:
    """Each log line has what NVML says, and memory in use by everybody is at least what torch holds."""
    done = run(folder, *ALONE, "--model", "tests.gpu.networks:at_pass", "--max-steps", "200")
    return _check_samples(done)


def _check_samples(done: Run) -> dict[str, Any]:
    last = done.of("train")[-1]
    assert all(name in last for name in _OF_A_GPU), f"a log line has {sorted(last)}"
    unknown = [name for name in _OF_A_GPU if None in last[name]]
    assert "gpu_memory_used" not in unknown, f"NVML does not say: {unknown}"
    used, held = last["gpu_memory_used"][0], last["memory_reserved"][0]
    assert used >= held > 0 or is_simulated(), (
        f"{used} bytes in use, torch holds {held}"
    )  # there NVML's answers are planted
    return figures(done) | {name: last[name] for name in _OF_A_GPU} | {"unknown": unknown}


def mfu_of_known_products(folder: Path) -> dict[str, Any]:
    """A network of nothing but large products: its MFU is near the share of the peak that such a product reaches."""
    peak = peak_flops(torch.cuda.get_device_name(0), "bf16")
    assert peak, f"no peak rate of {torch.cuda.get_device_name(0)} in planning/speedup.py"
    share = _product_rate() / peak
    sizes = (f"data.args.shape=[{_WIDTH}]", f"data.args.train={2 * _BATCH}", "data.args.val=0", "data.args.test=0")
    flags = ("--data", "synthetic", "--model", "tests.gpu.networks:products", "--batch-size", str(_BATCH))
    length = ("--epochs", "10000", "--max-steps", str(_STEPS), "--checkpoint-every", "100000", "--log-interval", "200")
    done = run(folder, *ALONE, *flags, *sets(*sizes), *length, "--amp", "bf16")
    lines = done.of("train")[1:]
    mfu = statistics.median(line["mfu"] for line in lines)
    of_a_sample = 6 * (_DEPTH * _WIDTH**2 + 10 * _WIDTH) - 2 * _WIDTH**2  # nobody needs the inputs' gradient
    known = of_a_sample * statistics.median(line["samples_per_second"] for line in lines)
    assert abs(mfu - known / peak) < 0.05 * mfu, f"MFU {mfu:.3f}, by hand {known / peak:.3f}"
    assert 0.5 * share < mfu < 1.1 * share, f"MFU {mfu:.3f}; one product reaches {share:.3f} of the peak"
    busy = [line["gpu_utilisation"][0] for line in lines if line["gpu_utilisation"][0] is not None]
    assert busy, "NVML says nothing of utilisation"
    assert max(busy) > 50, f"utilisation {busy} %"
    return _check_samples(done) | {"mfu": mfu, "product_share": share, "busy": busy}


def _product_rate() -> float:
    """FLOP/s of one product of the network's size on random data."""
    left, right = (torch.randn(size, _WIDTH, device="cuda", dtype=torch.bfloat16) for size in (_BATCH, _WIDTH))
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    began, times = time.perf_counter(), 50
    for _ in range(times):
        left @ right
    torch.cuda.synchronize()
    return 2 * _BATCH * _WIDTH**2 * times / (time.perf_counter() - began)
