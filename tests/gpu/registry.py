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
        needs: so many GPUs; with fewer it is skipped.
    """

    function: str
    real: bool = False
    limit: float = 180.0
    needs: int = 1


def carry_out(function: str, folder: Path) -> dict[str, Any]:
    """Call what a check names, in this process."""
    module, _, name = function.partition(":")
    return dict(getattr(import_module(module), name)(folder))


CHECKS = {
    # What a call of minutes should know first.
    "host-syncs": Check("tests.gpu.checks.host_syncs:none_in_steady_steps", real=True),
    "exact-one-gpu": Check("tests.gpu.checks.exact:two_ranks_on_one_gpu", limit=300),
    "fsdp-one-rank": Check("tests.gpu.checks.strategies:one_sharded_rank"),
    "fsdp-one-rank-exact": Check("tests.gpu.checks.strategies:exact_sharded_rank"),
    "host-syncs-exact": Check("tests.gpu.checks.host_syncs:none_in_exact_steps", real=True),
    "dp-twice": Check("tests.gpu.checks.strategies:data_parallel_twice"),
    "exact-2": Check("tests.gpu.checks.exact:two_gpus", limit=300, needs=2),
    "exact-4": Check("tests.gpu.checks.exact:four_gpus", limit=300, needs=4),
    "exact-8": Check("tests.gpu.checks.exact:eight_gpus", limit=300, needs=8),
    "rank-killed": Check("tests.gpu.checks.several:killed_rank", needs=2),
    "all-reduce-rounding": Check("tests.gpu.checks.nccl:rounding_of_all_reduce", limit=300, needs=4),
    "compile": Check("tests.gpu.checks.compiled:default", real=True, limit=300),
    "compile-steady": Check("tests.gpu.checks.compiled:steady_steps", real=True, limit=300),
    "compile-loss": Check("tests.gpu.checks.compiled:loss_in_the_graph", real=True, limit=300),
    "compile-checkpointing": Check("tests.gpu.checks.compiled:checkpointing", real=True, limit=400),
    "compile-lengths": Check("tests.gpu.checks.compiled:texts_of_many_lengths", real=True, limit=400),
    "compile-batch-size-auto": Check("tests.gpu.checks.compiled:measured_batch", real=True, limit=400),
    "flash-packing": Check("tests.gpu.checks.attention:flash_packing", real=True, limit=300),
    "flash-attention": Check("tests.gpu.checks.attention:flash", real=True),
    "gpt": Check("tests.gpu.checks.attention:gpt"),
    "mfu": Check("tests.gpu.checks.rates:mfu_of_known_products", real=True),
    "nccl-one-rank": Check("tests.gpu.checks.nccl:collectives_of_one_rank"),
    "exact-compiled": Check("tests.gpu.checks.exact:compiled_twice", real=True, limit=400),
    "fsdp-2": Check("tests.gpu.checks.several:sharded", limit=300, needs=2),
    "hsdp-8": Check("tests.gpu.checks.several:sharded_in_groups", needs=8),
    "bus-rate": Check("tests.gpu.checks.nccl:bus_rate", needs=2),
    "p2p-off": Check("tests.gpu.checks.several:without_peer_to_peer", needs=2),
    "scaling": Check("tests.gpu.checks.several:scaling", limit=400, needs=2),
    # Then everything else.
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
    "ddp-self-launched": Check("tests.gpu.checks.strategies:self_launched"),
    "ddp-one-gpu": Check("tests.gpu.checks.strategies:two_gloo_ranks_on_one_gpu", real=True),
    "checkpoint-bytes": Check("tests.gpu.checks.checkpoints:bytes_on_disk"),
    "resume-killed": Check("tests.gpu.checks.checkpoints:killed_and_resumed"),
    "resume-sigterm": Check("tests.gpu.checks.checkpoints:stopped_and_resumed"),
    "out-of-memory": Check("tests.gpu.checks.memory:too_large_a_batch"),
    "out-of-memory-later": Check("tests.gpu.checks.memory:in_the_middle"),
    "batch-size-auto": Check("tests.gpu.checks.memory:measured_batch"),
    "growing-segments": Check("tests.gpu.checks.memory:growing_segments", real=True),
    "device-assert": Check("tests.gpu.checks.faults:device_assert", real=True),
    "device-assert-nccl": Check("tests.gpu.checks.faults:device_assert_beside_nccl", real=True),
    "reduce-overhead": Check("tests.gpu.checks.compiled:reduce_overhead", real=True, limit=300),
    "reduce-overhead-accumulation": Check("tests.gpu.checks.compiled:accumulating", real=True, limit=300),
    "doctor": Check("tests.gpu.checks.commands:doctor"),
    "plan": Check("tests.gpu.checks.commands:plan"),
    "selftest": Check("tests.gpu.checks.commands:selftest"),
    "sampler": Check("tests.gpu.checks.rates:sampler"),
}
