import torch
from torch import Tensor, nn

from multigpu_cli.strategies.buffers import StepBuffers


def kept(value: Tensor) -> Tensor:
    return value


class Statistics(nn.Module):
    """Buffers as models have them: a mean, a counter, a constant that nobody touches."""

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


def test_one_micro_batch_is_exactly_what_torch_does() -> None:
    model, plain = Statistics(), Statistics()
    buffers = StepBuffers(model, 1, kept)
    for value in (4.0, 5.0):
        buffers.begin(1)
        model.see(value)
        buffers.collect()
        buffers.finish()
        plain.see(value)
    assert torch.equal(model.mean, plain.mean)
    assert int(model.count) == 7


def test_each_micro_batch_starts_from_the_same_statistics() -> None:
    model = Statistics()
    buffers = StepBuffers(model, 1, kept)
    buffers.begin(3)
    for value in (3.0, 6.0, 9.0):
        assert model.mean.tolist() == [1.0, 2.0]
        assert int(model.count) == 5
        model.see(value)
        buffers.collect()
    buffers.finish()
    assert torch.allclose(model.mean, 0.9 * torch.tensor([1.0, 2.0]) + 0.1 * 6.0)
    assert int(model.count) == 6, "a step counts once"


def test_the_order_of_micro_batches_does_not_matter_and_nothing_stays_from_the_last_step() -> None:
    ends = []
    for order in ([3.0, 6.0, 9.0], [9.0, 3.0, 6.0]):
        model = Statistics().double()
        buffers = StepBuffers(model, 1, kept)
        for _ in range(2):
            buffers.begin(3)
            for value in order:
                model.see(value)
                buffers.collect()
            buffers.finish()
        ends.append(model.mean)
    assert torch.allclose(*ends, rtol=1e-14)
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
        buffers.begin(3)
        for value in values:
            model.see(value)
            buffers.collect()
        buffers.finish()
    assert len(sent) == 3, "every worker takes part"
    model = Statistics()
    buffers = StepBuffers(model, 3, lambda value: value.copy_(sum(sent)))  # type: ignore[arg-type]
    buffers.begin(3)
    buffers.finish()
    assert torch.allclose(model.mean, 0.9 * torch.tensor([1.0, 2.0]) + 0.1 * 6.0)
    assert int(model.count) == 6


def test_constants_keep_their_bits() -> None:
    model = Statistics()
    constant = model.constant[:2].clone()
    buffers = StepBuffers(model, 1, kept)
    for _ in range(5):
        buffers.begin(3)
        for _ in range(3):
            model.see(1.0)
            buffers.collect()
        buffers.finish()
    assert torch.equal(model.constant[:2], constant)


def test_masks_and_rotations_stay_as_they_are() -> None:
    """Masks of attention are infinite or bool, and inf minus inf is no change to make; rotations are complex."""
    model, untouched = Statistics(), Statistics()
    buffers = StepBuffers(model, 1, kept)
    buffers.begin(2)
    for _ in range(2):
        model.see(1.0)
        buffers.collect()
    buffers.finish()
    for name in ("constant", "mask", "rotations"):
        assert torch.equal(getattr(model, name), getattr(untouched, name)), name


def test_a_counter_goes_on_beyond_what_a_float_can_hold() -> None:
    model = Statistics()
    model.count.fill_(2**53 + 1)
    buffers = StepBuffers(model, 1, kept)
    buffers.begin(2)
    for _ in range(2):
        model.see(1.0)
        buffers.collect()
    buffers.finish()
    assert int(model.count) == 2**53 + 2


def test_a_model_without_buffers_sends_nothing() -> None:
    def refuse(value: Tensor) -> Tensor:
        raise AssertionError("nothing to send")

    buffers = StepBuffers(nn.Linear(2, 2), 4, refuse)
    buffers.begin(8)
    buffers.collect()
    buffers.finish()
