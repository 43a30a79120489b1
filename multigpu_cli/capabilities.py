"""What a run may have beside its core, as text: deleting a room and its lines here takes it out of the program."""

from importlib import import_module
from typing import Any

PARTS = {
    "model.unfreeze_at": "multigpu_cli.freezing:Unfreeze",
    "metric best": "multigpu_cli.metrics.load:Metrics",
    "adapter": "multigpu_cli.language.adapter:Adapter",
    "hook": "multigpu_cli.hooks.hooks:UserHooks",
    "prompts": "multigpu_cli.language.prompts:PromptSamples",
    "logger": "multigpu_cli.loggers.part:Loggers",
    "mirror": "multigpu_cli.mirror.part:Mirroring",
    "notify": "multigpu_cli.notify.part:Notify",
    "tune.pause_at": "multigpu_cli.tune.pause:PauseAtRung",
}
"""A `Part` for settings of which one is given; parts are made and called in this order, on all ranks."""

REQUESTS = {"profile": "multigpu_cli.profiling.profiler:Profiling"}
"""A `Part` by the name with which logs/request asks for it while a run trains: Class(run, steps, id)."""

COMMANDS = {"tune": "multigpu_cli.tune.command:app", "watch": "multigpu_cli.watch.command:watch"}
"""Commands of rooms → a function, or a Typer app with commands below; imported with the front door, without torch."""

RULES = (
    "multigpu_cli.metrics.rules:RULES",
    "multigpu_cli.hooks.rules:RULES",
    "multigpu_cli.language.rules:RULES",
    "multigpu_cli.strategies.fsdp.rules:RULES",
    "multigpu_cli.rl.rules:RULES",
    "multigpu_cli.loggers.rules:RULES",
    "multigpu_cli.mirror.rules:RULES",
    "multigpu_cli.notify.rules:RULES",
)
"""Rules between the settings of a room and others, loaded when a request is first checked; none needs torch."""

ADAPTERS = {"adapter": "multigpu_cli.language.adapter:choose_adapter"}
"""By setting, the function that chooses what to make of a new network; also where nothing is trained."""

CHECK_BASE = {"model_dir": "multigpu_cli.language.adapter:check_base"}
"""By setting, the function that compares its value with the record in a checkpoint; rank 0 calls it."""

BEFORE_LAUNCH = {"mirror": "multigpu_cli.mirror.restore:check_mirror_is_new"}
"""By setting, its check before a launcher chooses the run folder."""

BEFORE_RESUME = {"mirror": "multigpu_cli.mirror.restore:restore_from_mirror"}
"""By setting, the function that fetches checkpoints into the run folder before one is chosen; rank 0 calls it."""

PART_STATES = {"hooks": "--hook"}
"""The entries of a checkpoint's state that belong to parts, with the flags of these."""

UNITS = ("env_steps", "tokens", "samples", "pixels")
"""Units of a run's speed: the first of these that its journal counts."""

OUTSIDE = ("logger", "mirror", "prompts", "notify")
"""Settings that send a run's files elsewhere, read text or run a program; the user is told where a file sets one."""

PLAN_NOTES = {
    "adapter": "adapter",
    "sharding": "sharding",
    "first_weights": "first weights",
    "compiled": "torch.compile",
    "model_call": "model call",
    "logits": "logits",
    "global_loss": "global loss",
    "guard": "guard",
    "metrics": "metrics",
    "hooks": "hook {}",
    "loggers": "loggers",
    "from_files": "from files",
}
"""Labels of the plan's optional rows by their key in the journal; a label with {}, for a number, is of a list."""


def load(code: str) -> Any:
    """What `module:thing` names; its module is imported now."""
    module, _, thing = code.partition(":")
    return getattr(import_module(module), thing)


def load_given(table: dict[str, str], config: Any) -> list[Any]:
    """Load the code of each entry of a table, whose key names settings, if one of these differs from its default."""
    usual = type(config)()
    codes = [code for keys, code in table.items() if any(config.get(key) != usual.get(key) for key in keys.split())]
    return [load(code) for code in codes]


STRATEGIES = {
    "single": "multigpu_cli.strategies.base:Single",
    "dp": "multigpu_cli.strategies.base:DataParallel",
    "ddp": "multigpu_cli.strategies.ddp:DDP",
    "fsdp": "multigpu_cli.strategies.fsdp.fsdp:FSDP2",
}
"""The class of each strategy, by the name that a placement has for it."""

EXACT_STRATEGIES = {
    "single": "multigpu_cli.strategies.exact:ExactReduction",
    "ddp": "multigpu_cli.strategies.exact:ExactReduction",
    "fsdp": "multigpu_cli.strategies.fsdp.exact:ExactFSDP2",
}
"""The classes with --exact."""

MULTI_PROCESS = [name for name in STRATEGIES if name not in ("single", "dp")]
"""Strategies with one process for each device."""

SHARDING = "--multi-gpu fsdp"
"""The flag that divides weights, gradients and the optimizer's state over several devices."""

