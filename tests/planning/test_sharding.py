"""What --multi-gpu fsdp holds and sends, in figures that are easy to follow."""

from dataclasses import replace

import pytest

from multigpu_cli.planning.memory import Memory, Sharding, forecast_sharded, shard_memory
from multigpu_cli.planning.speedup import Interconnect, Link, StepTimes, exposed_seconds, step_seconds

WHOLE = Memory(weights=1010, gradients=1000, optimizer=2000, fixed=5, per_sample=10)  # ten bytes are buffers
BLOCKS = Sharding(blocks=(300, 300, 250), rest=150)
AGAIN = 0.85  # of the weights lie in blocks, which are gathered for the backward pass again
KEPT = replace(BLOCKS, keeps_weights=True)


def test_the_state_is_divided_and_two_blocks_are_gathered_beside_the_rest() -> None:
    memory = shard_memory(WHOLE, BLOCKS, 4, 1)
    assert (memory.weights, memory.gradients, memory.optimizer) == (260, 250, 500)
    assert memory.unsharded == 150 + 2 * 300 + 150, "weights, and the gradient of the rest, which comes last"
    assert memory.total_bytes(10) == 260 + 500 + 900 + 250, "the gradients come while the activations go"
    assert memory.total_bytes(100) == 260 + 500 + 900 + 1005
    thirds = shard_memory(WHOLE, BLOCKS, 3, 1)
    assert (thirds.weights, thirds.gradients, thirds.optimizer) == (10 + 334, 334, 667), "the largest parts"


def test_several_passes_hold_the_whole_gradient_between_them() -> None:
    memory = shard_memory(WHOLE, BLOCKS, 4, 2)
    assert (memory.gradients, memory.unsharded) == (1000, 150 + 2 * 300)
    assert memory.total_bytes(10) == 260 + 500 + 750 + 1000 + 105


def test_weights_that_are_kept_are_all_gathered() -> None:
    assert shard_memory(WHOLE, KEPT, 4, 2).unsharded == 1000
    assert shard_memory(WHOLE, Sharding(blocks=(), rest=1000), 4, 2).unsharded == 1000, "no blocks: the model as one"


def test_reducing_in_each_pass_trades_memory_for_traffic() -> None:
    each, once = replace(BLOCKS, each_pass=True), BLOCKS
    assert [shard_memory(WHOLE, each, 4, passes).gradients for passes in (1, 2, 3)] == [250] * 3
    assert shard_memory(WHOLE, each, 4, 2).unsharded == shard_memory(WHOLE, once, 4, 1).unsharded
    rows = [forecast_sharded(WHOLE, sharding, 4, 3) for sharding in (each, once)]
    assert rows[0].sent - rows[1].sent == pytest.approx(2 * 750)
    groups = [forecast_sharded(WHOLE, replace(sharding, group_size=2), 4, 3) for sharding in (each, once)]
    assert groups[0].sent - groups[1].sent == pytest.approx(2 * (500 + 500)), "within groups, and between them"
    work = StepTimes(0.0, 2.0, 4.0, 1.0, (600.0, 400.0), gather=0.5, reduction=8.0, sharding=each)
    on_cores = Interconnect(Link("slow", 0.0, 100.0, "a test", overlaps=False))
    assert exposed_seconds(work, on_cores, 2, passes=3) == pytest.approx((3 + 3 * AGAIN) * 0.5 + 3 * 8)


def test_with_exact_each_pass_divides_the_gradient_and_sums_without_a_buddy_wait() -> None:
    exact = replace(BLOCKS, exact=True)
    assert [shard_memory(WHOLE, exact, 4, passes).gradients for passes in (1, 2, 3, 4)] == [500, 500, 750, 750]
    assert shard_memory(WHOLE, exact, 4, 2).unsharded == 150 + 2 * 300 + 150 + 300, (
        "and what the others send of a block"
    )
    assert forecast_sharded(WHOLE, exact, 4, 3).sent == pytest.approx((3 + 3 * AGAIN + 3 + 1 / 4) * 750), (
        "the quarter is for the norm"
    )
    work = StepTimes(0.0, 2.0, 4.0, 1.0, (600.0, 400.0), sharding=exact)
    network = Interconnect(Link("slow", 0.0, 100.0, "a test"))
    assert exposed_seconds(work, network, 2, passes=3) == pytest.approx((15 - 6) + (15 * AGAIN + 15 - 12))


@pytest.mark.parametrize(
    ("sharding", "passes", "times"),
    [(BLOCKS, 1, 2 + AGAIN), (BLOCKS, 3, 4 + 3 * AGAIN), (KEPT, 1, 2), (KEPT, 3, 2)],
)
def test_each_pass_gathers_the_blocks_twice_and_the_rest_once_and_the_gradients_go_once(
    sharding: Sharding, passes: int, times: float
) -> None:
    row = forecast_sharded(WHOLE, sharding, 4, passes)
    assert (row.sent, row.sent_by_ddp) == pytest.approx((times * 750, 2 * 750))


def test_weights_gathered_in_bf16_take_half_the_bytes_and_the_time_and_gradients_all_of_it() -> None:
    halved = replace(BLOCKS, share=0.5)
    assert forecast_sharded(WHOLE, halved, 4, 3).sent == pytest.approx(((3 + 3 * AGAIN) / 2 + 1) * 750)
    assert shard_memory(WHOLE, halved, 4, 2).unsharded == (150 + 2 * 300) / 2
    assert shard_memory(WHOLE, halved, 4, 1).unsharded == (150 + 2 * 300) / 2 + 150, (
        "the rest's gradient is reduced whole"
    )
    work = StepTimes(0.0, 2.0, 4.0, 1.0, (600.0, 400.0), sharding=halved)
    slow = Link("slow", 0.0, 100.0, "a test")
    exposed = (7.5 - 6) + max(0.0, 7.5 * AGAIN + 5 - 12)
    assert exposed_seconds(work, Interconnect(slow), 2, passes=3) == pytest.approx(exposed)
    on_cores = Interconnect(replace(slow, overlaps=False))
    assert exposed_seconds(work, on_cores, 2, passes=3) == pytest.approx((3 + 3 * AGAIN) * 2.5 + 5)


