"""A command as several ranks carry it out, forked from the running test."""

import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import main_multi_gpu
from tests.support.run_training import Agent


def outputs(workers: int, words: list[str], folder: Path, prepare: Callable[[], object] = lambda: None) -> list[str]:
    """What each rank printed.

    Args:
        prepare: what each rank does first.
    """
    fork, agent = get_context("fork"), Agent(workers)
    files = [folder / f"rank{rank}.txt" for rank in range(workers)]

    def work(rank: int) -> None:
        os.environ.update(agent.variables(rank))
        prepare()
        sys.stdout = files[rank].open("w")
        main_multi_gpu.leave(main_multi_gpu.run(words))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks beside torch's threads
        ranks = [fork.Process(target=work, args=(rank,)) for rank in range(workers)]
        for process in ranks:
            process.start()
    with agent.serving():
        for process in ranks:
            process.join(60)
            process.kill()
            assert process.exitcode == 0
    return [file.read_text() for file in files]
