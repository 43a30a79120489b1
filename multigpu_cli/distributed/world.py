"""`World`: a process among the ranks; collectives, errors that all raise, calls that may hang; and device memory."""

import ctypes
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from logging import getLogger
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout  # there is no public way; torchtitan uses it as well

from multigpu_cli.distributed.launch_env import FinalVerdict, PreviousAttempt
from multigpu_cli.errors import OutOfMemory, RequestError, TrainingError


class RankGpu(NamedTuple):
    """The GPU of a rank: its unique id, and its model."""

    uuid: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The result of the handshake, equal on all ranks."""

    store_prefix: str = ""  # the prefix of this attempt's keys in the store
    attempt: int = 0  # how often the job was started before: the largest number that any agent has recorded
    hosts: tuple[str, ...] = ()  # the name of each rank's machine
    agent_ids: tuple[str, ...] = ()  # the unique name of each rank's launcher agent
    restarts_left: int = 0  # how often the launcher would still restart the workers: the smallest number of any agent
    verdict: FinalVerdict | None = None  # the final verdict of an earlier attempt that forbids this one, or None
    previous_attempt: PreviousAttempt | None = None  # how the previous attempt ended, or None
    gpus: tuple[RankGpu | None, ...] = ()  # the GPU of each rank
    pids: tuple[int, ...] = ()  # the process of each rank, as its machine numbers it


@dataclass(frozen=True)
class World(Roster):
    """Rank, world size and device of this process, and what the handshake agreed on."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: dist.PrefixStore | None = field(default=None, compare=False)  # the launcher's, prefixed by attempt
    agent_dir: Path | None = field(default=None, compare=False)  # the folder for records of attempts

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints to the terminal."""
        return self.rank == 0


_MESSAGES = re.compile(
    r"_STATUS_(INTERNAL_ERROR_(DEVICE|HOST)_)?ALLOC(ATION)?_FAILED|CUDA (driver )?error: out of memory"
    r"|Cuda failure( \d+)? 'out of memory'|Failed to CUDA [cm]alloc"
)
_SYMPTOMS = re.compile(r"unable to find an engine|_STATUS_NOT_INITIALIZED")  # of little memory, or of another cause
_LITTLE = 1 / 8  # of a GPU's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: torch's allocator has an error type, CUDA libraries only have a message.

    cuBLAS, cuDNN, NCCL and other libraries allocate memory themselves, and so does CUDA for kernels and graphs. cuDNN
    and cuBLAS may only say that they find no kernel, or could not start.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return isinstance(error, torch.OutOfMemoryError)
    text = str(error)
    return _MESSAGES.search(text) is not None or (_SYMPTOMS.search(text) is not None and _has_little_memory())


def _has_little_memory() -> bool:
    """Whether this process's GPU has little left: what is free, and what torch's allocator keeps for later."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < _LITTLE * total


