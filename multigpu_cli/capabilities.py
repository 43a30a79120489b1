"""What a run may have beside its core, as text: deleting a room and its lines here takes it out of the program."""

from importlib import import_module
from typing import Any

PARTS = {
    "model.unfreeze_at": "multigpu_cli.run.freezing:Unfreeze",
    "metric best": "multigpu_cli.run.check_metrics:Metrics",
    "adapter": "multigpu_cli.run.pretrained_base:Adapter",
    "hook": "multigpu_cli.run.hooks:UserHooks",
    "prompts": "multigpu_cli.run.prompt_samples:PromptSamples",
    "logger": "multigpu_cli.run.loggers:Loggers",
    "mirror": "multigpu_cli.run.mirroring:Mirroring",
}
"""Settings, one of which is given → a `Part`: made and called in this order, on all ranks."""

ADAPTERS = {"adapter": "multigpu_cli.models.adapter:choose_adapter"}
"""Setting → what chooses what is made of a new network; also where nothing is trained."""

CHECK_BASE = {"model_dir": "multigpu_cli.run.pretrained_base:check_base"}
"""Setting → what compares what it names with a checkpoint's record of it; rank 0 calls it."""

BEFORE_LAUNCH = {"mirror": "multigpu_cli.run.restore_from_mirror:check_mirror_is_new"}
"""Setting → what checks it before a launcher chooses the run folder."""

BEFORE_RESUME = {"mirror": "multigpu_cli.run.restore_from_mirror:restore_from_mirror"}
"""Setting → what brings checkpoints that the run folder lacks, before one is chosen; rank 0 calls it."""

PART_STATES = {"hooks": "--hook"}
"""Entries of a checkpoint's state that parts have: name → flag."""

PLAN_NOTES = {
    "adapter": "adapter",
    "sharding": "sharding",
    "first_weights": "first weights",
    "compiled": "torch.compile",
    "model_call": "model call",
    "logits": "logits",
    "metrics": "metrics",
    "hooks": "hook {}",
    "loggers": "loggers",
    "from_files": "from files",
}
"""Rows of the plan that not every run has: key in the journal → label; with {} for a number the key holds a list."""


def load(code: str) -> Any:
    """What `module:thing` names; its module is imported now."""
    module, _, thing = code.partition(":")
    return getattr(import_module(module), thing)


def load_given(table: dict[str, str], config: Any) -> list[Any]:
    """What a table by settings (several: with spaces between) has for those that differ from their defaults."""
    usual = type(config)()
    return [
        load(code) for keys, code in table.items() if any(config.get(key) != usual.get(key) for key in keys.split())
    ]
