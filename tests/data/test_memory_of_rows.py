"""Data larger than any memory: a file of 64 GB, nearly all of it holes, of which rows are read at random."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest

_BATCHES, _ROWS, _WIDTH = 1000, 4096, 4096  # 64 MB a batch

_READ = """
import sys
import torch
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.fingerprint import compute_fingerprint
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Loader
from multigpu_cli.planning.batch import plan_batches

source = load_data_source(DataConfig(name="arrow", dir=sys.argv[1]), 0)
compute_fingerprint(source, 0)
config = DataConfig(num_workers=0, shuffle_block=int(sys.argv[2]) or None)
loader = Loader(source.train, source, config, device=torch.device("cpu"), seed=0)
plan, seen = plan_batches(samples=len(source.train), micro_batch=32, workers=1), 0
for _, work in loader.epoch(plan, 0, 0, 0, 1):
    seen += sum(int(batch.inputs[0, -1] == 0) for batch in work)
    if seen == 100:
        break
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(len(source.train), status["RssAnon"].split()[0])
"""


def write_holes(path: Path) -> None:
    """Record batches whose numbers are all zero, and whose bytes are holes; only their headers are written."""
    zeros = pyarrow.array(np.zeros(_ROWS * _WIDTH, dtype=np.float32))
    columns = [pyarrow.FixedSizeListArray.from_arrays(zeros, _WIDTH), pyarrow.array(np.zeros(_ROWS, dtype=np.int64))]
    batch = pyarrow.record_batch(columns, names=["x", "label"])
    body = zeros.nbytes + columns[1].nbytes
    head = batch.serialize().slice(0, batch.serialize().size - body).to_pybytes()
    with path.open("wb") as file:
        file.write(batch.schema.serialize().to_pybytes())
        for _ in range(_BATCHES):
            file.write(head)
            file.seek(body, os.SEEK_CUR)
        file.write(b"\xff\xff\xff\xff\0\0\0\0")


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 4096])
def test_a_file_of_64_gigabytes_takes_little_memory(tmp_path: Path, block: int) -> None:
    path = tmp_path / "holes.arrow"
    write_holes(path)
    assert path.stat().st_size > 2**36 * 0.97
    if path.stat().st_blocks * 512 > 2**28:
        pytest.skip("the file system has no holes")
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(path), str(block)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows, kilobytes = map(int, done.stdout.split())
    assert rows == _BATCHES * _ROWS // 10 * 8
    assert kilobytes < 500 * 1024
