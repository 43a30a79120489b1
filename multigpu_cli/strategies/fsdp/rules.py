"""The settings that do not go together with --multi-gpu fsdp, or not yet, and groups that do not fit the workers."""

from collections.abc import Iterator

from multigpu_cli.config.code_names import names_environments
from multigpu_cli.config.rules import Rule
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError
from multigpu_cli.planning.schedule import OPTIMIZERS


def find_sharding_errors(config: Config, workers: int) -> Iterator[RequestError]:
    """Yield an error for each setting that sharded weights exclude, or that doesn't fit groups of --shard-size."""
    yield from _find_excluded_modes(config)
    if (optimizer := OPTIMIZERS.get(config.optimizer.name)) and optimizer.needs_whole_weights:
        yield RequestError(
            f"--optimizer {config.optimizer.name} can't be used with --multi-gpu fsdp: its step needs all "
            "rows of a weight, and each worker has only some",
            remedy="an element-wise optimizer, such as adamw or sgd, or --multi-gpu ddp",
        )
    if names_environments(config) or config.task.name == "ppo":
        yield RequestError(
            "--task ppo can't be used with --multi-gpu fsdp: each pass of a sharded model is one of all workers, whose "
            "environments do not act equally often",
            remedy="--multi-gpu ddp",
        )
    shard_size = config.device.shard_size
    if shard_size and workers > 1 and workers % shard_size:  # one worker alone has nothing to shard
        sizes = [str(size) for size in range(2, workers + 1) if workers % size == 0]
        problem = f"--shard-size {shard_size}: {workers} workers can't be divided into groups of {shard_size}"
        remedy = f"--shard-size {' or '.join(sizes)}; with {workers} all workers are one group"
        yield RequestError(problem, remedy=remedy)


def _find_excluded_modes(config: Config) -> Iterator[RequestError]:
    """Yield an error for each mode of reproducibility, the compiler and communication that FSDP does not support."""
    model, compression = config.model, config.communication.grad_compression
    refused = (
        (f"--grad-compression {compression}", compression != "none", "--grad-compression none, or --multi-gpu ddp"),
        ("--sync-bn", model.sync_bn, "leave out --sync-bn, or use --multi-gpu ddp"),
    )
    if config.reproducibility.exact and config.device.shard_size:
        yield RequestError("--exact can't be used with --shard-size yet", remedy="leave out one of them")
    if config.reproducibility.exact and model.compile != "off":
        yield RequestError(
            f"--exact can't be used with --multi-gpu fsdp and --compile {model.compile}: blocks are compiled "
            "separately, and round differently than a whole model",
            remedy="--compile off, or --multi-gpu ddp",
        )
    for what, given, remedy in refused:
        if given:
            yield RequestError(f"{what} can't be used with --multi-gpu fsdp yet", remedy=remedy)
    if model.compile == "reduce-overhead":
        yield RequestError(
            "--compile reduce-overhead can't be used with --multi-gpu fsdp: gathered weights have new "
            "addresses in each pass, and CUDA graphs need fixed ones",
            remedy="--compile default, or --multi-gpu ddp",
        )


def _sharding(config: Config) -> Iterator[RequestError]:
    if config.device.multi_gpu == "fsdp":
        yield from find_sharding_errors(config, config.device.nproc_per_node or 1)


RULES = (
    Rule("multi_gpu shard_size nproc_per_node data task exact grad_compression compile sync_bn optimizer", _sharding),
)
