from dataclasses import replace
from pathlib import Path

from multigpu_cli.faults.rank_exits import RankExit, RankPosition
from multigpu_cli.faults.root_cause import full_report, hang_error, lost_peer_error, summary_line

GUILTY = RankExit(
    2, "forward, 12 steps done", "ValueError: bad\nin own.py:3 in f", "stack of 2\n", False, samples=[5, 7]
)
INNOCENT = RankExit(0, "reduction, 12 steps done", "RuntimeError: closed by peer", "stack of 0\n", True)


def test_the_first_end_that_is_nobodys_consequence_is_the_cause() -> None:
    error = lost_peer_error([INNOCENT, GUILTY], 3, 12)
    assert error.problem == "rank 2 failed (forward, 12 steps done): ValueError: bad\n  in own.py:3 in f"
    assert error.caused_by_peer
    assert "stack of 2" in error.__notes__[0], "for --debug"
    assert (error.rank, error.is_unexplained) == (2, False)


def test_the_causes_exit_code_and_known_remedy_are_taken_over() -> None:
    error = lost_peer_error([replace(GUILTY, problem="OSError: No space left on device", exit_code=2)], 3, 1)
    assert (error.exit_code, "free space" in error.remedy) == (2, True)
    told = lost_peer_error([replace(GUILTY, problem="its own words\n  try: its own way out")], 3, 1)
    assert told.remedy == "", "the cause says it already"


def test_a_rank_without_a_word_is_named() -> None:
    assert (
        lost_peer_error([INNOCENT], 3, 12).problem
        == "rank 1, 2 ended without an error message after step 12: was it killed?"
    )
    assert "before the first step" in lost_peer_error([INNOCENT], 3, None).problem
    alone, several = lost_peer_error([INNOCENT], 2, 12), lost_peer_error([INNOCENT], 3, 12)
    assert (alone.rank, several.rank) == (1, None)
    assert alone.is_unexplained


def test_where_each_rank_blames_another_and_none_is_missing_the_first_one_is_shown() -> None:
    waits = replace(INNOCENT, problem="waited for a rank that had ended")
    first = replace(INNOCENT, rank=1, problem="DistBackendError: NCCL error in: …, ncclRemoteError: socket /dev/shm")
    error = lost_peer_error([waits, first, replace(INNOCENT, rank=2)], 3, 12)
    assert error.problem == "rank 1 failed (reduction, 12 steps done): " + first.problem
    assert "--shm-size" in error.remedy
    assert error.caused_by_peer, "so that the next attempt is made"


def test_the_guilty_stack_stands_last() -> None:
    whole = full_report(lost_peer_error([GUILTY, INNOCENT], 3, 12), [GUILTY, INNOCENT])
    assert whole.index("rank 0 (only lost its peers)") < whole.index("samples of its batch: 5, 7")
    assert whole.endswith("stack of 2\n")
    assert summary_line(ValueError("bad\nmore")) == "ValueError: bad"


def test_who_hangs_is_behind_the_others() -> None:
    places = [RankPosition(0, 7, "reduction", "a.py:1 in f"), RankPosition(1, 7, "fetching data", "own.py:9 in g")]
    error = hang_error(places, 2, 600, Path("run/logs"))
    head, first, *_ = error.problem.splitlines()
    assert (head, error.rank) == ("no progress for 600 s: rank 1 did not arrive", 1)
    assert first.startswith("  rank 1: fetching data, 7 steps done")
    assert "own.py:9 in g" in error.problem
    assert "run/logs/stacks_*" in error.remedy


def test_an_earlier_step_is_behind_whatever_its_phase() -> None:
    places = [RankPosition(0, 8, "fetching data", ""), RankPosition(1, 7, "reduction", "")]
    assert "rank 1 did not arrive" in hang_error(places, 2, 1, None).problem


def test_who_waits_in_an_earlier_phase_of_a_later_pass_is_not_behind() -> None:
    """A worker with fewer micro-batches runs padding passes, and may wait there for one that computes."""
    places = [RankPosition(0, 7, "reduction", "", arrivals=5), RankPosition(1, 7, "forward", "", arrivals=6)]
    assert "rank 0 did not arrive" in hang_error(places, 2, 1, None).problem


def test_who_does_not_answer_did_not_arrive() -> None:
    error = hang_error([RankPosition(0, 7, "reduction", "")], 2, 1, None)
    assert "rank 1 did not arrive\n  rank 1: does not answer" in error.problem


def test_nobody_is_accused_where_all_stand_alike() -> None:
    places = [RankPosition(rank, 7, "reduction", "") for rank in range(2)]
    assert "all ranks are at the same position" in hang_error(places, 2, 1, None).problem
    assert hang_error(places[:1], 1, 1, None).problem.startswith("no progress for 1 s\n")
