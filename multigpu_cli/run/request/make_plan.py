"""Plans a run: batches, learning rate, schedule and precision, each with the reason for its choice."""

import inspect
from itertools import chain

import torch

from multigpu_cli.capabilities import STRATEGY_SETTINGS
from multigpu_cli.config.paths import explain_dataset
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.distributed.collectives import run_on_all_ranks
from multigpu_cli.distributed.placement import count_cores
from multigpu_cli.distributed.world import World
from multigpu_cli.planning.batch import BatchPlan, plan_batches
from multigpu_cli.planning.optimizer_names import find_rate
from multigpu_cli.planning.plan import Plan
from multigpu_cli.planning.schedule import Rate, ScheduleFunction, plan_schedule, resolve_learning_rate
from multigpu_cli.run.request.spec import RunRequest
from multigpu_cli.runtime.factories import bind_call, find_factory
from multigpu_cli.runtime.precision import agree_on_precision
from multigpu_cli.runtime.seeding import set_threads_per_rank

_AUGMENTS = ("data.mixup", "data.cutmix", "data.random_resized_crop", "data.rand_augment")
_EXTRAS = ("task.class_weights", "data.sample_weights", *_AUGMENTS)
_PROVISIONAL = 32  # stands for --batch-size auto until it has been measured


def make_plan(request: RunRequest, world: World) -> Plan:
    """The plan of a run, the same on every rank.

    Raises:
        RequestError: numbers that do not go together.
    """
    config, placement, source, start = request.config, request.placement, request.source, request.resume_point
    processes = max(world.size, placement.num_processes_to_launch)
    workers = {"single": 1, "dp": len(placement.devices)}.get(placement.strategy, processes)
    micro_batch, global_batch = source.fixed_batch_sizes or (config.batch.size, config.batch.global_size)
    epochs, exact = source.epochs or config.length.epochs, config.reproducibility.exact
    batches = plan_batches(
        samples=source.num_train_samples,
        micro_batch=_PROVISIONAL if micro_batch == "auto" else int(micro_batch),
        workers=workers,
        accumulation=config.batch.grad_accum_steps,
        global_batch=global_batch,
        drop_last=config.batch.drop_last,
        interleaved=request.strategy.interleaved,
    )
    base, rate_settings = _resolve_rate(request, batches), request.user_config.rate
    precision = agree_on_precision(config.precision.amp, world, placement.devices)
    workers_here = len(placement.devices) if placement.num_processes_to_launch else world.local_size
    compiled = "" if config.model.compile == "off" else f"{config.model.compile}{request.strategy.compile_note}"
    schedule = plan_schedule(
        peak=base.value,
        shape=config.rate.schedule,
        steps_per_epoch=batches.steps_per_epoch,
        epochs=epochs,
        max_steps=config.length.max_steps,
        warmup_epochs=config.rate.warmup_epochs,
        args=config.rate.args,
        function=run_on_all_ranks(world, lambda: _load_schedule(config)),
    )
    rate, every = request.factories.explain_rate(config, base, batches, epochs, schedule.total_steps)
    return Plan(
        placement_reason=f"{placement.strategy}{' with --exact' if exact else ''}: {placement.reason}",
        strategy=placement.strategy,
        device=_name_device(world),
        batches=batches,
        rate=rate,
        schedule=schedule,
        scheduler_every=every,
        base_lr=rate_settings.base_lr or find_rate(config.optimizer.name) if rate_settings.lr is None else None,
        base_batch_size=config.rate.base_batch_size,
        precision=precision.name,
        precision_reason="as the run was started with" if start.manifest else precision.reason,
        description=f"{request.model} on {_describe_data(request)}, {request.task}{_describe_extras(config)}",
        resume_reason=start.reason,
        unused_flags=_list_unused_flags(request),
        save_dir=start.folder,
        epochs=epochs,
        batch_size_reason="to be measured before the first step" if config.batch.size == "auto" else "",
        threads=set_threads_per_rank(workers_here, count_cores(), exact=exact),
        notes={"compiled": compiled, "from_files": config.from_files},
        data=request.source.note.removesuffix("; ") if request.source.codec.record else "",
    )


def _load_schedule(config: Config) -> ScheduleFunction | None:
    """The user's own schedule with its arguments; None for one by name.

    Raises:
        RequestError: it is not there, or does not take step, total and these arguments.
    """
    name, args = config.rate.schedule, config.rate.args
    if ":" not in name:
        return None
    function = find_factory(name, {}, flag="--schedule")
    further = ", ".join(list(inspect.signature(function).parameters)[2:])
    return bind_call(
        function,
        2,
        args,
        problem=f"--schedule {name}: can't be called with step, total and schedule.args",
        remedy="a function of (step, total), which returns the factor of the peak rate"
        + (f"; schedule.args has {further}" if further else ""),
    )


def _resolve_rate(request: RunRequest, batches: BatchPlan) -> Rate:
    settings = request.config.rate
    rate = resolve_learning_rate(
        given=settings.lr,
        base=settings.base_lr,
        base_batch=settings.base_batch_size,
        global_batch=batches.global_batch,
        rule=settings.lr_scaling,
        optimizer=request.config.optimizer.name,
    )
    if request.resume_point.manifest:
        return rate._replace(reason=f"{rate.value:.4g}, as the run was started with")
    return rate


def _describe_extras(config: Config) -> str:
    """Weights of classes and further augmentation, where they are asked for."""
    given = {key.partition(".")[2].replace("_", " "): config.get(key) for key in _EXTRAS}
    words = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    return words and f" with {words}"


def _describe_data(request: RunRequest) -> str:
    source, reason = request.source, explain_dataset(request.config)
    own = "" if source.codec.record else source.note  # else it has a row of its own
    note = f"{reason}: {own}" if reason else own
    return f"{request.config.data.name} ({note}{source.num_train_samples:,} training {source.noun})"


def _list_unused_flags(request: RunRequest) -> list[str]:
    """Flags that were given and have no effect here: the plan names them."""
    config, unused = request.config, request.factories.list_unused(request.config)
    if request.placement.devices[0].type == "cpu":
        unused |= {"data_on_device"}
    strategy = request.placement.strategy
    unused |= {*chain(*STRATEGY_SETTINGS.values())} - {*STRATEGY_SETTINGS.get(strategy, ())}
    ddp_arguments = sorted(request.factories.ddp) if strategy != "ddp" else []
    return [SETTINGS[key].flag or key for key in sorted(unused & config.explicit)] + ddp_arguments


def _name_device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
