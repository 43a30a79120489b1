"""Every setting of a run: one frozen dataclass per section, and one table for flags, YAML and help.

A setting's key (in YAML and --set) is its flag in snake_case: --batch-size is batch_size. Those with a dot in their
key have no flag: the free-form arguments of the parts (data.args.*, and so for model, task, optimizer, schedule, metric
and hook), and what few people need, such as optimizer.rates. Settings of a section that is FREE may differ on resume.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any

from multigpu_cli.config import types
from multigpu_cli.config.types import (
    ClassWeights,
    ParameterGroup,
    Setting,
    arguments,
    choice,
    flag,
    integer,
    number,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Strategy, GPUs and processes."""

    PANEL = "Devices"
    FREE = True
    multi_gpu: str = flag("auto", types.multi_gpu, "how several GPUs share the work")
    gpu_ids: tuple[int, ...] | None = flag(None, types.gpu_ids, "which GPUs, for dp and self-launched ddp or fsdp")
    nproc_per_node: int | None = flag(None, integer(1, 1024), "processes of a self-launched ddp (default: one per GPU)")
    reshard: str = flag("forward", choice("forward", "step"), "fsdp: free gathered weights after each pass, or step")
    shard_size: int | None = flag(None, integer(2), "fsdp: shard within groups of N workers, replicate between them")
    wrap: tuple[str, ...] = setting(
        "strategy.wrap", (), types.patterns, "fsdp: modules gathered as one (default: blocks)"
    )
    arrival_timeout: float = setting(
        "strategy.arrival_timeout", 120.0, number(1), "seconds for all ranks to load torch and arrive"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset."""

    PANEL = "Data, model, task"
    name: str = setting("data", "digits", types.text, "dataset: a name, a file, or your own as module:factory")
    args: dict[str, Any] = arguments("data.args")
    inputs: int | None = setting(
        "data.inputs", None, integer(1, 1000), "so many parts of a sample are inputs, the others targets (default: 1)"
    )
    dir: str | None = setting("data_dir", None, types.path, "folder or file that holds the dataset", free=True)
    mode: str = flag(
        "flatten", choice("flatten", "average", "first"), "several channels: all, their mean, or the first"
    )
    num_workers: int | str = flag("auto", integer(0, 1024, word="auto"), "loader processes per worker", free=True)
    on_device: str = setting(
        "data_on_device", "auto", choice("auto", "on", "off"), "keep the dataset in GPU memory", free=True
    )
    mixup: float | None = setting(
        "data.mixup", None, number(0, above=True), "mix training samples with others: X of Beta(X, X), e.g. 0.2"
    )
    cutmix: float | None = setting(
        "data.cutmix", None, number(0, above=True), "paste boxes of other training images: X of Beta(X, X), e.g. 1"
    )
    random_resized_crop: float | None = setting(
        "data.random_resized_crop", None, number(0, 1, above=True), "cut out X to 1 of a training image's area, resized"
    )
    rand_augment: int | None = setting(
        "data.rand_augment", None, integer(0, 30), "torchvision's RandAugment of training images: its magnitude, e.g. 9"
    )
    max_length: int | None = flag(None, integer(2), "chat: tokens of a sample or pack (default: the model's places)")
    packing: str = flag(
        "on", choice("on", "off"), "chat: several samples in a row; pairs of preferences never share one"
    )
    shuffle_block: int | None = setting(
        "data.shuffle_block", None, integer(1), "neighbours shuffled as a block (default: 1; of 2^24 rows or more 4096)"
    )
    shuffle_window: int = setting("data.shuffle_window", 64, integer(1), "so many such blocks are mixed at a time")
    mix: tuple[dict[str, Any], ...] = setting(
        "data.mix", (), types.sources, "several datasets: [{data: NAME, data_dir: …, args: {…}, weight: 2}, …]"
    )
    sample_weights: ClassWeights | None = setting(
        "data.sample_weights", None, types.class_weights, "training samples are drawn by the weights of their classes"
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    PANEL = "Data, model, task"
    name: str | None = setting(
        "model", None, types.text, "network: a name, timm/NAME, or module:factory (default: the dataset's)"
    )
    dir: str | None = setting("model_dir", None, types.path, "folder of a pretrained model of transformers", free=True)
    args: dict[str, Any] = arguments("model.args")
    sync_bn: bool = flag(False, types.switch, "BatchNorm statistics over all GPUs (SyncBatchNorm)")
    grad_checkpointing: bool = flag(False, types.switch, "recompute activations in backward: less memory, more time")
    freeze: tuple[str, ...] = flag((), types.patterns, "parameters kept as they are, e.g. 'features.*'")
    unfreeze_at: int | None = setting(
        "model.unfreeze_at", None, integer(2, 10**9), "what --freeze kept learns from this epoch on, counted from 1"
    )
    init_from: str | None = flag(None, types.path, "start from the weights in this file or folder")
    init_partial: bool = flag(False, types.switch, "what --init-from lacks stays as initialised")
    compile: str = flag("off", choice("off", "default", "reduce-overhead"), "torch.compile")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Small weights that learn in place of a pretrained model's, through peft."""

    PANEL = "Data, model, task"
    kind: str = setting(
        "adapter", "none", choice("none", "lora", "rslora", "dora"), "learn small weights beside a pretrained model's"
    )
    r: int = setting("adapter.r", 16, integer(1), "rank of the adapter's matrices")
    alpha: int = setting("adapter.alpha", 32, integer(1), "their product counts times alpha / r")
    dropout: float = setting("adapter.dropout", 0.0, number(0, 1, below=True), "of the adapter's inputs")
    targets: tuple[str, ...] = setting(
        "adapter.targets", (), types.modules, "layers with an adapter, e.g. q_proj,v_proj (default: all but the head)"
    )
    modules_to_save: tuple[str, ...] = setting(
        "adapter.modules_to_save", (), types.modules, "modules that learn as a whole, e.g. lm_head"
    )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The task and its loss."""

    PANEL = "Data, model, task"
    name: str | None = setting("task", None, types.text, "task: a name, or module:Class (default: the dataset's)")
    args: dict[str, Any] = arguments("task.args")
    label_smoothing: float = flag(0.0, number(0, 1, below=True), "softens one-hot targets")
    class_weights: ClassWeights | None = setting(
        "task.class_weights", None, types.class_weights, "a training sample's loss is multiplied by that of its class"
    )
    num_envs: int | None = flag(None, integer(1), "PPO: environments in total")
    env_group: int | None = flag(None, integer(1), "PPO: environments that are stepped as one batch")
    env_steps: int | None = flag(None, integer(1), "PPO: length in environment steps", free=True)
    episodes: int | None = flag(None, integer(1), "PPO: length in episodes", free=True)


@dataclass(frozen=True, kw_only=True)
class MetricConfig:
    """Further metrics of an evaluation, and which number makes weights the best."""

    PANEL = "Data, model, task"
    names: tuple[str, ...] = setting(
        "metric", (), types.named_code, "a further metric: a name, or your own as module:function; may be repeated"
    )
    args: dict[str, Any] = arguments("metric.args")
    best: str | None = flag(
        None, types.best, "what makes weights the best, e.g. val_macro_f1:max (default: the task's)"
    )


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """The user's own code that follows a training."""

    PANEL = "Logging"
    FREE = True
    names: tuple[str, ...] = setting(
        "hook", (), types.named_code, "your own class as module:Class follows the training; repeatable"
    )
    args: dict[str, Any] = setting("hook.args", {}, types.args, "arguments")


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """The length of the run: the limit that is reached first ends it."""

    PANEL = "Length and batch"
    epochs: int = flag(20, integer(1, 10**9), "passes over the training data", free=True)
    max_steps: int | None = flag(None, integer(1), "optimizer steps at most", free=True)
    early_stopping_patience: int | None = flag(None, integer(1), "stop after N epochs without gain")
    pause_at: int | None = setting("tune.pause_at", None, integer(1), "a trial of tune: stop after this epoch, no test")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The number of samples in an optimizer step."""

    PANEL = "Length and batch"
    size: int | str = setting(
        "batch_size", 32, integer(1, 2**31, word="auto"), "samples per device per micro-batch (per GPU)"
    )
    grad_accum_steps: int | None = flag(
        None, integer(1, 2**31), "micro-batches per optimizer step on each device (default: 1)"
    )
    global_size: int | None = setting(
        "global_batch_size", None, integer(1, 2**31), "fixes the global batch; accumulation is derived"
    )
    drop_last: bool = flag(False, types.switch, "leave out an epoch's last short global batch")


@dataclass(frozen=True, kw_only=True)
class RateConfig:
    """The learning rate and its schedule."""

    PANEL = "Learning rate and optimizer"
    lr: float | None = flag(None, number(0, above=True), "the learning rate, used exactly as given")
    base_lr: float | None = flag(
        None, number(0, above=True), "rate that suits the base batch, scaled (1e-3 adamw, 0.1 sgd, …)"
    )
    base_batch_size: int = flag(32, integer(1), "the batch that --base-lr was made for")
    lr_scaling: str = flag(
        "auto", choice("auto", "linear", "sqrt", "none"), "auto: linear for sgd, sqrt for Adam's kind"
    )
    warmup_epochs: float | None = flag(None, number(0), "warm-up from near zero (default: 2 epochs or 10 % of the run)")
    schedule: str = flag("cosine", types.schedule, "how the rate falls after warm-up")
    args: dict[str, Any] = arguments("schedule.args")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    PANEL = "Learning rate and optimizer"
    name: str = setting("optimizer", "adamw", types.optimizer, "optimizer (fused where the device has it)")
    args: dict[str, Any] = arguments("optimizer.args")
    rates: dict[str, float] = setting(
        "optimizer.rates", {}, types.rates, "what the learning rate is multiplied by, e.g. {head.*: 10}"
    )
    layer_decay: float | None = setting(
        "optimizer.layer_decay", None, number(0, 1, above=True), "a block's share of the next block's learning rate"
    )
    groups: tuple[ParameterGroup, ...] = setting(
        "optimizer.groups", (), types.groups, "weight_decay and lr_factor of the parameters that patterns match"
    )
    weight_decay: float = flag(1e-4, number(0), "on matrices and kernels, not on biases and norms")
    max_grad_norm: float | str = flag(
        1.0, number(0, above=True, word="off"), "clip the global batch's gradient to this norm"
    )
    ema: float | str = flag(
        "off", number(0, 1, above=True, below=True, word="off"), "evaluate averaged weights with this decay"
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    PANEL = "Precision and reproducibility"
    amp: str = flag(
        "auto", choice("auto", "bf16", "fp16", "off"), "mixed precision; auto: bf16 or fp16 on CUDA, off on CPU"
    )


@dataclass(frozen=True, kw_only=True)
class ReproducibilityConfig:
    """Random seed and exactness."""

    PANEL = "Precision and reproducibility"
    seed: int = flag(42, integer(0), "of the split, the order, the weights and all randomness")
    exact: bool = flag(False, types.switch, "the same bits on any number of workers")


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """How workers exchange gradients."""

    PANEL = "Communication"
    find_unused_parameters: bool = flag(False, types.switch, "for models that skip some parameters in a step")
    bucket_cap_mb: int | str = flag("auto", integer(1, 4096, word="auto"), "size of DDP's gradient buckets")
    param_dtype: str = setting(
        "strategy.param_dtype",
        "auto",
        choice("auto", "bf16", "fp32"),
        "fsdp: gather weights in this format (auto: bf16 on GPUs with --amp bf16)",
    )
    grad_compression: str = flag("none", choice("none", "fp16", "bf16", "powersgd"), "compress gradients on the wire")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Run folder, checkpoints and resuming."""

    PANEL = "Saving and resuming"
    save_dir: str | None = flag(None, types.path, "run folder (default: checkpoints/NAME/RUN-ID)")
    resume: str = flag("auto", types.path, "auto, never, or the run folder or checkpoint to go on from")
    every: str | None = setting(
        "checkpoint_every", None, types.every, "optimizer steps or minutes (default: each epoch)", free=True
    )
    keep: int = flag(3, integer(1, 10**6), "how many of the newest checkpoints stay", free=True)
    mirror: str | None = flag(
        None, types.url, "copy of the checkpoints in s3://…, gs://… or file:…, to go on from too", free=True
    )
    own_code: bool = flag(False, types.switch, "import code that only a run folder names", free=True)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Journal, samples of a model, loggers, and sample trace."""

    PANEL = "Logging"
    FREE = True
    interval: int = setting("log_interval", 50, integer(1), "optimizer steps between journal lines")
    prompts: str | None = flag(None, types.path, "chat: file of prompts that the model completes after an epoch")
    sample_every: int = flag(1, integer(1), "chat: epochs between completions of --prompts")
    loggers: tuple[str, ...] = setting(
        "logger", (), types.loggers, "send the journal to mlflow, wandb or your module:Class; several"
    )
    logger_wait: float = setting(
        "logger.wait", 60.0, number(0, 3600), "seconds that loggers may still send when the run has ended"
    )
    trace_samples: bool = flag(False, types.switch, "write sample numbers to a file")


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """How the run reacts to faults."""

    PANEL = "Faults"
    FREE = True
    nonfinite: str = flag("skip", choice("skip", "stop"), "a NaN or infinite gradient")
    on_oom: str = flag("shrink", choice("shrink", "stop"), "out of memory")
    hang_timeout: float = flag(600.0, number(1), "seconds without progress until a rank counts as stuck")
    max_restarts: int = flag(0, integer(0, 10**6), "restarts after a crash when self-launched")


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


LENGTH = ("epochs", "max_steps", "env_steps", "episodes")  # the first that is reached ends a run

SECTIONS: dict[str, Any] = {
    part.name: part.default_factory for part in fields(Config) if part.default_factory is not MISSING
}


def _list_settings() -> Iterator[Setting]:
    for section, kind in SECTIONS.items():
        for entry in fields(kind):
            key, free = entry.metadata["key"] or entry.name, entry.metadata["free"] or getattr(kind, "FREE", False)
            default = {} if entry.default is MISSING else entry.default
            meta = {**entry.metadata, "key": key, "free": free}
            yield Setting(**meta, section=section, attribute=entry.name, panel=kind.PANEL, default=default)


SETTINGS = {entry.key: entry for entry in _list_settings()}
