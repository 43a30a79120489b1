import json
from dataclasses import replace
from typing import Any

import pytest

from multigpu_cli.config.resume_rules import (
    OF_THE_COMMAND,
    PRIVATE,
    flatten_settings,
    is_same_run,
    merge_with_checkpoint,
    replace_settings,
)
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.errors import RequestError

PINS = {
    "batch_size": 32,
    "global_batch_size": 64,
    "lr": 0.004,
    "amp": "off",
    "model": "convnet",
    "task": "classification",
}
OTHER: dict[str, Any] = {  # a valid value for each setting that is not its default
    "multi_gpu": "ddp",
    "gpu_ids": [0, 1],
    "nproc_per_node": 2,
    "reshard": "step",
    "shard_size": 4,
    "strategy.wrap": ["layers.*"],
    "strategy.arrival_timeout": 5.0,
    "data": "har",
    "data.args": {"shape": [3, 8, 8]},
    "data.inputs": 2,
    "data_dir": "/data",
    "mode": "average",
    "num_workers": 3,
    "data_on_device": "off",
    "data.sample_weights": "balanced",
    "data.shuffle_block": 256,
    "data.shuffle_window": 8,
    "data.mix": [
        {"data": "csv", "data_dir": "a", "args": {"target": "y"}, "weight": 2.0},
        {"data": "digits", "data_dir": None, "args": {}, "weight": 1.0},
    ],
    "max_length": 512,
    "packing": "off",
    "data.mixup": 0.2,
    "data.cutmix": 1.0,
    "data.random_resized_crop": 0.35,
    "data.rand_augment": 9,
    "model": "mlp",
    "model_dir": "/model",
    "model.args": {"width": 7},
    "adapter": "lora",
    "adapter.r": 8,
    "adapter.alpha": 16,
    "adapter.dropout": 0.05,
    "adapter.targets": ["q_proj"],
    "adapter.modules_to_save": ["lm_head"],
    "sync_bn": True,
    "grad_checkpointing": True,
    "freeze": ["features.*"],
    "model.unfreeze_at": 3,
    "init_from": "w.pt",
    "init_partial": True,
    "compile": "default",
    "task": "ppo",
    "task.args": {"x": 1},
    "label_smoothing": 0.1,
    "task.class_weights": "balanced",
    "num_envs": 8,
    "env_group": 4,
    "env_steps": 100,
    "episodes": 50,
    "epochs": 7,
    "max_steps": 9,
    "early_stopping_patience": 2,
    "batch_size": 16,
    "grad_accum_steps": 2,
    "global_batch_size": 128,
    "drop_last": True,
    "lr": 0.5,
    "base_lr": 0.25,
    "base_batch_size": 8,
    "lr_scaling": "none",
    "warmup_epochs": 1.5,
    "schedule": "linear",
    "schedule.args": {"floor": 0.1},
    "optimizer": "sgd",
    "optimizer.args": {"momentum": 0.8},
    "optimizer.rates": {"head.*": 2.5},
    "optimizer.groups": [{"match": "*.bias", "weight_decay": 0.5, "lr_factor": 0.1}],
    "optimizer.layer_decay": 0.75,
    "weight_decay": 0.5,
    "max_grad_norm": "off",
    "ema": 0.5,
    "amp": "bf16",
    "seed": 7,
    "guard": "off",
    "exact": True,
    "find_unused_parameters": True,
    "bucket_cap_mb": 5,
    "strategy.param_dtype": "fp32",
    "strategy.reduce": "pass",
    "grad_compression": "fp16",
    "checkpoint_every": "10m",
    "keep": 9,
    "mirror": "file:mirror",
    "log_interval": 1,
    "prompts": "prompts.jsonl",
    "sample_every": 2,
    "logger": ["mlflow"],
    "logger.wait": 5.0,
    "trace_samples": True,
    "metric": ["macro_f1"],
    "metric.args": {"macro_f1": 1},
    "best": "val_macro_f1:max",
    "hook": ["own:Hook"],
    "hook.args": {"Hook": {"x": 1}},
    "nonfinite": "stop",
    "on_oom": "stop",
    "hang_timeout": 5.0,
    "max_restarts": 1,
}
KEYS = sorted(set(SETTINGS) - OF_THE_COMMAND - PRIVATE)
FREE = {key for key, entry in SETTINGS.items() if entry.free}


