from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.checkpoint.pieces import deserialize, serialize
from multigpu_cli.checkpoint.snapshot import Progress, TrainState
from multigpu_cli.checkpoint.weights import copy_to_host, fingerprint
from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.optimizers.eval_weights import EMAModel
from multigpu_cli.runtime.precision import Precision
from tests.support.optimizers import ScheduleFreeSGD
from tests.support.world import CPU


def build_state(optimizer: str = "adamw", *, ema: bool = True, width: int = 4, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return TrainState(
        model,
        build_optimizer(model, OptimizerConfig(name=optimizer)),
        Precision("off", CPU),
        EMAModel(model, 0.9) if ema else None,
        Progress(),
    )


def train(live: TrainState, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(live.progress.step))
        live.model(inputs).square().mean().backward()
        set_rate(live.optimizer, 0.05)
        live.precision.clip_and_step(live.optimizer, list(live.model.parameters()), 1.0)
        if live.average:
            live.average.update_parameters(live.model)
        live.progress.step += 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("ema", [False, True])
def test_a_restored_run_goes_on_with_the_same_bits(optimizer: str, ema: bool) -> None:
    undisturbed = build_state(optimizer, ema=ema)
    train(undisturbed, 6)
    interrupted = build_state(optimizer, ema=ema)
    train(interrupted, 3)
    interrupted.progress.best = {"accuracy": 0.5, "epoch": 1}
    state = deserialize(serialize(interrupted.capture()), "state.pt")
    assert (state["average"] is not None) == ema
    resumed = build_state(optimizer, ema=ema, seed=99)
    resumed.restore(state | {"hooks": {"mine": {"seen": 3}}}, "state.pt")
    assert resumed.progress == interrupted.progress
    assert resumed.part_states == {"hooks": {"mine": {"seen": 3}}}
    train(resumed, 3)
    assert fingerprint(resumed.model.state_dict()) == fingerprint(undisturbed.model.state_dict())
    assert fingerprint(resumed.eval_model().state_dict()) == fingerprint(undisturbed.eval_model().state_dict())


def test_the_loss_scale_goes_on_where_it_was() -> None:
    """A new one begins high, so that the first steps after a resume would be skipped again."""
    live, resumed = (build_state(seed=seed) for seed in (0, 99))
    for each in (live, resumed):
        each.precision = Precision("fp16", CPU)
    for bad in (True, True, False):
        loss = live.model(torch.ones(8, 3)).square().mean()
        live.precision.backward(loss * torch.inf if bad else loss)
        _, skipped = live.precision.clip_and_step(live.optimizer, list(live.model.parameters()), 1.0)
        assert bool(skipped) == bad
    scale = live.precision.state_dict()
    assert scale["scale"] == resumed.precision.state_dict()["scale"] / 4
    assert scale["_growth_tracker"] == 1
    resumed.restore(deserialize(serialize(live.capture()), "state.pt"), "state.pt")
    assert resumed.precision.state_dict() == scale


def test_a_checkpoint_from_before_losses_were_counted_is_restored() -> None:
    live = build_state()
    state = deserialize(serialize(live.capture()), "state.pt")
    del state["progress"]["line_losses"], state["progress"]["epoch_losses"]
    state["progress"]["last"] = {"epoch_loss": 0.5, "train_loss": 0.25}
    live.restore(state, "state.pt")
    assert (live.progress.line_losses, live.progress.epoch_losses) == ([0.0, 0], [0, 0.0, 0])
    assert live.progress.last == {"train_loss": 0.25}, "one name for the mean of an epoch"


def test_a_capture_stays_when_training_goes_on() -> None:
    live = build_state()
    train(live, 2)
    state = live.capture()
    before = serialize(state)
    train(live, 2)
    assert serialize(state) == before
    assert state["progress"]["step"] == 2


def test_what_forward_moves_is_copied_at_once_and_the_rest_before_the_optimizer_steps() -> None:
    live = build_state()
    train(live, 2)
    before = serialize(live.capture())
    snapshot = live.begin_capture()
    live.model(torch.randn(8, 3)).square().mean().backward()
    assert serialize(snapshot.finish()) == before, "batch norm's buffers have moved since"
    train(live, 1)
    assert serialize(snapshot.finish()) == before, "it is complete"


class Remembering(nn.Linear):
    """Has a state of its own beside weights and buffers, which each forward pass moves."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.seen, self.sizes = torch.zeros(1), {0}

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        self.sizes.add(len(inputs))
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "sizes": self.sizes}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen, self.sizes = state["seen"], state["sizes"]


def test_a_state_beside_the_weights_is_copied_at_once() -> None:
    model = Remembering(3, 2)
    live = TrainState(model, torch.optim.SGD(model.parameters()), Precision("off", CPU), None, Progress())
    snapshot = live.begin_capture()
    model(torch.randn(8, 3))
    captured = snapshot.finish()["model"]["_extra_state"]
    assert (captured["seen"].tolist(), captured["sizes"]) == ([0.0], {0})


def test_weights_for_use_that_only_the_optimizer_knows_are_captured_as_an_average_is() -> None:
    model = Remembering(3, 2)
    live = TrainState(model, ScheduleFreeSGD(model.parameters(), lr=0.1), Precision("off", CPU), None, Progress())
    live.optimizer.train()  # type: ignore[attr-defined]
    train(live, 3)
    found = live.capture()["average"]
    with live.eval_weights() as used:
        wanted = copy_to_host(used.state_dict())
    assert not torch.equal(wanted["weight"], model.weight)
    assert serialize(found) == serialize({f"module.{name}": value for name, value in wanted.items()})


def test_everything_captured_is_plain_values_and_tensors_in_host_memory() -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            return [leaf for entry in value.values() for leaf in leaves(entry)]
        if isinstance(value, (list, tuple)):
            return [leaf for entry in value for leaf in leaves(entry)]
        return [value]

    live = build_state()
    train(live, 1)
    for leaf in leaves(live.capture()):
        assert isinstance(leaf, (Tensor, str, int, float, bool, type(None))), type(leaf)
        assert not isinstance(leaf, Tensor) or leaf.device == CPU


def test_the_average_is_what_is_used_where_there_is_one() -> None:
    averaging, plain = build_state(), build_state(ema=False)
    assert averaging.eval_model() is not averaging.model
    assert plain.eval_model() is plain.model
    assert list(averaging.eval_model().state_dict()) == list(averaging.model.state_dict()), "no prefix of a wrapper"


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"step_7 does not fit the model(.|\n)*0\.weight is \(8, 3\)"):
        build_state(width=4).restore(build_state(width=8).capture(), "step_7")


def test_progress_begins_at_nothing() -> None:
    lists: dict[str, Any] = {"score": [], "faults": [], "line_losses": [0, 0], "epoch_losses": [0, 0, 0]}
    numbers = dict.fromkeys(("step", "stale_epochs", "train_seconds", "startup_seconds", "scheduled"), 0)
    flags = dict.fromkeys(("stopped_early", "evaluation_pending"), False)
    assert asdict(Progress()) == lists | numbers | {"best": {}, "last": {}} | flags


def test_a_capture_into_an_earlier_one_uses_its_memory_and_says_the_same() -> None:
    live = build_state()
    train(live, 1)
    first = live.capture()
    places = {name: value.data_ptr() for name, value in first["model"].items()}
    train(live, 2)
    second = live.capture(first)
    assert {name: value.data_ptr() for name, value in second["model"].items()} == places
    assert serialize(second) == serialize(live.capture())
    assert second["progress"]["step"] == 3


def test_a_capture_into_one_of_another_shape_takes_new_memory() -> None:
    """The optimizer has no state before its first step."""
    live = build_state()
    before, other = live.capture(), build_state(width=8).capture()
    train(live, 1)
    for into in (before, other):
        assert serialize(live.capture(into)) == serialize(live.capture())
    outline = torch.empty(2, device="meta")
    assert live.begin_capture(before, live.state_dict({"rows": outline})).finish()["task"]["rows"] is outline
