"""The forecast as a command; its arithmetic is tested in tests/planning."""

import json
import pickle
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import main_multi_gpu
from multigpu_cli.commands.doctor import bandwidth
from multigpu_cli.commands.plan import measure, plan
from multigpu_cli.commands.plan.measure import measure_worker, threads_per_worker
from multigpu_cli.commands.plan.plan import parse_plan_request
from multigpu_cli.config.schema import DeviceConfig
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.speedup import Link
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import fork_ranks

OWN = {"data": "tests.support.user_code:tensors", "model": "tests.run.test_profile_micro_batch:plain"}


def test_memory_and_arithmetic_are_those_of_the_network() -> None:
    """96 + 48 weights of four bytes; AdamW keeps two more of each, and a step of four bytes for each of two tensors."""
    alone = measure_worker(resolve(OWN | {"batch_size": "20"}, [], None), [1])
    memory = alone.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (576, 576, 1152 + 8)
    assert memory.per_sample == 4 * (16 + 3)
    assert alone.flops_per_sample == 2 * 2 * 96 + 3 * 2 * 48
    (work,) = alone.works.values()
    assert (work.messages, work.after) == ((576,), 0)
    assert min(work.data, work.forward, work.backward, work.commit) > 0


def test_a_planted_sleep_is_in_the_time_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_PAUSE", "0.01")
    monkeypatch.setattr(measure, "_SECONDS", 0)
    (work,) = measure_worker(resolve(OWN | {"model": "tests.support.user_code:net"}, [], None), [1]).works.values()
    assert 0.01 < work.forward < 0.05
    assert work.backward < work.forward


def test_workers_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "count_cores", lambda: 8)
    assert [threads_per_worker(count) for count in (2, 4, 8, 16)] == [4, 2, 1, 1]
    assert threads_per_worker(1) == torch.get_num_threads(), "a lone worker keeps what the user set"


def test_workers_in_step_wait_for_the_slowest_and_a_hiccup_does_not_count() -> None:
    """Two workers, three windows: one of them of other steps, one with a pause of a second.

    The slower one waits less for the message: 0.2 seconds are the wire.
    """
    usual = torch.tensor([[0.1, 1.0, 2.0, 0.4, 0.2], [0.1, 2.0, 1.0, 0.3, 0.3]], dtype=torch.float64)
    everyone = usual[:, None].repeat(1, 3 * measure._WINDOW, 1)
    everyone[:, ::2] = everyone.flip(0)[:, ::2]  # the slower one is now the one, now the other
    everyone[1, 3, 1] += 1.0
    everyone[:, -1, 0] = 0.0
    assert measure.median_step(everyone) == pytest.approx([0.1, 1.0, 2.0, 0.4, 0.2])


def test_several_at_once_take_their_steps_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forked workers, with what a new process is sent; the messages are DDP's buckets, and the buffers as doubles."""

    def forked(choice: Placement, *sent: Any) -> dict[int, Any]:
        def work(rank: int) -> None:
            function, config = pickle.loads(given)  # noqa: S301
            (tmp_path / str(rank)).write_text(json.dumps(function(config)))

        given = pickle.dumps(sent)
        fork_ranks(choice.num_processes_to_launch, work, 60)
        return {0: json.loads((tmp_path / "0").read_text())}

    monkeypatch.setattr(measure, "run_in_workers", forked)
    monkeypatch.setattr(measure, "count_cores", lambda: 2)
    alone = measure_worker(
        resolve(OWN | {"model": "tests.support.user_code:net", "batch_size": "20"}, [], None), [1, 2, 4]
    )
    model, two = alone.components.state.model, alone.works[2]
    assert list(two.messages) == [4 * sum(p.numel() for p in model.parameters())]
    assert two.after == 8 * sum(buffer.numel() for buffer in model.buffers()) > 0
    assert min(two.data, two.forward, two.backward, two.commit) > 0
    assert alone.wire
    assert not alone.wire.overlaps, "the cores that carry the bytes are those that compute"
    assert two.reduction is not None
    assert 1e-5 < two.reduction < 1
    assert alone.works[4].reduction is None, "beyond the cores there is nothing to be seen"