def make_config(**values: Any) -> Config:
    """A command on which these were written down."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    return replace(replace_settings(Config(), given), explicit=frozenset(given))


def test_every_setting_is_tested() -> None:
    assert sorted(OTHER) == KEYS
    assert all(OTHER[key] != flatten_settings(Config())[key] for key in KEYS)


def test_settings_are_plain_and_complete() -> None:
    config = replace_settings(Config(), OTHER)
    found = flatten_settings(config)
    assert json.loads(json.dumps(found)) == found == OTHER
    assert replace_settings(Config(), found) == config


def test_free_are_devices_loaders_logging_checkpoints_and_length() -> None:
    """DESIGN: 'Free to change: workers, loader, logging and checkpoint settings, and --epochs/--max-steps'."""
    assert {
        "multi_gpu", "gpu_ids", "nproc_per_node", "num_workers", "data_on_device", "data_dir", "log_interval",
        "trace_samples", "checkpoint_every", "keep", "epochs", "max_steps", "hang_timeout", "max_restarts",
    } <= FREE  # fmt: skip
    assert not FREE & {"seed", "lr", "batch_size", "global_batch_size", "amp", "optimizer", "model", "data", "exact"}


def test_a_run_of_before_a_setting_was_there_is_the_same_run() -> None:
    older = flatten_settings(Config())
    del older["init_partial"], older["freeze"]
    assert is_same_run(Config(), older)
    assert not is_same_run(make_config(init_partial=True), older)


@pytest.mark.parametrize("key", KEYS)
def test_the_same_command_again_goes_on(key: str) -> None:
    config = make_config(**{key: OTHER[key]})
    assert merge_with_checkpoint(config, flatten_settings(config), [key], {}, "run") == config


@pytest.mark.parametrize("key", KEYS)
def test_what_was_not_written_down_is_taken_over(key: str) -> None:
    stored = flatten_settings(make_config(**{"seed": 7, key: OTHER[key]}))
    found = merge_with_checkpoint(Config(), stored, ["seed", key], {}, "run")
    assert flatten_settings(found) == stored
    assert found.explicit == frozenset({"seed", key})


def test_a_command_that_says_everything_again_means_what_it_says() -> None:
    """First with --max-steps 2, then without: the run goes on to its end."""
    stored = flatten_settings(make_config(seed=7, max_steps=2))
    assert merge_with_checkpoint(make_config(seed=7), stored, ["seed", "max_steps"], {}, "run").length.max_steps is None
    assert merge_with_checkpoint(make_config(), stored, ["seed", "max_steps"], {}, "run").length.max_steps == 2


@pytest.mark.parametrize("key", sorted(FREE & set(KEYS)))
def test_what_is_free_is_taken_as_given(key: str) -> None:
    found = merge_with_checkpoint(make_config(**{key: OTHER[key]}), flatten_settings(Config()), [], PINS, "run")
    assert flatten_settings(found)[key] == OTHER[key]


@pytest.mark.parametrize("key", sorted(set(KEYS) - FREE))
def test_any_other_explicit_difference_is_refused_naming_both_values(key: str) -> None:
    old, new = PINS.get(key, flatten_settings(Config())[key]), OTHER[key]
    with pytest.raises(RequestError) as refused:
        merge_with_checkpoint(make_config(**{key: OTHER[key]}), flatten_settings(Config()), [], PINS, "runs/a")
    told = str(refused.value)
    assert (SETTINGS[key].flag or key) in told
    if isinstance(new, dict):
        assert all(f"{name}={f'{value}'.strip('[]').replace(', ', ',')}" in told for name, value in new.items())
    elif isinstance(new, list):
        assert ",".join(map(str, new)) in told
    else:
        assert ("is on" if new is True else f"{new}".removesuffix(".0")) in told
    before = "without" if old in (None, [], {}) else "with it off" if old is False else str(old).removesuffix(".0")
    assert before in told
    assert "runs/a" in told
    assert "another --save-dir" in told


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(RequestError) as refused:
        merge_with_checkpoint(
            make_config(seed=1, optimizer="sgd", epochs=3, keep=1), flatten_settings(Config()), [], PINS, "run"
        )
    told = str(refused.value)
    assert "--seed 1 differs from 42" in told
    assert "--optimizer sgd differs from adamw" in told
    assert "--epochs" not in told
    assert "--keep" not in told


@pytest.mark.parametrize("key", ["lr", "global_batch_size", "amp", "model", "task", "batch_size"])
def test_what_was_resolved_may_be_said_aloud(key: str) -> None:
    """The first command left --lr out; writing down the rate that was settled is no difference."""
    stored = flatten_settings(Config())
    found = merge_with_checkpoint(make_config(**{key: PINS[key]}), stored, [], PINS, "run")
    assert flatten_settings(found)[key] == stored[key]


def test_a_setting_that_did_not_exist_then_keeps_its_present_value() -> None:
    stored = {key: value for key, value in flatten_settings(Config()).items() if key != "label_smoothing"}
    assert merge_with_checkpoint(make_config(label_smoothing=0.1), stored, [], PINS, "run").task.label_smoothing == 0.1


@pytest.mark.parametrize("key", KEYS)
def test_two_commands_mean_the_same_run(key: str) -> None:
    """Where and how fast it runs, and what is logged and kept, do not count; its length and data do."""
    other, same = make_config(**{key: OTHER[key]}), flatten_settings(Config())
    assert is_same_run(Config(), same)
    assert is_same_run(other, same) == (key in FREE - {"epochs", "max_steps", "env_steps", "episodes", "data_dir"})


def test_places_are_of_the_command_alone() -> None:
    config = replace_settings(Config(), {"save_dir": "/x", "resume": "never", "own_code": True})
    assert not OF_THE_COMMAND & set(flatten_settings(config))
    assert is_same_run(config, flatten_settings(Config()))
    assert merge_with_checkpoint(config, flatten_settings(Config()), [], PINS, "run") == config


@pytest.mark.parametrize("key", KEYS)
def test_a_default_is_a_value_too(key: str) -> None:
    config = replace_settings(replace_settings(Config(), {key: OTHER[key]}), {key: flatten_settings(Config())[key]})
    assert config == Config()


def test_a_value_that_a_setting_cannot_have_is_named() -> None:
    with pytest.raises(RequestError, match="batch_size: must be"):
        replace_settings(Config(), {"batch_size": "many"})
