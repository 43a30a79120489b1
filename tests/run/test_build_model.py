"""A sharded model starts from the seed's own weights, and no rank but one ever holds all of them."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp  # seconds, once rather than in each forked rank
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from multigpu_cli.checkpoint.weights import fingerprint
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.sources import resolve
from multigpu_cli.data.loader import first_batch
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.models.blocks import find_blocks_to_wrap
from multigpu_cli.run.assembly.assemble import ModelFactory, build_components
from multigpu_cli.run.assembly.components import TrainComponents
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.strategies.fsdp import shard
from multigpu_cli.strategies.fsdp.fsdp import FSDP2
from multigpu_cli.strategies.fsdp.shard import agree_on_source
from tests.support.ranks import run_on_each_rank
from tests.support.run_training import run_training
from tests.support.world import CPU

SHY = {"model": "tests.support.awkward_models:shy", "ema": "0.9"}
LATE = {"model": "tests.run.test_build_components:Late", "data": "tests.run.test_build_components:Pictures"}
GPT = {"model": "gpt", "data": "tests.support.user_code:sentences", "task": "language-model", "ema": "0.9"}
SMALL = ("model.args.depth=8", "model.args.width=64", "model.args.heads=2")
HF = {"model": "transformers", "data": "tests.support.user_code:sentences", "task": "language-model"}
TINY = tuple(
    f"model.args.{name}"
    for name in ("architecture=llama", "hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2",
                 "num_key_value_heads=1", "intermediate_size=16")
)  # fmt: skip
ONE, EACH = "rank 0 builds the weights in host memory", "each rank builds the whole model in host memory: "
CASES: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "gpt": (GPT, ("model.args.depth=2", *SMALL[1:]), ONE),
    "silent": (SHY, ("model.args.how=silent",), ONE),
    "reads": (SHY, ("model.args.how=reads",), f"{EACH}on the meta device its factory raises RuntimeError"),
    "keeps": (SHY, ("model.args.how=keeps",), f"{EACH}it has tensors that are neither parameters nor buffers"),
    "draws": (SHY, ("model.args.how=draws",), f"{EACH}its factory draws random numbers"),
    "lazy": (LATE, (), f"{EACH}its first pass creates weights"),
    "llama": (HF, TINY, ONE),
}


def components(world: World, folder: Path, flags: dict[str, str], sets: tuple[str, ...]) -> TrainComponents:
    config = resolve({"save_dir": str(folder / str(world.rank)), "multi_gpu": "fsdp"} | flags, sets, None)
    strategy = "fsdp" if world.size > 1 else "single"
    return build_components(prepare_spec(config, Placement(strategy, (CPU,), 0, "a test"), world, FromConfig()), world)


def start(world: World, folder: Path, flags: dict[str, str], sets: tuple[str, ...]) -> tuple[str, list[str], str]:
    """A fingerprint of the first weights, of their average and of the buffers; the names; and the plan's words."""
    built = components(world, folder, flags, sets)
    with closing(built.loaders):
        state = built.state
        live = {"model": state.model.state_dict(), "average": state.average.state_dict() if state.average else {}}
        whole = built.strategy.gather_state(live)
        tensors: dict[str, Tensor] = {}
        for part, values in (*whole.items(), ("buffers", dict(state.model.named_buffers()))):
            tensors |= {f"{part}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        return fingerprint(tensors), sorted(tensors), str(built.plan.notes.get("first_weights", ""))


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, list[str], str]]]:
    """What one process and then each of three starts from in every case; one launch."""
    folder = tmp_path_factory.mktemp("starts")

    def each(world: World) -> dict[str, tuple[str, list[str], str]]:
        return {name: start(world, folder, *CASES[name][:2]) for name in CASES}

    return [each(World(CPU)), *run_on_each_rank(3, each)]


@pytest.mark.parametrize("name", CASES)
def test_the_first_weights_have_the_bits_of_one_process(
    name: str, starts: list[dict[str, tuple[str, list[str], str]]]
) -> None:
    alone, *sharded = [found[name] for found in starts]
    assert sharded[0][:2] == alone[:2]
    assert alone[2] == ""
    assert all(found[2].startswith(CASES[name][2]) for found in sharded), sharded[0][2]


