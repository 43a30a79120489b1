"""PPO end to end: the same on any number of workers, and after a stop or a kill as if nothing had been."""

from functools import partial
from typing import Any

import pytest
import torch

from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor import journal
from multigpu_cli.run.request.checks import check_device
from tests.rl.test_env_source import request
from tests.support.interrupted_evaluation import strike, terminate_self
from tests.support.run_training import run_training

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SETS = [f"task.args.{word}" for word in ("rollout=14", "passes=2", "minibatches=2", "evaluate_every=3")]
SETS.append("task.args.evaluate_episodes=3")
RUN: dict[str, Any] = {
    "data": "tests.support.toy_env:corridor",
    "task": "ppo",
    "model": "tests.support.toy_env:net",
    "num_envs": 6,
    "env_group": 2,
    "epochs": 4,
    "lr": 1e-3,
    "warmup_epochs": 0,
    "log_interval": 4,
    "save_dir": "run",
}
LSTM = ["model.args.lstm=true", "task.args.normalize_observations=true", "task.args.normalize_rewards=true"]
FIGURES = ("loss", "episode_reward", "episode_length", "kl", "entropy", "explained_variance", "value_loss")


def events(kind: str, run: str = "run") -> list[dict[str, Any]]:
    return [event for event in journal.read_events(f"{run}/journal.jsonl") if event["event"] == kind]


def train(workers: int, *more: str, **flags: Any) -> dict[str, Any]:
    ended = run_training(workers, sets=[*SETS, *more], **RUN | flags)
    assert ended.error == ""
    return ended.summary


def curve(run: str) -> torch.Tensor:
    """(lines, figures) float64; after a resume the last line of a step counts."""
    lines = {event["step"]: event for event in events("train", run)}
    return torch.tensor([[lines[step][name] for name in FIGURES] for step in sorted(lines)], dtype=torch.float64)


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluation_of_episodes_is_left_at_a_signal_and_made_once(workers: int) -> None:
    """In the middle of an episode, also on a rank that plays another one."""
    flags = RUN | {"sets": [*SETS, *LSTM], "exact": True}
    whole = run_training(workers, **flags | {"save_dir": "whole"}).summary
    stopped = run_training(workers, **flags, prepare=partial(strike, "val", 3, 1, terminate_self, workers - 1))
    assert (stopped.error, stopped.summary["status"], stopped.summary["epochs"]) == ("", "stopped", 3)
    assert events("eval") == []
    ended = run_training(workers, **flags)
    assert ended.error == ""
    assert ended.summary["fingerprint"] == whole["fingerprint"]
    assert ended.summary["best"] == whole["best"]
    evaluations = [[(each["step"], each["reward"]) for each in events("eval", run)] for run in ("run", "whole")]
    assert evaluations[0] == evaluations[1] != []


def test_one_two_and_four_workers_learn_alike() -> None:
    for workers in (1, 2, 4):
        train(workers, save_dir=f"on{workers}")
        assert (len(curve(f"on{workers}")), events("end", f"on{workers}")[0]["status"]) == (4, "completed")
    for workers in (2, 4):
        torch.testing.assert_close(curve("on1"), curve(f"on{workers}"), rtol=1e-4, atol=1e-6)
    rates = events("train", "on4")[-1]["rollout_steps_per_second"]
    assert [rate > 0 for rate in rates] == [False, True, True, True], "three groups: one worker has none"
    before, last = events("train", "on1")[-2:]
    seconds = (last["step"] - before["step"]) * last["step_ms"] / 1e3
    assert last["env_steps_per_second"] == pytest.approx((last["env_steps"] - before["env_steps"]) / seconds)


def test_the_same_bits_on_one_two_and_four_workers_with_exact() -> None:
    """Real actions and a pass that is one too many: all ranks leave it out."""
    more = ["data.args.real=true", "task.args.target_kl=1e-9"]
    marks = {workers: train(workers, *more, exact=True, save_dir=f"on{workers}") for workers in (1, 2, 4)}
    assert len({summary["fingerprint"] for summary in marks.values()}) == 1
    assert len({str(summary["final"]) for summary in marks.values()}) == 1
    assert torch.equal(curve("on1"), curve("on4"))
    assert marks[1]["samples"] == 4 * 6 * 14, "one pass of two each time"
    assert events("train", "on1")[-1]["env_steps"] == 4 * 6 * 14


def test_steps_that_a_moved_policy_leaves_out_were_not_taken() -> None:
    """They count in the schedule alone: there four updates are sixteen steps, of which eight are taken."""
    assert train(2, "task.args.target_kl=1e-9")["steps"] == 8
    last = events("train")[-1]
    assert (last["step"], last["steps_taken"], events("end")[0]["step"]) == (16, 8, 16)
    assert train(1, "task.args.target_kl=1e-9", epochs=3)["steps"] == 8
    assert len(events("start")) == 1, "it has been trained for longer: nothing to do"
    assert train(1, "task.args.target_kl=1e-9", epochs=6)["steps"] == 12
    assert events("resume")[0]["step"] == 16


