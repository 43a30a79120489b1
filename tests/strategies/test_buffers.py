from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from multigpu_cli.errors import TrainingError
from multigpu_cli.models.networks.convnet import ResNet
from multigpu_cli.strategies.buffers import StepBuffers
from tests.support.op_counter import Operations


def kept(value: Tensor) -> Tensor:
    return value


class Statistics(nn.Module):
    """Buffers as models have them: a mean, a counter, a constant that nobody touches."""

    mean: Tensor
    count: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3, -torch.inf]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("rotations", torch.tensor([1 + 2j, -torch.inf]))

    def see(self, value: float) -> None:
        self.mean.mul_(0.9).add_(0.1 * value)
        self.count.add_(1)


def step(buffers: StepBuffers, model: "Rebinding", values: Sequence[float]) -> None:
    buffers.begin_step(len(values))
    for value in values:
        model.see(value)
        buffers.collect()
    buffers.apply_mean_change()


def test_one_micro_batch_is_exactly_what_torch_does() -> None:
    model, plain = Statistics(), Statistics()
    buffers = StepBuffers(model, 1, kept)
    for value in (4.0, 5.0):
        buffers.begin_step(1)
        model.see(value)
        buffers.collect()
        buffers.apply_mean_change()
        plain.see(value)
    assert torch.equal(model.mean, plain.mean)
    assert int(model.count) == 7


def test_each_micro_batch_starts_from_the_same_statistics() -> None:
    model = Statistics()
    buffers = StepBuffers(model, 1, kept)
    buffers.begin_step(3)
    for value in (3.0, 6.0, 9.0):
        assert model.mean.tolist() == [1.0, 2.0]
        assert int(model.count) == 5
        model.see(value)
        buffers.collect()
    buffers.apply_mean_change()
    assert torch.allclose(model.mean, 0.9 * torch.tensor([1.0, 2.0]) + 0.1 * 6.0)
    assert int(model.count) == 6, "a step counts once"


def test_the_order_of_micro_batches_does_not_matter_and_nothing_stays_from_the_last_step() -> None:
    ends = []
    for order in ([3.0, 6.0, 9.0], [9.0, 3.0, 6.0]):
        model = Statistics().double()
        buffers = StepBuffers(model, 1, kept)
        for _ in range(2):
            buffers.begin_step(3)
            for value in order:
                model.see(value)
                buffers.collect()
            buffers.apply_mean_change()
        ends.append(model.mean)
    assert torch.allclose(ends[0], ends[1], rtol=1e-14)
    expected = 0.9 * (0.9 * torch.tensor([1.0, 2.0]) + 0.6) + 0.6
    assert torch.allclose(ends[0], expected.double())


def test_workers_add_their_changes_and_an_idle_one_adds_nothing() -> None:
    """Three workers with 2, 1 and 0 micro-batches, played one after the other."""
    models = [Statistics() for _ in range(3)]
    sent: list[Tensor] = []

    def recorded(value: Tensor) -> Tensor:
        sent.append(value.clone())
        return value

    for model, values in zip(models, ([3.0, 6.0], [9.0], []), strict=True):
        buffers = StepBuffers(model, 3, recorded)
        buffers.begin_step(3)
        for value in values:
            model.see(value)
            buffers.collect()
        buffers.apply_mean_change()
    assert len(sent) == 3, "every worker takes part"
    model = Statistics()
    buffers = StepBuffers(model, 3, lambda value: value.copy_(sum(sent)))  # type: ignore[arg-type]
    buffers.begin_step(3)
    buffers.apply_mean_change()
    assert torch.allclose(model.mean, 0.9 * torch.tensor([1.0, 2.0]) + 0.1 * 6.0)
    assert int(model.count) == 6


def test_constants_keep_their_bits() -> None:
    model = Statistics()
    constant = model.constant[:2].clone()
    buffers = StepBuffers(model, 1, kept)
    for _ in range(5):
        buffers.begin_step(3)
        for _ in range(3):
            model.see(1.0)
            buffers.collect()
        buffers.apply_mean_change()
    assert torch.equal(model.constant[:2], constant)


def test_masks_and_rotations_stay_as_they_are() -> None:
    """Masks of attention are infinite or bool, and inf minus inf is no change to make; rotations are complex."""
    model, untouched = Statistics(), Statistics()
    buffers = StepBuffers(model, 1, kept)
    buffers.begin_step(2)
    for _ in range(2):
        model.see(1.0)
        buffers.collect()
    buffers.apply_mean_change()
    for name in ("constant", "mask", "rotations"):
        assert torch.equal(getattr(model, name), getattr(untouched, name)), name


def test_a_counter_goes_on_beyond_what_a_float_can_hold() -> None:
    model = Statistics()
    model.count.fill_(2**53 + 1)
    buffers = StepBuffers(model, 1, kept)
    buffers.begin_step(2)
    for _ in range(2):
        model.see(1.0)
        buffers.collect()
    buffers.apply_mean_change()
    assert int(model.count) == 2**53 + 2


def test_a_model_without_buffers_sends_nothing() -> None:
    def refuse(value: Tensor) -> Tensor:
        raise AssertionError("nothing to send")

    buffers = StepBuffers(nn.Linear(2, 2), 4, refuse)
    buffers.begin_step(8)
    buffers.collect()
    buffers.apply_mean_change()


