import pytest
import torch

from multigpu_cli.errors import TrainingError
from multigpu_cli.faults.stop import SkippedStepLimit
from tests.support.world import CPU


def after(text: str, policy: str = "skip", *, fp16: bool = False) -> SkippedStepLimit:
    """A run whose steps went like this: x skipped, . taken."""
    watch = SkippedStepLimit(policy, CPU, fp16=fp16)
    for number, step in enumerate(text):
        watch.record(number, torch.tensor(float(step == "x")))
    return watch


def read_and_check(watch: SkippedStepLimit) -> list[int]:
    found = watch.read()
    watch.check_may_continue(found)
    return found


def test_skipped_steps_are_counted_since_the_last_reading() -> None:
    watch = after("..x.xx..")
    assert watch.read() == [2, 4, 5]
    assert watch.read() == []
    for number in (8, 12):  # between them the task left some out
        watch.record(number, torch.tensor(1.0))
    assert watch.read() == [8, 12]


def test_scattered_ones_never_end_a_run() -> None:
    assert len(read_and_check(after("x." * 200))) == 200
    assert len(read_and_check(after((9 * "x" + ".") * 5))) == 45


def test_ten_in_a_row_end_it_naming_the_way_out() -> None:
    with pytest.raises(TrainingError, match="NaN or infinite in 10 steps in a row, up to step 17") as failed:
        read_and_check(after("......." + 10 * "x"))
    assert failed.value.exit_code == 1
    assert "--lr" in failed.value.remedy


def test_a_row_is_noticed_although_it_has_ended_since() -> None:
    with pytest.raises(TrainingError, match="up to step 10"):
        read_and_check(after(10 * "x" + 40 * "."))


def test_a_row_may_reach_over_a_reading() -> None:
    watch = after(5 * "x")
    assert len(read_and_check(watch)) == 5
    for number in range(5, 10):
        watch.record(number, torch.tensor(1.0))
    with pytest.raises(TrainingError):
        read_and_check(watch)


def test_stop_ends_it_at_the_first() -> None:
    assert len(read_and_check(after("....", "stop"))) == 0
    with pytest.raises(TrainingError):
        read_and_check(after("..x.", "stop"))


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_with_fp16_overflows_belong_to_the_search_for_the_loss_scale(policy: str) -> None:
    assert len(read_and_check(after(29 * "x" + ".", policy, fp16=True))) == 29
    with pytest.raises(TrainingError):
        read_and_check(after(30 * "x", policy, fp16=True))