def test_a_skipped_step_is_named_also_where_others_were_left_out_after_it() -> None:
    """The first two of four steps of an update are taken, of three micro-batches each; this is in the fourth taken."""
    more = ["task.args.target_kl=1e-9", "model.args.at=12"]
    summary = train(1, *more, model="tests.support.toy_env:overflowing", lr=1e-2)
    assert summary["steps"] == 8
    assert [fault["action"].split(", of samples")[0] for fault in summary["faults"]] == [
        "1 step skipped: the gradient was NaN or infinite, last in step 6"
    ]


@pytest.mark.slow
def test_the_same_bits_after_twenty_updates_of_cartpole() -> None:
    pytest.importorskip("gymnasium")
    flags: dict[str, Any] = {"data": "gym:CartPole-v1", "model": "lstm-actor-critic", "epochs": 20, "exact": True}
    flags |= {"num_envs": 16, "env_group": 4}
    marks = {train(w, "task.args.rollout=64", **flags, save_dir=f"on{w}")["fingerprint"] for w in (1, 2, 4)}
    assert len(marks) == 1


@pytest.mark.parametrize(("more", "before", "after"), [([], 1, 2), (LSTM, 3, 1)])
def test_killed_and_resumed_on_other_workers_it_is_the_undisturbed_run(
    more: list[str], before: int, after: int
) -> None:
    undisturbed = train(1, *more, exact=True, save_dir="whole")
    passes = 2 * 4 * 3 // before + 3  # in the third update
    deed = {"OWN_DEED": f"{before - 1}:{passes}:SIGKILL", "OWN_AFTER": "run/checkpoints/step_*"}
    ended = run_training(before, sets=[*SETS, *more], **RUN, exact=True, environ=deed)
    assert before - 1 in ended.killed
    resumed = train(after, *more, exact=True)
    assert events("resume")[0]["step"] in (4, 8)
    assert resumed["fingerprint"] == undisturbed["fingerprint"]
    assert resumed["final"] == undisturbed["final"]
    assert resumed["samples"] == undisturbed["samples"]
    assert torch.equal(curve("run"), curve("whole"))


def test_asked_to_stop_it_ends_the_update_first() -> None:
    stopped = run_training(1, sets=SETS, **RUN, environ={"OWN_DEED": "0:18:SIGTERM"}).summary
    assert stopped["status"] == "stopped"
    assert stopped["steps"] == 8
    assert train(1)["fingerprint"] == train(1, save_dir="whole")["fingerprint"]
    assert not events("fault")


def test_environments_that_can_not_be_brought_back_are_told_of() -> None:
    flags = RUN | {"data": "tests.support.toy_env:forgetful", "epochs": 2}
    run_training(2, sets=SETS, **flags)
    ended = run_training(1, sets=SETS, **flags | {"epochs": 3})
    assert ended.summary["status"] == "completed"
    faults = [(event["kind"], event["action"]) for event in events("fault")]
    assert faults == [("resume", "6 environments could not be restored and restarted their episode")]


def test_a_number_of_episodes_ends_it() -> None:
    summary = train(2, episodes=15)
    counts = [event["episodes"] for event in events("train")]
    assert counts[-1] >= 15 > counts[-2]
    assert summary["status"] == "completed"
    assert summary["steps"] == 4 * len(counts) < 16
    assert events("eval")[-2]["step"] == summary["steps"], "it looks at where it has come"


def test_every_episode_of_an_evaluation_counts_once() -> None:
    found = [train(w, "task.args.evaluate_episodes=70", epochs=1, save_dir=f"on{w}")["final"] for w in (1, 3)]
    assert events("eval", "on1")[0]["samples"] == 70
    for name in ("reward", "length", "half_length"):
        assert found[0][f"test_{name}"] == pytest.approx(found[1][f"test_{name}"], rel=1e-3)
    assert found[0]["test_half_length"] == found[0]["test_length"] / 2


@pytest.mark.parametrize(
    ("more", "flags", "words"),
    [
        ([], {"model": "mlp"}, "a Sequential is not an actor-critic"),
        (["model.args.lstm=true", "task.args.minibatches=4"], {}, "--env-group 2: a network with a memory"),
    ],
)
def test_requests_that_can_not_be_carried_out(more: list[str], flags: dict[str, Any], words: str) -> None:
    ended = run_training(1, sets=[*SETS, *more], **RUN | flags)
    assert ended.kind == "RequestError"
    assert words in ended.error


def test_data_parallel_is_refused() -> None:
    gpus = (torch.device("cuda", 0), torch.device("cuda", 1))
    with pytest.raises(RequestError, match="--multi-gpu dp does not support --task ppo"):
        raise next(check_device(request(), Placement("dp", gpus, 0, "as asked"), World(torch.device("cpu"))))
