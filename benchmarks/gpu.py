"""On a GPU: our whole runs against the limit of the same model on batches that lie ready on the device.

    make gpu-bench        # or python -m benchmarks.gpu; under eight minutes

Without CUDA it says what it would have measured and ends well. Ours are runs of the front door as users start them; a
rate is that of the run's own summary, in which warm-up counts. Each limit is the plain loop: bf16 autocast,
channels_last, fused AdamW, no data path, nothing watched.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.pairs import ROOT, Row, program, row
from multigpu_cli.data.base import Source
from multigpu_cli.models.gpt import build as gpt
from multigpu_cli.models.har_convnet import build as har_convnet
from multigpu_cli.models.resnet import ResNet
from multigpu_cli.monitor import journal

_GOAL = 0.94
_PICTURES, _HAR = (3, 224, 224), (9, 128)
_VOCABULARY, _BLOCK = 50304, 1024
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}  # bf16, dense


def resnet34(input_shape: Sequence[int] = _PICTURES, num_classes: int = 10) -> nn.Module:
    """21.8 million parameters, of ResNet-50's size and built of our blocks."""
    return ResNet(tuple(input_shape), num_classes, 64, blocks=(3, 4, 6, 3))


def measure(tiny: bool = False) -> list[Row]:
    rows: list[Row] = []
    for name, job in JOBS.items():
        if torch.cuda.is_available():
            rows += job(name, tiny)
        else:
            print(f"skipped: {name}: there is no CUDA", file=sys.stderr)
    return rows


def _run(flags: dict[str, str], sets: Sequence[str] = ()) -> tuple[dict[str, float], list[journal.Event]]:
    """A run of the front door: its summary and its journal."""
    with tempfile.TemporaryDirectory() as folder:
        given = [word for key, value in flags.items() for word in (f"--{key}", value)]
        given += [word for each in sets for word in ("--set", each)]
        command = [sys.executable, "main_multi_gpu.py", "--json", "--save-dir", folder, "--multi-gpu", "none", *given]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout), list(journal.read(Path(folder, "journal.jsonl")))


class Job(NamedTuple):
    """One network on one kind of batch, for us and for the limit.

    Attributes:
        flags, sets: of our run; batch-size and max-steps are the limit's too.
        model: builds the network.
        batch: inputs and targets of one batch.
        aim: our rate as a share of the limit's.
    """

    flags: dict[str, str]
    sets: Sequence[str]
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    aim: float


def _limit(job: Job) -> float:
    """Samples a second of the plain loop, after a tenth of its steps as warm-up."""
    steps, device = int(job.flags["max-steps"]), torch.device("cuda")
    model = job.model().to(device)
    inputs, targets = (tensor.to(device) for tensor in job.batch(int(job.flags["batch-size"])))
    if inputs.ndim == 4:
        model, inputs = (each.to(memory_format=torch.channels_last) for each in (model, inputs))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(inputs)
        cross_entropy(logits.float().flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    for _ in range(max(3, steps // 10)):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return len(inputs) * steps / (time.perf_counter() - began)


def _against_limit(name: str, job: Job) -> list[Row]:
    rates, limits = [], []
    for _ in range(3):
        rates.append(_run(job.flags, job.sets)[0]["samples_per_second"])
        limits.append(_limit(job))
    shares = [rate / most for rate, most in zip(rates, limits, strict=True)]
    return [
        row(f"{name}: ours", rates, unit="samples/s"),
        row(f"{name}: the limit", limits, unit="samples/s"),
        row(f"{name}: ours / limit", shares, aim=job.aim, at_least=True),
    ]


def _classes(shape: Sequence[int], count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda batch: (torch.randn(batch, *shape), torch.arange(batch) % count)


def _steps(wanted: int, tiny: bool) -> dict[str, str]:
    return {"epochs": "1000", "max-steps": str(10 if tiny else wanted), "log-interval": "1000"}


def _pictures(name: str, tiny: bool) -> list[Row]:
    flags = {"data": "synthetic", "model": "benchmarks.gpu:resnet34", "batch-size": "256"} | _steps(150, tiny)
    sets = ["data.args.shape=[3,224,224]", "data.args.train=8192", "data.args.val=0", "data.args.test=0"]
    return _against_limit(name, Job(flags, sets, resnet34, _classes(_PICTURES, 10), 0.98))


def _har(name: str, tiny: bool) -> list[Row]:
    rows = []
    for compiled in ("off", "reduce-overhead"):
        flags = {"data": "har", "model": "har-convnet", "batch-size": "64", "compile": compiled} | _steps(1500, tiny)
        job = Job(flags, [], lambda: har_convnet(_HAR, 6), _classes(_HAR, 6), 0.9)
        rows += _against_limit(f"{name}, --compile {compiled}", job)
    return rows


def _fashion(name: str, tiny: bool) -> list[Row]:
    _, events = _run({"config": "fashion_mnist"} | ({"max-steps": "20"} if tiny else {}))
    began = next(event["time"] for event in events if event["event"] == "start")
    good = [e["time"] for e in events if e["event"] == "eval" and e["split"] == "val" and e["accuracy"] >= _GOAL]
    if not good:
        print(f"{name}: never reached", file=sys.stderr)
        return []
    return [row(name, [good[0] - began], unit="s")]


def tokens(windows: int = 2048) -> Source:
    """Random tokens of GPT-2's vocabulary."""
    torch.manual_seed(1)
    drawn = torch.randint(0, _VOCABULARY, (windows, _BLOCK + 1))
    train = TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
    kinds = {"model": "gpt", "task": "language-model"}
    return Source(train=train, val=None, test=None, input_shape=(_BLOCK,), num_classes=_VOCABULARY, **kinds)


def gpt2(input_shape: Sequence[int] = (_BLOCK,), num_classes: int = _VOCABULARY) -> nn.Module:
    return gpt(tuple(input_shape), num_classes, depth=12, heads=12, width=768)


def _gpt2(name: str, tiny: bool) -> list[Row]:
    flags = {"data": "benchmarks.gpu:tokens", "model": "benchmarks.gpu:gpt2", "batch-size": "16"} | _steps(60, tiny)
    rows = _against_limit(name, Job(flags, [], gpt2, lambda batch: tokens(batch).train.tensors, 0.98))
    weights = sum(p.numel() for p in gpt2().parameters())
    peak = next((peak for part, peak in _PEAKS.items() if part in torch.cuda.get_device_name()), None)
    if peak is None:
        print(f"{name}: no MFU, the peak of {torch.cuda.get_device_name()} is not in the table", file=sys.stderr)
        return rows
    share = 6 * weights * _BLOCK / peak  # FLOPs of a sample (Kaplan et al. 2020), without attention's own
    ours = rows[0]
    return [*rows, Row(f"{name}: MFU", ours.value * share, ours.least * share, ours.most * share)]


JOBS: dict[str, Callable[[str, bool], list[Row]]] = {
    "GPT-2 124M, bf16, 1,024 tokens": _gpt2,
    "ResNet-34, 224×224, bf16, images in GPU memory": _pictures,
    "HAR convnet, batch 64": _har,
    f"Fashion-MNIST, seconds to {_GOAL:.0%} on the validation part": _fashion,
}


if __name__ == "__main__":
    program(measure, __doc__)
