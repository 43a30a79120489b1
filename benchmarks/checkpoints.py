"""How long the loop waits for a checkpoint, as rows of the suite; see checkpoint_stall.py for what is measured how.

python -m benchmarks.checkpoints
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.checkpoint_stall import learner, measure_stall
from benchmarks.paired_timing import ROOT, Row, program, row

_INTERVAL = 50  # steps between two checkpoints


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    megabytes, pairs, rounds = (1.0, 1, 1) if tiny else (100.0, 3, 5)
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=ROOT, prefix=".checkpoint-stall-") as folder:
            kept, step = learner(megabytes, torch.device("cpu"))
            found.append(measure_stall(kept, step, Path(folder), pairs))
    shares = [each["stall_ms"] / (each["stall_ms"] + _INTERVAL * each["step_ms"]) for each in found]
    return [
        row("checkpoint: stall of the loop", [each["stall_ms"] for each in found], unit="ms"),
        row("checkpoint: stall / writing it synchronously", [each["stall_share"] for each in found]),
        row(f"checkpoint: share of the time at an interval of {_INTERVAL} steps", shares, aim=0.035),
    ]


if __name__ == "__main__":
    program(measure, __doc__)
