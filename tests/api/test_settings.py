"""MultiGPUConfig: each field has its effect, or is refused with a reason."""

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from multigpu_cli.api.settings import MultiGPUConfig, TrainingMode
from multigpu_cli.errors import RequestError

LONG: dict[str, Any] = {
    "training_mode": TrainingMode.DISTRIBUTED_DATA_PARALLEL,
    "use_mixed_precision": True,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "find_unused_parameters": True,
    "broadcast_buffers": True,
    "pin_memory": False,
    "num_workers": 4,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "sync_bn": True,
    "use_fp16_allreduce": True,
    "fp16_compression": True,
    "enable_fault_tolerance": True,
    "checkpoint_frequency": 1000,
    "recovery_timeout": 300,
    "use_gradient_as_bucket_view": False,
    "reduce_bucket_size": 16 * 1024 * 1024,
    "bucket_cap_mb": 16,
    "use_gradient_checkpointing": True,
    "static_graph": True,
}


def test_the_long_form_reaches_the_settings() -> None:
    asked = MultiGPUConfig(**LONG)
    config = asked.frozen()
    found = {
        "multi_gpu": "ddp",
        "amp": "auto",
        "grad_accum_steps": 4,
        "max_grad_norm": 0.5,
        "find_unused_parameters": True,
        "num_workers": 4,
        "sync_bn": True,
        "grad_compression": "fp16",
        "checkpoint_every": "1000",
        "hang_timeout": 300.0,
        "bucket_cap_mb": 16,
        "grad_checkpointing": True,
    }
    assert {key: config.get(key) for key in found} == found
    assert asked.ddp == {"gradient_as_bucket_view": False, "static_graph": True}
    assert (asked.loader_options.pin_memory, asked.loader_options.prefetch) == (False, 3)
    assert found.keys() - {"amp"} <= config.explicit


def test_it_may_be_changed_until_it_is_frozen() -> None:
    config = MultiGPUConfig(enable_fault_tolerance=False)
    config.batch_size, config.use_mixed_precision, config.max_grad_norm = 16, False, None
    frozen = config.frozen()
    assert (frozen.batch.size, frozen.precision.amp, frozen.optimizer.max_grad_norm) == (16, "off", "off")
    assert (frozen.fault.nonfinite, frozen.fault.on_oom) == ("stop", "stop")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"broadcast_buffers": False}, "broadcast_buffers=False"),
        ({"persistent_workers": False, "num_workers": 2}, "persistent_workers=False"),
        ({"bucket_cap_mb": 25, "reduce_bucket_size": 26}, "both are the bucket size"),
        ({"backend": "mpi"}, "backend 'mpi'"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"gradient_accumulation_steps": "x"}, "gradient_accumulation_steps must be"),
        ({"settings": {"emma": 1}}, "did you mean 'ema'"),
        ({"settings": {"epochs": 1}}, "num_epochs=… beside settings"),
        ({"settings": {"exact": True}}, "settings['exact'] has a place of its own\n  try: exact=True beside settings"),
        ({"exact": True, "sync_bn": True}, "exact can't be used with sync_bn"),
        ({"training_mode": "dp", "sync_bn": True}, "sync_bn can't be used with training_mode dp"),
    ],
)
def test_what_it_can_not_do_it_refuses(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as raised:
        MultiGPUConfig(**fields).frozen()
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("name", "mode"), [("DataParallel", "dp"), ("DDP", "ddp"), ("FSDP", "fsdp"), ("single_gpu", "none")]
)
def test_strategies_have_many_names(name: str, mode: str) -> None:
    assert TrainingMode.named(name).value == mode


def test_a_name_that_is_no_field_is_refused_at_once() -> None:
    config = MultiGPUConfig(batch_size=8)
    with pytest.raises(RequestError, match=r"^batchsize: MultiGPUConfig has no such field\n  try: .*batch_size"):
        config.batchsize = 16
    with pytest.raises(RequestError, match=r"^num_epoch: MultiGPUConfig has no such field\n  try: .*num_epochs"):
        MultiGPUConfig(num_epoch=3)  # type: ignore[call-arg]
    assert replace(config, seed=1).batch_size == copy(config).batch_size == config.batch_size == 8
