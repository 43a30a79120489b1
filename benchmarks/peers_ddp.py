"""The peers' steps of the MLP on two gloo workers, each against raw DistributedDataParallel in the same processes.

    pip install '.[bench]'
    python -m benchmarks.peers_ddp

CPU time of all threads, both ranks. The peers are bare, ours is at its defaults. All train the same network with the
same optimizer, unclipped; the loop written by hand takes its steps between theirs, and again as its own control.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp import WORKERS, late, raced
from benchmarks.paired_timing import STRETCH, Row, Seconds, program
from benchmarks.peers import PEERS, Peer, Race, control, installed, rank_output
from benchmarks.workloads import BATCH, Rivals, adamw, mlp, one_step, shuffled, vectors


def measure(tiny: bool = False) -> list[Row]:
    turns = 10 if tiny else 150
    peers = {name: PEERS[name][1] for name in installed()}
    return [each for name, peer in peers.items() if peer is not control for each in _compared(name, peer, turns)]


def _compared(name: str, peer: Peer, turns: int) -> list[Row]:
    found = raced(partial(_run, peer, turns))
    return [
        found.ratio(f"DDP: {name} / hand-written", "ours", "raw"),
        found.over(f"DDP: {name} over hand-written, both ranks", "ours", "raw"),
        found.ratio(f"DDP: hand-written / itself beside {name} (control)", "control", "raw"),
    ]


def _run(peer: Peer, turns: int, folder: Path) -> Seconds:
    seconds = Seconds(time.process_time)
    rivals = Rivals({"raw": late(_raw), "control": late(_raw)}, seconds)
    with rank_output(folder):
        peer(Race(turns * STRETCH, rivals, seconds, workers=WORKERS))
    return seconds


def _raw() -> Callable[[], None]:
    model, data = mlp(), vectors("train")
    assert data is not None
    batches = shuffled(data, BATCH // WORKERS)
    return one_step(DistributedDataParallel(model), adamw(model, fused=False), batches)


if __name__ == "__main__":
    program(measure, __doc__)