def test_frozen_weights_are_gathered_only() -> None:
    assert forecast_sharded(replace(WHOLE, gradients=200), BLOCKS, 2, 1).sent == pytest.approx((1 + AGAIN) * 500 + 100)


def test_one_worker_holds_everything_and_sends_nothing() -> None:
    row = forecast_sharded(WHOLE, BLOCKS, 1, 2)
    assert (row.memory, row.sent, row.sent_by_ddp) == (WHOLE, 0, 0)
    assert forecast_sharded(WHOLE, BLOCKS, 2, 2).memory == shard_memory(WHOLE, BLOCKS, 2, 2) != WHOLE


def test_groups_that_replicate_each_other_hold_and_send_their_own_parts() -> None:
    """Eight workers in groups of four: parts of a quarter, whose gradients go once more around between two groups."""
    grouped = replace(BLOCKS, group_size=4)
    assert shard_memory(WHOLE, grouped, 8, 1) == shard_memory(WHOLE, BLOCKS, 4, 1)
    assert forecast_sharded(WHOLE, grouped, 8, 1).sent == pytest.approx((2 + AGAIN) * 750 + 2 * (1 / 2) * 1000 / 4)
    assert shard_memory(WHOLE, grouped, 2, 1) == shard_memory(WHOLE, BLOCKS, 2, 1), "too few for such a group"
    work = StepTimes(0.0, 2.0, 4.0, 1.0, (600.0, 400.0), sharding=replace(grouped, group_size=2))
    network = Interconnect(Link("fast", 0.0, 1000.0, "a test"), Link("slow", 0.0, 100.0, "a test"), per_machine=2)
    gather = 0.5  # a half of 1,000 bytes, to the neighbour
    assert exposed_seconds(work, network, 4) == pytest.approx(max(0, gather - 2) + max(0, (1 + AGAIN) * gather + 5 - 4))
    on_cores = replace(network, inside=replace(network.inside, overlaps=False))
    assert exposed_seconds(work, on_cores, 4) == pytest.approx((2 + AGAIN) * gather + 5)


def test_groups_meet_over_the_link_between_machines_only_where_there_are_several() -> None:
    fast, slow = Link("fast", 0.0, 1000.0, "a test"), Link("slow", 0.0, 100.0, "a test")
    network = Interconnect(fast, slow, per_machine=4)
    assert network.all_reduce_between(1000, 2, 2) == fast.all_reduce(1000, 2) == 1
    assert network.all_reduce_between(1000, 3, 2) == slow.all_reduce(1000, 2) == 10
    assert Interconnect(fast, per_machine=4).all_reduce_between(1000, 3, 2) == 1


def test_gathering_hides_behind_the_passes_where_links_work_beside_the_device() -> None:
    """A hundred bytes a second: a gather of 1,000 bytes between two workers takes 5 seconds, and so does a scatter."""
    work = StepTimes(0.0, 2.0, 4.0, 1.0, (600.0, 400.0), sharding=BLOCKS)
    network = Interconnect(Link("slow", 0.0, 100.0, "a test"))
    assert exposed_seconds(work, network, 2, passes=3) == pytest.approx((15 - 6) + (15 * AGAIN + 5 - 12))
    assert exposed_seconds(replace(work, sharding=KEPT), network, 2, passes=3) == 0
    assert exposed_seconds(replace(work, sharding=KEPT), network, 2) == (5 - 2) + (5 - 4)
    assert exposed_seconds(work, network, 1) == 0
    on_cores = Interconnect(Link("slow", 0.0, 100.0, "a test", overlaps=False))
    step = 3 * 6 + (4 + 3 * AGAIN) * 5 + 1 / 2
    assert step_seconds(work, on_cores, 2, 3) == pytest.approx(step), "each commits its half"


def test_measured_seconds_take_the_place_of_the_ring() -> None:
    """A step gathers blocks before each of six passes, the rest before three, and reduces the gradients once."""
    gathered = (3 + 3 * AGAIN) * 0.5
    work = StepTimes(0.0, 2.0, 4.0, 1.0, (600.0, 400.0), gather=0.5, reduction=8.0, sharding=BLOCKS)
    on_cores = Interconnect(Link("slow", 0.0, 100.0, "a test", overlaps=False))
    assert exposed_seconds(work, on_cores, 2, passes=3) == pytest.approx(gathered + 8)
    step = 3 * 6 + gathered + 8 + 1
    assert step_seconds(work, on_cores, 2, 3) == pytest.approx(step), "the commit of a part was measured"
    assert exposed_seconds(replace(work, sharding=KEPT), on_cores, 2, passes=3) == 0.5 + 8
    assert exposed_seconds(replace(work, sharding=replace(BLOCKS, exact=True)), on_cores, 2, passes=3) == pytest.approx(
        gathered + 3 * 8
    )
    elsewhere = Interconnect(Link("assumed", 0.0, 100.0, "a test"))
    exposed = (15 - 6) + (15 * AGAIN + 5 - 12)
    assert exposed_seconds(work, elsewhere, 2, passes=3) == pytest.approx(exposed), "another machine's links"
