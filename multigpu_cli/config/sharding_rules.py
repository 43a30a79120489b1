"""The settings that do not go together with --multi-gpu fsdp, or not yet."""

from collections.abc import Iterator

from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError

KEYS = "grad_compression compile batch_size find_unused_parameters model.unfreeze_at amp sync_bn"
"""The keys that the rule reads, beside those of data and task."""


def find_sharding_errors(config: Config, *, acts: bool) -> Iterator[RequestError]:
    """What can't be done with sharded weights; each has a way out.

    Args:
        acts: the data are environments.
    """
    model, compression = config.model, config.communication.grad_compression
    refused = (
        (f"--grad-compression {compression}", compression != "none", "--grad-compression none, or --multi-gpu ddp"),
        (f"--compile {model.compile}", model.compile != "off", "--compile off"),
        ("--batch-size auto", config.batch.size == "auto", "a number, such as --batch-size 8"),
        (
            "--find-unused-parameters",
            config.communication.find_unused_parameters,
            "--freeze what takes no part in the loss, or use --multi-gpu ddp",
        ),
        ("model.unfreeze_at", model.unfreeze_at is not None, "--freeze for the whole run, or --multi-gpu ddp"),
        ("--amp fp16", config.precision.amp == "fp16", "--amp bf16 or --amp off"),
        ("--sync-bn", model.sync_bn, "leave out --sync-bn, or use --multi-gpu ddp"),
        ("--task ppo", acts or config.task.name == "ppo", "--multi-gpu ddp"),
    )
    for what, given, remedy in refused:
        if given:
            yield RequestError(f"{what}: not with --multi-gpu fsdp yet", remedy=remedy)
