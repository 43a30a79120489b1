"""A command as several ranks carry it out, forked from the running test."""

import sys
from collections.abc import Callable
from pathlib import Path

import main_multi_gpu
from tests.support.run_training import fork_ranks


def outputs(workers: int, words: list[str], folder: Path, prepare: Callable[[], object] = lambda: None) -> list[str]:
    """What each rank printed.

    Args:
        prepare: what each rank does first.
    """
    files = [folder / f"rank{rank}.txt" for rank in range(workers)]

    def work(rank: int) -> None:
        prepare()
        sys.stdout = files[rank].open("w")
        main_multi_gpu.leave(main_multi_gpu.run(words))

    fork_ranks(workers, work, 60)
    return [file.read_text() for file in files]
