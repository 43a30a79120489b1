import inspect
import itertools
from dataclasses import replace
from math import isclose, sqrt

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from multigpu_cli.errors import RequestError
from multigpu_cli.planning.schedule import (
    OPTIMIZERS,
    REFUSED,
    SHAPES,
    Rate,
    Schedule,
    plan_schedule,
    resolve_learning_rate,
)


def resolve_rate(**asked: object) -> Rate:
    usual = {"given": None, "base": None, "base_batch": 32, "global_batch": 128, "rule": "auto", "optimizer": "adamw"}
    return resolve_learning_rate(**usual | asked)  # type: ignore[arg-type]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    total = draw(st.integers(1, 400))
    return Schedule(
        peak=draw(st.floats(1e-6, 10)),
        total_steps=total,
        warmup_steps=draw(st.integers(0, total - 1)),
        shape=draw(st.sampled_from(SHAPES)),
    )


@pytest.mark.parametrize("rule", ["auto", "linear", "sqrt", "none"])
def test_a_given_rate_is_used_exactly(rule: str) -> None:
    rate = resolve_rate(given=4e-3, base=1.0, rule=rule)
    assert (rate.value, rate.rule) == (4e-3, "given")


@pytest.mark.parametrize(
    ("asked", "value", "rule"),
    [
        ({}, 1e-3 * 2, "sqrt"),
        ({"optimizer": "sgd"}, 0.1 * 4, "linear"),
        ({"rule": "linear"}, 1e-3 * 4, "linear"),
        ({"optimizer": "sgd", "rule": "sqrt"}, 0.1 * 2, "sqrt"),
        ({"rule": "none"}, 1e-3, "none"),
        ({"optimizer": "rmsprop"}, 1e-3 * 2, "sqrt"),
        ({"optimizer": "adagrad"}, 0.01, "none"),
        ({"optimizer": "my_code:Lion", "base": 0.3}, 0.3, "none"),
        ({"optimizer": "my_code:Lion", "base": 0.3, "rule": "sqrt"}, 0.6, "sqrt"),
        ({"base": 0.02, "base_batch": 256, "global_batch": 64}, 0.02 * sqrt(1 / 4), "sqrt"),
    ],
)
def test_a_base_rate_is_scaled_to_the_global_batch(asked: dict[str, object], value: float, rule: str) -> None:
    rate = resolve_rate(**asked)
    assert isclose(rate.value, value, rel_tol=1e-12)
    assert rate.rule == rule


def test_an_optimizer_without_a_known_rate_needs_one() -> None:
    with pytest.raises(RequestError, match="--optimizer my_code:Lion: no default learning rate is known") as refused:
        resolve_rate(optimizer="my_code:Lion")
    assert "--lr" in refused.value.remedy


def test_the_reason_shows_the_sum() -> None:
    assert resolve_rate(optimizer="adagrad").reason == "base rate 0.01, not scaled: no rule is known for adagrad"
    assert resolve_rate(optimizer="adagrad", rule="none").reason == "base rate 0.01, not scaled"
    assert resolve_rate().reason == "base rate 0.001 × √(128/32) (sqrt rule) = 0.002"
    assert resolve_rate(rule="linear").reason == "base rate 0.001 × 128/32 (linear rule) = 0.004"
    assert "--lr" in resolve_rate(given=4e-3).reason


@given(schedule=schedules())
def test_the_rate_stays_between_zero_and_the_peak(schedule: Schedule) -> None:
    rates = [schedule.rate_at(step) for step in range(schedule.total_steps)]
    assert all(0 < rate <= schedule.peak for rate in rates)


@given(schedule=schedules())
@example(Schedule(peak=0.1, total_steps=9, warmup_steps=2, shape="constant"))  # 0.1 * 3 / 3 is not 0.1
def test_warm_up_climbs_evenly_from_near_zero_to_the_peak(schedule: Schedule) -> None:
    climb = [schedule.rate_at(step) for step in range(schedule.warmup_steps + 1)]
    assert climb[-1] == schedule.peak
    gap = schedule.peak / (schedule.warmup_steps + 1)
    assert isclose(climb[0], gap)
    assert all(isclose(after - before, gap, rel_tol=1e-6) for before, after in itertools.pairwise(climb))


@given(schedule=schedules())
def test_after_warm_up_the_rate_never_rises(schedule: Schedule) -> None:
    rates = [schedule.rate_at(step) for step in range(schedule.warmup_steps, schedule.total_steps)]
    assert all(after <= before for before, after in itertools.pairwise(rates))


