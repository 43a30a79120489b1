"""What device, data and memory refuse, request by request."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from multigpu_cli.config.sources import resolve
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.run.request import checks
from multigpu_cli.run.request.checks import (
    check_data,
    check_device,
    check_state_fits,
    find_unpinned_facts,
    refuse_single_samples,
)
from multigpu_cli.run.request.spec import FromConfig
from tests.run.test_spec import spec
from tests.support.world import ALONE

SYNC, DP = {"sync_bn": True}, "can't be used with --multi-gpu dp: "


@pytest.mark.parametrize(
    ("flags", "strategy", "kind", "said"),
    [
        ({}, "dp", "cuda", []),
        ({"task": "ppo"}, "dp", "cuda", ["--multi-gpu dp does not support --task ppo"]),
        ({"task": "ppo"}, "ddp", "cuda", []),
        ({"task": "from-model"}, "dp", "cuda", [f"--task from-model {DP}replicas return means"]),
        ({"compile": "default"}, "dp", "cuda", [f"--compile default {DP}torch compiles for one GPU"]),
        ({"compile": "default"}, "ddp", "cuda", []),
        (SYNC, "dp", "cuda", ["--sync-bn works with ddp on GPUs only"]),
        (SYNC, "single", "cuda", ["--sync-bn works with ddp on GPUs only"]),
        (SYNC, "ddp", "cpu", ["--sync-bn works with ddp on GPUs only"]),
        (SYNC, "ddp", "cuda", []),
        ({}, "ddp", "cpu", []),
        ({"amp": "fp16"}, "ddp", "cpu", ["--amp fp16 needs a GPU"]),
        ({"grad_compression": "bf16"}, "ddp", "cpu", ["--grad-compression bf16 needs NCCL"]),
        ({"grad_compression": "bf16"}, "ddp", "cuda", []),
        ({"grad_compression": "bf16"}, "single", "cpu", []),
        ({"grad_compression": "fp16"}, "ddp", "cpu", []),
    ],
)
def test_a_device_refuses_what_it_cannot_do_and_nothing_else(
    flags: dict[str, Any], strategy: str, kind: str, said: list[str]
) -> None:
    device, config = torch.device(kind), resolve({"amp": "off"} | flags, (), None)
    found = list(check_device(config, Placement(strategy, (device,), 0, "as asked"), World(device)))
    assert len(found) == len(said)
    assert all(error.problem.startswith(words) for error, words in zip(found, said, strict=True))


UNLIKE = RequestError("unlike labels", remedy="others")
WEIGHTS: dict[str, Any] = {"task.class_weights": [1, 2, 3]}


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(
    ("task", "sets", "said"),
    [
        ("classification", {}, []),
        ("classification", WEIGHTS, []),
        ("classification", {"task.class_weights": [1, 2]}, ["task.class_weights: 2 weights for 3 classes"]),
        ("classification", {"data.sample_weights": [1, 2]}, ["unlike labels"]),
        ("classification", {"task.class_weights": "balanced"}, ["unlike labels"]),
        ("regression", {}, []),
        ("regression", WEIGHTS, ["task.class_weights is for --task classification, not regression"]),
        ("mine:Task", WEIGHTS, []),
        ("regression", {"task.label_smoothing": 0.1}, ["--label-smoothing is for --task classification, segmentation"]),
        ("regression", WEIGHTS | {"task.label_smoothing": 0.1}, ["--label-smoothing is for --task"]),
    ],
)
def test_settings_of_classes_are_for_classes(
    task: str, sets: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = spec()
    monkeypatch.setattr(checks, "find_unlike_label", lambda source: UNLIKE)
    of: dict[str, dict[str, Any]] = {"task": {"name": task}, "data": {}}
    for key, value in sets.items():
        part, _, name = key.partition(".")
        of[part][name] = value
    config = found.config
    config = replace(config, task=replace(config.task, **of["task"]), data=replace(config.data, **of["data"]))
    told = list(check_data(replace(found, config=config)))
    assert len(told) == len(said)
    assert all(error.problem.startswith(words) for error, words in zip(told, said, strict=True))


@pytest.mark.parametrize(
    ("smoothing", "task", "count"),
    [(0.1, "classification", 0), (0.1, "regression", 1), (0.1, "mine:Task", 0), (0.0, "regression", 0)],
)
def test_labels_are_smoothed_where_the_loss_reads_it(smoothing: float, task: str, count: int) -> None:
    config = resolve({"label_smoothing": smoothing}, (), None)
    assert len(list(FromConfig().find_unread(config, task))) == count


@pytest.mark.usefixtures("in_tmp_path")
def test_even_steps_and_a_validation_split_are_asked_for_where_they_are_needed() -> None:
    even, uneven = (spec(3, batch_size=10, global_batch_size=size) for size in (30, 64))
    for found, flags, count in ((even, SYNC, 0), (uneven, SYNC, 1), (uneven, {}, 0)):
        assert len(list(check_data(replace(found, config=resolve(flags, [], None))))) == count
    without = replace(even, source=replace(even.source, val=None))
    for found, patience, count in ((even, 2, 0), (without, 2, 1), (without, None, 0)):
        config = resolve({"early_stopping_patience": patience}, [], None)
        assert len(list(check_data(replace(found, config=config)))) == count


@pytest.mark.usefixtures("in_tmp_path")
def test_exact_resumes_if_the_known_facts_of_its_machine_agree() -> None:
    here = {"device": "new", "checksum of products": "1f", "checksum of convolutions": "2f"}
    request = replace(spec(exact=True), machine=here)
    for pinned, refused, unknown in (
        (here, [], []),
        ({}, [], list(here)),
        (here | {"device": "old"}, ["device old, here it is new"], []),
        ({"device": "new"}, [], ["checksum of products", "checksum of convolutions"]),
        (here | {"checksum of products": "9e"}, ["checksum of products 9e, here it is 1f"], []),
    ):
        manifest = request.checkpoint_metadata() | {"pins": {"machine": pinned}}
        resumed = replace(request, resume_point=replace(request.resume_point, manifest=manifest))
        assert [error.problem for error in check_data(resumed)] == [
            f"--exact: run was started with {difference}: bits would differ" for difference in refused
        ]
        warnings = list(find_unpinned_facts(resumed))
        assert len(warnings) == bool(unknown)
        assert all(f"started run without {', '.join(unknown)}: resume" in warning for warning in warnings)
    assert not list(find_unpinned_facts(request)), "a new run"


@pytest.mark.parametrize(
    ("hosts", "groups", "here", "there", "who", "what"),
    [
        (("a", "a", "b"), [0, 0, 2], [30, 0, 8, 0], [30, 0, 8, 0], "b (rank 2)", "other contents"),
        (("a", "a", "b"), [0, 1, 0], [30, 30, 8, 0], [30, 30, 8, 0], "rank 1", "other contents"),
        (("a", "b", "b"), [0, 1, 1], [29, 29, 8, 0], [1030, 1030, 8, 0], "a (rank 0)",
         "29 training samples instead of 1,030"),
        (("a", "b", "c"), [0, 1, 2], [1, 29, 8, 0], [1030, 29, 8, 0], "b, c (ranks 1, 2)",
         "1,030 training samples instead of 1"),
        (("a",) * 3, [0, 0, 2], [30, 1030, 8, 0], [30, 1030, 8, 2000], "rank 2",
         "1,030, 8 and 2,000 samples to train, validate and test on instead of 1,030, 8 and 0"),
        ((), [0, 0, 2], [30, 7, 8, 0], [7, 7, 8, 0], "rank 2", "7 training samples instead of 30"),
    ],
)  # fmt: skip
def test_the_ranks_whose_data_differ_are_named_with_what_differs(
    hosts: tuple[str, ...], groups: Sequence[int], here: list[int], there: list[int], who: str, what: str
) -> None:
    """`here` are the numbers of samples of rank 0, `there` those of the ranks in another group."""
    marks = [[1, 2, 3, 4, *(here if group == groups[0] else there)] for group in groups]
    error = checks._describe_difference(replace(ALONE, size=3, hosts=hosts), groups, marks, "mine")
    assert (error.problem, error.shared) == (f"--data mine: {who} and the others see different data: {what}", True)


def test_many_ranks_are_not_all_listed() -> None:
    assert checks._list_ranks([3]) == "rank 3"
    assert checks._list_ranks(range(1, 9)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8"
    assert checks._list_ranks(range(1, 10)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 …"


def test_a_model_that_is_too_large_for_one_gpu_is_told_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB of weights, as much of gradients, and two states of AdamW."""
    model, request = nn.Linear(1024, 256, bias=False), resolve({}, (), None)
    found: Any = SimpleNamespace(model="mine", config=request, factories=FromConfig())
    gpu = SimpleNamespace(total_memory=4 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    check_state_fits(found, model, torch.device("cuda"))
    gpu.total_memory -= 1
    with pytest.raises(RequestError) as refused:
        check_state_fits(found, model, torch.device("cuda"))
    assert refused.value.problem == (
        "--model mine: 1.00 MiB weights, 1.00 MiB gradients and 2.00 MiB optimizer state do not fit one GPU of 4.00 MiB"
    )
    assert refused.value.remedy.startswith("--multi-gpu fsdp")
    check_state_fits(found, model, torch.device("cpu"))
    check_state_fits(found, nn.Sequential(model, nn.LazyLinear(2)), torch.device("cuda"))


@pytest.mark.parametrize(
    ("asked", "strategy", "workers", "refused"),
    [("auto", "ddp", 2, True), ("auto", "ddp", 1, False), ("ddp", "ddp", 2, False), ("auto", "dp", 2, False)],
)
def test_sharding_is_named_where_auto_chose_ddp(asked: str, strategy: str, workers: int, refused: bool) -> None:
    found = Mock()
    found.config.device.multi_gpu, found.placement.strategy, found.plan.batches.workers = asked, strategy, workers
    if refused:
        with pytest.raises(RequestError, match="out of memory with a single sample on each of several devices"):
            refuse_single_samples(found)
    else:
        refuse_single_samples(found)
