"""A few ranks with a gloo group between them, forked from the running test: quick, since torch is imported already."""

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from multigpu_cli.distributed.world import World
from tests.support import safe_forks  # noqa: F401

_SECONDS = 240  # beside busy programs too
TIMEOUT = timedelta(seconds=30)
Join = Callable[[dist.Store, int, int], World]


def with_gloo(store: dist.Store, rank: int, size: int) -> World:
    """Join the others as a process on the CPU."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(torch.device("cpu"), rank, size, rank, size)


def run_on_each_rank(size: int, work: Callable[[World], Any], join: Join = with_gloo) -> list[Any]:
    """Do `work` on all ranks at once; what it returned (plain values, no tensors), in rank order.

    Args:
        join: what each rank does first.

    Raises:
        AssertionError: some rank raised or hung; its traceback.
    """
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            fork.Process(target=_rank, args=(rank, size, Path(folder, "store"), work, join, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            answers = [reader.recv() if reader.poll(_SECONDS) else ("hung", None) for reader, _ in pipes]
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
    wrong = [f"rank {rank}: {trace}" for rank, (trace, _) in enumerate(answers) if trace]
    assert not wrong, "\n".join(wrong)
    return [result for _, result in answers]


def _rank(rank: int, size: int, store: Path, work: Callable[[World], Any], join: Join, pipe: Connection) -> None:
    try:
        world = join(dist.FileStore(str(store), size), rank, size)
        pipe.send(("", work(world)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still reads
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    os._exit(0)
