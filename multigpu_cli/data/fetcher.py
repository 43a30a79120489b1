"""Fetches the samples of a map-style dataset, in loader processes or in this process."""

import atexit
import gc
import operator
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import tee
from multiprocessing import current_process
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.util import Finalize
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from multigpu_cli.data.collate import (
    Collate,
    Collated,
    Fetched,
    TokenCounts,
    count_tokens,
    fetch_together,
    get_sample,
    get_samples,
    move_batches,
    unwrap_dataset,
)
from multigpu_cli.data.order import EVAL_EPOCH
from multigpu_cli.data.source import SPLITS, DataSource
from multigpu_cli.distributed.placement import count_cores
from multigpu_cli.distributed.processes import die_with_parent
from multigpu_cli.errors import RequestError, TrainingError, pluralize
from multigpu_cli.planning.batch import make_key
from multigpu_cli.runtime.seeding import seed_host

_MOST_PROCESSES = 16  # per worker, as in torchvision's own training: each keeps batches in shared memory
_TRANSFER_COST = 30e-6  # seconds per sample of receiving a small batch from another process

Result = TypeVar("Result")


class ItemFetcher:
    """Fetches a map-style dataset sample by sample, with a DataLoader that is given the indices of each batch."""

    def __init__(
        self,
        split: Dataset[Any],
        device: torch.device,
        seed: int,
        wanted: int | str,
        workers_here: int,
        source: DataSource,
    ) -> None:
        self.device = device
        self._dataset, self._collate = _seed_split(split, seed, source), Collate(split, source.form)
        processes, reason = _loader_processes(self._dataset, wanted, workers_here)
        self._fetches_whole = not processes and self._dataset.fetch_batch is not None  # DataLoader would only cost time
        known = [part for part in (source.train, source.val, source.test, source.new) if part is not None]
        splits = known if any(part is split for part in known) else [split]
        self._number = next(at for at, part in enumerate(splits) if part is split)
        key = os.getpid(), id(source), *map(id, splits), str(device), seed, processes
        pool = _pools.get(key) if processes else None
        if pool is None or not pool.users:
            pool = _Pool(splits, device, seed, processes, source)
        _pools[key] = self._loader = pool
        pool.users.add(self)
        where = f"by {pluralize(processes, 'loader process')}" if processes else "in this process"
        self.data_location = f"fetched {where}{reason}"

    def stream(self, chunks: Iterable[Tensor], epoch: int) -> Iterator[Fetched]:
        batches = fetch_together(chunks, self._fetch_whole) if self._fetches_whole else self._fetch(chunks, epoch)
        with _without_traceback():
            yield from move_batches(batches, self.device)

    def _fetch(self, chunks: Iterable[Tensor], epoch: int) -> Iterator[Fetched]:
        """Batches from the pool; where another stream has had it in between, what is left is asked for again."""
        while True:
            requested, chunks = tee(chunks)
            turn = self._loader.turn = object()
            self._loader.requests.now = ((self._number, [(epoch, at) for at in chunk.tolist()]) for chunk in requested)
            made = iter(self._loader)
            while self._loader.turn is turn:
                if (found := next(made, None)) is None:
                    return
                batch, tokens = found
                yield Fetched(batch.inputs, batch.targets, next(chunks), tokens)

    def _fetch_whole(self, indices: Tensor) -> Fetched:
        whole = self._dataset.fetch_whole(indices.numpy())
        self._collate.check_classes(whole.indices, whole.targets)
        return whole

    def close(self) -> None:
        """End the loader processes, if any, unless other splits need them."""
        self._loader.users.discard(self)
        if not self._loader.users:
            end_processes(self._loader)


Request = tuple[int, list[tuple[int, int]]]
"""A batch that is asked for: the number of a split, and (epoch, index) of each sample."""


