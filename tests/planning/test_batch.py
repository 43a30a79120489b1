from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multigpu_cli.errors import RequestError
from multigpu_cli.planning.batch import BatchPlan, MicroBatch, plan_batches


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    samples, drop_last = draw(st.integers(1, 300)), draw(st.booleans())
    return BatchPlan(
        samples=samples,
        micro_batch=draw(st.integers(1, 40)),
        global_batch=draw(st.integers(1, samples if drop_last else 400)),
        workers=draw(st.integers(1, 9)),
        drop_last=drop_last,
    )


def positions(share: list[MicroBatch]) -> list[int]:
    return [position for _, start, stop in share for position in range(start, stop)]


@given(plan=plans())
def test_an_epoch_has_each_sample_exactly_once(plan: BatchPlan) -> None:
    trained = [
        position
        for step in range(plan.steps_per_epoch)
        for rank in range(plan.workers)
        for position in positions(plan.local_micro_batches(step, rank))
    ]
    dropped = plan.last_batch_samples if plan.drop_last else 0
    assert trained == list(range(plan.samples - dropped))


@given(plan=plans())
def test_shares_are_contiguous_blocks_in_rank_order_that_cover_a_step(plan: BatchPlan) -> None:
    for step in range(plan.steps_per_epoch):
        shares = [plan.local_micro_batches(step, rank) for rank in range(plan.workers)]
        assert [micro for share in shares for micro in share] == plan.all_micro_batches(step)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@given(plan=plans())
def test_interleaved_shares_are_dealt_in_turn(plan: BatchPlan) -> None:
    plan = replace(plan, interleaved=True)
    for step in range(plan.steps_per_epoch):
        shares = [plan.local_micro_batches(step, rank) for rank in range(plan.workers)]
        dealt = [micro for turn in zip_longest(*shares) for micro in turn if micro is not None]
        assert dealt == plan.all_micro_batches(step)
        assert len(shares[0]) - len(shares[-1]) <= 1


@given(plan=plans())
def test_micro_batches_are_numbered_and_only_the_last_is_short(plan: BatchPlan) -> None:
    for step in range(plan.steps_per_epoch):
        every = plan.all_micro_batches(step)
        assert [micro.number for micro in every] == list(range(len(every)))
        assert {micro.stop - micro.start for micro in every[:-1]} <= {plan.micro_batch}
        assert 0 < every[-1].stop - every[-1].start <= plan.micro_batch
        assert sum(micro.stop - micro.start for micro in every) == plan.num_samples(step)
    if plan.samples >= plan.global_batch:
        assert len(plan.all_micro_batches(0)) == plan.micro_batches


@given(plan=plans())
def test_the_shortest_micro_batch_is_found(plan: BatchPlan) -> None:
    every = [micro for step in range(plan.steps_per_epoch) for micro in plan.all_micro_batches(step)]
    assert plan.smallest_micro_batch == min(micro.stop - micro.start for micro in every)


@given(plan=plans(), workers=st.integers(1, 12))
def test_nothing_but_the_shares_depends_on_the_number_of_workers(plan: BatchPlan, workers: int) -> None:
    other = replace(plan, workers=workers)
    assert other.steps_per_epoch == plan.steps_per_epoch
    for step in range(plan.steps_per_epoch):
        assert other.all_micro_batches(step) == plan.all_micro_batches(step)
        assert other.num_samples(step) == plan.num_samples(step)


@given(plan=plans())
def test_accumulation_is_what_the_busiest_worker_has_in_a_full_step(plan: BatchPlan) -> None:
    if plan.samples >= plan.global_batch:
        assert plan.accumulation == max(len(plan.local_micro_batches(0, rank)) for rank in range(plan.workers))


@given(plan=plans())
@example(plan=BatchPlan(samples=13, micro_batch=2, global_batch=8, workers=2))  # 3 in the last, the third short
def test_even_means_that_all_workers_always_have_equally_many(plan: BatchPlan) -> None:
    counts = [
        {len(plan.local_micro_batches(step, rank)) for rank in range(plan.workers)}
        for step in range(plan.steps_per_epoch)
    ]
    if plan.samples >= plan.global_batch:
        assert plan.is_even == all(len(different) == 1 for different in counts)


