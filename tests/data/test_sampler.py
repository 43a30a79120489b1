import torch

from multigpu_cli.data.sampler import epoch_order


def test_every_sample_once() -> None:
    for count in (1, 2, 97, 1000):
        assert epoch_order(count, 42, 0).sort().values.tolist() == list(range(count))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(5)
    first = epoch_order(500, 42, 3)
    torch.rand(1000)
    assert torch.equal(epoch_order(500, 42, 3), first)
    others = [epoch_order(500, seed, epoch) for seed, epoch in ((42, 4), (43, 3), (3, 42))]
    assert all(not torch.equal(other, first) for other in others)


def test_asking_for_an_order_draws_nothing_from_the_models_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    epoch_order(500, 42, 3)
    assert torch.equal(torch.rand(3), expected)


def test_orders_are_well_mixed() -> None:
    """Each sample meets each tenth of an epoch about equally often."""
    places = torch.stack([epoch_order(100, 1, epoch).argsort() for epoch in range(500)]).float()
    assert float((places.mean(0) - 49.5).abs().max()) < 6  # 4.6 deviations of a uniform draw's mean


def test_the_order_never_changes_between_versions() -> None:
    """A checkpoint says only how many steps were done: another order would train samples twice."""
    assert epoch_order(8, 42, 0).tolist() == [1, 3, 6, 2, 4, 5, 7, 0]
