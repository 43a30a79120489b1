from multigpu_cli.planning.memory import Memory, fit_line


def test_a_batch_that_fits() -> None:
    memory = Memory(weights=100, gradients=100, optimizer=200, fixed=50, per_sample=10)
    assert memory.total_bytes(0) == 450
    assert memory.total_bytes(5) == 500
    assert memory.activations(5) == 100
    assert [memory.largest_batch(capacity) for capacity in (400, 459, 460, 509, 510)] == [0, 0, 1, 5, 6]


def test_a_batch_that_fits_where_gradients_take_the_place_of_activations() -> None:
    memory = Memory(weights=100, gradients=100, optimizer=200, fixed=50, per_sample=10, unsharded=30, in_turn=True)
    assert memory.total_bytes(5) == 330 + 100
    assert memory.total_bytes(6) == 330 + 110
    assert [memory.largest_batch(capacity) for capacity in (429, 430, 439, 440)] == [0, 5, 5, 6]


def test_two_measurements_make_a_line() -> None:
    assert fit_line((10, 150.0), (30, 350.0)) == (50, 10)
    assert fit_line((10, 90.0), (30, 350.0)) == (0, 13), "nothing is kept that is less than nothing"
