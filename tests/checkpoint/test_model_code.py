"""A network whose code was edited between two attempts of a run: it is named, and refused with --exact."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.checkpoint.weights import describe_code, load_trained_weights, name_changes
from multigpu_cli.commands.inference import load_run
from multigpu_cli.commands.requests import InferenceRequest
from tests.support.fork import exit_code
from tests.support.run_training import Ended, run_training
from tests.test_links_in_run_folders import content

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN: dict[str, Any] = {"model": "edited:make", "global_batch_size": 20, "batch_size": 10, "save_dir": "run"}
CODE = '''
import torch
from torch import nn

def bend(inputs):
    return torch.relu(inputs)

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make_layers()

class Net(Base):
    """Three classes."""

    def forward(self, inputs):
        return self.layers(bend(inputs))

def make_layers():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

class Other(nn.Module):
    pass

def make():
    return nn.Sequential(Net(), nn.Identity())
'''
SAID_NOTHING = CODE.replace('"""Three classes."""', "").replace("return self", "# why\n\n        return  self")
SAID_NOTHING = SAID_NOTHING.replace("pass", "x = 1").replace("make():\n", "make():\n    print()\n")
FORWARD = CODE.replace("bend(inputs))", "torch.tanh(inputs))")
FUNCTION = CODE.replace("torch.relu", "torch.tanh")
LAYER = CODE.replace("Identity", "Tanh")


def train(workers: int, code: str, **flags: Any) -> Ended:
    Path("edited.py").write_text(code)
    return run_training(workers, **RUN | flags, prepare=lambda: setattr(sys, "dont_write_bytecode", True))


def warnings(ended: Ended) -> list[str]:
    assert ended.error == ""
    return [fault["action"] for fault in ended.summary["faults"]]


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_an_edit_is_named_once_on_any_number_of_workers(mode: str) -> None:
    flags = {"multi_gpu": mode}
    assert warnings(train(1, CODE, epochs=1)) == []
    assert warnings(train(2, SAID_NOTHING, epochs=2, **flags)) == []
    [said] = warnings(train(2, FORWARD, epochs=3, **flags))
    assert said == (
        "the model's Net changed since run/checkpoints/step_00000006 was written: its weights, and the best so far, "
        "are of the code before"
    )
    assert warnings(train(1, FORWARD, epochs=4)) == [said], "it is not said again"


def test_exact_refuses_it_and_nothing_is_touched() -> None:
    assert warnings(train(1, CODE, epochs=1, exact=True)) == []
    before = content(Path("run"))
    for code, named in ((FORWARD, "Net"), (FUNCTION, "bend"), (LAYER, "Identity, Tanh")):
        ended = train(2, code, epochs=2, exact=True)
        told = f"the model's {named} changed since run/" in ended.error
        assert (ended.kind, told) == ("RequestError", True), ended.error
        assert "--init-from run/checkpoints/step_00000003 " in ended.error
        assert content(Path("run")) == before
    assert warnings(train(2, SAID_NOTHING, epochs=2, exact=True)) == []


def test_the_commands_that_use_the_weights_name_it_too(capfd: pytest.CaptureFixture[str]) -> None:
    request = InferenceRequest(run=Path("run"), own_code=True)
    for code, named in ((CODE, ""), (FORWARD, "Net"), (LAYER, "Identity, Tanh")):
        if not named:
            assert warnings(train(1, code, epochs=1)) == []
        Path("edited.py").write_text(code)
        assert exit_code(lambda: load_run(load_trained_weights(request.run), request)) == 0
        said = " ".join(capfd.readouterr().err.split())
        assert said == (f"warning: the model's {named} changed since run/best.pt was written" if named else "")


class Written(nn.Module):
    pass


def test_what_is_no_edit_makes_no_difference() -> None:
    def make(*layers: nn.Module) -> nn.Module:
        return nn.Sequential(*layers, nn.BatchNorm1d(3))

    lazy = describe_code(make(nn.LazyLinear(3)))
    first_pass = make(nn.LazyLinear(3))
    first_pass(torch.ones(2, 4))
    assert lazy == describe_code(first_pass) == describe_code(nn.SyncBatchNorm.convert_sync_batchnorm(first_pass))
    assert name_changes(lazy, describe_code(make(nn.Conv1d(3, 3, 1)))) == "Conv1d, Linear"
    without_source: dict[str, Any] = {"nn": nn, "__name__": __name__}
    exec("class Typed(nn.Module): pass", without_source)
    *_, sources = describe_code(nn.Sequential(without_source["Typed"](), Written())).values()
    assert list(sources) == ["Written"]


def test_records_of_another_python_or_of_before_are_not_compared() -> None:
    now = {"layers": {"Net": "0"}, "Python 3.12": {"Net": "a", "new": "b"}}
    assert name_changes(now | {"Python 3.12": {"Net": "c", "gone": "d"}}, now) == "Net"
    assert name_changes({"layers": {"Net": "0"}, "Python 3.11": {"Net": "c"}}, now) == ""
    assert name_changes({}, now) == ""
