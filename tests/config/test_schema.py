"""The table of settings says what DESIGN's contract says."""

import pytest

from multigpu_cli.config.schema import SETTINGS, Config

FLAGS = """
--data --data-dir --model --task --mode --epochs --max-steps --batch-size --grad-accum-steps --global-batch-size
--drop-last --lr --base-lr --base-batch-size --lr-scaling --warmup-epochs --schedule --optimizer --weight-decay
--max-grad-norm --label-smoothing --ema --amp --compile --num-workers --data-on-device --early-stopping-patience
--save-dir --resume --own-code --checkpoint-every --keep --log-interval --trace-samples --seed --exact --nonfinite
--on-oom --hang-timeout --max-restarts --sync-bn --grad-checkpointing --find-unused-parameters --freeze --init-from
--bucket-cap-mb --grad-compression --num-envs --env-group --env-steps --episodes --multi-gpu --gpu-ids --nproc-per-node
--reshard --shard-size --init-partial --model-dir --max-length --packing --prompts --sample-every
--adapter --metric --best --hook --mirror --logger --notify
"""
DEFAULTS = {
    "data": "digits",
    "mode": "flatten",
    "epochs": 20,
    "batch_size": 32,
    "base_batch_size": 32,
    "lr_scaling": "auto",
    "schedule": "cosine",
    "optimizer": "adamw",
    "weight_decay": 1e-4,
    "max_grad_norm": 1.0,
    "amp": "auto",
    "compile": "off",
    "resume": "auto",
    "keep": 3,
    "log_interval": 50,
    "seed": 42,
    "nonfinite": "skip",
    "on_oom": "shrink",
    "hang_timeout": 600,
    "max_restarts": 0,
    "multi_gpu": "auto",
}


def test_every_flag_of_the_contract_is_there_and_no_other() -> None:
    assert sorted(setting.flag for setting in SETTINGS.values() if setting.flag) == sorted(FLAGS.split())


@pytest.mark.parametrize(("key", "value"), DEFAULTS.items())
def test_defaults_are_those_of_the_contract(key: str, value: object) -> None:
    assert Config().get(key) == value


@pytest.mark.parametrize("key", SETTINGS)
def test_a_default_is_a_value_that_one_could_write(key: str) -> None:
    setting = SETTINGS[key]
    if setting.default is not None and setting.default != ():
        assert setting.kind.parse(setting.default) == setting.default


@pytest.mark.parametrize("key", SETTINGS)
def test_each_has_help_of_one_line(key: str) -> None:
    assert 3 < len(SETTINGS[key].help) < 80
    assert "\n" not in SETTINGS[key].help
