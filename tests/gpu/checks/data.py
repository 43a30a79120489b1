"""Where batches come from: the same bits by every way."""

from pathlib import Path
from typing import Any

from tests.gpu.front_door import ALONE, figures, run, same_weights

_SHORT = ("--epochs", "2", "--exact", *ALONE)


def on_the_device_and_beside(folder: Path) -> dict[str, Any]:
    """Batches that a stream of their own brings in time are those that lie on the GPU."""
    there, beside = (run(folder / word, *_SHORT, "--data-on-device", word) for word in ("on", "off"))
    same_weights(there, beside)
    where = [done.of("start")[-1]["data"] for done in (there, beside)]
    assert where == ["in GPU memory", "in host memory"], where
    return figures(beside)


def loader_processes(folder: Path) -> dict[str, Any]:
    """Samples that processes fetch and pinned memory hands over are those that this process fetches."""
    flags = (*_SHORT, "--data", "tests.gpu.networks:pictures", "--model", "convnet", "--num-workers")
    alone, others = (run(folder / count, *flags, count) for count in ("0", "2"))
    same_weights(alone, others)
    where = others.of("start")[-1]["data"]
    assert where.startswith("fetched by 2 loader processes"), where
    return figures(others)
