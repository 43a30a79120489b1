import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch._C._distributed_c10d import ErrorType

from multigpu_cli.distributed.world import World, find_communication_error
from multigpu_cli.errors import TrainingError
from multigpu_cli.faults import rank_exits
from multigpu_cli.faults.rank_exits import RankExit, RankExits
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from tests.distributed.launcher import run_command, torchrun
from tests.support.fork import exit_code
from tests.support.run_training import run_training
from tests.support.world import ALONE


def move_run(watch: Watchdog, logs: Path, pauses: list[float]) -> None:
    """A run of one step and then some forward passes, with pauses between them."""
    watch.start(0, logs)
    watch.set_position(1, "fetching data")
    for pause in pauses:
        watch.set_position(1, "forward")
        time.sleep(pause)


def write_to(file: Path) -> Callable[[TrainingError], None]:
    def write(error: TrainingError) -> None:
        file.write_text(str(error))

    return write


def watch_run(folder: Path, pauses: list[float]) -> tuple[int, str]:
    """How a process ends whose run moves like this and whose watch waits 0.3 s; and its last words."""
    words = folder / "words"

    def work() -> None:
        with Watchdog(ALONE, 0.3, write_to(words)) as watch:
            move_run(watch, folder / "logs", pauses)

    code = exit_code(work)
    return code, words.read_text() if words.exists() else ""


def test_a_run_that_stands_still_is_ended_and_says_where(tmp_path: Path) -> None:
    code, words = watch_run(tmp_path, [0.01, 5.0])
    assert code == 1
    assert "no progress for 0 s\n  rank 0: forward, 1 steps done, at " in words
    assert "test_watchdog.py" in words
    assert "in move_run" in (tmp_path / "logs" / "stacks_0_rank_0.txt").read_text()


