import os

import pytest

from multigpu_cli.distributed.launch_env import LaunchEnv, refuse_srun_copies
from multigpu_cli.errors import RequestError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "5",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_without_a_launcher_there_is_no_meeting() -> None:
    assert LaunchEnv.from_environment({}) is None
    assert LaunchEnv.from_environment({"MASTER_ADDR": "node0", "LOCAL_RANK": "0"}) is None


def test_torchruns_variables_are_read() -> None:
    assert LaunchEnv.from_environment(TORCHRUN) == LaunchEnv(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        address="node0",
        port=29500,
        attempt=2,
        agent_store=True,
        restarts_left=3,
    )


def test_another_launcher_may_leave_out_what_is_torchruns_own() -> None:
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    launch_env = LaunchEnv.from_environment(plain)
    assert launch_env is not None
    assert (launch_env.local_size, launch_env.attempt, launch_env.agent_store, launch_env.restarts_left) == (
        8,
        0,
        False,
        0,
    )


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        LaunchEnv.from_environment({key: value for key, value in TORCHRUN.items() if key != name})
    assert "torchrun" in refused.value.remedy


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}=many in the environment is not a whole number"):
        LaunchEnv.from_environment(TORCHRUN | {name: "many"})


def test_tasks_of_one_srun_are_no_runs_of_their_own() -> None:
    with pytest.raises(RequestError, match=r"srun started 4 tasks(?s:.)*deploy/slurm.sbatch"):
        refuse_srun_copies({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
        TORCHRUN | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=["a batch script", "one task", "torchrun in each task"],
)
def test_other_starts_under_slurm_are_left_alone(environ: dict[str, str]) -> None:
    refuse_srun_copies(environ)


def test_the_tests_themselves_were_not_launched() -> None:
    assert LaunchEnv.from_environment(os.environ) is None
