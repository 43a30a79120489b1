import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from multigpu_cli.distributed.world import World
from multigpu_cli.monitor.meters import SampleTrace
from tests.support.ranks import run_on_each_rank
from tests.support.world import ALONE


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line(tmp_path: Path) -> None:
    with closing(SampleTrace(tmp_path / "samples.jsonl", ALONE, 4)) as trace:
        trace.write(1, [torch.tensor([5, 0]), torch.tensor([7])])
        assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "samples": [5, 0, 7]}], "at once, in case of a kill"
        trace.write(2, [torch.tensor([1, 2, 3, 4])])
        trace.write(3, [])
    assert lines(tmp_path / "samples.jsonl")[1:] == [{"step": 2, "samples": [1, 2, 3, 4]}, {"step": 3, "samples": []}]


def test_a_resumed_run_adds_to_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(SampleTrace(tmp_path / "samples.jsonl", ALONE, 4)) as trace:
            trace.write(step, [torch.tensor([step])])
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [1, 2]


def test_a_line_that_a_kill_has_torn_is_not_joined_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "samples": [1]}\n{"step": 2, "sam')
    with closing(SampleTrace(tmp_path / "samples.jsonl", ALONE, 4)) as trace:
        trace.write(2, [torch.tensor([3])])
    assert '{"step": 2, "samples": [3]}' in (tmp_path / "samples.jsonl").read_text().splitlines()


def test_workers_are_gathered_in_order_and_idle_ones_have_none(tmp_path: Path) -> None:
    shares = [[torch.tensor([9, 8])], [], [torch.tensor([1]), torch.tensor([0])]]

    def work(world: World) -> None:
        with closing(SampleTrace(tmp_path / "samples.jsonl", world, 6)) as trace:
            trace.write(1, shares[world.rank])

    run_on_each_rank(3, work)
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "samples": [9, 8, 1, 0]}]
