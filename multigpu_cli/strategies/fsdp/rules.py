"""The settings that do not go together with --multi-gpu fsdp, or not yet, and groups that do not fit the workers."""

from collections.abc import Iterator

from multigpu_cli.config.rules import Rule, RuleContext
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.optimizer_names import OPTIMIZERS


def find_sharding_errors(config: Config, *, acts: bool) -> Iterator[RequestError]:
    """What can't be done with sharded weights; each has a way out.

    Args:
        acts: the data are environments.
    """
    model, compression = config.model, config.communication.grad_compression
    refused = (
        (f"--grad-compression {compression}", compression != "none", "--grad-compression none, or --multi-gpu ddp"),
        ("--sync-bn", model.sync_bn, "leave out --sync-bn, or use --multi-gpu ddp"),
    )
    if config.reproducibility.exact and config.device.shard_size:
        yield RequestError("--exact: not with --shard-size yet", remedy="leave out one of them")
    if config.reproducibility.exact and model.compile != "off":
        yield RequestError(
            f"--exact together with --multi-gpu fsdp and --compile {model.compile}: blocks are compiled by themselves, "
            "and the code of a whole model rounds otherwise",
            remedy="--compile off, or --multi-gpu ddp",
        )
    if (known := OPTIMIZERS.get(config.optimizer.name)) and known.needs_whole_weights:
        yield RequestError(
            f"--optimizer {config.optimizer.name}: not with --multi-gpu fsdp: its step on a weight needs all its rows, "
            "and each worker has only some",
            remedy="an optimizer that treats each number by itself, such as adamw or sgd, or --multi-gpu ddp",
        )
    for what, given, remedy in refused:
        if given:
            yield RequestError(f"{what}: not with --multi-gpu fsdp yet", remedy=remedy)
    if acts or config.task.name == "ppo":
        yield RequestError(
            "--task ppo together with --multi-gpu fsdp: each pass of a sharded model is one of all workers, whose "
            "environments do not act equally often",
            remedy="--multi-gpu ddp",
        )
    if model.compile == "reduce-overhead":
        yield RequestError(
            "--compile reduce-overhead together with --multi-gpu fsdp: gathered weights lie elsewhere in each pass, "
            "and CUDA graphs need fixed addresses",
            remedy="--compile default, or --multi-gpu ddp",
        )


def find_group_errors(shard_size: int | None, workers: int) -> Iterator[RequestError]:
    """A --shard-size that does not divide the workers; one worker alone has nothing to shard."""
    if shard_size and workers > 1 and workers % shard_size:
        sizes = [str(size) for size in range(2, workers + 1) if workers % size == 0]
        yield RequestError(
            f"--shard-size {shard_size}: {workers} workers can't be divided into groups of {shard_size}",
            remedy=f"--shard-size {' or '.join(sizes)}; with {workers} all workers are one group",
        )


def _sharding(config: Config, facts: RuleContext) -> Iterator[RequestError]:
    if config.device.multi_gpu == "fsdp":
        acts = config.data.name.partition(":")[0] in facts.environments
        yield from find_sharding_errors(config, acts=acts)
        yield from find_group_errors(config.device.shard_size, config.device.nproc_per_node or 1)


RULES = (
    Rule("multi_gpu shard_size nproc_per_node data task exact grad_compression compile sync_bn optimizer", _sharding),
)
