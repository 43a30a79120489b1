import math
from typing import Any

import pytest
import torch
from torch import nn

from multigpu_cli.config.schema import OptimizerConfig
from multigpu_cli.distributed.world import World, all_reduce_sum
from multigpu_cli.errors import RequestError
from multigpu_cli.optimizers.build import build_optimizer, set_rate
from multigpu_cli.runtime import precision
from multigpu_cli.runtime.precision import Precision, PrecisionChoice, agree_on_precision, choose_precision
from tests.support.ranks import run_on_each_rank

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_full_precision_on_cpu_and_offers_what_is_faster(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    name, because = choose_precision("auto", CPU)
    assert name == "off"
    assert ("--amp bf16" in because) == native


@pytest.mark.parametrize("wanted", ["off", "bf16"])
def test_what_was_asked_for_is_taken(wanted: str) -> None:
    assert choose_precision(wanted, CPU) == (wanted, f"--amp {wanted}")


def test_fp16_on_cpu_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="--amp fp16 needs a GPU"):
        choose_precision("fp16", CPU)


def test_an_overflow_in_the_rows_of_one_rank_skips_the_step_of_all() -> None:
    def work(world: World) -> list[Any]:
        rows = nn.Parameter(torch.ones(2))
        optimizer, scaled = (
            build_optimizer(nn.ParameterList([rows]), OptimizerConfig(name="sgd")),
            Precision("fp16", CPU),
        )
        set_rate(optimizer, 0.1)
        seen = []
        for overflow in (True, False):
            scaled.backward(rows.sum())
            assert rows.grad is not None
            rows.grad[0] *= float("inf") if overflow and world.rank == 1 else 1
            _, skipped = scaled.clip_and_step(
                optimizer, [rows], None, lambda own: all_reduce_sum(world, own.square()).sqrt()
            )
            seen += [float(skipped), scaled.state_dict()["scale"], rows[0].item() < 1]
        return seen

    assert run_on_each_rank(2, work) == [[1.0, 2.0**15, False, 0.0, 2.0**15, True]] * 2