def free_memory(device: torch.device) -> None:
    """Release cached memory after a pass that may not have fit, and reset counters, which are not those of the run."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def pin_memory(tensor: Tensor) -> Tensor:
    """A copy in page-locked host memory; the tensor itself where the system gives no such memory."""
    return _try_pinned(tensor.pin_memory, lambda: tensor)


def empty_on_host(like: Tensor) -> Tensor:
    """Host memory for a copy of a tensor, page-locked for one of a GPU, as far as the system gives such memory."""
    pageable = partial(torch.empty_like, like, device="cpu")
    return _try_pinned(partial(pageable, pin_memory=True), pageable) if like.is_cuda else pageable()


def _try_pinned(pinned: Callable[[], Tensor], pageable: Callable[[], Tensor]) -> Tensor:
    try:
        return pinned()
    except RuntimeError as error:
        _note_pageable((str(error).splitlines() or [""])[0])
        return pageable()


@cache
def _note_pageable(reason: str) -> None:
    """Warn that memory is pageable, once for each reason."""
    getLogger(__name__).warning("no page-locked memory (%s): copies between host and GPU are slower", reason)


@cache
def copy_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A stream for life: torch deals out 32 in turn, so that one made later would be that of another purpose."""
    return torch.cuda.Stream(device)


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect_collectives(world: World, groups: Sequence[dist.ProcessGroup], *, pairs: bool) -> None:
    """Call collectives once in each group, with `pairs` all-to-all too: NCCL takes memory for each kind as it comes."""
    smallest = -all_reduce_max(world, [-torch.cuda.mem_get_info(world.device)[1]])[0]
    most = min(2**24, int(smallest) // 64)  # bytes: short messages take other ways
    for group in (None, *groups):
        size = dist.get_world_size(group)
        whole = torch.zeros(most // 4 // size * size, device=world.device)
        part = whole[: len(whole) // size].clone()
        dist.all_reduce(whole, group=group)
        all_gather_single(whole, part, group=group)
        reduce_scatter_single(part, whole, group=group)
        if pairs:
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD


def keep_freed_memory(below: int = 32 * 2**20) -> None:
    """Keep freed blocks below this size in bytes for the next step, and return larger ones to the system (glibc only).

    By default glibc returns free memory at the end of its heap, so that page faults may take a tenth of a step, and
    raises `below` up to 32 MiB: if weights are gathered and freed all the time, it keeps several times their size.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl and macOS have none
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        library.mallopt(_MMAP_THRESHOLD, below)


def all_reduce_sum(world: World, value: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place, on every rank."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def add_disjoint(world: World, value: Tensor) -> Tensor:
    """The sum, in place, of all ranks' tensors, of which at each place only one rank's is not zero; any dtype.

    Bytes are added, so that no bit changes: -0.0 plus the 0.0 of another rank would be 0.0.
    """
    if world.size > 1 and value.numel():
        dist.all_reduce(value.view(-1).view(torch.uint8))
    return value


def all_reduce_max(world: World, values: Sequence[float]) -> list[float]:
    """The elementwise maximum of all ranks' numbers, on every rank; waits for the device."""
    if world.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def disable_collective_timeout(world: World, groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """Let collectives, also those in some ranks' own groups, wait without limit: the watchdog knows of progress."""
    for group in (None, *groups) if world.size > 1 else ():
        _set_pg_timeout(timedelta(days=7), group)


def find_communication_error() -> str:
    """Return what NCCL reports of any process group, such as COMM_ERROR; "" for nothing, or if no backend can tell."""
    groups = [*dist.distributed_c10d._world.pg_map]  # a copy, because another thread may add a group
    for backend in [group._get_backend(kind) for group in groups for kind in group._device_types]:
        if hasattr(backend, "get_error") and (name := backend.get_error().name) != "SUCCESS":
            return str(name)
    return ""


def all_gather(world: World, values: Tensor) -> list[Tensor]:
    """All ranks' tensors, in rank order; all must have the same shape."""
    if world.size == 1:
        return [values]
    parts = torch.zeros((world.size, *values.shape), dtype=values.dtype, device=values.device)
    parts[world.rank] = values
    dist.all_reduce(parts)  # not dist.all_gather, which gloo lacks for CUDA tensors
    return list(parts)


def broadcast_object(world: World, value: Any, *, source: int = 0) -> Any:
    """The source rank's value on every rank: anything that `torch.load(weights_only=True)` can load.

    It is sent as a byte tensor and not as a pickled object, so that it can't contain code.
    """
    if world.size == 1:
        return value
    sends = world.rank == source
    content = _to_bytes(value, world.device) if sends else torch.empty(0, dtype=torch.uint8, device=world.device)
    size = torch.tensor([content.numel()], dtype=torch.int64, device=world.device)
    dist.broadcast(size, src=source)
    content = content if sends else content.new_empty(int(size))
    dist.broadcast(content, src=source)
    return value if sends else _from_bytes(content)


def send_object(world: World, value: Any) -> int:
    """Send rank 0 what it takes with `receive_object`; the number of bytes."""
    content = _to_bytes(value, world.device)
    dist.send(torch.tensor([content.numel()], dtype=torch.int64, device=world.device), 0)
    dist.send(content, 0)
    return content.numel()


def receive_object(world: World, source: int) -> Any:
    """On rank 0 what another rank sends."""
    size = torch.empty(1, dtype=torch.int64, device=world.device)
    dist.recv(size, source)
    content = torch.empty(int(size), dtype=torch.uint8, device=world.device)
    dist.recv(content, source)
    return _from_bytes(content)


def all_gather_object(world: World, value: Any) -> list[Any]:
    """All ranks' values, in rank order, on every rank: anything that `torch.load(weights_only=True)` can load."""
    if world.size == 1:
        return [value]
    own = _to_bytes(value, world.device)
    sizes = [int(size) for size in all_gather(world, torch.tensor(own.numel(), device=world.device))]
    padded = own.new_zeros(max(sizes))
    padded[: own.numel()] = own
    return [_from_bytes(part[:size]) for part, size in zip(all_gather(world, padded), sizes, strict=True)]


def _to_bytes(value: Any, device: torch.device) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)


def _from_bytes(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=True, map_location="cpu")


Result = TypeVar("Result")
_KINDS = (TrainingError, RequestError, OutOfMemory)  # the types of errors that are raised on all ranks


def run_on_all_ranks(world: World, work: Callable[[], Result], *, source: int | None = None) -> Result:
    """Run work that may fail on any rank; if it fails, the error of the first such rank is raised on all ranks.

    Without this, the other ranks would wait in the next collective for the rank that failed. `work` itself must not
    communicate. With `source` all take that rank's result or error. OutOfMemory: the device's memory did not suffice.
    """
    error: TrainingError | None = None
    try:
        result = work()
    except TrainingError as caught:
        error = caught
    except RuntimeError as caught:  # not stored, so that the tensors in its traceback are freed
        if not is_out_of_memory(caught):
            raise
        message = (str(caught).splitlines() or [""])[0]
        error = OutOfMemory(f"rank {world.rank} ran out of memory: {message}", remedy="use a smaller --batch-size")
    if world.size == 1 and error:
        raise error
    if source is None:
        source = world.size - int(all_reduce_max(world, [float(world.size - world.rank) if error else 0.0])[0])
        if source == world.size:
            return result
    kind = max((number for number, each in enumerate(_KINDS) if isinstance(error, each)), default=0)
    failure = error and [kind, error.problem, {"remedy": error.remedy, "caused_by_peer": error.caused_by_peer}]
    result, failure = broadcast_object(world, [None if error else result, failure], source=source)
    if failure:
        raise _KINDS[failure[0]](failure[1], shared=True, **failure[2]) from error
    return result


def run_in_step(world: World, work: Callable[[], Result]) -> Result:
    """Run work in which all ranks communicate: if this one runs out of memory, the launcher has to end the others."""
    try:
        return work()
    except RuntimeError as caught:
        if world.size == 1 or not is_out_of_memory(caught):
            raise
        message = (str(caught).splitlines() or [""])[0]
    raise TrainingError(f"rank {world.rank} ran out of memory: {message}", remedy="use a smaller --batch-size")


def run_on_main_rank(world: World, work: Callable[[], Result], *, by: int = 0) -> Result:
    """Run work on one rank only and broadcast its result (plain values) or its error."""
    return run_on_all_ranks(world, work if world.rank == by else lambda: None, source=by)  # type: ignore[return-value]


def call_in_thread(work: Callable[[], Result], name: str) -> tuple[Thread, Future[Result]]:
    """Call work that may hang in a thread of this name, which no exit waits for; the future has its result or error."""
    answer: Future[Result] = Future()

    def call() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # raised again where the answer is read
            answer.set_exception(error)

    thread = Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread, answer
