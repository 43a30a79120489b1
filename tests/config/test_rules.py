"""Rules between settings, places and the environment: what each refuses, and that fair requests pass."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multigpu_cli.config.rules import OWN_RUN_ID, drop_launcher_settings, find_rule_errors
from multigpu_cli.config.sources import gather, resolve

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def list_faults(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> str:
    return "\n".join(str(fault) for fault in find_rule_errors(resolve(flags, (), None), environ))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"data": "digitz"}, ["--data digitz", "did you mean 'digits'?"]),
        ({"model": "mpl"}, ["--model mpl", "'mlp'"]),
        ({"task": "regress"}, ["--task regress", "'regression'", "module:factory"]),
        ({"model": "my/model.py:Net"}, ["--model my/model.py:Net", "module:factory"]),
        ({"model": "model.py:Net"}, ["--model model.py:Net", "my_file:build"]),
        ({"data": ":load"}, ["--data :load"]),
        ({"lr": "1", "base_batch_size": "64"}, ["--lr can't be used with --base-batch-size", "--base-lr 1"]),
        ({"lr": "1", "lr_scaling": "linear"}, ["--lr can't be used with --lr-scaling"]),
        ({"warmup_epochs": "20"}, ["--warmup-epochs 20", "--epochs 20"]),
        ({"warmup_epochs": "3", "epochs": "2"}, ["--warmup-epochs 3", "--epochs 2"]),
        (
            {"grad_accum_steps": "3", "global_batch_size": "128"},
            ["--grad-accum-steps 3", "--global-batch-size 128", "96"],
        ),
        ({"grad_accum_steps": "8", "global_batch_size": "128"}, ["--grad-accum-steps 8", "leave out"]),
        ({"adapter": "lora"}, ["--adapter lora without --model pretrained", "--freeze"]),
        (
            {"model": "pretrained", "model_dir": "x", "model.args": {"quantize": "4bit"}},
            ["can't be trained", "--adapter lora"],
        ),
        (
            {"data": "chat", "model_dir": "x", "model.args": {"quantize": "4bit"}},
            ["can't be trained", "--adapter lora"],
        ),
        (
            {
                "model": "pretrained",
                "model_dir": "x",
                "model.args": {"quantize": "4bit"},
                "adapter": "lora",
                "multi_gpu": "fsdp",
            },
            ["quantize can't be used with --multi-gpu fsdp yet"],
        ),
        ({"adapter.r": "8"}, ["adapter.r: it has no effect without --adapter", "--adapter lora"]),
        ({"exact": True, "multi_gpu": "dp"}, ["--exact can't be used with --multi-gpu dp"]),
        ({"exact": True, "sync_bn": True}, ["--exact can't be used with --sync-bn"]),
        ({"exact": True, "grad_compression": "fp16"}, ["--exact can't be used with --grad-compression"]),
        ({"multi_gpu": "dp", "nproc_per_node": "2"}, ["--nproc-per-node", "--multi-gpu dp"]),
        ({"multi_gpu": "none", "nproc_per_node": "2"}, ["--nproc-per-node", "--multi-gpu none"]),
        ({"multi_gpu": "none", "gpu_ids": "0,1"}, ["--gpu-ids 0,1", "--multi-gpu none"]),
        ({"nproc_per_node": "3", "gpu_ids": "0,1"}, ["--nproc-per-node 3", "--gpu-ids 0,1"]),
        ({"multi_gpu": "dp", "sync_bn": True}, ["--sync-bn", "--multi-gpu dp"]),
        ({"multi_gpu": "none", "max_restarts": "2"}, ["--max-restarts", "--multi-gpu none"]),
        ({"multi_gpu": "fsdp", "exact": True, "shard_size": "2"}, ["--exact can't be used with --shard-size yet"]),
        ({"multi_gpu": "fsdp", "exact": True, "compile": "default"}, ["--exact can't be used with", "--compile off"]),
        (
            {"multi_gpu": "fsdp", "grad_compression": "fp16"},
            ["--grad-compression fp16 can't be used with --multi-gpu fsdp"],
        ),
        ({"multi_gpu": "fsdp", "compile": "reduce-overhead"}, ["CUDA graphs need fixed", "--compile default"]),
        ({"multi_gpu": "fsdp", "sync_bn": True}, ["--sync-bn can't be used with --multi-gpu fsdp yet"]),
        ({"multi_gpu": "fsdp", "data": "gym"}, ["--task ppo can't be used with --multi-gpu fsdp", "act equally often"]),
        ({"multi_gpu": "fsdp", "gpu_ids": "0,1", "nproc_per_node": "3"}, ["fsdp uses one process per GPU"]),
        ({"num_envs": "8"}, ["--num-envs", "--task ppo"]),
        ({"env_steps": "8", "task": "classification"}, ["--env-steps", "--task ppo"]),
        ({"episodes": "8", "env_group": "2"}, ["--episodes is for", "--env-group is for"]),
        (
            {"data": "gym:Pole-v1", "task": "classification"},
            ["--data gym:Pole-v1: this names", "--task ppo"],
        ),
        ({"data": "gyn:Pole-v1"}, ["--data gyn:Pole-v1: must be module:factory"]),
    ],
)
def test_what_cannot_go_together_is_refused(flags: dict[str, Any], words: list[str]) -> None:
    message = list_faults(flags)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"data": "my.data:load", "model": "net:Net.build", "task": "ppo", "num_envs": "4", "env_steps": "100"},
        {"task": "mine:Task", "num_envs": "4"},
        {"data": "gym:CartPole-v1", "num_envs": "4", "episodes": "9"},
        {"lr": "1", "lr_scaling": "none", "base_batch_size": "32"},
        {"warmup_epochs": "1.5", "epochs": "2"},
        {"warmup_epochs": "0"},
        {"grad_accum_steps": "2", "global_batch_size": "128"},
        {"global_batch_size": "5"},
        {"multi_gpu": "none", "gpu_ids": "1"},
        {"multi_gpu": "dp", "gpu_ids": "0,1"},
        {"nproc_per_node": "2", "gpu_ids": "0,1"},
        {"multi_gpu": "ddp", "nproc_per_node": "2", "max_restarts": "3"},
        {
            "multi_gpu": "fsdp",
            "find_unused_parameters": True,
            "nproc_per_node": "2",
            "max_restarts": "3",
            "compile": "default",
            "batch_size": "auto",
            "amp": "fp16",
        },
    ],
)
def test_fair_requests_pass(flags: dict[str, Any]) -> None:
    assert list_faults(flags) == ""


@pytest.mark.parametrize(
    ("flags", "changed", "words"),
    [
        ({}, {"MASTER_ADDR": ""}, ["incomplete", "MASTER_ADDR"]),
        ({}, {"WORLD_SIZE": "", "MASTER_PORT": ""}, ["RANK", "without WORLD_SIZE, MASTER_PORT"]),
        ({}, {"RANK": "one"}, ["RANK=one"]),
        ({}, {"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"multi_gpu": "dp"}, {}, ["--multi-gpu dp under torchrun"]),
        ({"multi_gpu": "none"}, {}, ["--multi-gpu none under torchrun"]),
        ({"gpu_ids": "2,3"}, {}, ["--gpu-ids 2,3 under torchrun", "CUDA_VISIBLE_DEVICES=2,3"]),
        ({"nproc_per_node": "4"}, {}, ["--nproc-per-node 4", "2 processes"]),
        ({"max_restarts": "4"}, {}, ["--max-restarts 4 under torchrun", "torchrun --max-restarts=4"]),
    ],
)
def test_what_torchrun_rules_out_is_refused(flags: dict[str, Any], changed: dict[str, str], words: list[str]) -> None:
    message = list_faults(flags, TORCHRUN | changed)
    assert all(word in message for word in words), message


def test_what_fits_the_launcher_passes() -> None:
    assert list_faults({"multi_gpu": "ddp", "nproc_per_node": "2"}, TORCHRUN) == ""
    assert list_faults({"multi_gpu": "none"}, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) == ""
    assert list_faults({"multi_gpu": "dp"}, {"MASTER_ADDR": "left over in a shell"}) == ""


def test_workers_of_our_own_launcher_get_settings_that_it_has_followed() -> None:
    ours = TORCHRUN | {"TORCHELASTIC_RUN_ID": f"{OWN_RUN_ID}abc"}
    assert list_faults({"gpu_ids": "2,3", "nproc_per_node": "2", "max_restarts": "1"}, ours) == ""


def test_paths_that_are_not_there_or_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "weights.pt"
    file.touch()
    (tmp_path / "data" / "last.pt").touch()
    (link := tmp_path / "link").symlink_to(gone := tmp_path / "unmounted disk")
    for flags, words in (
        ({"data_dir": tmp_path / "dat"}, ["--data-dir", "did you mean", "data"]),
        ({"data_dir": file}, ["--data-dir", "not a file of a known dataset", ".csv", "--data NAME"]),
        ({"data_dir": file, "data": "digits"}, ["--data-dir", "is a file", "--data digits needs a folder"]),
        ({"init_from": tmp_path / "weight.pt"}, ["--init-from", "did you mean", "weights.pt"]),
        ({"init_from": tmp_path / "data"}, ["--init-from", "is a folder", "best.pt"]),
        ({"init_from": "google/vit-base"}, ["no such file", "nothing is downloaded", "folder", "model.safetensors"]),
        ({"save_dir": file}, ["--save-dir", "is a file"]),
        ({"save_dir": file / "run"}, ["--save-dir", f"{file} is a file"]),
        ({"save_dir": link}, [f"--save-dir {link}", f"a symbolic link to {gone}, which", f"mkdir -p '{gone}'"]),
        ({"save_dir": link / "run"}, [f"--save-dir {link}/run: {link} is a symbolic link to {gone}"]),
        ({"resume": tmp_path / "run-7"}, ["--resume", "no such run folder"]),
        ({"resume": "nevr"}, ["--resume nevr", "did you mean 'never'?"]),
    ):
        message = list_faults(flags)
        assert all(word in message for word in words), message


def test_paths_that_are_right_pass(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.touch()
    assert (
        list_faults({"data_dir": tmp_path, "init_from": file, "save_dir": tmp_path / "a" / "b", "resume": tmp_path})
        == ""
    )
    assert list_faults({"data": "mine:load", "data_dir": file}) == ""
    (tmp_path / "model.safetensors").touch()
    assert list_faults({"init_from": tmp_path}) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "no permission to write" in list_faults({"save_dir": tmp_path / "run"})


def test_rules_say_nothing_about_settings_that_are_broken_anyway() -> None:
    request = gather({"epochs": "0", "warmup_epochs": "30", "data": "digitz"}, (), None)
    faults = find_rule_errors(request.config, invalid_keys=request.invalid_keys)
    assert [str(fault).split(":")[0] for fault in faults] == ["--data digitz"]


@pytest.mark.parametrize(
    ("flags", "environ", "left"),
    [
        ({}, {}, {"nproc_per_node": 4, "max_restarts": 1, "multi_gpu": "ddp"}),
        ({"multi_gpu": "none"}, {}, {"nproc_per_node": None, "max_restarts": 0, "multi_gpu": "none"}),
        ({"gpu_ids": "0,1"}, {}, {"nproc_per_node": None, "max_restarts": 1, "multi_gpu": "ddp"}),
        ({}, TORCHRUN, {"nproc_per_node": None, "max_restarts": 0, "multi_gpu": "ddp"}),
        ({"seed": "3"}, {}, {"nproc_per_node": 4, "max_restarts": 1, "multi_gpu": "ddp"}),
    ],
)
def test_where_a_file_says_it_ran_gives_way(
    flags: dict[str, Any], environ: dict[str, str], left: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("multi_gpu: ddp\nnproc_per_node: 4\nmax_restarts: 1\n")
    request = gather(flags, (), str(tmp_path / "config.yaml"))
    config = drop_launcher_settings(request.config, request.file_keys, environ)
    assert {key: config.get(key) for key in left} == left
    assert find_rule_errors(config, environ) == []
