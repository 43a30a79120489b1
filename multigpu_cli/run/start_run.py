"""Starts an assembled run: prepares its folder, writes the settings and the first lines of the journal."""

import platform

import torch

from multigpu_cli.checkpoint.files import publish, remove_drafts
from multigpu_cli.checkpoint.lock import fail_on_write_error
from multigpu_cli.checkpoint.run_folder import rewind_run
from multigpu_cli.errors import pluralize
from multigpu_cli.faults.rank_status import read_previous_cause
from multigpu_cli.run.restore_best_file import restore_best_file
from multigpu_cli.run.run import Run
from multigpu_cli.run.train_log import compiler_fields
from multigpu_cli.runtime.choose_strategy_and_devices import describe_unlike_gpus, gpu_models
from multigpu_cli.runtime.collectives import disable_collective_timeout
from multigpu_cli.runtime.raise_on_all_ranks import run_on_main_rank
from multigpu_cli.runtime.rank_output import log_path
from multigpu_cli.runtime.restart_records import record_run


def start_run(run: Run, memory_warnings: list[str]) -> None:
    """Write the settings and the first lines of this attempt, with the faults that came before it.

    Args:
        memory_warnings: from `fit_batch_sizes_to_memory`.
    """
    world, start, log, logs = run.world, run.spec.resume_point, run.log, run.folder / "logs"
    if world.local_rank == 0:
        record_run(world.agent_dir, world.attempt, str(run.folder))
    run_on_main_rank(world, lambda: _prepare_folder(run))
    models = gpu_models(run.spec.placement, world)
    log.journal.write(
        "start",
        plan=run.plan.as_dict(),
        world_size=world.size,
        host=platform.node(),
        hosts=list(dict.fromkeys(world.hosts)),
        devices=[str(device) for device in run.spec.placement.devices],
        gpus=list(models.values()),
        data=run.loaders.train.data_location,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        resumed_from=start.checkpoint,
        **compiler_fields(run),
    )
    if weights := run.state.initial_weights:
        log.journal.write("initial_weights", file=run.config.model.init_from, **weights._asdict())
    if warning := describe_unlike_gpus(models, "rank" if world.size > 1 else "GPU"):
        log.console.warn(warning)
    for warning in start.warnings:
        run.log_fault("out of memory" if warning.startswith("out of memory") else "damaged checkpoint", warning)
    for warning in memory_warnings:
        run.log_fault("out of memory", warning)
    if cause := read_previous_cause(world):
        run.log_fault("restart", f"attempt {world.attempt + 1} of this launch: {cause}")
    if lost := restore_best_file(run):
        run.log_fault("checkpoint", lost)
    run.observer.watchdog.start(run.progress.step, logs)
    disable_collective_timeout(world, run.strategy.groups)
    if log.console.rank_output:
        log.console.rank_output.start(logs, world.attempt)
    log.console.details(lambda: _detail_rows(run))
    if start.manifest:
        log.journal.write(
            "resume", step=run.progress.step, from_world_size=start.manifest["world_size"], world_size=world.size
        )
        if run.state.restore_warning:
            run.log_fault("resume", run.state.restore_warning)
        if not run.spec.same_length:
            log.console.note(f"the run now has {run.plan.schedule.total_steps} steps: the schedule was recomputed")


def _prepare_folder(run: Run) -> None:
    with fail_on_write_error(run.folder):
        rewind_run(run.spec.resume_point, run.checkpointer.store)
        (run.folder / "summary.json").unlink(missing_ok=True)  # the previous attempt's
        remove_drafts(run.folder)
        run.checkpointer.store.sweep()
        publish(run.folder / "config.yaml", run.spec.as_yaml().encode())
    if run.log.tensorboard:
        run.log.tensorboard.plan(run.plan.rows())


def _detail_rows(run: Run) -> list[tuple[str, str]]:
    """For --verbose, what was chosen beside the plan: label and value of each line."""
    world, config, loaders = run.world, run.config, run.loaders
    parameters = list(run.state.model.parameters())
    learning = [p for p in parameters if p.requires_grad]
    count, trained = (sum(p.numel() for p in group) for group in (parameters, learning))
    size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    splits = {"training": loaders.train, "validation": loaders.val, "test": loaders.test}
    samples = ", ".join(f"{loader.size:,} {name}" for name, loader in splits.items() if loader is not None)
    rows = [
        ("versions", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("model", f"{run.spec.model}: {count:,} parameters, {trained:,} trained, {size:.1f} MiB"),
        ("samples", f"{samples}; {loaders.train.data_location}; evaluated in batches of {run.eval_batch_size}"),
        ("optimizer", f"{type(run.state.optimizer).__name__}, {pluralize(len(learning), 'tensor')}"),
        ("checkpoints", f"every {config.checkpoint.every or 'epoch'}, {config.checkpoint.keep} are kept"),
    ]
    if world.size > 1:
        cap = config.communication.bucket_cap_mb
        buckets = "" if cap == "auto" else f", buckets of {float(cap):g} MiB"
        rows.append(("gradients", f"{torch.distributed.get_backend()}{buckets}"))
        first, last = log_path(run.folder / "logs", 1), log_path(run.folder / "logs", world.size - 1)
        rows.append(("other ranks", f"print to {first}" + (f" … {last.name}" if world.size > 2 else "")))
    return rows
