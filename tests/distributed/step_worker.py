"""The first steps of some runs, on the first 1, 2, 3 and 4 of some processes in turn.

For each number of workers a group of its own is formed on the agent's store, as a restart would form it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multigpu_cli import distributed, engine
from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.launch_env import LaunchEnv
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World, all_reduce_sum
from multigpu_cli.faults.stop import StopRequest
from multigpu_cli.faults.watchdog import Watchdog
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.assembly import assemble
from multigpu_cli.run.open import assemble_run
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.run.run import Run
from tests.distributed.steps import CASES, SHAPES, WORKERS, Case


def flags(case: Case, folder: Path) -> dict[str, Any]:
    model = "tests.support.user_code:Double" if case.double else case.network
    return {
        "data": "tests.support.user_code:tensors",
        "model": "tests.support.user_code:net" if model == "own" else model,
        "global_batch_size": case.global_batch,
        "batch_size": case.batch,
        "optimizer": case.optimizer,
        "lr": 0.01,
        "save_dir": str(folder),
        "max_steps": case.steps,
        "epochs": 100,
    }


def sets(case: Case) -> list[str]:
    found = [f"data.args.shape={SHAPES[case.network]}", f"data.args.train={case.samples}"]
    if case.double:
        return [*found, f"model.args.network={case.network}", f"model.args.normed={str(case.normed).lower()}"]
    return found + (
        [f"model.args.norm={str(case.normed).lower()}"] if case.network == "own" else ["model.args.width=8"]
    )


def first_steps(case: Case, world: World, folder: Path) -> dict[str, Any]:
    """Losses, the first gradient, and buffers and weights at the end, through the engine's own `train_step`."""
    choice = Placement("ddp" if world.size > 1 else "single", (world.device,), 0, "a test")
    spec = prepare_spec(resolve(flags(case, folder), sets(case), None), choice, world, FromConfig())
    with ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        watch = Watchdog(world, 600, lambda error: None)
        run = assemble_run(assemble.build_components(spec, world), Console("silent"), StopRequest(), watch, stack)
        found: dict[str, Any] = {"losses": []}
        _keep_first_gradient(run, found)
        batches = run.plan.batches
        while run.progress.step < case.steps:
            epoch, first = divmod(run.progress.step, batches.steps_per_epoch)
            for layout, work in run.loaders.train.epoch(batches, epoch, first, world.rank, 1):
                losses = engine.train_step(run, layout, work).losses_by_micro_batch(world.device)
                found["losses"].append(float(all_reduce_sum(world, losses).sum()) / layout.samples)
                run.progress.step += 1
                if run.progress.step == case.steps:
                    break
        found["state"] = {name: value.clone() for name, value in run.state.model.state_dict().items()}
    return found


def _keep_first_gradient(run: Run, found: dict[str, Any]) -> None:
    commit = run.state.precision.clip_and_step

    def keep_gradient(
        optimizer: Any, parameters: list[Tensor], max_norm: float | None, *more: Any
    ) -> tuple[Tensor, Tensor]:
        if "gradient" not in found:
            names = [name for name, p in run.state.model.named_parameters() if p.requires_grad]
            found["gradient"] = {
                name: p.grad.clone() for name, p in zip(names, parameters, strict=True) if p.grad is not None
            }
        return commit(optimizer, parameters, max_norm, *more)

    run.state.precision.clip_and_step = keep_gradient  # type: ignore[method-assign, assignment]


def take_first_steps(out: Path, names: Sequence[str], rank: int) -> None:
    """What a forked rank does: the first steps of these cases among so many workers, into files."""
    assemble._compare_code = lambda *_: ({}, "")  # nothing is resumed
    distributed.process_group._pin_to_own_core = lambda *_: nullcontext()  # type: ignore[assignment]
    launch_env = LaunchEnv.from_environment(os.environ)
    assert launch_env is not None
    torch.set_num_threads(1)
    for workers in WORKERS:
        if rank >= workers:  # the smaller worlds come first
            continue
        here = replace(launch_env, size=workers, local_size=workers, attempt=workers)
        with distributed.process_group.process_group(here, torch.device("cpu"), timeout=300) as world:
            for name in names:
                found = first_steps(CASES[name], world, out / f"{name}-{workers}")
                torch.save(found, out / f"{name}-{workers}-{rank}.pt")
    os._exit(0)
