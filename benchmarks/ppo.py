"""Environment steps of PPO on CartPole, rollouts and updates together, against a loop in CleanRL's style.

    python -m benchmarks.ppo

Our run is whole: the engine's loop with journal, progress and checkpoints, on one worker; evaluations are left out on
both sides. The same number of environments, network, passes and minibatches.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.paired_timing import Row, alternate, program, row
from benchmarks.ppo_reference_loop import PARTS, PASSES, STEPS, updates
from benchmarks.step_overhead import assemble_training
from multigpu_cli.engine import fit

ID, ENVIRONMENTS = "CartPole-v1", 8


def measure(tiny: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    turns = 2 if tiny else 21
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        theirs = updates(ID, ENVIRONMENTS)
        sides: dict[str, Callable[[], object]] = {"ours": _ours(folder, stack), "theirs": lambda: next(theirs)}
        found = alternate(sides, turns)
    steps = STEPS * ENVIRONMENTS
    rates = {side: [steps / seconds for seconds in found.blocks(side)] for side in sides}
    return [
        row("environment steps/s, CleanRL's loop", rates["theirs"], unit="1/s"),
        row("environment steps/s, ours on one worker", rates["ours"], unit="1/s"),
        found.ratio("an update with its rollout: ours / CleanRL's loop", "ours", "theirs", aim=1.0),
    ]


def _ours(folder: str, stack: ExitStack) -> Callable[[], object]:
    """One update of a run at our recipe's settings for as long as somebody asks."""
    flags = {
        "data": f"gym:{ID}",
        "num_envs": str(ENVIRONMENTS),
        "env_group": str(ENVIRONMENTS),
        "epochs": "1000000",
        "lr": "2.5e-4",
        "max_grad_norm": "0.5",
        "weight_decay": "0",
        "log_interval": str(PASSES * PARTS),
        "checkpoint_every": "1m",
        "save_dir": str(Path(folder, "run")),
    }
    sets = [f"task.args.rollout={STEPS}", f"task.args.passes={PASSES}", f"task.args.minibatches={PARTS}"]
    run = assemble_training(flags, stack, sets=[*sets, "task.args.evaluate_every=1000000"])
    return lambda: fit(run, until=run.progress.step + PASSES * PARTS)


if __name__ == "__main__":
    program(measure, __doc__)
