"""Resolves a request into a RunSpec: folder, data and plan, all checked before anything is written."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multigpu_cli.config.own_code import NAMING, check_code
from multigpu_cli.config.resume_rules import OF_THE_COMMAND, flatten_settings, merge_with_checkpoint, replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import dump
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.fingerprint import DataFingerprint, compute_fingerprint
from multigpu_cli.environments.registry import ENVIRONMENTS
from multigpu_cli.errors import RequestError, combine_errors
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.make_plan import RunRequest, make_plan
from multigpu_cli.run.resume_point import agree_on_start
from multigpu_cli.run.user_objects import UserObjects
from multigpu_cli.run.validate_request import check_data, check_device, describe_machine, raise_all
from multigpu_cli.runtime.collectives import run_on_all_ranks
from multigpu_cli.runtime.placement import Placement
from multigpu_cli.runtime.world import World
from multigpu_cli.tasks.open_data import open_data

_LENGTH = ("epochs", "max_steps", "env_steps", "episodes")


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunRequest):
    """A request that can be carried out.

    Attributes:
        plan: the arithmetic.
        data_fingerprint: of the dataset's contents.
    """

    plan: Plan
    data_fingerprint: DataFingerprint

    @property
    def pinned(self) -> dict[str, Any]:
        """What a later command may not change, as resolved."""
        batches = self.plan.batches
        pinned = {
            "batch_size": batches.micro_batch,
            "global_batch_size": batches.global_batch,
            "lr": self.plan.schedule.peak,
            "amp": self.plan.precision,
            "model": self.model,
            "task": self.task,
        }
        if self.config.communication.bucket_cap_mb != "auto":
            pinned["bucket_cap_mb"] = self.config.communication.bucket_cap_mb
        return pinned | ({"machine": describe_machine(self.plan)} if self.config.reproducibility.exact else {})

    def as_yaml(self) -> str:
        """config.yaml: the user's settings."""
        live = f"# with live objects from Python, which --config does not bring back: {self.user_objects}\n"
        return (live if self.user_objects else "") + dump(self.user_config)

    def weights_metadata(self) -> dict[str, Any]:
        """What is stored with weights: the settings, and what of the data the weights depend on."""
        source = self.source
        network = {"model": self.model, "task": self.task, "input_shape": list(source.input_shape)}
        sizes = {"num_classes": source.num_classes, "outputs": source.outputs}
        tokens = {"vocabulary": source.vocabulary.mark()} if source.vocabulary else {}
        return flatten_settings(self.user_config) | {
            "learned": source.signature(),
            "built_for": network | sizes | tokens,
        }

    def checkpoint_metadata(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the run."""
        return {
            "settings": self.weights_metadata(),
            "written": sorted(self.user_config.explicit - OF_THE_COMMAND),
            "pins": self.pinned,
            "samples": self.plan.batches.samples,
            "data": self.data_fingerprint,
        }

    @property
    def nothing_to_do(self) -> bool:
        """Whether the folder holds this very run, completed."""
        manifest, ended = self.start.manifest or {}, self.start.summary or {}
        long_enough = self.same_length or manifest.get("step", 0) >= self.plan.schedule.total_steps
        return ended.get("status") == "completed" and long_enough

    @property
    def same_length(self) -> bool:
        """Whether the run is as long as when its checkpoint was written."""
        stored = self.start.manifest["settings"] if self.start.manifest else None
        return stored is not None and all(self.user_config.get(key) == stored[key] for key in _LENGTH)


def resolve_spec(
    config: Config,
    placement: Placement,
    world: World,
    *,
    source: DataSource | None = None,
    user_objects: UserObjects | None = None,
) -> RunSpec:
    """Choose the folder, adopt what its checkpoint pins, load the data and make the plan.

    Args:
        source: the dataset, where it has been loaded already.
        user_objects: live objects, in place of what the settings name.

    Raises:
        RequestError: the request can't be carried out; nothing was touched.
    """
    start = agree_on_start(config, world)
    pinned: dict[str, Any] = {}
    user_config = config
    if manifest := start.manifest:
        pinned = manifest["pins"]
        origin = str(Path(str(start.checkpoint)).parents[1])
        user_config = merge_with_checkpoint(config, manifest["settings"], manifest["written"], pinned, origin)
    elif start.global_batch and not config.batch.global_size:
        pinned = {"global_batch_size": start.global_batch}
    command, config = config, replace_settings(user_config, _pinned_settings(pinned)) if pinned else user_config
    parts = user_objects.parts_by_name if user_objects else NAMING
    check_code(config, command, str(start.checkpoint), environments=ENVIRONMENTS, parts=parts)
    loaded = user_objects.source if user_objects else source
    source = run_on_all_ranks(world, lambda: _open_source(config, placement, world, loaded))
    fingerprint = run_on_all_ranks(world, lambda: compute_fingerprint(source, config.reproducibility.seed))
    if world.size > 1:
        from multigpu_cli.run.rank_consistency import check_same_data, check_same_machine  # late: not for one process

        check_same_data(world, source, fingerprint, config.data.name)
    request = RunRequest(
        user_config=user_config,
        config=config,
        placement=placement,
        start=start,
        source=source,
        user_objects=user_objects,
    )
    spec = RunSpec(**vars(request), plan=make_plan(request, world), data_fingerprint=fingerprint)
    if world.size > 1 and config.reproducibility.exact:
        check_same_machine(world, describe_machine(spec.plan))
    raise_all(check_data(spec))
    return spec


def _open_source(config: Config, placement: Placement, world: World, source: DataSource | None) -> DataSource:
    """The dataset; errors of the dataset and of the device are raised together."""
    errors = list(check_device(config, placement, world))
    try:
        source = source or open_data(config)
    except RequestError as error:
        raise combine_errors([*errors, error]) from error
    raise_all(errors)
    return source


def with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    """The same request with another micro-batch; the global batch, and so the schedule, stay as they are."""
    batches = replace(spec.plan.batches, micro_batch=size)
    return replace(spec, plan=replace(spec.plan, batches=batches))


def with_measured_batch(spec: RunSpec, size: int, world: World, reason: str) -> RunSpec:
    """The request with the micro-batch that --batch-size auto measured; without --global-batch-size G follows it."""
    spec = replace(spec, config=replace_settings(spec.config, {"batch_size": size}))
    return replace(spec, plan=replace(make_plan(spec, world), batch_size_reason=reason))


def _pinned_settings(pinned: dict[str, Any]) -> dict[str, Any]:
    """Settings that stand for the pins: accumulation is derived anew from the number of workers."""
    values = {key: value for key, value in pinned.items() if key in SETTINGS} | {"grad_accum_steps": None}
    return values | ({"base_lr": None} if "lr" in pinned else {})