def test_where_the_run_folder_takes_no_word_the_run_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs is a cause of hangs; here opening the file for the stacks waits for ever."""
    monkeypatch.setattr("multigpu_cli.faults.watchdog._WRITING", 0.5, raising=False)
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "stacks_0_rank_0.txt")
    monkeypatch.setattr("multigpu_cli.faults.rank_exits.without_links", lambda path, flags: os.open(path, os.O_WRONLY))
    code, words = watch_run(tmp_path, [0.01, 5.0])
    assert code == 1
    assert words.startswith(f"the run can't continue, and no report could be written to {tmp_path / 'logs'}")


def test_a_slow_run_that_moves_is_left_alone(tmp_path: Path) -> None:
    assert watch_run(tmp_path, [0.15] * 6) == (0, "")


def test_before_its_first_step_a_run_may_take_its_time(tmp_path: Path) -> None:
    def work() -> None:
        with Watchdog(ALONE, 0.1, lambda error: None) as watch:
            watch.start(5, tmp_path)
            watch.set_position(5, "fetching data")
            time.sleep(0.6)

    assert exit_code(work) == 0


def test_a_process_that_was_stopped_and_goes_on_is_left_alone(tmp_path: Path) -> None:
    """Ctrl-Z, a debugger, a machine that sleeps: nothing moved, but nothing hung."""

    def work() -> None:
        goes_on = threading.Event()
        signal.signal(signal.SIGCONT, lambda *_: goes_on.set())
        stopped = f"grep -q 'State:.T' /proc/{os.getpid()}/status"
        wake = f"until {stopped}; do sleep 0.05; done; sleep 4.3; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])  # on a busy machine its start takes longer than the watch is patient
        with Watchdog(ALONE, 4.0, lambda error: None) as watch:
            watch.start(0, tmp_path)
            watch.set_position(1, "forward")
            time.sleep(1)  # the watch, which looks every 0.4 s, has seen that
            os.kill(os.getpid(), signal.SIGSTOP)
            assert goes_on.wait(20)
            time.sleep(0.2)  # and looks again

    assert exit_code(work) == 0


@pytest.mark.parametrize(
    "pause",
    [pytest.param(0.1, id="seldom", marks=pytest.mark.slow), pytest.param(0.01, id="whenever the watch looks")],
)
def test_who_waits_for_a_rank_that_moves_is_left_alone(tmp_path: Path, pause: float) -> None:
    """And where none moves any more, all are ended."""
    read, write = os.pipe()

    def rank(number: int) -> None:
        store = dist.PrefixStore("attempt-0", dist.FileStore(str(tmp_path / "store"), 2))
        with Watchdog(World(torch.device("cpu"), number, 2, number, 2, store=store), 0.5, lambda error: None) as watch:
            watch.start(0, tmp_path)
            watch.set_position(1, ("saving", "reduction")[number])
            for _ in range(0 if number else int(2 / pause)):
                time.sleep(pause)
                watch.mark_progress()
            os.write(write, b"0" if number == 0 else b"")
            time.sleep(20)

    waits = get_context("fork").Process(target=rank, args=(1,))
    waits.start()
    assert exit_code(lambda: rank(0)) == 1
    waits.join(10)
    assert waits.exitcode == 1
    os.close(write)
    assert os.read(read, 1) == b"0", "the one that moved came to its end"


def test_who_waits_in_a_collective_hears_that_another_rank_failed(tmp_path: Path) -> None:
    """gloo notices that a peer has gone; NCCL would wait."""
    words = tmp_path / "words"

    def world(rank: int) -> World:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        return World(torch.device("cpu"), rank, 2, rank, 2, store=dist.PrefixStore("attempt-0", store))

    def waits() -> None:
        with Watchdog(world(0), 5, write_to(words)) as watch:
            watch.start(0, tmp_path)
            watch.set_position(0, "reduction")
            time.sleep(20)

    RankExits(world(1)).publish(
        RankExit(1, "forward, 1 steps done", "ValueError: bad", "its stack", caused_by_peer=False)
    )
    began = time.monotonic()
    assert exit_code(waits) == 1
    assert time.monotonic() - began < 10
    assert words.read_text() == "rank 1 failed (forward, 1 steps done): ValueError: bad"
    assert "its stack" in (tmp_path / "crash_0.txt").read_text()


def groups_with(error: ErrorType) -> Any:
    """Process groups of gloo, which can't tell, and of a backend that reports this."""
    backends = {"cpu": SimpleNamespace(), "cuda": SimpleNamespace(get_error=lambda: error)}
    kinds = (["cpu"], ["cpu", "cuda"])
    return SimpleNamespace(pg_map=[SimpleNamespace(_device_types=each, _get_backend=backends.get) for each in kinds])


