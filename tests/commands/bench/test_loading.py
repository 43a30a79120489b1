"""Loading alone, against a dataset whose samples take a known time."""

import json

import pytest

import main_multi_gpu
from multigpu_cli.commands import bench_overlap
from multigpu_cli.commands.bench_overlap import measure_loading
from multigpu_cli.config.sources import resolve
from multigpu_cli.errors import RequestError
from tests.support import user_code


def test_a_planted_wait_limits_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty milliseconds: alone at most 50 samples a second; two processes fetch more than one."""
    monkeypatch.setattr(user_code.SlowItems, "seconds", 2e-2)
    monkeypatch.setattr(bench_overlap, "count_cores", lambda: 2)
    found = measure_loading(resolve({"data": "tests.support.user_code:SlowItems", "batch_size": "5"}, [], None), 1)
    assert list(found.rates) == [0, 1, 2]
    assert 10 < found.rates[0][0] < 50
    assert found.rates[2][0] > found.rates[0][0]
    assert found.advice.startswith("--num-workers ")


def test_fewer_processes_are_advised_where_they_are_enough() -> None:
    rates = {0: [100.0, 90.0, 95.0], 1: [192.0] * 3, 2: [200.0, 1.0, 200.0], 4: [201.0] * 3}
    assert bench_overlap._choose_advice(rates, in_memory=False).startswith("--num-workers 1: 192 samples/s")


def test_data_in_memory_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "tests.support.user_code:tensors", "--data-only", "--repetitions", "1"]
    assert main_multi_gpu.run(["bench", *words]) == 0
    assert "--num-workers has no effect" in capsys.readouterr().out
    assert main_multi_gpu.run(["bench", *words, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["rates"]) == ["0"]


def test_an_epoch_of_one_batch_has_a_rate_too() -> None:
    (rate,) = measure_loading(
        resolve({"data": "tests.support.user_code:tensors", "batch_size": "2000"}, [], None), 1
    ).rates[0]
    assert rate > 1000


def test_environments_are_refused() -> None:
    with pytest.raises(RequestError, match="bench --data-only needs the samples of a dataset"):
        measure_loading(resolve({"data": "gym:CartPole-v1", "task": "ppo"}, [], None), 1)