@pytest.mark.parametrize(
    ("shape", "end"), [("cosine", 0.0), ("linear", 0.0), ("constant", 1.0), ("step", 0.01), ("wsd", 0.0)]
)
def test_where_each_shape_ends(shape: str, end: float) -> None:
    schedule = Schedule(peak=1.0, total_steps=100, warmup_steps=0, shape=shape)
    assert schedule.rate_at(100) == pytest.approx(end)
    assert schedule.rate_at(1000) == pytest.approx(end), "beyond the end it stays"
    assert replace(schedule, total_steps=1).rate_at(1) == pytest.approx(end)


@pytest.mark.parametrize(
    ("shape", "half"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0), ("step", 0.1), ("wsd", 1.0)]
)
def test_a_floor_is_where_the_fall_ends(shape: str, half: float) -> None:
    schedule = plan(shape=shape, warmup_epochs=0, args={"floor": 0.1})
    assert schedule.rate_at(0) == 1.0
    assert schedule.rate_at(100) == pytest.approx(half)
    assert schedule.rate_at(200) == pytest.approx(1.0 if shape == "constant" else 0.1)


def test_a_fall_to_nothing_and_no_fall_at_all_can_be_written_down() -> None:
    assert plan(shape="wsd", warmup_epochs=0, args={"floor": 0, "decay": 0}) == plan(
        shape="wsd", warmup_epochs=0, args={"floor": 0.0, "decay": 0.0}
    )


@pytest.mark.parametrize("args", [{"flor": 0.1}, {"floor": 2}, {"floor": "low"}, {"floor": True}])
def test_a_floor_that_is_none_is_refused(args: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"schedule\.args\.flo"):
        plan(args=args)


@pytest.mark.parametrize(
    ("shape", "half", "late"), [("cosine", 0.5, 0.1464466), ("linear", 0.5, 0.25), ("step", 0.1, 0.01)]
)
def test_how_each_shape_falls(shape: str, half: float, late: float) -> None:
    schedule = Schedule(peak=1.0, total_steps=120, warmup_steps=20, shape=shape)
    assert schedule.rate_at(70) == pytest.approx(half)
    assert schedule.rate_at(95) == pytest.approx(late)


def plan(**asked: object) -> Schedule:
    usual = {"peak": 1.0, "shape": "cosine", "steps_per_epoch": 10, "epochs": 20, "max_steps": None}
    return plan_schedule(**usual | {"warmup_epochs": None} | asked)  # type: ignore[arg-type]


def test_the_run_is_counted_in_optimizer_steps() -> None:
    assert plan().total_steps == 200
    assert plan(max_steps=35).total_steps == 35
    assert plan(max_steps=900).total_steps == 200


@pytest.mark.parametrize(
    ("asked", "warmup"),
    [
        ({}, 20),  # two epochs, a tenth of the run
        ({"epochs": 40}, 20),  # two epochs
        ({"epochs": 4}, 4),  # a tenth of the run
        ({"max_steps": 50}, 5),
        ({"warmup_epochs": 0.0}, 0),
        ({"warmup_epochs": 1.5}, 15),
        ({"warmup_epochs": 3.0, "max_steps": 12}, 30),  # cut short by --max-steps, which the plan says
    ],
)
def test_how_long_the_warm_up_is(asked: dict[str, object], warmup: int) -> None:
    assert plan(**asked).warmup_steps == warmup


def test_a_warm_up_that_is_cut_short_never_reaches_the_peak() -> None:
    schedule = plan(warmup_epochs=3.0, max_steps=12)
    assert schedule.rate_at(11) == pytest.approx(12 / 31)


def test_a_warm_up_that_never_ends_is_refused() -> None:
    with pytest.raises(RequestError, match=r"--warmup-epochs 3: the warm-up does not end within --epochs 3"):
        plan(epochs=3, warmup_epochs=3.0)


@given(epochs=st.integers(1, 30), steps=st.integers(1, 50), most=st.none() | st.integers(1, 2000))
def test_the_usual_warm_up_always_ends(epochs: int, steps: int, most: int | None) -> None:
    schedule = plan(epochs=epochs, steps_per_epoch=steps, max_steps=most)
    assert 0 <= schedule.warmup_steps < schedule.total_steps
    assert max(schedule.rate_at(step) for step in range(schedule.total_steps)) == schedule.peak