_OF_SHARDING = ("strategy.wrap", "strategy.param_dtype", "strategy.reduce")
STRATEGY_SETTINGS = {
    "ddp": ("find_unused_parameters", "grad_compression", "bucket_cap_mb"),
    "fsdp": ("find_unused_parameters", "reshard", "shard_size", *_OF_SHARDING),
}
"""The settings of each strategy that have no effect with most others."""

RESOLVED = ("bucket_cap_mb", "strategy.param_dtype")
"""Settings that a start resolves where they are "auto", and checkpoints pin."""

BEFORE_PINNED = {"strategy.param_dtype": "fp32"}
"""What some of them stand for as long as they are not resolved, and in checkpoints that do not say it yet."""

DATASETS = {
    "digits": "multigpu_cli.data.builtin.small_images:digits",
    "har": "multigpu_cli.data.builtin.har:load",
    "mnist": "multigpu_cli.data.builtin.small_images:mnist",
    "fashion-mnist": "multigpu_cli.data.builtin.small_images:fashion_mnist",
    "cifar10": "multigpu_cli.data.builtin.small_images:cifar10",
    "synthetic": "multigpu_cli.data.builtin.synthetic:load",
    "image-folder": "multigpu_cli.data.images.folder:load",
    "csv": "multigpu_cli.data.tables.table:load",
    "arrow": "multigpu_cli.data.rows.source:load_arrow_rows",
    "jsonl": "multigpu_cli.data.rows.source:load_json_rows",
    "tar": "multigpu_cli.data.rows.source:load_tar_rows",
    "mixture": "multigpu_cli.data.mixture:load",
    "npz": "multigpu_cli.data.builtin.npz:load",
    "text": "multigpu_cli.language.text:load",
    "chat": "multigpu_cli.language.chat.chat:load",
}

FILES: dict[str, tuple[str, ...]] = {
    "csv": (".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    "npz": (".npz",),
    "text": (".txt",),
    "chat": (".jsonl", ".parquet", ".json"),
    "arrow": (".arrow",),
    "tar": (".tar",),
    "jsonl": (),  # which are taken for a chat
}
"""The datasets that are files, and the suffixes by which one is recognized."""

TRANSFORMS = {
    "rand_augment": "multigpu_cli.data.images.augment:RandAugment",
    "mix": "multigpu_cli.data.images.mixing:SampleMixer",
}
"""Of whole batches, beside a dataset's own."""

TASKS = {
    "classification": "multigpu_cli.tasks.supervised:Classification",
    "segmentation": "multigpu_cli.tasks.supervised:Segmentation",
    "multi-label": "multigpu_cli.tasks.supervised:MultiLabel",
    "regression": "multigpu_cli.tasks.supervised:Regression",
    "language-model": "multigpu_cli.language.task:LanguageModel",
    "dpo": "multigpu_cli.language.task:DPO",
    "from-model": "multigpu_cli.tasks.own_loss:FromModel",
    "ppo": "multigpu_cli.rl.task:PPO",
}

MODELS = {
    "mlp": "multigpu_cli.models.networks.mlp:build",
    "convnet": "multigpu_cli.models.networks.convnet:ConvNet",
    "resnet18": "multigpu_cli.models.networks.convnet:resnet18",
    "har-convnet": "multigpu_cli.models.networks.convnet:HarConvNet",
    "transformers": "multigpu_cli.language.hugging_face:build",
    "pretrained": "multigpu_cli.language.hugging_face:build_pretrained",
    "timm/": "timm:list_models",
    "torchvision/": "torchvision:models.list_models",
    "gpt": "multigpu_cli.models.networks.gpt:GPT",
    "actor-critic": "multigpu_cli.rl.policy:ActorCritic",
    "lstm-actor-critic": "multigpu_cli.rl.policy:RecurrentActorCritic",
    "clstm-actor-critic": "multigpu_cli.rl.policy:CascadedActorCritic",
}

BUILDERS = {"timm": "timm:model_entrypoint", "torchvision": "torchvision.models:get_model_builder"}
"""By library of networks, the function that finds the factory of one by its name."""

OUTPUTS = {
    "logits": "multigpu_cli.language.hugging_face:Logits",
    "whole": "multigpu_cli.language.hugging_face:NamedInputs",
}
"""The wrapper around a network of transformers, by what a call returns."""

ENVIRONMENTS = {"gym": "multigpu_cli.environments.gym:GymGroup", "trading": "multigpu_cli.trading.request:group"}
"""`gym` takes a gymnasium id after a colon: gym:CartPole-v1."""

LOGGERS = {"mlflow": "multigpu_cli.loggers.mlflow:MLflowLogger", "wandb": "multigpu_cli.loggers.wandb:WandbLogger"}

ACTORS = {"ppo": "multigpu_cli.rl.env_source:open_environments"}
"""By task that acts in environments, the function that opens those of --data as a data source."""

METRICS = {
    "macro_accuracy": "multigpu_cli.metrics.builtin:MacroAccuracy",
    "macro_f1": "multigpu_cli.metrics.builtin:MacroF1",
    "top5_accuracy": "multigpu_cli.metrics.builtin:compute_top5",
    "auroc": "multigpu_cli.metrics.builtin:AUROC",
    "r2": "multigpu_cli.metrics.builtin:R2",
}
