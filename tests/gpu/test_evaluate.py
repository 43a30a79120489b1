"""`multigpu evaluate` and the API's evaluation on simulated GPUs of unlike models."""

import json
from pathlib import Path

import pytest

from multigpu_cli.distributed.world import World
from tests.commands.several import outputs
from tests.gpu.simulated.gpus import alone, each_rank
from tests.gpu.simulated.install import Simulated, install
from tests.gpu.simulated.machine import Gpu, Machine
from tests.support.run_training import run_training
from tests.support.user_inputs import loader, network
from train_multi_gpu import evaluate_with_multi_gpu

OLD = Gpu("Tesla T4", capability=(7, 5))  # without bf16
UNLIKE = Machine((Gpu(), OLD))


def test_all_workers_take_the_format_that_all_gpus_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the figures are those of one worker to the last bit."""
    monkeypatch.chdir(tmp_path)
    alone(lambda sim: None)  # compiles the library before the forks
    assert run_training(save_dir="run", batch_size=5, epochs=2, lr=0.05).error == ""
    words = ["evaluate", "run", "--own-code", "--json"]
    both, _ = outputs(2, words, tmp_path, prepare=lambda: install(UNLIKE))
    (one,) = outputs(1, words, tmp_path, prepare=lambda: install(Machine((OLD,))))
    (new,) = outputs(1, words, tmp_path, prepare=lambda: install(Machine.of(1)))
    assert json.loads(both) == json.loads(one) | {"world_size": 2}
    assert json.loads(new)["loss"] != json.loads(one)["loss"], "bf16 is another format"


def test_so_do_those_of_the_api() -> None:
    def loss(sim: Simulated, world: World | None = None) -> float:
        return float(evaluate_with_multi_gpu(network(), loader(20), screen="silent")["test_loss"])

    assert each_rank(2, loss, UNLIKE) == [alone(loss, Machine((OLD,)))] * 2
