"""CPU time that a sample costs before the model sees it: cropped, mirrored, normalised 32×32×3 images.

    python -m benchmarks.data_path

Our loader on a dataset in memory, against the per-sample Dataset and DataLoader of torch's tutorials, in one process.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from benchmarks.paired_timing import Row, alternate, program
from benchmarks.workloads import PerSample, pictures
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.loader import Loader
from multigpu_cli.planning.batch import plan_batches

_BATCH = 128


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    samples = 1024 if tiny else 8192
    ours, theirs, bare = _ours(samples), _theirs(samples), _ours(samples, augment=False)
    sides = {"ours": lambda: next(ours), "bare": lambda: next(bare), "theirs": lambda: next(theirs)}
    found = alternate(sides, 14 if tiny else 140)
    return [
        found.micro("our loader: a sample cropped, mirrored, normalised", "ours", _BATCH, aim=4.5),
        found.micro("our loader: a sample normalised only", "bare", _BATCH),
        found.micro("Dataset + DataLoader: a sample", "theirs", _BATCH),
        found.ratio("our loader / Dataset + DataLoader", "ours", "theirs", aim=0.12),
    ]


def _ours(samples: int, *, augment: bool = True) -> Iterator[None]:
    source = pictures(samples=samples)
    source = source if augment else replace(source, augment=None)
    loader = Loader(source.train, source, DataConfig(), device=torch.device("cpu"), seed=0)
    plan, epoch = plan_batches(samples=samples, micro_batch=_BATCH, workers=1), 0
    while True:
        for _, work in loader.epoch(plan, epoch, 0, 0, 1):
            for _ in work:
                yield
        epoch += 1


def _theirs(samples: int) -> Iterator[None]:
    loader = DataLoader(PerSample(samples), batch_size=_BATCH, shuffle=True, drop_last=True)
    while True:
        for _ in loader:
            yield


if __name__ == "__main__":
    program(measure, __doc__)