@given(plan=plans(), steps=st.integers(0, 200))
def test_samples_after_counts_what_the_steps_trained(plan: BatchPlan, steps: int) -> None:
    steps = min(steps, 5 * plan.steps_per_epoch)
    assert plan.samples_after(steps) == sum(plan.num_samples(step % plan.steps_per_epoch) for step in range(steps))


@given(plan=plans(), replicas_per_process=st.integers(2, 5))
def test_with_lanes_one_process_passes_neighbouring_micro_batches_together(
    plan: BatchPlan, replicas_per_process: int
) -> None:
    for step in range(plan.steps_per_epoch):
        every, passes = plan.all_micro_batches(step), plan.local_forward_passes(step, 0, replicas_per_process)
        assert positions(passes) == positions(every)
        assert len(passes) == -(-len(every) // replicas_per_process)
        assert [number for number, _, _ in passes] == list(range(len(passes)))
        assert all(stop - start <= replicas_per_process * plan.micro_batch for _, start, stop in passes)
        samples = plan.num_samples(step)
        assert plan.layout(step, 0, replicas_per_process) == (step, samples, len(passes), passes)


@given(plan=plans())
def test_with_one_lane_a_process_passes_its_share(plan: BatchPlan) -> None:
    assert plan.local_forward_passes(0, plan.workers - 1, 1) == plan.local_micro_batches(0, plan.workers - 1)


def test_the_global_batch_is_micro_batch_times_accumulation_times_workers() -> None:
    plan = plan_batches(samples=1000, micro_batch=16, workers=4, accumulation=2)
    assert (plan.global_batch, plan.accumulation, plan.steps_per_epoch, plan.last_batch_samples) == (128, 2, 8, 104)
    assert (plan.drop_last, plan.interleaved) == (False, False)
    assert BatchPlan(samples=1000, micro_batch=16, global_batch=128, workers=4) == plan


@pytest.mark.parametrize(("workers", "accumulation"), [(1, 4), (2, 2), (3, 2), (4, 1), (8, 1)])
def test_a_given_global_batch_stays_and_accumulation_follows(workers: int, accumulation: int) -> None:
    plan = plan_batches(samples=1000, micro_batch=32, workers=workers, global_batch=128)
    assert (plan.global_batch, plan.accumulation) == (128, accumulation)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"accumulation": 2, "global_batch": 100}, ["--global-batch-size 100", "--grad-accum-steps 2", "= 128"]),
        ({"global_batch": 3}, ["--global-batch-size 3", "(4)"]),
        ({"samples": 3}, ["3 samples", "4 workers"]),
        ({"samples": 60, "drop_last": True}, ["--drop-last", "60", "64"]),
    ],
)
def test_a_plan_that_leaves_nothing_to_do_is_refused(asked: dict[str, int], named: list[str]) -> None:
    usual: dict[str, Any] = {"samples": 500, "micro_batch": 16, "workers": 4}
    with pytest.raises(RequestError) as refused:
        plan_batches(**usual | asked)
    assert all(word in refused.value.problem for word in named)
    assert refused.value.remedy


def test_accumulation_and_global_batch_may_agree() -> None:
    plan = plan_batches(samples=500, micro_batch=16, workers=4, accumulation=2, global_batch=128)
    assert plan.global_batch == 128


def test_what_is_just_enough_is_taken() -> None:
    plan = plan_batches(samples=4, micro_batch=1, workers=4, global_batch=4, drop_last=True)
    assert (plan.steps_per_epoch, plan.accumulation, plan.last_batch_samples) == (1, 1, 0)


@given(plan=plans(), epoch=st.integers(0, 3))
def test_the_layouts_of_all_workers_make_up_the_step(plan: BatchPlan, epoch: int) -> None:
    for step in range(plan.steps_per_epoch):
        number = epoch * plan.steps_per_epoch + step
        layouts = [plan.layout(number, rank, 1) for rank in range(plan.workers)]
        assert {(each.step, each.samples, each.micro_batches) for each in layouts} == {
            (number, plan.num_samples(step), plan.num_micro_batches(step))
        }
        assert [each for layout in layouts for each in layout.passes] == plan.all_micro_batches(step)
