"""The checks by name, in the order in which they are carried out; nothing is imported until one is."""

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Check(NamedTuple):
    """One check.

    Attributes:
        function: "module:function"; it gets an empty folder, returns its figures, and raises AssertionError where
            something does not hold.
        real: it can't be carried out on a simulated device.
        limit: seconds.
    """

    function: str
    real: bool = False
    limit: float = 180.0


def carry_out(function: str, folder: Path) -> dict[str, Any]:
    """Call what a check names, in this process."""
    module, _, name = function.partition(":")
    return dict(getattr(import_module(module), name)(folder))


CHECKS = {
    "bf16": Check("tests.gpu.checks.training:bf16"),
    "fp16": Check("tests.gpu.checks.training:fp16"),
    "fp32": Check("tests.gpu.checks.training:fp32"),
    "auto": Check("tests.gpu.checks.training:chosen_by_itself"),
    "sgd-batchnorm": Check("tests.gpu.checks.training:sgd_and_batchnorm"),
    "ema": Check("tests.gpu.checks.training:averaged_weights"),
    "accumulation": Check("tests.gpu.checks.training:checkpointing_and_accumulation"),
    "loader-processes": Check("tests.gpu.checks.data:loader_processes"),
    "data-beside": Check("tests.gpu.checks.data:on_the_device_and_beside"),
    "ddp-nccl": Check("tests.gpu.checks.strategies:one_nccl_rank"),
    "fsdp-nccl": Check("tests.gpu.checks.strategies:one_sharded_rank"),
    "ddp-self-launched": Check("tests.gpu.checks.strategies:self_launched"),
    "ddp-one-gpu": Check("tests.gpu.checks.strategies:two_gloo_ranks_on_one_gpu", real=True),
    "dp-twice": Check("tests.gpu.checks.strategies:data_parallel_twice"),
    "host-syncs": Check("tests.gpu.checks.host_syncs:none_in_steady_steps", real=True),
    "checkpoint-bytes": Check("tests.gpu.checks.checkpoints:bytes_on_disk"),
    "resume-killed": Check("tests.gpu.checks.checkpoints:killed_and_resumed"),
    "resume-sigterm": Check("tests.gpu.checks.checkpoints:stopped_and_resumed"),
    "compile": Check("tests.gpu.checks.compiled:default", real=True, limit=300),
    "reduce-overhead": Check("tests.gpu.checks.compiled:reduce_overhead", real=True, limit=300),
    "reduce-overhead-accumulation": Check("tests.gpu.checks.compiled:accumulating", real=True, limit=300),
    "out-of-memory": Check("tests.gpu.checks.memory:too_large_a_batch"),
    "out-of-memory-later": Check("tests.gpu.checks.memory:in_the_middle"),
    "batch-size-auto": Check("tests.gpu.checks.memory:measured_batch"),
    "flash-attention": Check("tests.gpu.checks.attention:flash", real=True),
    "gpt": Check("tests.gpu.checks.attention:gpt"),
    "device-assert": Check("tests.gpu.checks.faults:device_assert", real=True),
    "doctor": Check("tests.gpu.checks.commands:doctor"),
    "plan": Check("tests.gpu.checks.commands:plan"),
    "selftest": Check("tests.gpu.checks.commands:selftest"),
    "sampler": Check("tests.gpu.checks.rates:sampler"),
    "mfu": Check("tests.gpu.checks.rates:mfu_of_known_products", real=True),
}