class _Pool(DataLoader[Any]):
    """The processes that fetch the samples of all splits of a source, for one stream of batches at a time."""

    def __init__(
        self, splits: list[Dataset[Any]], device: torch.device, seed: int, processes: int, source: DataSource
    ) -> None:
        self.source, self.users = source, WeakSet[ItemFetcher]()
        self.turn: object = None  # of the stream that was begun last
        self.requests, options = _Requests(), source.loader_options
        super().__init__(
            _Splits([(_seed_split(split, seed, source), Collate(split, source.form)) for split in splits]),
            collate_fn=lambda made: made,
            batch_sampler=self.requests,  # type: ignore[arg-type]  # what `_Splits` is asked for
            num_workers=processes,
            pin_memory=options.pin_memory and device.type == "cuda",
            prefetch_factor=options.prefetch if processes else None,
            persistent_workers=processes > 0,
            worker_init_fn=ignore_group_signals,
            multiprocessing_context=LoaderContext() if processes else None,
        )
        if processes:  # fork now: during training a thread may hold a lock, on which the child would wait for ever
            deque(self, maxlen=0)
            Finalize(None, _end_pools, exitpriority=11)  # in a child of multiprocessing; queues are closed at 10


_pools: WeakValueDictionary[tuple[object, ...], _Pool] = WeakValueDictionary()


@atexit.register  # after torch's own, so called before it: from then on a DataLoader ends no processes
def _end_pools() -> None:
    """End what is left at exit: multiprocessing terminates its children and waits, but these ignore SIGTERM."""
    for pool in [pool for (process, *_), pool in _pools.items() if process == os.getpid()]:
        end_processes(pool)


class _Requests:
    """A batch sampler whose batches are set before each pass."""

    now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


class _Splits(Dataset[Any]):
    """The datasets of all splits, with their way to make a batch."""

    def __init__(self, parts: "list[tuple[SeededDataset, Collate]]") -> None:
        self._parts = parts

    def __getitems__(self, request: Request) -> tuple[Collated, TokenCounts | None]:
        number, places = request
        dataset, collate = self._parts[number]
        numbered = dataset.__getitems__(places)
        if isinstance(numbered, Fetched):
            collate.check_classes(numbered.indices, numbered.targets)
            return Collated(numbered.inputs, numbered.targets), None
        made = collate(numbered)
        return made, count_tokens([item for _, item in numbered], made.targets)  # on a device one would wait for them


class SeededDataset(Dataset[Any]):
    """The user's dataset, with all random generators seeded from (seed, epoch, sample) before each item.

    A dataset of ours with `fetch_batch(indices)` puts batches together without a sample in between; it draws no random
    numbers. One that fetches several samples at once (`__getitems__`) is seeded once per batch, by its first sample;
    the samples of a batch depend only on the seed and the step. A number beyond the dataset's end is a repeated sample.
    Packs are made anew for each epoch; a method `set_epoch` of a user's is not called: here it would be for every
    sample, and for evaluations with a number that many can't take.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, split: str = "train") -> None:
        self.dataset, self.seed, self.split = dataset, seed, split
        self._size = len(dataset)  # type: ignore[arg-type]
        self._make_packs = getattr(unwrap_dataset(dataset), "make_packs_of_epoch", None)
        self.fetch_batch = getattr(dataset, "fetch_batch", None)
        self._whole = callable(getattr(unwrap_dataset(dataset), "__getitems__", None))

    def __getitem__(self, where: tuple[int, int]) -> tuple[int, Any]:
        self._seed(*where)
        index = where[1] % self._size
        return index, get_sample(self.dataset, index, self.split)

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, Any]] | Fetched:
        if self.fetch_batch is not None:
            return self.fetch_whole(np.array([index for _, index in places]))
        if not self._whole:
            return [self[where] for where in places]
        self._seed(*places[0])
        indices = [index % self._size for _, index in places]
        return list(zip(indices, get_samples(self.dataset, indices, self.split), strict=True))

    def fetch_whole(self, indices: np.ndarray) -> Fetched:
        """A batch that the dataset itself puts together (`fetch_batch`)."""
        assert self.fetch_batch is not None
        at = indices % self._size
        inputs, targets = self.fetch_batch(at)
        return Fetched(inputs, targets, torch.from_numpy(at))

    def _seed(self, epoch: int, index: int) -> None:
        if self._make_packs is not None:
            self._make_packs(epoch)
        seed_host(make_key(self.seed, epoch, index))


def _seed_split(dataset: Dataset[Any], seed: int, source: DataSource) -> SeededDataset:
    """Return the dataset of a split, with the name that the source has for it, for messages."""
    names = (name for name in (*SPLITS, "new") if getattr(source, name) is dataset)
    return SeededDataset(dataset, seed, next(names, "train"))


def _loader_processes(dataset: SeededDataset, wanted: int | str, workers_here: int) -> tuple[int, str]:
    """Number of loader processes, with the reason for `auto`: one per spare core up to 16; 0 if samples are cheap."""
    if wanted != "auto":
        return int(wanted), ""
    spare = 0 if current_process().daemon else min(_MOST_PROCESSES, count_cores() // workers_here - 1)
    if spare < 1:
        return 0, ": no spare core"
    seconds = run_in_process(partial(_seconds_a_sample, dataset))
    return (spare if seconds > _TRANSFER_COST else 0), f": {1e6 * seconds:,.0f} µs a sample, measured"


def run_in_process(work: Callable[[], Result]) -> Result:
    """Call `work` in another process: a file that a dataset opens here would be shared with forked loader processes."""
    if current_process().daemon:  # a daemon may not fork, so its files are not shared either
        return work()
    there: DataLoader[Result] = DataLoader(
        [work],  # type: ignore[arg-type]  # a list serves as a dataset
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
    """Re-raise a loader process's TrainingError without the traceback that torch adds to its message."""
    try:
        yield
    except TrainingError as error:
        kind = type(error)
        _, found, message = error.problem.rpartition(f"{kind.__module__}.{kind.__name__}: ")
        if found:
            raise kind(message.strip()) from error
        raise


