"""Whole runs through `train`, in forked processes: as many workers as asked for, without the seconds of a launcher."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import tensorboard.compat.proto.event_pb2
import tensorboard.plugins.custom_scalar.layout_pb2
import tensorboard.plugins.hparams.plugin_data_pb2  # noqa: F401
import torch._dynamo  # seconds; runs import these at their start, and here they do so once for all
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks  # noqa: F401

import multigpu_cli.config.yaml_text
import multigpu_cli.data.fetcher
import multigpu_cli.distributed.process_group
import multigpu_cli.distributed.rendezvous
import multigpu_cli.monitor.tensorboard
import multigpu_cli.run.request.prepare
import multigpu_cli.strategies.ddp
import multigpu_cli.strategies.exact
import multigpu_cli.strategies.fsdp.fsdp
import multigpu_cli.tasks.supervised
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import TrainingError
from tests.support import safe_forks  # noqa: F401
from train_multi_gpu import train

OWN = {
    "data": "tests.support.user_code:tensors",
    "model": "tests.support.user_code:net",
    "multi_gpu": "auto",
    "hang_timeout": 45,
}
_SECONDS = 90
_COUNTS_PASSES = tuple(
    f"tests.support.{name}"
    for name in (
        "user_code:net",
        "oom_model:",
        "failing_model:",
        "disk_fault_model:",
        "awkward_models:greedy",
        "awkward_models:telling",
        "toy_env:",
    )
)
"""Networks that act in a numbered pass: the guard would name their counters, and they would count its passes."""


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        summary: what rank 0's `train` returned, or {}.
        error: the text of the first rank's error that came, "" where there was none.
        kind: its type.
        killed: ranks that a signal ended.
    """

    summary: dict[str, Any]
    error: str
    kind: str
    killed: list[int]


def run_training(
    workers: int = 1,
    *,
    sets: Sequence[str] = (),
    recipe: str | None = None,
    environ: Mapping[str, str] | None = None,
    attempt: int = 0,
    dry_run: bool = False,
    screen: str = "quiet",
    apart: bool = False,
    prepare: Callable[[], object] = lambda: None,
    **flags: Any,
) -> Ended:
    """Train with OWN and these flags on so many workers; 1 trains in one process without a group.

    As an agent does, the others are killed once one of them is gone for another reason than being done.

    Args:
        apart: each is on a node of its own, with node0, node1, … as working directory.
        prepare: what each process does before it trains.
    """
    fork, agent = get_context("fork"), Agent(workers)
    request = (OWN | flags, list(sets), recipe, dry_run, screen, apart, prepare)
    pipes = [fork.Pipe(duplex=False) for _ in range(workers)]
    ranks = [
        fork.Process(target=_rank, args=(agent, attempt, dict(environ or {}), request, rank, pipes))
        for rank in range(workers)
    ]
    for process in ranks:
        process.start()
    with agent.serving():
        answers = _answers([reader for reader, _ in pipes], ranks)
        for process in ranks:
            process.join()
    errors = [answer for answer in answers if answer is not None and answer[0]]
    kind, error, _ = errors[0] if errors else ("", "", None)
    summaries = [answer[2] for answer in answers if answer is not None and answer[2] is not None]
    killed = [rank for rank, answer in enumerate(answers) if answer is None]
    for rank in killed:
        print(f"rank {rank} did not say how it ended: exit code {ranks[rank].exitcode}", file=sys.stderr)
    return Ended(summaries[0] if summaries and answers[0] is not None else {}, error, kind, killed)


class Agent:
    """What torchrun's agent does for forked ranks: it keeps the store where they meet, and tells them where that is.

    The store opens when all are forked. Its thread looks up the name of each connection, and a rank that is forked
    meanwhile finds the C library's resolver locked for ever.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._asked, self._told = os.pipe()

    @contextmanager
    def serving(self) -> Iterator[None]:
        try:
            if self._workers == 1:  # it meets nobody
                yield
                return
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            os.write(self._told, store.port.to_bytes(2) * self._workers)
            yield
        finally:
            os.close(self._asked)
            os.close(self._told)

    def variables(self, rank: int, attempt: int = 0) -> dict[str, str]:
        """What a rank finds in its environment, once the store is open; nothing where it is alone."""
        if self._workers == 1:
            return {}
        os.close(self._told)  # nobody waits for an agent that is gone
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._workers),
            "LOCAL_WORLD_SIZE": str(self._workers),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(int.from_bytes(os.read(self._asked, 2))),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }


def fork_ranks(workers: int, work: Callable[[int], object], seconds: float) -> None:
    """Do `work` in so many forks, each told its rank and where the others are; all must end with 0 in time."""
    fork, agent = get_context("fork"), Agent(workers)

    def act(rank: int) -> None:
        os.environ.update(agent.variables(rank))
        work(rank)

    ranks = [fork.Process(target=act, args=(rank,)) for rank in range(workers)]
    for process in ranks:
        process.start()
    with agent.serving():
        for process in ranks:
            process.join(seconds)
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * workers


def _answers(readers: list[Connection], ranks: list[Any]) -> list[Any]:
    """What each rank said at its end, in rank order; None for one that was killed.

    Processes are waited for: pipes and sentinels stay open for as long as loader processes outlive their rank.
    """
    answers: list[Any] = [None] * len(readers)
    left = {os.pidfd_open(process.pid): rank for rank, process in enumerate(ranks)}
    deadline = time.monotonic() + _SECONDS
    while left:
        ended: list[Any] = wait(left, max(0.0, deadline - time.monotonic()))
        for end in ended:
            rank = left.pop(end)
            os.close(end)
            if readers[rank].poll():
                answers[rank] = readers[rank].recv()
            if answers[rank] is None:
                _end(ranks)
            elif answers[rank][0]:
                deadline = min(deadline, time.monotonic() + 10)
        if not ended:
            places = {rank: Path(f"/proc/{ranks[rank].pid}/wchan").read_text() for rank in sorted(left.values())}
            for process in ranks:
                for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    os.kill(int(child), signal.SIGABRT)  # pytest has it print where it stands
                    time.sleep(0.3)
            _end(ranks)
            raise AssertionError(f"ranks hang, in the kernel's function {places}")
    return answers


def _end(ranks: list[Any]) -> None:
    for process in ranks:
        process.kill()


def _rank(
    agent: Agent,
    attempt: int,
    environ: dict[str, str],
    request: tuple[Any, ...],
    rank: int,
    pipes: list[tuple[Connection, Connection]],
) -> None:
    flags, sets, recipe, dry_run, screen, apart, prepare = request
    faulthandler.dump_traceback_later(_SECONDS - 20, file=2)  # where it stands, if it hangs
    os.environ.update(environ | agent.variables(rank, attempt))
    if apart:
        os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        os.chdir(f"node{rank}")
    multigpu_cli.run.request.prepare.count_cores = lambda: len(pipes)  # type: ignore[attr-defined]  # one thread each, also alone
    # tests share the cores, and in a batch no rank interrupts another
    multigpu_cli.distributed.process_group._pin_to_own_core = lambda *_: nullcontext()  # type: ignore[assignment]
    pipe = pipes[rank][1]
    try:
        prepare()
        off = {"guard": "off"} if str(flags.get("model")).startswith(_COUNTS_PASSES) else {}
        pipe.send(("", "", train(resolve(off | flags, sets, recipe), screen=screen, dry_run=dry_run)))
    except TrainingError as error:
        pipe.send((type(error).__name__, str(error), None))
    except BaseException as error:
        pipe.send((type(error).__name__, traceback.format_exc(), None))
    os._exit(0)
