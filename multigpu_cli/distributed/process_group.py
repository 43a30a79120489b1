"""Forms the process group of a run, or uses an existing one; and where the work of a command runs."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group  # for a run that has failed

from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.distributed.launch_env import (
    AttemptRefused,
    LaunchEnv,
    attempt_number,
    find_agent_dir,
    node_name,
    prepare_allocator,
    read_last_verdict,
    read_previous_attempt,
    record_attempt,
)
from multigpu_cli.distributed.placement import Placement, choose_placement, count_cores, count_visible_gpus
from multigpu_cli.distributed.processes import die_with_parent
from multigpu_cli.distributed.world import RankGpu, World, call_in_thread, keep_freed_memory
from multigpu_cli.errors import RequestError, TrainingError

_FIRST = 60.0  # seconds for the first all-reduce
_ABORT = 60.0  # seconds


@contextmanager
def process_group(
    launch_env: LaunchEnv | None, device: torch.device, *, timeout: float, backend: str | None = None
) -> Iterator[World]:
    """Form the process group for the duration of the context; without a launcher, a world of size 1.

    The timeout of collectives is in seconds; by default the backend is gloo, and for CUDA nccl: one process a GPU.
    """
    if device.type == "cuda":
        prepare_allocator()
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if launch_env is None:
        yield World(device)
        return
    if dist.is_initialized():  # the caller's own group, which the caller destroys
        shared: Any = dist.distributed_c10d._get_default_store()
        with _restore_timeouts():
            other = shared.clone() if hasattr(shared, "clone") else shared  # for other threads, if torch supports it
            yield _build_world(device, launch_env, shared, other)
        return
    die_with_parent()
    with _pin_to_own_core(launch_env, device):  # before gloo starts its threads, which inherit it
        world, store = rendezvous(launch_env, device, timeout=timeout)
        with init_process_group(world, store, timeout=timeout, backend=backend):
            yield world


@contextmanager
def _pin_to_own_core(launch_env: LaunchEnv, device: torch.device) -> Iterator[None]:
    """Pin this rank to a core, if there is one for each: gloo's threads of other ranks would interrupt its step."""
    cores = sorted(os.sched_getaffinity(0)) if device.type == "cpu" and hasattr(os, "sched_getaffinity") else []
    rank, size = launch_env.local_rank, launch_env.local_size
    if pins := size > 1 and rank < size and len(cores) // size == 1:
        os.sched_setaffinity(0, cores[len(cores) * rank // size : len(cores) * (rank + 1) // size])
    try:
        yield
    finally:
        if pins:
            os.sched_setaffinity(0, cores)


@contextmanager
def _restore_timeouts() -> Iterator[None]:
    """Restore the timeouts of the caller's process group, which `disable_collective_timeout` changes."""
    group: Any = dist.group.WORLD
    backends = [group._get_backend(kind) for kind in group._device_types]
    clocks = [(each, each.options._timeout) for each in backends if hasattr(each, "options")]
    try:
        yield
    finally:
        for backend, clock in clocks:
            backend._set_default_timeout(clock)


def rendezvous(launch_env: LaunchEnv, device: torch.device, *, timeout: float) -> tuple[World, dist.Store]:
    """Rendezvous with all ranks, before a process group is formed; returns the world and a store for the group."""
    store = _open_store(launch_env, timeout, hosts=not launch_env.agent_store and launch_env.rank == 0)
    client = _open_store(launch_env, timeout, hosts=False)  # a second connection, for other threads
    return _build_world(device, launch_env, store, client), store


@contextmanager
def init_process_group(
    world: World, store: dist.Store, *, timeout: float, backend: str | None = None
) -> Iterator[None]:
    """Form the process group after rendezvous, for the context; with NCCL no two ranks may share a GPU."""
    backend = backend or ("nccl" if world.device.type == "cuda" else "gloo")
    if backend == "nccl":
        check_own_gpus(world)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(world.store_prefix, store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=world.device if backend == "nccl" else None,
    )
    connected = False
    try:
        if backend == "nccl":
            _connect(world)
        connected = True
        yield
    except BaseException as error:
        shared = isinstance(error, TrainingError) and error.shared and not error.caused_by_peer
        if backend == "nccl" and not (shared and connected):  # destroying it would wait for peers that may be dead
            _ends_within(_ABORT, _abort_process_group)  # nor is this sure to end: the process goes on to its own end
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _connect(world: World) -> None:
    """All-reduce 8 bytes, in which NCCL connects all ranks: where GPUs can't reach each other, it waits for ever."""

    def reduce() -> None:
        torch.cuda.set_device(world.device)
        dist.all_reduce(torch.zeros(1, dtype=torch.float64, device=world.device))
        torch.cuda.synchronize(world.device)

    if not _ends_within(_FIRST, reduce):
        raise TrainingError(
            f"NCCL has connected the {world.size} ranks, and a first all-reduce of 8 bytes has not ended in "
            f"{_FIRST:.0f} s: GPUs or machines can't reach each other",
            remedy="NCCL_P2P_DISABLE=1 torchrun … if the GPUs of one machine hang (PCIe with IOMMU or ACS); a larger "
            "/dev/shm: docker run --shm-size=8g; NCCL_SOCKET_IFNAME=… names the network interface between machines; "
            "NCCL_DEBUG=INFO shows where it waits",
            shared=True,
        )


def _ends_within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether work ends in time, in a thread of its own, which may stay; an error of it is raised here."""
    _, done = call_in_thread(work, "group")
    if not wait([done], seconds).done:
        return False
    done.result()
    return True


def check_own_gpus(world: World) -> None:
    """Raise the same RequestError on all ranks if two ranks of a machine share a GPU."""
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (host, gpu) in enumerate(zip(world.hosts, world.gpus, strict=True)):
        if gpu is not None:
            users[host, gpu.uuid].append(rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            gpus = sum(where == host for where, _ in users)
            problem = f"ranks {','.join(map(str, ranks))} share a GPU of {host}, and NCCL needs one GPU per rank"
            remedy = f"use --nproc_per_node={gpus}, or one GPU per process, or CUDA_VISIBLE_DEVICES= to train on CPU"
            raise RequestError(problem, remedy=remedy, shared=True)


def _build_world(device: torch.device, launch_env: LaunchEnv, store: dist.Store, client: dist.Store) -> World:
    """Rendezvous with all ranks and agree on this attempt; `client` is another connection to the store."""
    from multigpu_cli.distributed.rendezvous import RankInfo, agree_on_roster  # late: of launched processes only

    environ = launch_env.environ
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    own = RankInfo(
        rank=launch_env.rank,
        size=launch_env.size,
        nonce=uuid4().hex,
        host=os.uname().nodename,
        node=node_name(environ),
        attempt=attempt_number(environ) if environ else launch_env.attempt,
        restarts_left=launch_env.restarts_left,
        verdict=read_last_verdict(environ),
        previous_attempt=read_previous_attempt(environ),
        gpu=RankGpu(_identify(gpu), gpu.name) if gpu else None,
        pid=os.getpid(),
    )
    agreed = agree_on_roster(store, own, patience=launch_env.arrival)
    if agreed.verdict:
        raise AttemptRefused(agreed.verdict)
    record_attempt(environ, agreed.attempt, agreed.agent_ids)
    return World(
        device,
        launch_env.rank,
        launch_env.size,
        launch_env.local_rank,
        launch_env.local_size,
        store=dist.PrefixStore(agreed.store_prefix, client),
        agent_dir=find_agent_dir(environ),
        **vars(agreed),
    )


def _identify(gpu: Any) -> str:
    """What no two ranks of a machine may have alike: the MIG slices of a card are one GPU for NCCL."""
    return f"card {gpu.pci_domain_id:x}:{gpu.pci_bus_id:x}" if " MIG " in gpu.name else str(gpu.uuid)


def _open_store(launch_env: LaunchEnv, timeout: float, *, hosts: bool) -> dist.TCPStore:
    try:
        store = dist.TCPStore(
            launch_env.address,
            launch_env.port,
            launch_env.size,
            is_master=hosts,
            timeout=timedelta(seconds=launch_env.arrival),
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            problem = f"MASTER_PORT={launch_env.port} in the environment: another program uses that port"
            remedy = "use torchrun --standalone, which chooses a free port, or another --master-port"
            raise RequestError(problem, remedy=remedy) from error
        raise _missing_store_error(launch_env) from error
    store.set_timeout(timedelta(seconds=max(timeout, 300)))
    return store


def _missing_store_error(launch_env: LaunchEnv) -> TrainingError:
    problem = f"no answer from {launch_env.address}:{launch_env.port}, where rank 0's store should be"
    if launch_env.agent_store and launch_env.size > launch_env.local_size:
        problem += "; if rank 0 has moved to another node, torchrun still uses the address of the first one"
    remedy = "use TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun … on every node"
    return TrainingError(problem, remedy=remedy, caused_by_peer=True)


def place_on_machine(device: DeviceConfig, launch_env: LaunchEnv | None = None) -> Placement:
    """Choose among the GPUs and CPU cores that this process may use."""
    return choose_placement(device, gpus=count_visible_gpus(), cpus=count_cores(), launch_env=launch_env)


@contextmanager
def join_workers(device: DeviceConfig, timeout: float) -> Iterator[tuple[Placement, World]]:
    """Join the workers that a launcher has started; a collective that lacks a rank fails after so many seconds."""
    launch_env = LaunchEnv.current()
    placement = place_on_machine(device, launch_env)
    with process_group(launch_env, placement.devices[0], timeout=timeout, backend=placement.backend) as world:
        yield placement, world