def _seconds_a_sample(dataset: SeededDataset) -> float:
    """The shortest time of a few samples, since the first may open files."""
    taken: list[float] = []
    rows = 1 if dataset.fetch_batch is None else 32  # as many as are typical
    for index in range(min(8, len(dataset.dataset))):  # type: ignore[arg-type]
        places = [(EVAL_EPOCH, index + row) for row in range(rows)]
        began = time.perf_counter()
        dataset.__getitems__(places)
        taken.append((time.perf_counter() - began) / len(places))
        if index > 1 and sum(taken) > 0.5:  # seconds
            break
    return min(taken, default=0.0)


_LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes: the path of a Unix socket has 108, with a final zero
_SHORT = ("/tmp", "/dev/shm")  # used if TMPDIR is too long


class LoaderContext(ForkContext):
    """The start method of loader processes, for DataLoader's `multiprocessing_context`; `close` removes their sockets.

    torch passes tensors through Unix sockets, which multiprocessing creates below TMPDIR; a long path breaks them.
    """

    def __init__(self) -> None:
        self._sockets = tempfile.mkdtemp(prefix="pymp-", dir=_short_folder())  # the prefix of multiprocessing itself

    def Process(self, *args: Any, **named: Any) -> ForkProcess:  # type: ignore[override]
        return _LoaderProcess(self._sockets, *args, **named)

    def close(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)


class _LoaderProcess(ForkProcess):
    terminate = ForkProcess.kill  # it ignores SIGTERM, which torch sends to one that has not ended when it was asked to

    def __init__(self, sockets: str, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._config["tempdir"] = sockets  # type: ignore[attr-defined]  # multiprocessing reads it from here

    def _bootstrap(self, *args: Any, **named: Any) -> int:
        # torch starts its own check later, of the parent at that time: where the trainer was killed in between, it is
        # another one, and this process would never end
        die_with_parent(self._parent_pid)  # type: ignore[attr-defined]
        gc.freeze()  # what the parent left to be collected, such as another loader's iterator, is not this process's
        return super()._bootstrap(*args, **named)  # type: ignore[misc, no-any-return]


def ignore_group_signals(_: int) -> None:
    """A `worker_init_fn`: a signal to the process group is meant for the trainer, which still needs its loaders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_processes(loader: DataLoader[Any]) -> None:
    """End a loader's processes now: garbage collection may never happen, and they must not outlive this process."""
    if (iterator := loader._iterator) is not None and loader.num_workers:
        iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None
    if isinstance(context := loader.multiprocessing_context, LoaderContext):
        context.close()


def _short_folder() -> str:
    for folder in (tempfile.gettempdir(), *_SHORT):
        if len(os.fsencode(folder)) <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    reason = "too long for the sockets of loader processes, and /tmp is not writable"
    remedy = f"set TMPDIR to a path of at most {_LONGEST} bytes, or use --num-workers 0"
    raise RequestError(f"--num-workers: TMPDIR={tempfile.gettempdir()} is {reason}", remedy=remedy)
