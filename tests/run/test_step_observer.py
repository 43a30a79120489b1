"""What observes a step is told of each of its phases, and changes nothing."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from torch.nn.functional import cross_entropy

from multigpu_cli.data.collate import TokenCounts
from multigpu_cli.data.loader import Batch, first_batch
from multigpu_cli.monitor.meters import StepTimer
from multigpu_cli.planning.batch import MicroBatch, StepLayout
from multigpu_cli.run.assembly.components import StepResult
from multigpu_cli.run.run import StepObserver
from multigpu_cli.run.step import forward_backward
from tests.run.test_profile_micro_batch import components


def observer() -> Any:
    """One whose parts note how they are called."""
    return StepObserver(watchdog=Mock(), timer=StepTimer(), noise=Mock(), nonfinite=Mock(), loss=Mock(), trace=Mock())


def batches(count: int) -> list[Batch]:
    tokens = TokenCounts(real=6, learned=5, places=8)
    return [Batch(None, None, torch.tensor([10 * number]), number, tokens) for number in range(count)]


def layout(passes: int) -> StepLayout:
    return StepLayout(7, 6, 3, [MicroBatch(number, 2 * number, 2 * number + 2) for number in range(passes)])


def test_each_part_is_told_what_it_asks_for() -> None:
    seen, outcome = observer(), StepResult(3, {}, torch.ones(()), torch.ones(()))
    work = batches(3)
    assert seen.take_tokens() == (0, 0)
    assert [(batch.micro_batch_index, last) for batch, last in seen.fetch(layout(2), iter(work))] == [
        (0, False),
        (1, True),
    ]
    assert seen.watchdog.set_position.call_args_list == [((7, "fetching data"),)] * 2
    assert seen.timer.data_wait.read()[1] == 2
    assert [seen.take_tokens(), seen.take_tokens()] == [(2 * 6, 2 * 8), (0, 0)]
    seen.phase("forward", work[1].sample_indices)
    assert seen.watchdog.set_position.call_args.args == (7, "forward", work[1].sample_indices)
    seen.noise.is_due.return_value = False
    seen.backward_done(list)
    assert seen.noise.is_due.call_args.args == (8, 2, 2), "step 8, counted from 1; both of its two passes are done"
    assert not seen.noise.record_gradient.called
    seen.noise.is_due.return_value = True
    seen.backward_done(lambda: ["gradient"])
    seen.noise.record_gradient.assert_called_once_with(["gradient"])
    for units, skipped in ((0, 0), (1, 1), (2, 1)):
        seen.step_done(outcome, torch.tensor(units))
        assert seen.nonfinite.record.call_args.args == (7, skipped), "a step that has nothing to learn is no fault"
    seen.step_done(outcome, 6)
    assert seen.nonfinite.record.call_args.args[1] is outcome.skipped, "with no work for the device"
    assert seen.loss.add.call_args.args == (7, 3, {}, 6)
    assert seen.trace.write.call_args.args == (8, [work[0].sample_indices, work[1].sample_indices])


def test_a_worker_without_work_is_observed_too() -> None:
    seen = observer()
    assert list(seen.fetch(layout(2), iter(batches(2))))
    assert list(seen.fetch(layout(0)._replace(step=8), iter([]))) == []
    seen.step_done(StepResult(3, {}, torch.ones(()), torch.zeros(())), 6)
    assert seen.trace.write.call_args.args == (9, []), "and nothing is left of the step before"


def test_a_gradient_is_the_same_whoever_looks(tmp_path: Path) -> None:
    gradients = []
    for looking in (observer(), None):
        made = components(tmp_path, "tests.run.test_profile_micro_batch:plain")
        batch = first_batch(made.loaders.train, 10)
        for last in (True, False):
            if looking:
                list(looking.fetch(layout(1), iter([batch])))
            loss = forward_backward(made, batch, 20, last=last, observer=looking)
        if looking:
            told = [call.args[1] for call in looking.watchdog.set_position.call_args_list]
            assert told == ["fetching data", "forward", "last backward", "fetching data", "forward", "backward"]
            assert looking.noise.is_due.call_count == 2
        assert loss.shape == ()
        assert not loss.requires_grad
        gradients.append([p.grad for p in made.strategy.local_parameters])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    both = 2 * cross_entropy(made.state.model(batch.inputs), batch.targets, reduction="sum") / 20
    torch.testing.assert_close(gradients[0], [*torch.autograd.grad(both, made.strategy.local_parameters)])
