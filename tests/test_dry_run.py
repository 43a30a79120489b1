"""`--dry-run` refuses what the run itself would, in the same words, and leaves nothing behind."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import main_multi_gpu
from tests.support.fork import exit_code
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")

OWN = ["--data", "tests.support.user_code:tensors", "--save-dir", "run", "--num-workers", "0"]
HERE = "tests.test_dry_run"


def wide(**settings: Any) -> Any:
    """A network that ignores how many classes there are."""
    from torch import nn

    return nn.Linear(6, settings.get("units", 12))


def two_faced() -> Any:
    """A network that returns something else while it is trained, as GoogLeNet does."""
    from torch import Tensor, nn

    class TwoFaced(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            outputs = super().forward(inputs)
            return (outputs, outputs) if self.training else outputs

    return TwoFaced(6, 3)


def idle() -> Any:
    """A network with a layer that takes no part."""
    from torch import nn

    class Idle(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.spare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    return Idle()


def of_lightning() -> Any:
    """A network that brings its own training, as Lightning's do."""
    from torch import nn

    class OfLightning(nn.Linear):
        def training_step(self, batch: Any, index: int) -> None:
            """Never called."""

        def configure_optimizers(self) -> None:
            """Never called."""

    return OfLightning(6, 3)


def run_apart(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code of a command in a process of its own, and what it said."""
    code = exit_code(lambda: os._exit(main_multi_gpu.run(words)))
    said = capfd.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "mlp", "--set", "model.widht=3"], "did you mean 'width'?"),
        (["--model", "mlp", "--set", "task.smothing=3"], "task.args.smothing"),
        (["--model", "mlp", "--set", "model.num_classes=5"], "try: --set model.num_classes=3, or another --task"),
        (["--model", f"{HERE}:wide", "--set", "model.units=5"], "it returned         float32 (2, 5)"),
        (["--model", "convnet"], "needs images"),
        (["--model", f"{HERE}:two_faced"], "it returned         (float32 (2, 3), float32 (2, 3))"),
        (["--model", "timm/resnet18", "--set", "model.pretrained=true"], "--init-from FILE"),
    ],
)
def test_it_refuses_in_the_words_of_the_run(words: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    dry, run = (run_apart([*OWN, *words, *flag], capfd) for flag in (["--dry-run"], []))
    assert dry == run
    assert dry[0] == 2
    assert named in dry[2]
    assert not list(Path().iterdir())


def test_for_several_processes_too_without_starting_them(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*OWN, "--model", f"{HERE}:idle", "--multi-gpu", "ddp", "--nproc-per-node", "2", "--dry-run"]
    code, _, said = run_apart(words, capfd)
    assert code == 2
    refused = run_training(2, model=f"{HERE}:idle", save_dir="run", num_workers=0)
    assert said.removeprefix("error: ").strip() == refused.error
    assert "spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias took no part in the loss" in said
    assert run_apart([*words, "--find-unused-parameters"], capfd)[0] == 0
    assert not list(Path().iterdir())


def test_the_plan_says_what_was_tried(capfd: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run_apart([*OWN, "--model", "mlp", "--batch-size", "5", "--dry-run"], capfd)
    assert code == 0
    assert "tried          forward and backward with 2 samples: model, data and task fit" in shown
    words = ["--model", "mlp", "--nproc-per-node", "2", "--dry-run", "--json"]
    plan = json.loads(run_apart([*OWN, *words], capfd)[1])
    assert (plan["workers"], plan["tried"].partition(", ")[2]) == (2, "data and task fit, in one process")
    assert not list(Path().iterdir())


def test_a_folder_in_which_a_run_is_at_work_and_one_that_is_complete(capfd: pytest.CaptureFixture[str]) -> None:
    from multigpu_cli.checkpoint.files import lock_folder

    run_training(save_dir="run", model="mlp", epochs=1, num_workers=0)
    before = sorted(Path("run").rglob("*"))
    words = ["--save-dir", "run", "--own-code", "--dry-run", "--epochs"]
    assert run_apart([*words, "1", "--json"], capfd)[:1] == (0,)
    with lock_folder(Path("run")):
        code, _, said = run_apart([*words, "2"], capfd)
    assert code == 2
    assert "another run is using run" in said
    assert sorted(Path("run").rglob("*")) == before


def test_methods_that_another_trainer_would_call_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_apart([*OWN, "--model", f"{HERE}:of_lightning", "--dry-run"], capfd)
    assert code == 0
    assert "not called here: the model's training_step and configure_optimizers" in out
