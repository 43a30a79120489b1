"""Every setting of a run: one frozen dataclass per section, and one table for flags, YAML and help.

A setting's key (in YAML and --set) is its flag in snake_case: --batch-size is batch_size. `guard` has no flag, nor have
those with a dot in their key: the free-form arguments of the parts (data.args.*, and so for model, task, optimizer,
schedule, metric and hook), and what few people need, such as optimizer.rates. Settings of a section that is FREE may
differ on resume.
"""

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any

from multigpu_cli.config import types
from multigpu_cli.config.types import Setting, choice, flag, integer, number, setting, subkey

_CHAT, _RL = "Chat and language models", "Reinforcement learning (PPO)"  # chapters of the help, as each PANEL


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Strategy, GPUs and processes."""

    PANEL = "Distributed training"
    FREE = True
    multi_gpu: str = flag("auto", types.multi_gpu, "how GPUs share the work")
    gpu_ids: tuple[int, ...] | None = flag(None, types.gpu_ids, "GPUs to use (torchrun: CUDA_VISIBLE_DEVICES)")
    nproc_per_node: int | None = flag(None, integer(1, 1024), "worker processes to start (default: one per GPU)")
    reshard: str = flag("forward", choice("forward", "step"), "fsdp: when to free gathered weights")
    shard_size: int | None = flag(None, integer(2), "fsdp: shard within groups of N workers, replicate across")
    wrap: tuple[str, ...] = setting(
        "strategy.wrap", (), types.patterns, "fsdp: modules that are gathered as a unit (default: blocks)"
    )
    arrival_timeout: float = setting(
        "strategy.arrival_timeout", 120.0, number(1), "seconds for all ranks to load torch and arrive"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset."""

    PANEL = "Data"
    name: str = setting("data", "digits", types.text, "name, file or module:function")
    args: dict[str, Any] = types.arguments("data.args")
    inputs: int | None = subkey(
        None, integer(1, 1000), "the first N elements of a sample are inputs, the others targets (default: 1)"
    )
    dir: str | None = setting("data_dir", None, types.path, "folder or file of the dataset", free=True)
    mode: str = flag(
        "flatten", choice("flatten", "average", "first"), "several channels: all, their mean, or the first"
    )
    num_workers: int | str = flag("auto", integer(0, 1024, word="auto"), "data loading processes per worker", free=True)
    on_device: str = setting(
        "data_on_device", "auto", choice("auto", "on", "off"), "keep the whole dataset in GPU memory", free=True
    )
    mixup: float | None = subkey(None, number(0, above=True), "MixUp of training samples: X of Beta(X, X), e.g. 0.2")
    cutmix: float | None = subkey(None, number(0, above=True), "CutMix of training images: X of Beta(X, X), e.g. 1")
    random_resized_crop: float | None = subkey(
        None, number(0, 1, above=True), "RandomResizedCrop of X to 1 of a training image's area"
    )
    rand_augment: int | None = subkey(None, integer(0, 30), "RandAugment for training images: its magnitude, e.g. 9")
    max_length: int | None = flag(None, integer(2), "maximum number of tokens (default: the model's)", panel=_CHAT)
    packing: str = flag(
        "on", choice("on", "off"), "pack several samples (never preference pairs) into one sequence", panel=_CHAT
    )
    shuffle_block: int | None = subkey(
        None, integer(1), "rows shuffled as a block (default: 1; from 2^24 rows on 4096)"
    )
    shuffle_window: int = subkey(64, integer(1), "number of blocks that are mixed")
    mix: tuple[dict[str, Any], ...] = subkey(
        (), types.sources, "mixture of datasets: [{data: NAME, data_dir: …, args: {…}, weight: 2}, …]"
    )
    sample_weights: types.ClassWeights | None = subkey(
        None, types.class_weights, "weights of the classes when training samples are drawn"
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    PANEL = "Model and task"
    name: str | None = setting("model", None, types.text, "name, timm/NAME or module:function (default: the dataset's)")
    dir: str | None = setting("model_dir", None, types.path, "folder of a pretrained Hugging Face model", free=True)
    args: dict[str, Any] = types.arguments("model.args")
    sync_bn: bool = flag(False, types.switch, "use SyncBatchNorm: batch statistics over all GPUs")
    grad_checkpointing: bool = flag(False, types.switch, "recompute activations: less memory, more time")
    freeze: tuple[str, ...] = flag((), types.patterns, "parameters not to train, e.g. 'features.*'; repeatable")
    unfreeze_at: int | None = subkey(
        None, integer(2, 10**9), "first epoch (from 1) that trains the --freeze parameters"
    )
    init_from: str | None = flag(None, types.path, "load initial weights from this file or folder")
    init_partial: bool = flag(False, types.switch, "load matching weights only; leave the rest at their initial values")
    compile: str = flag("off", choice("off", "default", "reduce-overhead"), "torch.compile")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Small weights that learn in place of a pretrained model's, through peft."""

    PANEL = _CHAT
    kind: str = setting("adapter", "none", choice("none", "lora", "rslora", "dora"), "fine-tune with an adapter")
    r: int = subkey(16, integer(1), "rank of the adapter matrices")
    alpha: int = subkey(32, integer(1), "scale of the adapter: its output is multiplied by alpha / r")
    dropout: float = subkey(0.0, number(0, 1, below=True), "dropout of the adapter's inputs")
    targets: tuple[str, ...] = subkey(
        (), types.modules, "layers with an adapter, e.g. q_proj,v_proj (default: all but the head)"
    )
    modules_to_save: tuple[str, ...] = subkey((), types.modules, "modules that are trained in full, e.g. lm_head")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The task and its loss."""

    PANEL = "Model and task"
    name: str | None = setting("task", None, types.text, "name or module:Class (default: the dataset's)")
    args: dict[str, Any] = types.arguments("task.args")
    label_smoothing: float = flag(0.0, number(0, 1, below=True), "label smoothing, from 0 to 1")
    class_weights: types.ClassWeights | None = subkey(
        None, types.class_weights, "weights of the classes in the training loss"
    )
    num_envs: int | None = flag(None, integer(1), "number of environments, over all workers", panel=_RL)
    env_group: int | None = flag(None, integer(1), "environments that are stepped as one batch", panel=_RL)
    env_steps: int | None = flag(None, integer(1), "length of training in environment steps", free=True, panel=_RL)
    episodes: int | None = flag(None, integer(1), "length of training in episodes", free=True, panel=_RL)


@dataclass(frozen=True, kw_only=True)
class MetricConfig:
    """Further metrics of an evaluation, and which number makes weights the best."""

    PANEL = "Model and task"
    names: tuple[str, ...] = setting(
        "metric", (), types.named_code, "additional metric: name or module:function; repeatable"
    )
    args: dict[str, Any] = types.arguments("metric.args")
    best: str | None = flag(None, types.best, "metric of the best weights, e.g. val_macro_f1:max (default: the task's)")


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """The user's own code that follows a training."""

    PANEL = "Logging"
    FREE = True
    names: tuple[str, ...] = setting("hook", (), types.named_code, "hook class (callback) as module:Class; repeatable")
    args: dict[str, Any] = types.arguments("hook.args")


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """The length of the run: the limit that is reached first ends it."""

    PANEL = "Length and batch"
    epochs: int = flag(20, integer(1, 10**9), "number of epochs", free=True)
    max_steps: int | None = flag(None, integer(1), "maximum number of optimizer steps", free=True)
    early_stopping_patience: int | None = flag(None, integer(1), "stop after N epochs without improvement")
    pause_at: int | None = setting("tune.pause_at", None, integer(1), "set by tune: pause after this epoch, no test")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The number of samples in an optimizer step."""

    PANEL = "Length and batch"
    size: int | str = setting("batch_size", 32, integer(1, 2**31, word="auto"), "samples per GPU in one micro-batch")
    grad_accum_steps: int | None = flag(
        None, integer(1, 2**31), "micro-batches per optimizer step on each GPU (default: 1)"
    )
    global_size: int | None = setting(
        "global_batch_size", None, integer(1, 2**31), "samples per optimizer step over all GPUs"
    )
    drop_last: bool = flag(False, types.switch, "drop the last global batch of an epoch if it is incomplete")


@dataclass(frozen=True, kw_only=True)
class RateConfig:
    """The learning rate and its schedule."""

    PANEL = "Learning rate and optimizer"
    lr: float | None = flag(None, number(0, above=True), "learning rate, used as given")
    base_lr: float | None = flag(
        None, number(0, above=True), "learning rate for --base-batch-size, scaled (1e-3 adamw, 0.1 sgd, …)"
    )
    base_batch_size: int = flag(32, integer(1), "batch size that --base-lr is meant for")
    lr_scaling: str = flag(
        "auto",
        choice("auto", "linear", "sqrt", "none"),
        "how --base-lr scales; auto: linear for SGD, sqrt for Adam variants",
    )
    warmup_epochs: float | None = flag(None, number(0), "length of the warm-up (default: 2, or 10 % of the run)")
    schedule: str = flag("cosine", types.schedule, "learning rate schedule after the warm-up")
    args: dict[str, Any] = types.arguments("schedule.args")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    PANEL = "Learning rate and optimizer"
    name: str = setting("optimizer", "adamw", types.optimizer, "optimizer; its fused version where the device has one")
    args: dict[str, Any] = types.arguments("optimizer.args")
    rates: dict[str, float] = subkey(
        {}, types.rates, "factors of the learning rate by parameter pattern, e.g. {head.*: 10}"
    )
    layer_decay: float | None = subkey(
        None, number(0, 1, above=True), "a block's learning rate, as a factor of the next block's"
    )
    groups: tuple[types.ParameterGroup, ...] = subkey(
        (), types.groups, "weight_decay and lr_factor of parameters that match patterns"
    )
    weight_decay: float = flag(1e-4, number(0), "weight decay; not applied to biases and normalization layers")
    max_grad_norm: float | str = flag(
        1.0, number(0, above=True, word="off"), "clip the gradient of the global batch to this norm"
    )
    ema: float | str = flag(
        "off", number(0, 1, above=True, below=True, word="off"), "decay of averaged weights (EMA), which are evaluated"
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    PANEL = "Precision and reproducibility"
    amp: str = flag("auto", choice("auto", "bf16", "fp16", "off"), "mixed precision; auto: on for CUDA")


@dataclass(frozen=True, kw_only=True)
class ReproducibilityConfig:
    """Random seed and exactness."""

    PANEL = "Precision and reproducibility"
    seed: int = flag(42, integer(0), "random seed")
    exact: bool = flag(False, types.switch, "bit-identical results on any number of workers")
    guard: str = flag("on", choice("on", "off"), "refuse code whose result depends on the number of workers", free=True)


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """How workers exchange gradients."""

    PANEL = "Distributed training"
    find_unused_parameters: bool = flag(False, types.switch, "for models that do not use all parameters in every step")
    bucket_cap_mb: int | str = flag("auto", integer(1, 4096, word="auto"), "size of DDP's gradient buckets in MB")
    param_dtype: str = setting(
        "strategy.param_dtype", "auto", choice("auto", "bf16", "fp32"), "fsdp: format of gathered weights, e.g. bf16"
    )
    reduce: str = setting("strategy.reduce", "step", choice("step", "pass"), "fsdp: how often gradients are reduced")
    grad_compression: str = flag("none", choice("none", "fp16", "bf16", "powersgd"), "compress exchanged gradients")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Run folder, checkpoints and resuming."""

    PANEL = "Saving and resuming"
    save_dir: str | None = flag(None, types.path, "run folder (default: checkpoints/NAME/RUN-ID)")
    resume: str = flag("auto", types.path, "auto, never, a run folder or a checkpoint")
    every: str | None = setting(
        "checkpoint_every", None, types.every, "optimizer steps or minutes (default: every epoch)", free=True
    )
    keep: int = flag(3, integer(1, 10**6), "number of checkpoints to keep", free=True)
    mirror: str | None = flag(
        None, types.url, "copy checkpoints to s3://…, gs://… or file:…; resume from there", free=True
    )
    own_code: bool = flag(False, types.switch, "allow importing custom code referenced by a run folder", free=True)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Journal, samples of a model, loggers, and sample trace."""

    PANEL = "Logging"
    FREE = True
    interval: int = setting("log_interval", 50, integer(1), "optimizer steps between log lines")
    prompts: str | None = flag(None, types.path, "file of prompts that the model answers after each epoch", panel=_CHAT)
    sample_every: int = flag(1, integer(1), "epochs between answers to --prompts", panel=_CHAT)
    loggers: tuple[str, ...] = setting(
        "logger", (), types.loggers, "also log to mlflow, wandb or module:Class; repeatable"
    )
    logger_wait: float = setting(
        "logger.wait", 60.0, number(0, 3600), "seconds that loggers may keep sending after the run"
    )
    trace_samples: bool = flag(False, types.switch, "record the sample indices of each step in samples.jsonl")


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """How the run reacts to faults."""

    PANEL = "Faults"
    FREE = True
    nonfinite: str = flag("skip", choice("skip", "stop"), "on a NaN or infinite gradient: skip the step, or stop")
    on_oom: str = flag("shrink", choice("shrink", "stop"), "on out of memory: smaller batches, or stop")
    hang_timeout: float = flag(600.0, number(1), "seconds without progress until a rank counts as hung")
    max_restarts: int = flag(0, integer(0, 10**6), "restarts after a crash (not under torchrun)")
    notify: str | None = flag(None, types.command, "program to run at the end, after a fault and after a stall")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings after defaults < YAML < --set < flags; nothing is derived here."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    metric: MetricConfig = field(default_factory=MetricConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    rate: RateConfig = field(default_factory=RateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    reproducibility: ReproducibilityConfig = field(default_factory=ReproducibilityConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hook: HookConfig = field(default_factory=HookConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    recipe: str | None = None
    explicit: frozenset[str] = frozenset()  # keys that the user gave (YAML, --set or flag); the others are defaults
    from_files: str = ""  # what only a file gives and imports code, sends the run elsewhere or names prompts

    @property
    def last_epoch(self) -> float:
        """The epoch with which the run ends; where --env-steps counts instead, no number tells."""
        return self.length.epochs if self.task.env_steps is None else inf

    def get(self, key: str) -> Any:
        """The value of a setting by its key."""
        entry = SETTINGS[key]
        return getattr(getattr(self, entry.section), entry.attribute)

    def nest(self, keys: Iterable[str]) -> dict[str, Any]:
        """The recipe and the values of these keys, those of a part such as `model` below its name."""
        data: dict[str, Any] = {"recipe": self.recipe}
        for key in keys:
            (part, _, inner), value = key.partition("."), self.get(key)
            if part in types.PARTS:
                data.setdefault(part, {})[inner or types.PARTS[part]] = value
            else:
                data[key] = list(value) if isinstance(value, tuple) else value
        return data


LENGTH = ("epochs", "max_steps", "env_steps", "episodes")  # the first that is reached ends a run

SECTIONS: dict[str, Any] = {
    part.name: part.default_factory for part in fields(Config) if part.default_factory is not MISSING
}


def _list_settings() -> Iterator[Setting]:
    for section, kind in SECTIONS.items():
        for entry in fields(kind):
            key = entry.metadata["key"].format(section=section, name=entry.name)
            free = entry.metadata["free"] or getattr(kind, "FREE", False)
            default = {} if entry.default is MISSING else entry.default
            meta = {**entry.metadata, "key": key, "free": free, "panel": entry.metadata["panel"] or kind.PANEL}
            yield Setting(**meta, section=section, attribute=entry.name, default=default)


SETTINGS = {entry.key: entry for entry in _list_settings()}