@given(schedule=schedules(), cut=st.integers(0, 400))
def test_a_resumed_run_continues_the_same_curve(schedule: Schedule, cut: int) -> None:
    afresh = Schedule(
        peak=schedule.peak,
        total_steps=schedule.total_steps,
        warmup_steps=schedule.warmup_steps,
        shape=schedule.shape,
    )
    assert [afresh.rate_at(step) for step in range(cut, 400)] == [schedule.rate_at(step) for step in range(cut, 400)]


def test_wsd_is_stable_until_its_decay() -> None:
    """Hägele et al. 2024: 1 - sqrt of what is done of it."""
    schedule = plan(shape="wsd", warmup_epochs=1, args={"decay": 0.4})
    assert schedule.rate_at(5) == pytest.approx(6 / 11)
    assert {schedule.rate_at(step) for step in range(10, 121)} == {1.0}
    assert schedule.rate_at(140) == pytest.approx(1 - sqrt(0.25))
    assert plan(shape="wsd", args={}).rate_at(161) < 1.0 == plan(shape="wsd", args={}).rate_at(160), (
        "a fifth, if not said"
    )
    assert plan(shape="wsd", warmup_epochs=15, args={"decay": 1.0}).rate_at(149) < 1.0
    assert plan(shape="wsd", args={"decay": 0.0}).rate_at(200) == 1.0


@pytest.mark.parametrize(
    ("shape", "args"), [("cosine", {"decay": 0.2}), ("wsd", {"decay": 2}), ("wsd", {"dekay": 0.2})]
)
def test_a_share_of_decay_is_of_wsd_alone(shape: str, args: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"schedule\.args\.de"):
        plan(shape=shape, args=args)


@given(total=st.integers(1, 3000), peak=st.floats(1e-6, 10))
def test_an_own_function_gives_the_share_of_the_peak(total: int, peak: float) -> None:

    def ramp(step: int, of: int) -> float:
        assert step < of, "steps beyond the end are nobody's"
        return step / of

    schedule = plan(peak=peak, shape="my_code:ramp", max_steps=total, epochs=300, function=ramp)
    assert schedule.warmup_steps == 0
    assert [schedule.rate_at(step) for step in (0, total - 1)] == [0.0, peak * ((total - 1) / total)]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda step, total: 1 / abs(step - 7), "its factor of step 7 of 200 raised ZeroDivisionError"),
        (lambda step, total: 1 / (total - 1 - step), "its factor of step 199 of 200 raised ZeroDivisionError"),
        (lambda step, total: float("nan") if step > 190 else 1.0, "its factor of step 191 of 200 is nan"),
        (lambda step, total: 1 - step, "its factor of step 2 of 200 is -1"),
        (lambda step, total: "much", "its factor of step 0 of 200 is 'much'"),
        (len, "its factor of step 0 of 200 raised TypeError"),
    ],
)
def test_an_own_function_that_fails_somewhere_is_refused_before_the_run(function: object, told: str) -> None:
    with pytest.raises(RequestError, match=f"--schedule my_code:f: {told}"):
        plan(shape="my_code:f", function=function)


def test_an_own_function_that_remembers_is_refused() -> None:
    count = itertools.count(1)
    with pytest.raises(RequestError, match="two different factors"):
        plan(shape="my_code:f", function=lambda step, total: 1 / next(count))


def test_every_optimizer_of_torch_is_a_choice_or_refused() -> None:
    kinds = [kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert {known.class_name for known in OPTIMIZERS.values()} | {"Muon"} >= names - _refused(names)
    assert all(known.class_name in names for known in OPTIMIZERS.values() if known.class_name != "Muon")
    assert _refused(names) == {"LBFGS", "SparseAdam", "Rprop", "ASGD"}


def _refused(names: set[str]) -> set[str]:
    return {name for name in names if name.lower() in REFUSED}


def test_rates_are_torchs_own_but_for_those_with_a_source_and_who_needs_whole_weights_says_so() -> None:
    kinds = {name: getattr(torch.optim, known.class_name, None) for name, known in OPTIMIZERS.items()}
    rates = {name: inspect.signature(kind).parameters["lr"].default for name, kind in kinds.items() if kind}
    assert {name: OPTIMIZERS[name].rate for name, rate in rates.items() if rate != OPTIMIZERS[name].rate} == {
        "sgd": 0.1,
        "rmsprop": 1e-3,
    }
    assert {name for name, known in OPTIMIZERS.items() if known.needs_whole_weights} == {"adafactor", "muon"}


def test_a_name_is_that_of_its_class() -> None:
    assert all(name == known.class_name.lower() for name, known in OPTIMIZERS.items())
    assert not OPTIMIZERS.keys() & REFUSED.keys()
