"""Resolves a request into a RunSpec: folder, data and plan, all checked before anything is written."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu_cli.capabilities import CHECK_BASE, load_given
from multigpu_cli.checkpoint.files import Moved, ignore_progress
from multigpu_cli.config.own_code import FOLLOWING, NAMING, check_code, describe_origin
from multigpu_cli.config.resume_rules import merge_with_checkpoint, replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.fingerprint import compute_fingerprint
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.errors import RequestError, combine_errors
from multigpu_cli.run.agree_on_resume import agree_on_resume_point
from multigpu_cli.run.device_and_data_rules import check_data, check_device, raise_all
from multigpu_cli.run.make_plan import make_plan
from multigpu_cli.run.spec import RunRequest, RunSpec, describe_machine
from multigpu_cli.runtime.choose_strategy_and_devices import Placement
from multigpu_cli.runtime.raise_on_all_ranks import run_on_all_ranks, run_on_main_rank
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.open_data import open_data

if TYPE_CHECKING:
    from multigpu_cli.run.user_objects import UserObjects


def prepare_spec(
    config: Config,
    placement: Placement,
    world: World,
    *,
    source: DataSource | None = None,
    user_objects: "UserObjects | None" = None,
    moved: Moved = ignore_progress,
    note: Callable[[str], None] = print,
) -> RunSpec:
    """Choose the folder, adopt what its checkpoint pins, load the data and make the plan.

    Args:
        source: the dataset, where it has been loaded already.
        user_objects: live objects, in place of what the settings name.
        moved: called as a checkpoint is copied to the run folder, or the data is read.
        note: shows that a checkpoint is copied.

    Raises:
        RequestError: the request can't be carried out; nothing was touched.
    """
    start = agree_on_resume_point(config, world, moved, note)
    pinned: dict[str, Any] = {}
    user_config, origin = config, str(Path(str(start.checkpoint)).parents[1]) if start.checkpoint else ""
    if manifest := start.manifest:
        pinned = manifest["pins"]
        user_config = merge_with_checkpoint(config, manifest["settings"], manifest["written"], pinned, origin)
    elif start.global_batch and not config.batch.global_size:
        pinned = {"global_batch_size": start.global_batch}
    command, config = config, replace_settings(user_config, _pinned_settings(pinned)) if pinned else user_config
    parts = (*(user_objects.parts_by_name if user_objects else NAMING), *FOLLOWING)
    check_code(config, command, str(start.checkpoint), environments=ENVIRONMENTS, parts=parts)
    loaded = user_objects.source if user_objects else source
    source = run_on_all_ranks(world, lambda: _open_source(config, placement, world, loaded, moved))
    if manifest and (base := manifest["settings"].get("base")):
        for check in load_given(CHECK_BASE, config):
            run_on_main_rank(world, partial(check, base, config, source, origin))
    fingerprint = run_on_all_ranks(world, lambda: compute_fingerprint(source, config.reproducibility.seed))
    if world.size > 1:
        from multigpu_cli.run.check_ranks_agree_on_data_and_machine import (  # late: not for one process
            check_same_data,
            check_same_machine,
        )

        check_same_data(world, source, fingerprint, config.data.name)
    request = RunRequest(
        user_config=user_config,
        config=replace(config, from_files=describe_origin(config, command, origin, ENVIRONMENTS)),
        placement=placement,
        resume_point=start,
        source=source,
        user_objects=user_objects,
    )
    plan, base = make_plan(request, world), dict(source.text_model)
    spec = RunSpec(**vars(request), plan=plan, data_fingerprint=fingerprint, base=base)
    if world.size > 1 and config.reproducibility.exact:
        check_same_machine(world, describe_machine(spec.plan))
    raise_all(check_data(spec))
    return spec


def _open_source(
    config: Config, placement: Placement, world: World, source: DataSource | None, moved: Moved
) -> DataSource:
    """The dataset; errors of the dataset and of the device are raised together."""
    errors = list(check_device(config, placement, world))
    try:
        source = source or open_data(config, moved)
    except RequestError as error:
        raise combine_errors([*errors, error]) from error
    raise_all(errors)
    return source


def with_measured_batch(spec: RunSpec, size: int, world: World, reason: str) -> RunSpec:
    """The request with the micro-batch that --batch-size auto measured; without --global-batch-size G follows it."""
    spec = replace(spec, config=replace_settings(spec.config, {"batch_size": size}))
    return replace(spec, plan=replace(make_plan(spec, world), batch_size_reason=reason, notes=spec.plan.notes))


def _pinned_settings(pinned: dict[str, Any]) -> dict[str, Any]:
    """Settings that stand for the pins: accumulation is derived anew from the number of workers."""
    values = {key: value for key, value in pinned.items() if key in SETTINGS} | {"grad_accum_steps": None}
    return values | ({"base_lr": None} if "lr" in pinned else {})