class Rebinding(nn.Module):
    """Buffers that forward replaces, as `self.mean = …` does, rather than writes into."""

    mean: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def see(self, value: float, length: int = 3) -> None:
        self.mean = 0.9 * self.mean + 0.1 * value
        if length > len(self.table):
            self.table = torch.arange(float(length))


@pytest.mark.parametrize("values", [(6.0,), (3.0, 6.0, 9.0)], ids=["one micro-batch", "accumulated"])
def test_a_buffer_that_forward_replaces_counts_like_one_it_writes_into(values: tuple[float, ...]) -> None:
    model, told = Rebinding(), torch.tensor([1.0, 2.0])
    buffers, registered = StepBuffers(model, 1, kept), model.mean
    for _ in range(2):
        model.see(1.0)  # outside of a step, as in a warm-up
        step(buffers, model, values)
        told = 0.9 * (0.9 * told + 0.1) + 0.1 * 6.0
        assert torch.allclose(model.mean, told)
        assert model.mean is registered, "whoever holds it sees it move: a checkpoint, an average, DDP"


def test_a_replaced_buffer_goes_back_with_a_skipped_step_and_an_abandoned_one() -> None:
    model = Rebinding()
    buffers = StepBuffers(model, 1, kept)
    step(buffers, model, [torch.nan])
    buffers.rollback(torch.tensor(1.0))
    assert model.mean.tolist() == [1.0, 2.0]
    buffers.begin_step(2)
    model.see(5.0)
    buffers.abort_step()
    assert model.mean.tolist() == [1.0, 2.0]


def test_a_table_that_grows_is_left_to_its_model() -> None:
    """Positions and masks for longer sequences are made anew, each worker by itself, and are in no checkpoint."""
    model = Rebinding()
    buffers = StepBuffers(model, 2, kept)
    for length in (3, 7, 7):
        buffers.begin_step(2)
        model.see(1.0, length)
        buffers.collect()
        buffers.apply_mean_change()
        assert model.table.tolist() == list(range(length))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_table_that_forward_removes_is_left_to_its_model(workers: int) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(2), persistent=False)
    buffers = StepBuffers(model, workers, kept)
    buffers.begin_step(1)
    del model.table
    buffers.collect()
    buffers.apply_mean_change()
    assert not hasattr(model, "table")


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 1), (1, 2)])
def test_a_buffer_of_the_checkpoint_must_keep_its_shape(workers: int, micro_batches: int) -> None:
    model = Rebinding()
    buffers = StepBuffers(nn.ModuleDict({"inner": model}), workers, kept)
    buffers.begin_step(micro_batches)
    model.mean = torch.zeros(3)
    with pytest.raises(TrainingError, match=r"inner\.mean from \(2,\) to \(3,\)"):
        buffers.collect()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_flag_that_any_micro_batch_changes_changes(before: bool, after: bool, workers: int) -> None:
    for changes in ([True, True], [True, False], [False, True]):
        flags = nn.Module()
        flags.register_buffer("flag", torch.tensor([before, before]))
        buffers = StepBuffers(flags, workers, kept)
        buffers.begin_step(2)
        for changed in changes:
            if changed:
                flags.get_buffer("flag")[1] = after
            buffers.collect()
        buffers.apply_mean_change()
        assert flags.get_buffer("flag").tolist() == [before, after]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_whole_numbers_move_without_rounding(kind: torch.dtype) -> None:
    """By the mean change, towards zero, however large the numbers are."""
    far = {torch.uint8: 120, torch.int32: 2**29 + 1, torch.int64: 2**61 + 1}[kind]
    start = torch.tensor([far, 0, 3, 100], dtype=kind)
    sent: list[Tensor] = []
    for changes in ([far, far, 0, -96], [far, far, -3, -100]):  # two workers, played one after the other
        model = nn.Module()
        model.register_buffer("count", start.clone())
        buffers = StepBuffers(model, 2, lambda value: sent.append(value.clone()) or value)
        buffers.begin_step(2)
        model.get_buffer("count").copy_(start.long() + torch.tensor(changes))
        buffers.collect()
        buffers.apply_mean_change()
    model.get_buffer("count").copy_(start)
    buffers = StepBuffers(model, 2, lambda value: value.copy_(sum(sent)))  # type: ignore[arg-type]
    buffers.begin_step(2)
    buffers.apply_mean_change()
    assert model.get_buffer("count").tolist() == [2 * far, far, 2, 2]


@pytest.mark.parametrize(("workers", "micro_batches", "most"), [(1, 1, 12), (1, 2, 50), (2, 1, 40), (2, 4, 75)])
def test_a_step_takes_few_kernels_however_many_buffers_there_are(workers: int, micro_batches: int, most: int) -> None:
    """ResNet-34 has 108 of them: with some kernels for each, a step would wait for the host that launches them."""
    model = ResNet((3, 8, 8), 2, 8, blocks=(3, 4, 6, 3))
    assert len(list(model.buffers())) == 108
    buffers = StepBuffers(model, workers, kept)
    with Operations() as seen:
        buffers.begin_step(micro_batches)
        for _ in range(micro_batches):
            buffers.collect()
        buffers.apply_mean_change()
        buffers.rollback(torch.zeros(()))
    assert seen.kernels <= most