def measure_most_bytes(world: World, folder: Path) -> tuple[int, int, int]:
    """The most bytes of tensors while the model is built, its rows, and its largest group."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        built = components(world, folder, GPT, SMALL)
    with closing(built.loaders):
        added = most = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                added += event.nbytes()
                most = max(most, added)
        model = built.state.model
        blocks = [model.get_submodule(name) for name in find_blocks_to_wrap(model)]
        sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
        total = sum(parameter.nbytes for parameter in model.parameters())
        return most, sum(row.nbytes for row in built.strategy.local_parameters), max(*sizes, total - sum(sizes))


def test_no_rank_but_one_holds_more_than_a_block_beside_its_rows(tmp_path: Path) -> None:
    """Weights and their average are rows here; a gathered group is held twice, and the next is gathered beside it."""
    whole, *others = run_on_each_rank(4, lambda world: measure_most_bytes(world, tmp_path))
    for most, rows, group in others:
        assert 2 * rows < most < 2 * rows + 5 * group < 2 * rows + 4 * rows, "its rows and some groups, not all weights"
        assert whole[0] > 4 * rows, "else this measures nothing"


def test_where_a_checkpoint_has_all_weights_nobody_builds_them(in_tmp_path: None) -> None:
    flags: dict[str, Any] = {"multi_gpu": "fsdp", "max_steps": 2, "batch_size": 10, "save_dir": "run"} | SHY
    flags["data"] = "tests.support.user_code:without_evaluation"
    sets = ["model.args.how=keep"]
    whole = run_training(2, **flags | {"save_dir": "whole"}, sets=sets)
    run_training(2, **flags | {"max_steps": 1}, sets=sets)
    plan = run_training(2, **flags, sets=sets, dry_run=True).summary
    assert plan["first_weights"] == "no rank builds the weights: the checkpoint has them"
    assert run_training(2, **flags, sets=sets).summary["fingerprint"] == whole.summary["fingerprint"]
    other = flags | {"save_dir": "other", "sets": ["model.args.how=silent"]}
    run_training(2, **other | {"max_steps": 1})
    plan = run_training(2, **other, dry_run=True).summary
    assert plan["first_weights"].startswith("rank 0 builds the weights"), "a buffer is in no checkpoint"


@pytest.mark.parametrize(("model", "last"), [("convnet", True), ("tests.run.test_build_components:Viewing", False)])
def test_with_exact_kernels_are_laid_out_as_without_sharding(model: str, last: bool, tmp_path: Path) -> None:
    """Rank 0 tries it in host memory, and the others do the same on the meta device."""

    def work(world: World) -> tuple[list[Any], list[Any]]:
        flags = {"model": model, "data": "tests.run.test_build_components:Pictures"}
        config = resolve(flags | {"save_dir": str(tmp_path / str(world.rank))}, [], None)
        spec = prepare_spec(config, Placement("fsdp", (CPU,), 0, "a test"), world, FromConfig())
        spec = replace(spec, config=replace_settings(config, {"exact": True}))
        task = spec.factories.build_task(spec.config, spec.source)
        loader = task.train_stream(config.data, world, 1)
        factory, freed = ModelFactory(spec, world, task, lambda: first_batch(loader, 2)), []
        with patch.object(shard, "keep_freed_memory", lambda below: freed.append(below)):
            built = FSDP2.build_model(factory)
        on_meta, reason = shard._build_without_weights(factory)
        assert freed == [4 * 2**20]
        compiled_spec = replace(spec, config=replace_settings(spec.config, {"compile": "default"}))
        compiled = FSDP2.build_model(factory._replace(spec=compiled_spec))
        gathered = find_blocks_to_wrap(compiled.model) or [""]
        assert compiled.blocks == [compiled.model.get_submodule(name) for name in gathered]
        assert built.blocks == []
        return [on_meta is None, reason], [list(parameter.stride()) for parameter in built.model.parameters()]

    (why, one), (why_not, other) = run_on_each_rank(2, work)
    assert one == other
    assert (why, why_not) == ([True, "the layout of its kernels is tried on it"], [False, ""])
    shapes = any(strides[1] == 1 and strides[0] > 4 for strides in one if len(strides) == 4)
    assert shapes == last


def test_ranks_that_build_other_networks_are_told_so() -> None:
    """Also where they differ only in the names that one weight or one buffer has."""

    def work(world: World) -> list[str]:
        layer, norm = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3, affine=False)
        once = torch.nn.Sequential(layer, norm)
        told = []
        for other in (
            torch.nn.Linear(3, 4),
            torch.nn.Sequential(layer, norm, layer),
            torch.nn.Sequential(layer, norm, norm),
        ):
            with pytest.raises(RequestError) as refused:
                agree_on_source(world, other if world.rank else once, "")
            told.append(refused.value.problem)
        return told

    told = "--model: rank 1 built other parameters or buffers than rank 0"
    assert run_on_each_rank(2, work) == [[told] * 3] * 2


def test_rank_0_sends_the_weights_whoever_else_builds_them() -> None:
    def work(world: World) -> tuple[int | None, str]:
        return agree_on_source(world, torch.nn.Linear(3, 3), ("it sends the weights", "its factory reads")[world.rank])

    assert run_on_each_rank(2, work) == [(0, f"{EACH}its factory reads")] * 2


def test_what_a_checkpoint_could_not_hold_is_refused(tmp_path: Path) -> None:
    flags = {"model": "tests.support.awkward_models:telling", "save_dir": str(tmp_path / "run")}
    config = resolve(flags, ["model.args.plain=false"], None)
    spec = prepare_spec(config, Placement("fsdp", (CPU,), 0, "a test"), World(CPU), FromConfig())
    with pytest.raises(RequestError, match="get_extra_state of layers returns what could not be read back"):
        shard._build(ModelFactory(spec, World(CPU), cast(Any, None), cast(Any, None)))
