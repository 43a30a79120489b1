"""Fetches the samples of a map-style dataset, in loader processes or in this process."""

import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import tee
from multiprocessing import current_process
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from multigpu_cli.data.collate import Collate, get_sample, get_samples, unwrap_dataset
from multigpu_cli.data.data_source import LoaderOptions
from multigpu_cli.data.epoch_order import EVAL_EPOCH
from multigpu_cli.data.transfer import Fetched, move_batches
from multigpu_cli.data.worker_context import LoaderContext, end_processes, ignore_group_signals
from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.planning.rng_keys import make_key
from multigpu_cli.runtime.seeding import seed_host

_MOST_PROCESSES = 8  # for each worker
_HANDED_OVER = 30e-6  # seconds that a sample of a small batch costs this process if another one fetches it
_LONGEST_LOOK = 0.5  # seconds


Result = TypeVar("Result")


class ItemFetcher:
    """A map-style dataset, fetched sample by sample; the order of samples is settled before the loader sees it."""

    def __init__(
        self,
        split: Dataset[Any],
        device: torch.device,
        seed: int,
        wanted: int | str,
        workers_here: int,
        fetching: LoaderOptions,
    ) -> None:
        processes, reason = _loader_processes(SeededDataset(split, seed), wanted, workers_here)
        self.device = device
        self._chunks = _Chunks()
        self._loader: DataLoader[Any] = DataLoader(
            SeededDataset(split, seed),
            collate_fn=Collate(split),
            batch_sampler=self._chunks,
            num_workers=processes,
            pin_memory=fetching.pin_memory and device.type == "cuda",
            prefetch_factor=fetching.prefetch if processes else None,
            persistent_workers=processes > 0,
            worker_init_fn=ignore_group_signals,
            multiprocessing_context=LoaderContext() if processes else None,
        )
        self.data_location = (
            f"fetched by {pluralize(processes, 'loader process')}" if processes else "fetched in this process"
        )
        self.data_location += reason
        if processes:  # forked now: amid training a thread may hold a lock, and the child would wait for it for ever
            deque(self._loader, maxlen=0)

    def stream(self, chunks: Iterable[Tensor], epoch: int) -> Iterator[Fetched]:
        asked, chunks = tee(chunks)
        self._chunks.now = ([(epoch, index) for index in chunk.tolist()] for chunk in asked)
        with _without_traceback():
            fetched = zip(chunks, self._loader, strict=True)
            yield from move_batches(((inputs, targets, indices) for indices, (inputs, targets) in fetched), self.device)

    def close(self) -> None:
        """End the loader processes, if there are any."""
        end_processes(self._loader)


class _Chunks:
    """A batch sampler whose batches are laid down before each pass."""

    def __init__(self) -> None:
        self.now: Iterable[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.now)


class SeededDataset(Dataset[Any]):
    """The user's dataset, with all generators seeded from (seed, epoch, sample) before each item.

    A dataset that fetches whole batches (`__getitems__`) is seeded once for each, by its first sample: which samples
    are a batch depends on the seed and the step alone. A number beyond the dataset's end is a sample that comes again.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._size = len(dataset)  # type: ignore[arg-type]
        self._whole = callable(getattr(unwrap_dataset(dataset), "__getitems__", None))

    def __getitem__(self, where: tuple[int, int]) -> tuple[int, Any]:
        self._seed(*where)
        index = where[1] % self._size
        return index, get_sample(self.dataset, index)

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, Any]]:
        if not self._whole:
            return [self[where] for where in places]
        self._seed(*places[0])
        indices = [index % self._size for _, index in places]
        return list(zip(indices, get_samples(self.dataset, indices), strict=True))

    def _seed(self, epoch: int, index: int) -> None:
        seed_host(make_key(self.seed, epoch, index))


def _loader_processes(dataset: SeededDataset, wanted: int | str, workers_here: int) -> tuple[int, str]:
    """How many, and for `auto` why: one a spare core, unless samples come faster than a process hands them over."""
    if wanted != "auto":
        return int(wanted), ""
    spare = 0 if current_process().daemon else min(_MOST_PROCESSES, (os.cpu_count() or 1) // workers_here - 1)
    if spare < 1:
        return 0, ": no core to spare"
    seconds = run_in_process(partial(_seconds_a_sample, dataset))
    return (spare if seconds > _HANDED_OVER else 0), f": {1e6 * seconds:,.0f} µs a sample, measured"


def run_in_process(work: Callable[[], Result]) -> Result:
    """What `work` returns in a process of its own: a file that a dataset opens here, before the fork, would be shared.

    Raises:
        RequestError: the user's dataset failed.
    """
    if current_process().daemon:  # it may not have children, so none of its files will be shared either
        return work()
    there: DataLoader[Result] = DataLoader(
        [work],  # type: ignore[arg-type]  # a list is a dataset, too
        batch_size=None,
        collate_fn=operator.call,  # type: ignore[arg-type]
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=ignore_group_signals,
        multiprocessing_context=LoaderContext(),
    )
    try:
        with _without_traceback():
            return next(iter(there))  # type: ignore[no-any-return]
    finally:
        end_processes(there)


@contextmanager
def _without_traceback() -> Iterator[None]:
    """What a loader process says of the user's dataset, without the way there, which torch puts before it."""
    try:
        yield
    except RequestError as error:
        _, came_from_there, said = error.problem.rpartition(f"{RequestError.__module__}.RequestError: ")
        if came_from_there:
            raise RequestError(said.strip()) from error
        raise


def _seconds_a_sample(dataset: SeededDataset) -> float:
    """The least of a few, since the first may open files."""
    taken: list[float] = []
    for index in range(min(8, len(dataset.dataset))):  # type: ignore[arg-type]
        began = time.perf_counter()
        dataset[EVAL_EPOCH, index]
        taken.append(time.perf_counter() - began)
        if sum(taken) > _LONGEST_LOOK:
            break
    return min(taken, default=0.0)
