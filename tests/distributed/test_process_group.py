import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed import process_group as group_module
from multigpu_cli.distributed.launch_env import LaunchEnv, leave_failures_to_watchdog
from multigpu_cli.distributed.placement import Placement, count_cores
from multigpu_cli.distributed.process_group import check_own_gpus, init_process_group, process_group
from multigpu_cli.distributed.world import RankGpu, World, disable_collective_timeout
from multigpu_cli.errors import RequestError, TrainingError
from multigpu_cli.monitor.console import Console
from multigpu_cli.run import open as open_module
from multigpu_cli.run.open import resolve_request
from multigpu_cli.run.request.spec import FromConfig
from tests.support.fork import exit_code, wait_for_end
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import fork_ranks


def test_a_world_of_one_needs_no_group() -> None:
    with process_group(None, torch.device("cpu"), timeout=5) as world:
        assert world == World(torch.device("cpu"), 0, 1, 0, 1)
        assert not dist.is_initialized()


_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since torch 2.9, and before


@pytest.mark.parametrize("user", [{}, *({name: "max_split_size_mb:64"} for name in _NAMES)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_gpu_memory_grows_in_segments_unless_told_otherwise(
    kind: str, user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(_read_allocator()))
    with patch.dict(os.environ):
        for name in _NAMES:
            os.environ.pop(name, None)
        os.environ.update(user)
        with process_group(None, torch.device(kind), timeout=5):
            ours = {} if kind == "cpu" else dict.fromkeys(_NAMES, "expandable_segments:True")
            assert _read_allocator() == (user or ours)
            assert seen == ([] if kind == "cpu" else [_read_allocator()]), "CUDA reads it at its start"


def _read_allocator() -> dict[str, str]:
    return {name: os.environ[name] for name in _NAMES if name in os.environ}


@pytest.mark.parametrize("agent_store", [False, True])
def test_a_group_lasts_as_long_as_its_context(agent_store: bool) -> None:
    def work() -> None:
        agents = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        launch_env = LaunchEnv(
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            address="localhost",
            port=agents.port if agent_store else _free_port(),
            attempt=3,
            agent_store=agent_store,
        )
        with process_group(launch_env, torch.device("cpu"), timeout=5) as world:
            assert (world.rank, world.size, world.local_rank, world.local_size, world.attempt) == (0, 1, 0, 1, 3)
            assert world.store is not None
            assert dist.get_backend() == "gloo"
            dist.all_reduce(torch.ones(1))
        assert not dist.is_initialized()
        with (
            pytest.raises(ZeroDivisionError),
            process_group(replace(launch_env, attempt=4), torch.device("cpu"), timeout=5),
        ):
            raise ZeroDivisionError
        assert not dist.is_initialized(), "left also after an error"
        generations = {key.split("/")[0] for key in agents.list_keys() if "sealed" in key}
        assert len(generations) == 2 * agent_store, "restarts read no stale addresses"

    assert exit_code(work) == 0


def test_freed_memory_is_kept_on_a_cpu_and_not_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(group_module, "keep_freed_memory", lambda: devices.append("kept"))
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        with process_group(None, device, timeout=1):
            pass
    assert devices == ["kept", torch.device("cuda", 0)]


@pytest.mark.skipif(count_cores() < 2, reason="needs two cores")
def test_two_ranks_and_their_threads_are_pinned_to_a_core_each_until_the_group_ends() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]

    def threads() -> dict[Path, set[int]]:
        return {task: os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}

    def work(rank: int) -> None:
        os.sched_setaffinity(0, cores)
        before = threads()
        with process_group(LaunchEnv.from_environment(os.environ), torch.device("cpu"), timeout=30):
            dist.all_reduce(torch.ones(1))
            now = threads()
            started = now.keys() - before.keys()
            assert started, "gloo has threads"
            assert [now[each] for each in started] == [{cores[rank]}] * len(started)
            assert os.sched_getaffinity(0) == {cores[rank]}
        assert os.sched_getaffinity(0) == set(cores)

    fork_ranks(2, work, 60)


@pytest.mark.parametrize(
    ("rank", "size", "cores", "kept"),
    [
        (0, 2, {3, 5, 9}, {3}),
        (1, 2, {3, 5, 9}, {5, 9}),
        (2, 3, {0, 1, 2}, {2}),
        (0, 2, {0, 1, 2, 3}, None),  # there is room for the threads of all
        (1, 3, {0, 1}, None),
        (2, 2, {0, 1}, None),  # a launcher that counts otherwise
        (0, 1, {0}, None),
    ],
)
def test_ranks_are_pinned_only_where_there_is_a_core_for_each(
    rank: int, size: int, cores: set[int], kept: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, wanted: calls.append(set(wanted)))
    launch_env = LaunchEnv(rank, size, rank, size, "", 0, 0, agent_store=False)
    with suppress(ZeroDivisionError), group_module._pin_to_own_core(launch_env, torch.device("cpu")):
        assert calls == ([kept] if kept else [])
        raise ZeroDivisionError
    assert calls == ([kept, cores] if kept else []), "given back after an error too"
    with group_module._pin_to_own_core(launch_env, torch.device("cuda")):
        assert calls == ([kept, cores] if kept else []), "a GPU needs no core"


@pytest.mark.parametrize(
    ("hosts", "uuids", "named"),
    [
        ("aabb", "1213", ""),
        ("aaaa", "1211", "ranks 0,2,3 share a GPU"),
        ("abab", "1223", ""),  # machines may be copies of one another
    ],
)
def test_two_ranks_on_one_gpu_are_refused_before_nccl_does(hosts: str, uuids: str, named: str) -> None:
    """A launcher that shows each rank one GPU may show all of them the same."""
    gpus = tuple(RankGpu(uuid, "H100") for uuid in uuids)
    world = World(torch.device("cuda", 0), 1, 4, 1, 4, hosts=tuple(hosts), gpus=gpus)
    if not named:
        return check_own_gpus(world)
    with pytest.raises(RequestError, match=named) as refused:
        check_own_gpus(world)
    assert refused.value.shared
    assert "--nproc_per_node=" in refused.value.remedy
    with pytest.raises(RequestError, match=named), init_process_group(world, dist.HashStore(), timeout=1):
        pass
    return None


def test_a_group_of_somebody_else_has_its_own_clock_again_afterwards() -> None:
    """While we train in it the watch decides who hangs; nobody else has one."""

    def clock() -> float:
        group: Any = dist.group.WORLD
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    def work(world: World) -> tuple[float, bool, float]:
        before, launch_env = clock(), LaunchEnv(world.rank, 2, world.rank, 2, "", 0, 0, agent_store=False)
        with process_group(launch_env, world.device, timeout=30) as ours:
            disable_collective_timeout(ours)
            meanwhile = clock()
        return before, meanwhile > before, clock()

    assert run_on_each_rank(2, work) == [(30.0, True, 30.0)] * 2


def test_a_worker_ends_with_its_agent() -> None:
    """A killed agent must not leave workers behind that train beside the run that follows."""
    launch_env = LaunchEnv(
        rank=0, size=1, local_rank=0, local_size=1, address="localhost", port=_free_port(), attempt=0, agent_store=False
    )
    read, write = os.pipe()

    def agent() -> None:
        if os.fork() == 0:
            with process_group(launch_env, torch.device("cpu"), timeout=5):
                os.write(write, b"joined")
                time.sleep(20)
            os._exit(0)
        assert os.read(read, 6) == b"joined"
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(agent) == -signal.SIGKILL
    os.close(write)
    wait_for_end(read)


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def _make_shared_error(*, consequence: bool) -> RequestError:
    error = RequestError("of the run")
    error.shared, error.caused_by_peer = True, consequence
    return error


@pytest.mark.parametrize(
    ("backend", "error", "end"),
    [
        ("nccl", ValueError("of the run"), "aborted"),
        ("gloo", ValueError("of the run"), "destroyed"),
        ("nccl", _make_shared_error(consequence=True), "aborted"),
        ("nccl", _make_shared_error(consequence=False), "destroyed"),
    ],
)
def test_a_run_that_fails_waits_for_peers_only_where_they_all_leave(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: Exception, end: str
) -> None:
    """Destroying a group of NCCL's waits for what the others have not finished; aborting it does not.

    The rank that tells the others why they all leave goes on before they have heard it: NCCL sends beside the host.
    """
    done: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(group_module, "_connect", lambda world: None)
    monkeypatch.setattr(group_module, "_abort_process_group", lambda: done.append("aborted"))
    world = World(torch.device("cpu"), store_prefix="of a test")
    with (
        pytest.raises(type(error), match="of the run"),
        init_process_group(world, dist.HashStore(), timeout=1, backend=backend),
    ):
        raise error
    with init_process_group(world, dist.HashStore(), timeout=1, backend=backend):
        pass
    assert done == [end, "destroyed"]


def test_an_abort_that_hangs_does_not_keep_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may with NCCL while a kernel waits for a peer."""
    left = threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(group_module, "_connect", lambda world: None)
    monkeypatch.setattr(group_module, "_abort_process_group", lambda: left.wait(20))
    monkeypatch.setattr(group_module, "_ABORT", 0.1)
    world, began = World(torch.device("cpu"), store_prefix="of a test"), time.monotonic()
    with (
        pytest.raises(ValueError, match="of the run"),
        init_process_group(world, dist.HashStore(), timeout=1, backend="nccl"),
    ):
        raise ValueError("of the run")
    left.set()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "user", [{}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}]
)
def test_torch_leaves_failures_to_the_watchdog_unless_told_otherwise(user: dict[str, str]) -> None:
    """It would end the process in a thread of its own, with SIGABRT."""
    given = dict(user)
    with leave_failures_to_watchdog(given):
        assert given == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"} | user
    assert given == user


def test_mig_slices_of_a_card_are_one_gpu() -> None:
    """NCCL goes by the bus, and they have different uuids."""

    def slices(kind: str, *cards: int) -> tuple[RankGpu, ...]:
        each = [SimpleNamespace(uuid=f"{at}", name=kind, pci_domain_id=0, pci_bus_id=on) for at, on in enumerate(cards)]
        return tuple(RankGpu(group_module._identify(properties), kind) for properties in each)

    def check(gpus: tuple[RankGpu, ...]) -> None:
        check_own_gpus(World(torch.device("cuda", 0), 0, 2, 0, 2, hosts=("a", "a"), gpus=gpus))

    check(slices("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 7, 8))
    check(slices("NVIDIA A100-SXM4-40GB", 7, 7))  # cloned machines of one name
    with pytest.raises(RequestError, match="ranks 0,1 share a GPU"):
        check(slices("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 7, 7))


def test_a_run_forms_its_group_with_its_own_patience_and_under_its_own_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[float, str | None]] = []

    def note(launch_env: LaunchEnv, *_: Any, **__: Any) -> Any:
        seen.append((launch_env.arrival, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")))
        raise ZeroDivisionError

    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(open_module, "process_group", note)
    config, launch_env = resolve({}, ["strategy.arrival_timeout=7"], None), LaunchEnv(0, 2, 0, 2, "", 0, 0, False)
    choice, console = Placement("ddp", (torch.device("cpu"),), 0, "of a test"), Console("silent")
    with (
        pytest.raises(ZeroDivisionError),
        resolve_request(config, choice, launch_env, console, lambda error: None, FromConfig()),
    ):
        pass
    assert seen == [(7.0, "0")]


def test_ranks_have_as_long_to_arrive_as_asked_for() -> None:
    """Cold imports from a slow disk may take more than the two minutes of old."""
    launch_env = LaunchEnv(0, 2, 0, 2, "localhost", _free_port(), attempt=0, agent_store=False, arrival=0.2)
    with (
        pytest.raises(TrainingError, match="rank 1 of 2 did not join"),
        process_group(launch_env, torch.device("cpu"), timeout=5),
    ):
        pass
