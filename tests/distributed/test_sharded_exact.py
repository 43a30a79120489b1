"""--exact with --multi-gpu fsdp: the bits of an unsharded run, whatever runs it and wherever it goes on."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor, nn
from torch.nn.functional import linear

from multigpu_cli.checkpoint.store import Store
from tests.distributed.test_sharded import GPT, SIZES, WRITTEN, read_curve, read_evals, read_events, run
from tests.support.run_training import Ended

pytestmark = pytest.mark.usefixtures("in_tmp_path")
EXACT: dict[str, Any] = {"exact": True, "max_grad_norm": 0.5}
MLP: dict[str, Any] = {"model": "mlp", "sets": ["model.args.width=17"], "ema": 0.9}
IMAGES = {"model": "convnet", "sets": ["data.args.shape=[2, 8, 8]", "model.args.width=8"]}
CASES: dict[str, dict[str, Any]] = {
    "mlp": MLP,
    "convnet": IMAGES | {"ema": 0.9, "max_steps": 4},
    "gpt": GPT | {"sets": SIZES, "grad_checkpointing": True, "amp": "bf16", "max_steps": 4},
    "fp32": GPT | {"sets": SIZES},
    "sgd": MLP | {"optimizer": "sgd", "freeze": "1.*", "amp": "bf16"},
    "unfrozen": MLP | {"sets": [*MLP["sets"], "model.unfreeze_at=2"], "freeze": "1.*"},
    "steps": MLP | {"global_batch_size": 12, "batch_size": 6, "reshard": "step"},  # two of four are idle
    "many passes": IMAGES | {"global_batch_size": 30, "batch_size": 1, "optimizer": "sgd"},
    "unused": {"model": "tests.support.failing_model:choosy"},
    "tied": {
        "model": "tests.distributed.test_sharded_exact:build_twice",
        "amp": "bf16",
        "sets": ["strategy.wrap=again"],
    },
}


class Twice(nn.Module):
    """One module has the weight of another, and a third is called twice: their gradients are sums."""

    seen: Tensor

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(features, 9), nn.Sequential(nn.Linear(9, 9), nn.Tanh())
        self.head, self.tail = nn.Linear(9, 9), nn.Linear(9, num_classes)
        self.head.weight = self.first.weight = nn.Parameter(torch.randn(9, 9) / 3)
        self.register_buffer("seen", torch.zeros(9))

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.again(self.again(self.first(nn.functional.pad(inputs, (0, 3))).tanh()))
        if self.training:
            self.seen.lerp_(found.detach().float().mean(0), 0.1)
        logits: Tensor = self.tail(linear(self.head(found), self.head.weight) - self.seen)
        return logits


def build_twice(input_shape: tuple[int], num_classes: int) -> nn.Module:
    return Twice(*input_shape, num_classes)


def train(workers: int, folder: str, case: dict[str, Any], **flags: Any) -> Ended:
    ended = run(workers, folder, case | EXACT, **flags)
    assert not ended.error, ended.error
    return ended


def read_bits(folder: str) -> list[tuple[str, bytes]]:
    """All tensors of the last checkpoint, in its order: weights, average, buffers, moments."""
    newest, _ = Store(Path(folder, "checkpoints"), 3).find_newest()
    assert newest is not None
    tensors = list(_list_tensors(newest.state()))
    assert any(name.startswith(".optimizer.state.") for name, _ in tensors)
    return tensors


def _list_tensors(state: Any, name: str = "") -> Any:
    if isinstance(state, Tensor):
        yield name, state.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _list_tensors(value, f"{name}.{key}")


def assert_same_bits(folder: str, other: str) -> None:
    assert read_curve(folder) == read_curve(other)
    assert read_evals(folder) == read_evals(other)
    assert read_bits(folder) == read_bits(other)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("convnet", (3,)), ("gpt", (2,))),
        *(pytest.param(name, (2, 3, 4), marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_the_bits_are_those_of_one_process(name: str, sizes: Sequence[int]) -> None:
    """Uneven and idle shares, accumulation, dropout, clipping, and what each case adds."""
    alone = train(1, "alone", CASES[name])
    for workers in sizes:
        ended = train(workers, f"on{workers}", CASES[name])
        assert (ended.summary["strategy"], ended.summary["world_size"]) == ("fsdp", workers)
        assert_same_bits(f"on{workers}", "alone")
        assert ended.summary["fingerprint"] == alone.summary["fingerprint"]


def test_other_sums_have_other_bits() -> None:
    """The control: or the tests above could not fail."""
    train(1, "alone", MLP, max_steps=3)
    run(3, "plain", MLP, max_grad_norm=0.5, max_steps=3)
    assert read_curve("plain") != read_curve("alone")


def test_a_killed_run_has_the_bits_of_one_that_was_left_alone() -> None:
    """4 → 2 → 1, and another way on to ddp: each attempt reads what the one before wrote."""
    case: dict[str, Any] = {"epochs": 3, "ema": 0.9}
    whole = train(1, "whole", case).summary
    killed = run(4, "run", case | EXACT, environ=WRITTEN | {"OWN_DEED": "3:12:SIGKILL"})
    assert 3 in killed.killed
    assert train(2, "run", case, max_steps=6).summary["resumed_from"]
    shutil.copytree("run", "other")
    ends = [train(1, "run", case), train(3, "other", case, multi_gpu="ddp")]
    for folder, ended in zip(("run", "other"), ends, strict=True):
        assert [event["from_world_size"] for event in read_events(folder, "resume")] == [4, 2]
        assert_same_bits(folder, "whole")
        assert ended.summary["fingerprint"] == whole["fingerprint"]


def test_a_run_that_was_begun_without_sharding_goes_on_with_its_bits() -> None:
    train(1, "whole", MLP)
    train(2, "run", MLP, multi_gpu="ddp", max_steps=4)
    train(3, "run", MLP)
    assert read_curve("run") == read_curve("whole")
    assert read_bits("run") == read_bits("whole")


def test_a_torch_that_has_no_hook_for_the_reduction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter")
    ended = run(2, "run", EXACT)
    assert (ended.kind, "can't sum gradients in a fixed order" in ended.error) == ("RequestError", True), ended.error
    assert not Path("run").exists()