@pytest.mark.parametrize(("native", "name"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_cuda_asks_for_native_bf16(native: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def supported(*, including_emulation: bool) -> bool:
        asked["emulation"] = including_emulation
        return native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert choose_precision("auto", CUDA).name == name
    assert asked == {"emulation": False}


@pytest.mark.parametrize("ranks", [("bf16", "bf16", "bf16"), ("bf16", "fp16", "bf16"), ("fp16", "bf16", "bf16")])
def test_ranks_on_unlike_gpus_take_one_format(ranks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is scaled for fp16 on one rank alone would drown the others'."""

    def work(world: World) -> PrecisionChoice:
        monkeypatch.setattr(
            precision, "choose_precision", lambda wanted, device: PrecisionChoice(ranks[world.rank], "its GPU")
        )
        return agree_on_precision("auto", world, [world.device])

    found = run_on_each_rank(3, work)
    assert {each.name for each in found} == {"fp16" if "fp16" in ranks else "bf16"}
    other = ranks.index("fp16") if "fp16" in ranks else None
    reasons = [
        "its GPU" if other is None or name == "fp16" else f"rank {other}'s GPU does not support bf16" for name in ranks
    ]
    assert [each.reason for each in found] == reasons


def test_what_was_asked_for_needs_no_agreement() -> None:
    alone, two = World(CPU), World(CPU, 0, 2)
    assert (
        agree_on_precision("bf16", two, [CPU])
        == agree_on_precision("bf16", alone, [CPU])
        == choose_precision("bf16", CPU)
    )
    assert agree_on_precision("auto", alone, [CPU]) == choose_precision("auto", CPU)


def test_the_gpus_of_one_process_take_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel, and the plan of a run that is not started yet."""
    formats = {CUDA: "bf16", torch.device("cuda", 1): "fp16", CPU: "bf16"}
    monkeypatch.setattr(
        precision, "choose_precision", lambda wanted, device: PrecisionChoice(formats[device], "its own")
    )
    assert agree_on_precision("auto", World(CPU), [CUDA, torch.device("cuda", 1)]) == (
        "fp16",
        "cuda:1 does not support bf16",
    )
    assert agree_on_precision("auto", World(CPU), [CUDA]) == ("bf16", "its own")


def test_bf16_computes_in_bf16_and_keeps_fp32_weights() -> None:
    model = nn.Linear(4, 2)
    with Precision("bf16", CPU).autocast():
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    assert model.weight.dtype == torch.float32
    with Precision("off", CPU).autocast():
        assert model(torch.ones(1, 4)).dtype == torch.float32


class Step:
    """One parameter with a gradient, and an optimizer as a run has it."""

    def __init__(self, gradient: list[float], optimizer: str = "sgd", decay: float = 0.0) -> None:
        self.model = nn.Linear(len(gradient), 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = build_optimizer(self.model, OptimizerConfig(name=optimizer, weight_decay=decay))
        set_rate(self.optimizer, 0.1)
        self.give(gradient)

    def give(self, gradient: list[float]) -> None:
        self.model.weight.grad = torch.tensor([gradient])

    def commit(self, max_norm: float | None = None) -> list[float]:
        found = Precision("off", CPU).clip_and_step(self.optimizer, list(self.model.parameters()), max_norm)
        return [float(value) for value in found]

    @property
    def weights(self) -> list[float]:
        return self.model.weight.detach().flatten().tolist()


def test_a_step_is_taken_and_measured() -> None:
    step = Step([3.0, 4.0])
    assert step.commit() == [5.0, 0.0]
    assert step.weights == pytest.approx([1 - 0.1 * 1.9 * 3, 1 - 0.1 * 1.9 * 4]), "Nesterov's first step is 1.9 times g"
    assert step.model.weight.grad is None


def test_the_norm_is_measured_before_clipping_to_it() -> None:
    step = Step([3.0, 4.0])
    assert step.commit(max_norm=1.0) == [5.0, 0.0]
    assert step.weights == pytest.approx([1 - 0.19 * 0.6, 1 - 0.19 * 0.8], rel=1e-4)


def test_a_gradient_below_the_limit_is_left_alone() -> None:
    free, limited = Step([0.3, 0.4]), Step([0.3, 0.4])
    free.commit()
    limited.commit(max_norm=1.0)
    assert limited.weights == free.weights


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_that_is_not_finite_is_skipped_as_if_it_had_not_been(
    optimizer: str, bad: float, max_norm: float | None
) -> None:
    step, undisturbed = (Step([0.3, 0.4], optimizer, decay=0.1) for _ in range(2))
    for each in (step, undisturbed):
        each.commit(max_norm)
    before = step.weights
    step.give([bad, 1.0])
    norm, skipped = step.commit(max_norm)
    assert skipped == 1.0
    assert not torch.isfinite(torch.tensor(norm))
    assert step.weights == before
    assert step.model.weight.grad is None
    for each in (step, undisturbed):
        each.give([0.5, -0.2])
        assert each.commit(max_norm)[1] == 0.0
    assert step.weights == undisturbed.weights, "momentum and step counts must not have seen the skipped one"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_also_the_very_first_step_may_be_skipped(optimizer: str) -> None:
    """Fused SGD makes its momentum buffers in the first step, of uninitialised memory if that is skipped."""
    size = 4096
    junk = [torch.full((1, size), 1e9) for _ in range(64)]  # what fresh memory would then show
    del junk
    step, undisturbed = Step([float("nan")] * size, optimizer), Step([0.5] * size, optimizer)
    assert step.commit()[1] == 1.0
    step.give([0.5] * size)
    assert step.commit() == undisturbed.commit()
    assert step.weights == undisturbed.weights


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_norm_is_torchs_to_the_last_bit_and_clipping_to_one_rounding(mixed: bool, max_norm: float | None) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)))
        if mixed:
            models[-1][1].double()
        for parameter in models[-1].parameters():
            parameter.grad = torch.randn_like(parameter)
    ours, theirs = (list(model.parameters()) for model in models)
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm or torch.inf)
    with torch.no_grad():
        for parameter in ours:
            parameter.zero_()
    optimizer = torch.optim.SGD(ours, lr=1.0, fused=True)  # leaves minus the clipped gradient
    assert torch.equal(Precision("off", CPU).clip_and_step(optimizer, [*ours], max_norm)[0], norm)
    for mine, p in zip(ours, theirs, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(-mine, p.grad, rtol=1.5 * torch.finfo(p.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_of_the_loss_is_one_of_the_gradient(dtype: torch.dtype) -> None:
    weights = torch.randn(9, dtype=dtype, requires_grad=True)
    precision = Precision("off", CPU)
    for factor in (1 / 3, 1 / 7, 1 / 7):
        (expected,) = torch.autograd.grad(weights.exp().sum() * factor, weights)
        weights = weights.detach().requires_grad_()
        precision.backward(weights.exp().sum(), factor)
        assert weights.grad is not None
        assert torch.equal(weights.grad, expected)


def test_the_loss_scale_is_kept() -> None:
    precision = Precision("off", CPU)
    assert precision.state_dict() == {}
    precision.load_state_dict({})


def test_cast_weights_are_dropped_where_they_are_asked_to_be() -> None:
    """Else gathered weights that were freed would stay in bf16 until the pass ends."""
    kept = []
    for keeps in (True, False):
        precision = Precision("bf16", CPU)
        precision.keeps_casts = keeps
        with precision.autocast():
            kept.append(torch.is_autocast_cache_enabled())
    assert kept == [True, False]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_a_factor_of_the_gradient_is_part_of_the_step(name: str, max_norm: float | None) -> None:
    """As multiplied before: the norm, the clipping, and where the weights come to; times infinity the step is none."""
    before, within, never = (Step([3.0, 4.0], name) for _ in range(3))
    before.give([1.5, 2.0])
    expected = before.commit(max_norm)
    for step, factor in ((within, 0.5), (never, math.inf)):
        moved = Precision("off", CPU).clip_and_step(
            step.optimizer, [*step.model.parameters()], max_norm, factor=torch.tensor(factor, dtype=torch.float64)
        )
        found = [float(value) for value in moved]
        assert found[1] == (factor == math.inf)
        if factor == 0.5:
            assert found == pytest.approx(expected)
    assert within.model.weight.tolist() == [pytest.approx(before.model.weight.tolist()[0])]
    assert never.model.weight.tolist() == [[1.0, 1.0]]