@pytest.mark.parametrize("error", [ErrorType.SUCCESS, ErrorType.COMM_ERROR, ErrorType.REMOTE_ERROR, ErrorType.TIMEOUT])
def test_errors_of_any_process_group_are_found(error: ErrorType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_world", groups_with(error))
    assert find_communication_error() == ("" if error is ErrorType.SUCCESS else error.name)


@pytest.mark.parametrize("peer_answers", [True, False])
def test_nccl_errors_end_a_rank_that_waits(peer_answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself would end it by SIGABRT after eight minutes. The peer that does not answer is the lost one."""
    monkeypatch.setattr(dist.distributed_c10d, "_world", groups_with(ErrorType.COMM_ERROR))
    words = tmp_path / "words"

    def waits(rank: int) -> None:
        store = dist.PrefixStore("attempt-0", dist.FileStore(str(tmp_path / "store"), 2))
        with Watchdog(World(torch.device("cpu"), rank, 2, 0, 2, store=store), 5, write_to(words)) as watch:
            watch.start(0, tmp_path)
            watch.set_position(1, "reduction")
            time.sleep(20)

    peer = get_context("fork").Process(target=waits, args=(1,))
    if peer_answers:
        peer.start()
    assert exit_code(lambda: waits(0)) == 1
    if not peer_answers:
        assert words.read_text().startswith("rank 1 ended without an error message after step 1: was it killed?")
        return
    peer.join(10)
    assert peer.exitcode == 1
    said = words.read_text()
    assert "NCCL reports COMM_ERROR: another rank, its node or the network between them failed" in said
    assert "  try: check that node" in said


def under_one_agent(folder: Path, rank: int, pids: tuple[int, ...]) -> World:
    """The world of a rank on one of two nodes; that of rank 2 is another one."""
    store = dist.PrefixStore("attempt-0", dist.FileStore(str(folder / "store"), 2))
    size, agents = len(pids), ("agent", "agent", "another agent")[: len(pids)]
    cpu = torch.device("cpu")
    return World(cpu, rank, size, 1 - rank, 2, store=store, agent_dir=folder, agent_ids=agents, pids=pids)


def find_ended_process() -> int:
    process = get_context("fork").Process(target=os._exit, args=(0,))
    process.start()
    process.join(10)
    return process.pid or 0


def test_sigterm_ends_a_rank_in_a_call_if_a_peer_was_killed(tmp_path: Path) -> None:
    """NCCL reports no error, and Python's handler of a signal waits until the call returns."""
    words, killed = tmp_path / "words", find_ended_process()

    def waits() -> None:
        world = under_one_agent(tmp_path, 0, (os.getpid(), killed))
        with StopRequest(), Watchdog(world, 300, write_to(words)) as watch:
            watch.start(0, tmp_path)
            watch.set_position(1, "reduction")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    began = time.monotonic()
    assert exit_code(waits) == 1
    assert time.monotonic() - began < 20
    assert words.read_text().startswith("rank 1 ended without an error message after step 1: was it killed?")


def test_local_ranks_that_left_in_order_are_not_lost(tmp_path: Path) -> None:
    """Rank 0 may still write what the run has left; and process IDs of another node mean nothing here."""
    ended, alive = find_ended_process(), os.getpid()

    def has_killed_ranks(*pids: int) -> bool:
        return RankExits(under_one_agent(tmp_path, 0, pids)).has_killed_ranks()

    assert [has_killed_ranks(alive, alive, ended), has_killed_ranks(alive, ended, alive)] == [False, True]
    with Watchdog(under_one_agent(tmp_path, 1, (alive, ended, alive)), 300, lambda error: None):
        pass
    assert not has_killed_ranks(alive, ended, alive)


def test_all_that_live_name_the_rank_that_was_killed(tmp_path: Path) -> None:
    """Rank 3 is gone, which only rank 2 notices; the others wait for rank 2, and are not those that were killed."""

    def rank(number: int) -> None:
        store = dist.PrefixStore("attempt-0", dist.FileStore(str(tmp_path / "store"), 4))
        with Watchdog(
            World(torch.device("cpu"), number, 4, number, 4, store=store), 5, write_to(words(number))
        ) as watch:
            watch.start(0, tmp_path)
            watch.set_position(1, "reduction")
            if number < 2:
                time.sleep(20)
            try:
                raise RuntimeError("Connection closed by peer")
            except RuntimeError as error:
                words(number).write_text(str(watch.publish_and_find_root_cause(error)))
                os._exit(1)

    def words(number: int) -> Path:
        return tmp_path / f"words_{number}"

    others = [get_context("fork").Process(target=rank, args=(number,)) for number in (1, 2)]
    for other in others:
        other.start()
    assert exit_code(lambda: rank(0)) == 1
    for other in others:
        other.join(10)
        assert other.exitcode == 1
    named = "rank 3 ended without an error message after step 1: was it killed?"
    assert words(0).read_text().startswith(named), words(0).read_text()
    assert words(2).read_text().startswith(named), words(2).read_text()
    assert not words(1).exists(), "one speaks for all"
    report = (tmp_path / "crash_0.txt").read_text()
    assert [f"--- rank {number} (only lost its peers): reduction, 1 steps done" in report for number in range(4)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert "in rank" in report, "where those that waited did so"


@pytest.mark.slow  # under half a minute
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_torchrun_with_a_killed_rank_of_four_ends_with_its_number(mode: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net"}
    flags |= {"multi_gpu": mode, "epochs": 400, "save_dir": "run", "lr": 0.01, "batch_size": 4, "quiet": True}
    ended = run_command(torchrun(4, **flags), tmp_path, OWN_DEED="3:12:SIGKILL", OWN_PAUSE="0.02")
    assert ended.returncode == 1
    said = re.findall(r"rank [\d, ]+ ended without an error message", ended.stderr)
    assert set(said) == {"rank 3 ended without an error message"}, ended.stderr
    assert summary(tmp_path / "run")["error"].startswith("TrainingError: rank 3 ended without")


class Unplugged(dist.Store):
    """The cable is out: nothing comes back, and the connection seems open."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_who_is_cut_off_from_the_store_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exits, "_TIMEOUT", 0.2)
    words = tmp_path / "words"

    def waits() -> None:
        cut_off = World(torch.device("cpu"), 1, 2, 0, 1, store=Unplugged())  # type: ignore[arg-type]
        with Watchdog(cut_off, 0.5, write_to(words)) as watch:
            watch.start(0, tmp_path)
            watch.set_position(1, "reduction")
            time.sleep(20)

    began = time.monotonic()
    assert exit_code(waits) == 1
    assert time.monotonic() - began < 10
    assert "rank 0 did not arrive" in words.read_text()


def fail_run(folder: Path, error: Exception, *, begins_at: int) -> None:
    """A run of four steps that fails in its fifth."""
    with Watchdog(ALONE, 9, lambda error: None) as watch:
        watch.start(begins_at, folder)
        watch.set_position(4, "forward", torch.tensor([3, 1]))
        assert watch.publish_and_find_root_cause(error) is watch.publish_and_find_root_cause(error) is error
        raise error


def test_an_error_is_explained_once_and_knows_its_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="bad") as raised:
        fail_run(tmp_path, TrainingError("bad"), begins_at=2)
    assert raised.value.failed_at == 4
    assert "rank 0: forward, 4 steps done\nsamples of its batch: 3, 1" in (tmp_path / "crash_0.txt").read_text()


def test_an_error_before_the_first_step_of_an_attempt_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as raised:
        fail_run(tmp_path, TrainingError("bad"), begins_at=4)
    assert raised.value.failed_at is None


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def test_the_rank_that_failed_first_is_named_by_the_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_training(2, model="tests.support.failing_model:net", save_dir=str(run), hang_timeout=20)
    assert ended.error.startswith("rank 1 failed (forward, 3 steps done): ValueError: the planted fault")
    assert "failing_model.py" in ended.error
    assert "rank 1 failed" in summary(run)["error"]
    report = (run / "logs" / "crash_0.txt").read_text()
    assert report.index("rank 0 (only lost its peers)") < report.index("--- rank 1: forward, 3 steps done")


@pytest.mark.parametrize(("mode", "network"), [("ddp", "net"), ("fsdp", "deep")])
def test_a_hang_ends_all_ranks_and_names_the_one_that_did_not_arrive(
    mode: str, network: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sharded, all are in the same forward pass, where the others wait for the weights of the next block."""
    run = tmp_path / "run"
    flags: dict[str, Any] = {"multi_gpu": mode, "model": f"tests.support.failing_model:{network}"}
    ended = run_training(2, **flags, sets=["model.args.how=sleep"], save_dir=str(run), hang_timeout=1)
    said = capfd.readouterr().err
    assert re.search(r"rank 1 did not arrive\n  rank 1: forward, \d steps done, at ", said), said
    assert "failing_model.py" in said
    assert ended.killed == [0, 1]
    assert summary(run)["status"] == "failed"
    assert "did not arrive" in summary(run)["error"]
    for rank in (0, 1):
        assert "Thread" in (run / "logs" / f"stacks_0_rank_{rank}.txt").read_text()


def test_parameters_that_ddp_waits_for_are_named(tmp_path: Path) -> None:
    """It lists them by index only."""
    ended = run_training(
        2, model="tests.support.failing_model:forgetful", save_dir=str(tmp_path / "run"), checkpoint_every="1000"
    )
    assert "no gradient for: 1.bias" in ended.error