@pytest.mark.parametrize(
    ("flags", "messages", "after"),
    [
        ({}, (1, 3.5), 0),
        ({"bucket_cap_mb": "2"}, (2, 2, 0.5), 0),
        ({"grad_compression": "bf16"}, (0.5, 1.75), 0),
        ({"exact": True}, (), 4.5),
    ],
)
def test_a_step_sends_what_the_settings_say(
    flags: dict[str, Any], messages: tuple[float, ...], after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.5 MiB of gradients; with --exact they travel when backward has ended."""
    monkeypatch.setattr(measure, "_SECONDS", 0)
    config = resolve(OWN | {"batch_size": "4"} | flags, [f"model.args.width={2**17}"], None)
    (work,) = measure_worker(config, [1]).works.values()
    assert [size / 2**20 for size in work.messages] == list(messages)
    assert work.after / 2**20 == after


def test_the_size_of_buckets_is_measured_where_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_cap", lambda model, world: world.size)
    monkeypatch.setattr(measure, "_SECONDS", 0)
    config = resolve(OWN | {"batch_size": "4"}, [f"model.args.width={2**17}"], None)
    messages, _ = measure._messages_of_step(measure_worker(config, [1]).components, World(torch.device("cpu"), size=2))
    assert [size / 2**20 for size in messages] == [2, 2, 0.5]


@pytest.mark.parametrize(("after", "reduction"), [(0.0, 2.0), (88.0, 3.0)])
def test_a_network_without_buffers_sends_its_gradients_alone(
    after: float, reduction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of four phases of a second each, a bucket of two seconds, and the buffers, or a mere word, of one."""

    monkeypatch.setattr(measure, "_SECONDS", 0)
    monkeypatch.setattr(measure, "count_cores", lambda: 2)
    answer = ((576.0,), after, [1.0] * 4 + [2.0, 1.0])
    monkeypatch.setattr(measure, "run_in_workers", lambda choice, function, config: dict.fromkeys(range(2), answer))
    work = measure_worker(resolve(OWN | {"batch_size": "20"}, [], None), [2]).works[2]
    assert (work.data, work.commit, work.messages, work.after) == (1.0, 1.0, (576.0,), after)
    assert work.reduction == reduction


def test_workers_beyond_the_cores_have_the_wire_of_those_that_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def crowded(config: Any, workers: int) -> Any:
        seen.append(workers)
        return None, f"between {workers}"

    monkeypatch.setattr(measure, "_SECONDS", 0)
    monkeypatch.setattr(measure, "count_cores", lambda: 2)
    monkeypatch.setattr(measure, "_measure_together", crowded)
    config = resolve(OWN | {"batch_size": "20"}, [], None)
    assert str(measure_worker(config, [4]).wire) == "between 2"
    assert measure_worker(config, [1]).wire is None
    assert seen == [2]


def test_one_worker_needs_no_wire(capsys: pytest.CaptureFixture[str]) -> None:
    words = [part for name, value in OWN.items() for part in (f"--{name}", value)]
    assert main_multi_gpu.run(["plan", *words, "--workers", "1"]) == 0
    assert "network  one worker needs none" in capsys.readouterr().out


def test_a_late_message_is_not_taken_for_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks that take their steps together, rank 1 comes a tenth of a second late to the second message."""
    config, cpu = resolve(OWN | {"batch_size": "20"}, [], None), torch.device("cpu")
    real = torch.distributed.all_reduce

    def late(value: torch.Tensor) -> None:
        time.sleep(0.1 * torch.distributed.get_rank() * (len(value) == 2))
        real(value)

    def taken(world: World) -> list[float]:
        torch.set_num_threads(1)
        components, _ = measure.build_probed(config, Placement("single", (cpu,), 0, "plan"), World(cpu), str(tmp_path))
        with closing(components.loaders.train):
            messages = [torch.zeros(1), torch.zeros(2)]
            rows = islice(measure._steps(components, world.size, messages), 8)
            return torch.tensor(list(rows)).median(0).values.tolist()

    monkeypatch.setattr(torch.distributed, "all_reduce", late)
    for *own, first, second in run_on_each_rank(2, taken):
        assert second > 0.1
        assert first + sum(own) < 0.1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0)
    monkeypatch.setattr(measure, "count_cores", lambda: 1)
    words = [part for name, value in OWN.items() for part in (f"--{name}", value)]
    more = ["--workers", "2,4", "--interconnect", "ethernet-25", "--gpus-per-node", "2", "--price-per-gpu-hour", "3"]
    assert main_multi_gpu.run(["plan", *words, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["workers"] for row in found["rows"]] == [1, 2, 4]
    assert all(row["cost"] > 0 for row in found["rows"])
    assert found["about"]["wire"].startswith("assumed: 25 Gbit/s")
    assert "between machines of 2" in found["about"]["wire"]
    assert main_multi_gpu.run(["plan", *words, *more, "--noise-scale", "500", "--save-dir", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert (kept["micro_batch"], kept["memory"]) == (found["micro_batch"], found["memory"])
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    said = capsys.readouterr().out
    assert "forecast, not measured" in said
    assert "144 parameters" in said
    assert "0.56 KiB weights" in said


def test_a_disturbed_forecast_leaves_its_speedups_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two probes of one worker, the second three times as slow: other work has the cores."""
    probes = iter([[0.1, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 0.3]])
    monkeypatch.setattr(measure, "count_cores", lambda: 1)
    monkeypatch.setattr(measure, "time_steps", lambda components: {None: None})
    monkeypatch.setattr(measure, "median_step", lambda times: next(probes))
    words = [part for name, value in OWN.items() for part in (f"--{name}", value)]
    assert main_multi_gpu.run(["plan", *words, "--workers", "1", "--interconnect", "pcie4"]) == 0
    assert "100%" in capsys.readouterr().out
    probes = iter([[0.1] * 4, [0.1] * 4, [0.3] * 4])
    assert main_multi_gpu.run(["plan", *words, "--workers", "2", "--interconnect", "pcie4"]) == 0
    said = capsys.readouterr().out
    assert "note: other work disturbed the measurement (a step of one worker took 400.00 ms, then 1200.00 ms)" in said
    assert "%" not in said


def test_the_wire_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that sleep five milliseconds before each all-reduce have at least half of that as latency of a hop."""

    def forked(choice: Placement, function: Any) -> dict[int, Any]:
        return dict(enumerate(run_on_each_rank(choice.num_processes_to_launch, bandwidth.measure_allreduce)))

    real = torch.distributed.all_reduce

    def late(value: Any, *args: Any, **named: Any) -> Any:
        time.sleep(0.005)
        return real(value, *args, **named)

    monkeypatch.setattr(bandwidth, "run_in_workers", forked)
    monkeypatch.setattr(torch.distributed, "all_reduce", late)
    monkeypatch.setattr(bandwidth, "_SIZES", {"cpu": (2**10, 2**12, 2**14)})
    wire = plan.measure_interconnect(2, DeviceConfig())
    assert isinstance(wire, Link)
    assert 0.0025 <= wire.latency < 0.02
    assert not wire.overlaps, "the cores that carry the bytes are those that compute"
    assert "measured here: gloo, 2 workers" in wire.rests_on


@pytest.mark.parametrize("command", ["plan", "bench", "selftest"])
def test_not_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Each of its workers would measure while the others do."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main_multi_gpu.run([command]) == 2
    assert f"{command} under torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("pcie5", "1", None, None, "8"), "--interconnect pcie5"),
        ((None, "1,x", None, None, "8"), "--workers must be"),
        ((None, "0", None, None, "8"), "--workers must be"),
        ((None, "1", "-1", None, "8"), "--price-per-gpu-hour must be"),
        ((None, "1", None, "much", "8"), "--noise-scale must be"),
        ((None, "1", None, "nan", "8"), "--noise-scale must be"),
        ((None, "1", "inf", None, "8"), "--price-per-gpu-hour must be"),
        ((None, "1", None, None, "1.5"), "--gpus-per-node must be"),
    ],
)
def test_wrong_words_are_named(words: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_plan_request(*words)
