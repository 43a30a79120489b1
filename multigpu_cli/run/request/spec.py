"""A run as it was requested (RunRequest), and with its plan and all checks passed (RunSpec)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from multigpu_cli.checkpoint.run_folder import ResumePoint
from multigpu_cli.config.resume_rules import OF_THE_COMMAND, flatten_settings
from multigpu_cli.config.schema import LENGTH, Config
from multigpu_cli.config.sources import dump
from multigpu_cli.data.fingerprint import DataFingerprint
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.models.build import find_adapter
from multigpu_cli.planning.plan import Plan
from multigpu_cli.run.request.from_config import FromConfig
from multigpu_cli.strategies.base import Strategy, find_strategy


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A request whose settings, run folder and dataset are known."""

    user_config: Config  # the user's settings, with those of the run that is continued; written to config.yaml
    config: Config  # the same with what the checkpoint pins and this start found out; the run is built from it
    placement: Placement
    resume_point: ResumePoint
    source: DataSource
    factories: FromConfig

    @property
    def model(self) -> str:
        """The model's name: the dataset's own model where the user named none."""
        return self.config.model.name or self.source.model

    @property
    def strategy(self) -> type[Strategy]:
        """The planned strategy. Each process of a dry run, and a run in one process, trains with another."""
        return find_strategy(self.placement.strategy, exact=self.config.reproducibility.exact)

    @property
    def task(self) -> str:
        """The task's name: the dataset's own task where the user named none."""
        return self.config.task.name or self.source.task


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunRequest):
    """A request that can be carried out."""

    plan: Plan
    data_fingerprint: DataFingerprint
    base: Mapping[str, str] = field(default_factory=dict)  # what checkpoints record of the pretrained model
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # and of the network's code, once it is built

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
        return self.factories.comment + dump(self.user_config)

    def weights_metadata(self) -> dict[str, Any]:
        """What is stored with weights: the settings, and what of the data the weights depend on."""
        source = self.source
        network = {"model": self.model, "task": self.task, "input_shape": list(source.input_shape)}
        sizes = {"num_classes": source.num_classes, "outputs": source.num_outputs}
        tokens = {"vocabulary": text} if (text := source.codec.serialize()) else {}
        return flatten_settings(self.user_config) | {
            "learned": source.signature(),
            "built_for": network | sizes | tokens,
            **({"base": dict(self.base)} if self.base else {}),
            **({"code": dict(self.code)} if self.code else {}),
            **({"reference": "initial adapter"} if self.has_reference else {}),
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
    def begins_from_weights(self) -> bool:
        """Whether --init-from gives the weights, and not a checkpoint."""
        return bool(self.config.model.init_from and not self.resume_point.checkpoint)

    @property
    def has_reference(self) -> bool:
        """Whether preferences are compared with the adapter of --init-from; a run of an older version did not."""
        if manifest := self.resume_point.manifest:
            return "reference" in manifest["settings"]
        return self.begins_from_weights and self.source.noun == "pairs" and find_adapter(self.config) is not None

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds this very run, completed."""
        manifest, ended = self.resume_point.manifest or {}, self.resume_point.summary or {}
        long_enough = self.same_length or manifest.get("step", 0) >= self.plan.schedule.total_steps
        return ended.get("status") == "completed" and long_enough

    @property
    def same_length(self) -> bool:
        """Whether the run is as long as when its checkpoint was written."""
        stored = self.resume_point.manifest["settings"] if self.resume_point.manifest else None
        return stored is not None and all(self.user_config.get(key) == stored[key] for key in LENGTH)


def describe_machine(plan: Plan) -> dict[str, Any]:
    """What the bits of a result depend on beside the settings: a run with --exact resumes only where all are equal."""
    capability = f" with {torch.backends.cpu.get_cpu_capability()}" if plan.device == "cpu" else ""
    return {"CPU threads": plan.threads, "device": plan.device + capability, "torch version": torch.__version__}


def with_notes(spec: RunSpec, **notes: str | list[str]) -> RunSpec:
    """The same request with more said in its plan."""
    return replace(spec, plan=replace(spec.plan, notes={**spec.plan.notes, **notes}))


def with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    """The same request with another micro-batch; the global batch, and so the schedule, stay as they are."""
    batches = replace(spec.plan.batches, micro_batch=size)
    return replace(spec, plan=replace(spec.plan, batches=batches))
