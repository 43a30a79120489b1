"""`MultiGPUConfig`: the settings of the Python API, and the flags that they correspond to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Self

from multigpu_cli.config import rules
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.data.source import LoaderOptions
from multigpu_cli.errors import RequestError, did_you_mean, raise_all

_UNLIMITED = 10**6  # epochs: the user's own loop decides when training ends
_NEVER = 999_999_999  # optimizer steps


class TrainingMode(Enum):
    """How several GPUs share the work; the values are those of --multi-gpu."""

    AUTO = "auto"
    SINGLE_GPU = "none"
    DATA_PARALLEL = "dp"
    DISTRIBUTED_DATA_PARALLEL = "ddp"
    FULLY_SHARDED_DATA_PARALLEL = "fsdp"

    @classmethod
    def named(cls, strategy: "str | TrainingMode") -> "TrainingMode":
        """From any of the names in use: auto, none, dp, DataParallel, ddp, DistributedDataParallel, fsdp, …"""
        if isinstance(strategy, cls):
            return strategy
        word = re.sub(r"[^a-z]", "", str(strategy).lower())
        known = {"single": cls.SINGLE_GPU, "distributed": cls.DISTRIBUTED_DATA_PARALLEL}
        known |= {mode.value: mode for mode in cls} | {mode.name.lower().replace("_", ""): mode for mode in cls}
        if word not in known:
            raise RequestError(f"strategy {strategy!r} is not supported", remedy=did_you_mean(word, known))
        return known[word]


@dataclass
class MultiGPUConfig:
    """Settings of a run from Python. It may be changed until training is set up, which freezes a copy of it.

    Every field has its effect or is refused with a reason (RequestError when training is set up); a name that is no
    field is refused at once. None takes the default of the command line.

    Attributes:
        training_mode: how several GPUs share the work; auto takes DDP for two or more, never DataParallel.
        device_ids: which GPUs; under torchrun, that of each local rank.
        world_size: processes. Under a launcher it must agree with it; without `rank`, so many are started here.
        rank, local_rank: this process among them, where no launcher says so; MASTER_ADDR and MASTER_PORT must be set.
        backend: nccl or gloo; None takes nccl on GPUs and gloo on CPU.
        timeout: how long a collective waits for a rank before training begins; from then on, `recovery_timeout` counts.
        batch_size: samples per device per micro-batch, or "auto".
        global_batch_size: fixes the samples of an optimizer step on any number of devices.
        gradient_accumulation_steps: micro-batches per optimizer step on each device.
        drop_last: leave out an epoch's last short global batch.
        num_epochs: passes over the data; None with `setup_training` trains for as long as it is called, else 10.
        learning_rate: as given; None scales 1e-3 (AdamW) to the global batch. An optimizer of yours has its own rate.
        use_mixed_precision: bf16, or fp16 with loss scaling on GPUs without it; full precision on CPU.
        max_grad_norm: the global batch's gradient is clipped to this norm; None does not clip.
        find_unused_parameters, use_gradient_as_bucket_view, static_graph: as in DistributedDataParallel.
        bucket_cap_mb, reduce_bucket_size: one size, in MiB and in bytes.
        broadcast_buffers: True only; buffers are equal on all ranks in every step.
        use_fp16_allreduce, fp16_compression: gradients are sent in half precision; both fields mean the same.
        sync_bn: BatchNorm statistics over all GPUs.
        use_gradient_checkpointing: recompute activations in backward.
        num_workers: loader processes per device, or "auto".
        pin_memory, prefetch_factor: as in DataLoader.
        persistent_workers: True only with loader processes: they are forked once, before training begins.
        enable_fault_tolerance: False saves at the end only, and stops at the first NaN or lack of memory.
        checkpoint_frequency: optimizer steps between checkpoints; None saves after each epoch.
        recovery_timeout: seconds without progress until a rank counts as stuck, and the run is ended.
        max_restarts: of a run whose processes are started here.
        save_dir: run folder; one that holds a run is continued. None begins a new one under checkpoints/.
        seed, exact: as --seed and --exact.
        screen: silent, quiet, normal or verbose.
        settings: any other setting of the command line, by key: {"ema": 0.999, "schedule": "linear"}.
    """

    training_mode: TrainingMode | str = TrainingMode.AUTO
    device_ids: list[int] | None = None
    world_size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    backend: str | None = None
    timeout: timedelta | None = None
    batch_size: int | str = 32
    global_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    drop_last: bool = False
    num_epochs: int | None = None
    learning_rate: float | None = None
    use_mixed_precision: bool = True
    max_grad_norm: float | None = 1.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    use_gradient_as_bucket_view: bool = True
    bucket_cap_mb: int | None = None
    reduce_bucket_size: int | None = None
    broadcast_buffers: bool = True
    use_fp16_allreduce: bool = False
    fp16_compression: bool = False
    sync_bn: bool = False
    use_gradient_checkpointing: bool = False
    num_workers: int | str = "auto"
    pin_memory: bool = True
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    enable_fault_tolerance: bool = True
    checkpoint_frequency: int | None = None
    recovery_timeout: float = 600.0
    max_restarts: int = 0
    save_dir: str | None = None
    seed: int = 42
    exact: bool = False
    screen: str = "quiet"
    settings: dict[str, Any] = field(default_factory=dict)

    def __new__(cls, *_: Any, **values: Any) -> Self:
        for name in values:
            cls._check_name(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_name(name)
        super().__setattr__(name, value)

    @classmethod
    def _check_name(cls, name: str) -> None:
        names = [entry.name for entry in fields(cls)]
        if name not in names:
            remedy = f"{did_you_mean(name, names)}; settings={{…}} takes the other settings of the command line"
            raise RequestError(f"{name}: MultiGPUConfig has no such field", remedy=remedy)

    def frozen(self) -> Config:
        """The engine's Config for these settings; RequestError: all that is invalid."""
        raise_all(self._find_errors())
        explicit = {k: value for k, value in self._by_key().items() if value not in (None, SETTINGS[k].default)}
        faults = []
        for key, value in explicit.items():
            try:
                SETTINGS[key].kind.parse(value)
            except ValueError as error:
                faults.append(RequestError(f"{_FIELDS.get(key, key)} {error}"))
        raise_all(faults)
        config = replace(replace_settings(Config(), explicit), explicit=frozenset(explicit))
        raise_all(map(to_python_error, rules.find_rule_errors(config, invalid_keys=["data"])))
        return config

    @property
    def loader_options(self) -> LoaderOptions:
        """How batches are copied to the device."""
        return LoaderOptions(pin_memory=self.pin_memory, prefetch=self.prefetch_factor)

    @property
    def ddp(self) -> dict[str, Any]:
        """Arguments of DistributedDataParallel that the command line has no flag for."""
        views = {} if self.use_gradient_as_bucket_view else {"gradient_as_bucket_view": False}
        return views | ({"static_graph": True} if self.static_graph else {})

    def _by_key(self) -> dict[str, Any]:
        tolerant = self.enable_fault_tolerance
        half = self.use_fp16_allreduce or self.fp16_compression
        every = self.checkpoint_frequency if tolerant else _NEVER
        bucket = self.bucket_cap_mb or (self.reduce_bucket_size and max(1, self.reduce_bucket_size // 2**20))
        derived: dict[str, Any] = {} if tolerant else {"nonfinite": "stop", "on_oom": "stop"}
        values = {key: getattr(self, name) for key, name in _FIELDS.items()} | {
            "multi_gpu": TrainingMode.named(self.training_mode).value,
            "gpu_ids": ",".join(map(str, self.device_ids)) if self.device_ids else None,
            "nproc_per_node": None,
            "epochs": _UNLIMITED if self.num_epochs is None else self.num_epochs,
            "amp": "auto" if self.use_mixed_precision else "off",
            "max_grad_norm": "off" if self.max_grad_norm is None else self.max_grad_norm,
            "bucket_cap_mb": bucket or "auto",
            "grad_compression": "fp16" if half else "none",
            "checkpoint_every": None if every is None else str(every),
            "hang_timeout": float(self.recovery_timeout),
            "resume": "auto" if self.save_dir else "never",
        }
        if self.num_epochs is None:
            derived |= {"schedule": "constant", "warmup_epochs": 0.0}
        return values | derived | self.settings

    def _find_errors(self) -> Iterator[RequestError]:
        if not self.broadcast_buffers:
            reason = "with buffers that differ between ranks, results would depend on the number of ranks"
            yield RequestError(f"broadcast_buffers=False is not supported: {reason}", remedy="leave it out")
        if not self.persistent_workers and self.num_workers not in (0, "auto"):
            yield RequestError(
                "persistent_workers=False is not supported: loader processes are forked once, before training "
                "begins; a process that is forked later may inherit a lock that is never released",
                remedy="leave it out, or num_workers=0",
            )
        both = self.bucket_cap_mb, self.reduce_bucket_size
        if None not in both and both[0] != (both[1] or 0) / 2**20:
            reason = "both are the bucket size, in MiB and in bytes"
            problem = f"bucket_cap_mb={both[0]} disagrees with reduce_bucket_size={both[1]}: {reason}"
            yield RequestError(problem, remedy="leave one of them out")
        if self.backend not in (None, "nccl", "gloo"):
            yield RequestError(f"backend {self.backend!r} is not supported", remedy="nccl, gloo, or leave it out")
        unknown = sorted(self.settings.keys() - SETTINGS.keys())
        taken = sorted(self.settings.keys() & (_FIELDS.keys() | {"data", "model", "data.args", "model.args"}))
        if unknown:
            yield RequestError(f"settings[{unknown[0]!r}]: unknown", remedy=did_you_mean(unknown[0], SETTINGS))
        if taken:
            field_name = _FIELDS.get(taken[0])
            value = f"{field_name}={self.settings[taken[0]]!r}" if field_name == taken[0] else f"{field_name}=…"
            instead = f"{value} beside settings" if field_name else "the argument for the object itself"
            yield RequestError(f"settings[{taken[0]!r}] has a place of its own", remedy=instead)


_FIELDS = {
    "multi_gpu": "training_mode",
    "gpu_ids": "device_ids",
    "nproc_per_node": "world_size",
    "grad_accum_steps": "gradient_accumulation_steps",
    "epochs": "num_epochs",
    "lr": "learning_rate",
    "amp": "use_mixed_precision",
    "grad_compression": "fp16_compression",
    "grad_checkpointing": "use_gradient_checkpointing",
    "checkpoint_every": "checkpoint_frequency",
    "hang_timeout": "recovery_timeout",
} | {entry.name: entry.name for entry in fields(MultiGPUConfig) if entry.name in SETTINGS}
"""Setting of the command line → field."""


def to_python_error(error: RequestError) -> RequestError:
    """The error with the fields of MultiGPUConfig in place of flags."""

    def field_of(flag: "re.Match[str]") -> str:
        key = flag[1].replace("-", "_")
        return _FIELDS.get(key, {"data": "dataset", "model": "model", "task": "criterion"}.get(key, flag[0]))

    def in_fields(text: str) -> str:
        return re.sub(r"--([a-z][a-z-]*[a-z])", field_of, text)

    return type(error)(in_fields(error.problem), remedy=in_fields(error.remedy))
