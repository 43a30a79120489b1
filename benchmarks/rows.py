"""What a row on the disk costs: random rows of Arrow files, .tar shards and JSON lines, and a training step on them.

    python -m benchmarks.rows

The files lie in the page cache, so that nothing but the programs is measured. The steps train a small network on
batches of 32 rows of 12 KB; "again" is a second loader of the same rows in memory, the control. By default such rows
are read in the training process, as these are (`--num-workers auto` measures them, and sending them would take
longer): what that takes of its CPU time is measured. With a loader process beside it, it is the time on the clock.
Times are those of whole epochs, since rows of several batches are read at once.
"""

import json
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.paired_timing import Clock, Row, Seconds, alternate, program
from benchmarks.workloads import mlp
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.rows.arrow import ArrowStore
from multigpu_cli.data.rows.jsonl import JsonStore
from multigpu_cli.data.rows.store import RowStore
from multigpu_cli.data.rows.tar import TarStore
from multigpu_cli.data.source import DataSource
from multigpu_cli.planning.batch import plan_batches

_AT_ONCE, _BATCH, _WIDTH = 128, 32, 3072


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    rows, turns = (400, 28) if tiny else (20_000, 140)
    with tempfile.TemporaryDirectory(prefix="multigpu-rows-") as place:
        folder = Path(place)
        stores = _write_stores(folder, rows)
        reads = {name: _reader(store, column) for name, (store, column) in stores.items()}
        found = alternate(reads, turns)
        figures = [
            found.micro(f"{name}: a random row", name, _AT_ONCE, aim=aim)
            for name, aim in (("arrow", 3.0), ("tar", None), ("jsonl", None))
        ]
        figures.append(_time_finding(stores["tar"][0], turns))
        sources = _open_sources(folder, 320 if tiny else 2000)
        alone = _time_epochs(sources, 0, turns // 14, time.thread_time)
        beside = _time_epochs(sources, 1, turns // 14, time.perf_counter)
    steps = -(-sources["memory"].num_train_samples // _BATCH)
    figures.append(alone.micro("a step on rows in memory", "memory", steps))
    for took, where in ((alone, ""), (beside, ", read by a loader process")):
        names = ("again", "arrow", "mixture")
        figures += [took.ratio(f"a step on {name} / on rows in memory{where}", name, "memory") for name in names]
    return figures


def _time_epochs(sources: dict[str, DataSource], processes: int, turns: int, clock: Clock) -> Seconds:
    loaders = {name: _open_loader(source, processes) for name, source in sources.items()}
    steps = {name: partial(next, _run_epochs(loader)) for name, loader in loaders.items()}
    took = alternate(steps, turns, clock)
    for loader in loaders.values():
        loader.close()
    return took


def _write_stores(folder: Path, rows: int) -> dict[str, tuple[RowStore, str]]:
    """The same vectors of 64 numbers in each format."""
    numbers = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    arrow = _write_arrow(folder / "rows.arrow", numbers, np.zeros(rows, dtype=np.int64))
    lines, shard = folder / "rows.jsonl", folder / "rows.tar"
    lines.write_text("".join(json.dumps({"x": row.tolist()}) + "\n" for row in numbers.round(3)))
    with tarfile.open(shard, "w") as archive:
        for key, row in enumerate(numbers):
            sink = BytesIO()
            np.save(sink, row)
            for ending, content in (("npy", sink.getvalue()), ("cls", b"1")):
                info = tarfile.TarInfo(f"{key:06d}.{ending}")
                info.size = len(content)
                archive.addfile(info, BytesIO(content))
    return {"arrow": (ArrowStore([arrow]), "x"), "tar": (TarStore([shard]), "npy"), "jsonl": (JsonStore([lines]), "x")}


def _write_arrow(path: Path, inputs: np.ndarray, labels: np.ndarray) -> Path:
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(inputs.reshape(-1)), inputs.shape[1])
    table = pyarrow.table({"x": lists, "label": labels})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=1000)
    return path


def _reader(store: RowStore, column: str) -> Callable[[], Any]:
    generator = random.Random(0)
    return lambda: store.read(column, generator.choices(range(len(store)), k=_AT_ONCE))


def _time_finding(store: RowStore, turns: int) -> Row:
    """Where a row of a .tar is: its number, which lies in the index, without the member itself."""
    found = alternate({"cls": _reader(store, "cls")}, turns)
    return found.micro("tar: finding a random row", "cls", _AT_ONCE, aim=3.0)


def _open_sources(folder: Path, rows: int) -> dict[str, DataSource]:
    numbers = np.random.default_rng(1).normal(size=(rows, _WIDTH)).astype(np.float32)
    labels = np.arange(rows) % 10
    files = [_write_arrow(folder / f"{name}.arrow", numbers, labels) for name in "ab"]
    parts = tuple({"data": "arrow", "data_dir": str(file), "args": {}, "weight": 1.0} for file in files)
    arrow = load_data_source(DataConfig(name="arrow", dir=str(files[0])), 0)
    mixture = load_data_source(DataConfig(name="mixture", mix=parts, args={"samples": len(arrow.train)}), 0)  # type: ignore[arg-type]
    memory = replace(arrow, train=TensorDataset(torch.from_numpy(numbers), torch.from_numpy(labels)))
    return {"memory": memory, "again": memory, "arrow": arrow, "mixture": mixture}


def _run_epochs(loader: Loader) -> Iterator[None]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    plan, epoch = plan_batches(samples=loader.source.num_train_samples, micro_batch=_BATCH, workers=1), 0
    while True:
        for _, work in loader.epoch(plan, epoch, 0, 0, 1):
            for batch in work:
                cross_entropy(model(batch.inputs), batch.targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        yield
        epoch += 1


def _open_loader(source: DataSource, processes: int) -> Loader:
    config = DataConfig(num_workers=processes)
    return Loader(source.train, source, config, device=torch.device("cpu"), seed=0)


if __name__ == "__main__":
    program(measure, __doc__)
