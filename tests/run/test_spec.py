from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch import nn

from multigpu_cli.capabilities import CHECK_BASE
from multigpu_cli.checkpoint.run_folder import write_note
from multigpu_cli.checkpoint.store import Store
from multigpu_cli.config.sources import resolve
from multigpu_cli.data import load
from multigpu_cli.data.source import Codec
from multigpu_cli.distributed.placement import Placement
from multigpu_cli.distributed.world import World
from multigpu_cli.errors import RequestError
from multigpu_cli.monitor.gpu import NoNvml
from multigpu_cli.run.request import prepare
from multigpu_cli.run.request import spec as spec_room
from multigpu_cli.run.request.checks import check_data
from multigpu_cli.run.request.prepare import prepare_spec
from multigpu_cli.run.request.spec import FromConfig, RunSpec, describe_machine
from multigpu_cli.runtime.arithmetic import compute_checksums
from multigpu_cli.strategies.base import Single
from tests.support.ranks import run_on_each_rank
from tests.support.user_code import Items, tensors
from tests.support.world import ALONE

SINGLE = Placement("single", (ALONE.device,), 0, "a test")
OWN = {"data": "tests.support.user_code:tensors", "model": "tests.support.user_code:net", "save_dir": "run"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


def spec(workers: int = 1, /, **flags: Any) -> RunSpec:
    """A request as `workers` self-launched CPU processes would settle it, or one alone."""
    choice = Placement("ddp", (ALONE.device,) * workers, workers, "a test") if workers > 1 else SINGLE
    return prepare_spec(resolve(OWN | flags, [], None), choice, ALONE, FromConfig())


def save_checkpoint(found: RunSpec, step: int = 10, workers: int = 1) -> None:
    """A checkpoint of that run, as training leaves it."""
    Path("run").mkdir(exist_ok=True)
    Store(Path("run/checkpoints"), 3).save(step, {}, found.checkpoint_metadata() | {"world_size": workers})


def test_the_global_batch_and_with_it_the_rate_grow_with_the_workers() -> None:
    for workers in (1, 2, 4):
        plan = spec(workers, batch_size=5).plan
        assert plan.batches.global_batch == 5 * workers
        assert plan.rate.value == pytest.approx(1e-3 * (5 * workers / 32) ** 0.5)


def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(prepare, "count_cores", lambda: 14)
    assert (spec(1).plan.threads, spec(2).plan.threads) == (1, 7), "a single one uses what OMP_NUM_THREADS says"


def test_the_plan_says_how_the_network_is_compiled() -> None:
    pieces = "default, inside DDP: in pieces that end with its buckets, so that these travel during backward"
    for workers, exact, said in ((2, False, pieces), (2, True, "default"), (1, False, "default")):
        rows = dict(spec(workers, compile="default", exact=exact).plan.rows())
        assert rows["torch.compile"] == said
    sharded = prepare_spec(
        resolve(OWN | {"compile": "default"}, [], None), SINGLE._replace(strategy="fsdp"), ALONE, FromConfig()
    )
    assert sharded.plan.notes["compiled"] == "default, each gathered block by itself"
    assert "torch.compile" not in dict(spec().plan.rows())


def slanted(step: int, total: int, peak_at: float, floor: float = 0.0) -> float:
    return max(floor, 1 - abs(step / total - peak_at))


def test_a_schedule_of_ones_own_says_which_arguments_it_has() -> None:
    own = f"{__name__}:slanted"
    schedule = spec(schedule=own, **{"schedule.args": {"peak_at": 0.5}}).plan.schedule
    assert schedule.rate_at(0) == pytest.approx(schedule.peak / 2)
    told = "can't be called with step, total and schedule.args: .*\n  try: .*; schedule.args has peak_at, floor$"
    with pytest.raises(RequestError, match=told):
        spec(schedule=own, **{"schedule.args": {"peak": 0.5}})


class Recorded(Codec):
    record = MappingProxyType({"tokenizer": "its sum"})


def test_what_was_done_with_the_data_has_a_row_of_its_own_where_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = spec().source
    for codec, row in ((Codec(), ""), (Recorded(), "all of it")):
        found = replace(source, note="all of it; ", codec=codec)
        monkeypatch.setattr(prepare, "open_data", Mock(return_value=found))
        plan = spec().plan
        assert (plan.data, "(all of it; " in plan.description) == (row, not row)


class Noting(nn.Linear):
    def __init__(self, model_dir: str = "its own") -> None:
        super().__init__(6, 3)
        self.folder = model_dir


def test_a_factory_is_offered_what_settings_and_data_say(monkeypatch: pytest.MonkeyPatch) -> None:
    built, adapt, seeded = Mock(), Mock(), Mock()
    for name, each in (("build_model", built), ("find_adapter", adapt), ("seed_weights", seeded)):
        monkeypatch.setattr(spec_room, name, each)
    offered = {"input_shape": (6,), "num_classes": 3, "task": "classification", "mode": "flatten", "seed": 42}
    for flags, more in (({}, {}), ({"task": "from-model"}, {"task": "from-model"}), ({"task": "x:y"}, {"task": "x:y"})):
        found = spec(**flags)
        source = replace(found.source, model_kwargs={"vocabulary": 5})
        assert found.factories.build_model(found.config, source) is built.return_value
        whole = flags.get("task") == "from-model"
        told = offered | {"vocabulary": 5} | more
        built.assert_called_with(found.config.model, OWN["model"], told, whole_output=whole, adapt=adapt.return_value)
        adapt.assert_called_with(found.config, reference=False)
        seeded.assert_called_with(42)
    numbers = replace(source, num_classes=0, num_outputs=4)
    found.factories.build_model(found.config, numbers)
    assert built.call_args.args[2]["num_classes"] == 4
    assert "num_classes=4" in found.factories.describe_model(found.config, numbers)


def test_checkpoints_say_what_the_run_is_pinned_to_and_what_its_weights_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = spec(batch_size=5)
    pins = {
        "batch_size": 5, "global_batch_size": 5, "lr": found.plan.schedule.peak, "amp": "off",
        "model": OWN["model"], "task": "classification", "strategy.param_dtype": "fp32",
    }  # fmt: skip
    found = replace(found, plan=replace(found.plan, precision="off"))
    assert found.pinned == pins
    assert replace(found, config=resolve(OWN | {"bucket_cap_mb": 7}, [], None)).pinned == pins | {"bucket_cap_mb": 7}
    machine = describe_machine(found.plan, found.placement)
    assert replace(found, machine=machine).pinned == pins | {"machine": machine}
    capability = torch.backends.cpu.get_cpu_capability()
    assert machine == {
        "CPU threads": found.plan.threads, "device": f"cpu with {capability}", "torch version": torch.__version__,
        **compute_checksums(torch.device("cpu"), "off"),
    }  # fmt: skip
    assert spec(exact=True).machine == machine | {"CPU threads": 1}
    weights = found.weights_metadata()
    built = {"model": OWN["model"], "task": "classification", "input_shape": [6], "num_classes": 3, "outputs": 1}
    assert {key: weights[key] for key in ("learned", "built_for")} == {
        "learned": found.source.signature(), "built_for": built
    }  # fmt: skip
    assert weights.keys() - found.user_config.explicit >= {"learned", "built_for"}
    assert weights.keys().isdisjoint({"base", "code", "reference"})
    whole = found.checkpoint_metadata()
    assert whole == {
        "settings": weights, "written": ["batch_size", "data", "model"], "pins": pins, "samples": 60,
        "data": found.data_fingerprint,
    }  # fmt: skip
    more = replace(found, base={"tokenizer": "a"}, code={"layers": {"Linear": "b"}})
    recorded = more.weights_metadata()
    assert (recorded["base"], recorded["code"]) == (more.base, more.code)


def test_preferences_are_compared_with_the_adapter_that_a_run_begins_from(monkeypatch: pytest.MonkeyPatch) -> None:
    found = spec()
    begun = replace(found, config=resolve(OWN | {"init_from": "weights.pt"}, [], None))
    pairs = replace(found.source, noun="pairs")
    for adapter in (None, Mock()):
        monkeypatch.setattr(spec_room, "find_adapter", lambda config, found=adapter: found)
        assert not begun.has_reference
        assert not replace(found, source=pairs).has_reference
        assert replace(begun, source=pairs).has_reference is (adapter is not None)
    for settings in ({}, {"reference": "initial adapter"}):
        point = replace(found.resume_point, manifest={"settings": settings}, checkpoint="there")
        later = replace(begun, source=pairs, resume_point=point)
        assert later.has_reference is bool(settings)
        assert not later.begins_from_weights
    assert replace(found, resume_point=point).weights_metadata()["reference"] == "initial adapter"


def test_what_a_gpu_computes_by_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NoNvml("none here")

    gpu, found = torch.device("cuda", 7), spec()
    facts = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(spec_room, "open_nvml", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(spec_room, "compute_checksums", lambda device, precision: {"checksum": f"{device} {precision}"})
    assert describe_machine(found.plan, Placement("single", (gpu,), 0, "a test")) == {
        "CPU threads": found.plan.threads, "device": "cpu", "torch version": torch.__version__,
        "CUDA version": torch.version.cuda, "cuDNN version": torch.backends.cudnn.version(), "driver": None,
        "number of multiprocessors": 108, "checksum": "cuda:7 off",
    }  # fmt: skip


def test_a_network_may_say_at_which_share_its_parts_learn() -> None:
    model, config = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), resolve({}, (), None).optimizer
    model.rate_factors = {"0.": 0.5}  # type: ignore[assignment]
    factors = spec_room.compute_rate_factors(model, config)
    assert factors == {"0.weight": 0.5, "0.bias": 0.5, "1.weight": 1.0, "1.bias": 1.0}


def test_what_older_checkpoints_lack_stands_for_what_it_was_then() -> None:
    facts = spec(base_lr=0.2).checkpoint_metadata() | {"world_size": 1}
    facts["settings"]["base"], seen = {"tokenizer": "a"}, Mock()
    del facts["pins"]["strategy.param_dtype"]
    Path("run").mkdir()
    write_note(Path("run"), {"batch_size": 4, "global_batch_size": 8})
    fresh = spec()
    assert (fresh.config.get("strategy.param_dtype"), fresh.config.batch.global_size) == ("auto", 8)
    Store(Path("run/checkpoints"), 3).save(10, {}, facts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "load_given", lambda table, _: [seen] if table is CHECK_BASE else [])
        again = spec(base_lr=0.2)
    assert again.config.get("strategy.param_dtype") == "fp32"
    assert (again.config.rate.base_lr, again.user_config.rate.base_lr) == (None, 0.2)
    seen.assert_called_once_with({"tokenizer": "a"}, again.config, again.source.codec.record, "run")


def test_a_model_is_told_its_folder_where_one_is_given() -> None:
    for flags, told in (({}, "its own"), ({"model_dir": "given"}, "given")):
        found = spec(model=f"{__name__}:Noting", **flags)
        assert found.factories.build_model(found.config, found.source).folder == told


def test_what_steps_in_one_place_need_not_step_alike_in_several() -> None:
    """An optimizer that reads the clock moves the copies of ddp apart; dp has one."""
    found, model = spec(2, optimizer="tests.support.optimizers:Clocked", lr=0.1), nn.Linear(6, 3)
    build = partial(found.factories.build_optimizer, found.config, model=model, strategy=Single(model))
    with pytest.raises(RequestError, match="two steps from the same state give different bits"):
        build(found.plan)
    build(replace(found.plan, strategy="dp"))


def test_a_fixed_global_batch_does_not() -> None:
    plans = [spec(workers, batch_size=5, global_batch_size=20).plan for workers in (1, 2, 4)]
    assert {plan.batches.global_batch for plan in plans} == {20}
    assert {plan.rate.value for plan in plans} == {plans[0].rate.value}
    assert [plan.batches.accumulation for plan in plans] == [4, 2, 1]


def test_the_plan_has_a_base_rate_where_the_rate_was_not_given() -> None:
    rates = [spec(**flags).plan.base_lr for flags in ({}, {"base_lr": 0.2}, {"lr": 0.3})]
    assert rates == [1e-3, 0.2, None]


def test_what_is_measured_later_is_named_as_such() -> None:
    plan, given = spec(batch_size="auto", amp="off").plan, spec(batch_size=5).plan
    assert (plan.batches.micro_batch, plan.batch_size_reason) == (32, "to be measured before the first step")
    assert (given.batches.micro_batch, given.batch_size_reason, given.scheduler_every) == (5, "", 0)
    assert plan.precision_reason not in ("", "as the run was started with")


def test_the_plan_says_where_compiling_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(prepare, "describe_machine", lambda plan, placement: {})
    config = resolve(OWN | {"amp": "off"}, [], None)
    for strategy, exact, faster in (("single", False, True), ("dp", False, False), ("single", True, False)):
        choice, wish = (
            Placement(strategy, (gpu,), 0, "a test"),
            replace(config, reproducibility=replace(config.reproducibility, exact=exact)),
        )
        plan = prepare_spec(wish, choice, World(gpu), FromConfig()).plan
        assert plan.device == "A100"
        assert plan.notes["compiled"] == (
            "off: --compile default is often faster on a GPU, after a minute or two" if faster else ""
        )


def test_accumulation_counts_in_the_rate() -> None:
    assert spec(2, batch_size=5, grad_accum_steps=3, optimizer="sgd").plan.rate.value == pytest.approx(0.1 * 30 / 32)


def test_word_of_small_memory_changes_the_micro_batch_of_a_resumed_run_alone() -> None:
    """The global batch beside it is that of an attempt before the first checkpoint, and perhaps of another command."""
    save_checkpoint(spec(2, batch_size=5, grad_accum_steps=2), workers=2)
    write_note(Path("run"), {"batch_size": 4, "global_batch_size": 64})
    batches = spec(2).plan.batches
    assert (batches.micro_batch, batches.global_batch) == (4, 20)


def test_a_fixed_global_batch_counts_more_than_that_of_an_attempt_before() -> None:
    Path("run").mkdir()
    write_note(Path("run"), {"batch_size": 4, "global_batch_size": 64})
    assert spec(2).plan.batches.global_batch == 64
    assert spec(2, global_batch_size=32).plan.batches.global_batch == 32


def test_a_resumed_run_keeps_batch_and_rate_on_any_number_of_workers() -> None:
    first = spec(2, batch_size=5, grad_accum_steps=2)
    save_checkpoint(first, workers=2)
    for workers, accumulation in ((1, 4), (2, 2), (4, 1), (3, 2)):
        again = spec(workers, batch_size=5, grad_accum_steps=2)
        assert (again.plan.batches.global_batch, again.plan.batches.accumulation) == (20, accumulation)
        assert again.plan.rate.value == first.plan.rate.value
        assert "as the run was started with" in again.plan.rate.reason
        assert again.pinned == first.pinned
        assert again.plan.resume_reason.startswith("resumes from step 10")


def test_what_was_said_is_kept_apart_from_what_was_settled() -> None:
    save_checkpoint(spec(2, batch_size=5))
    again = spec(1)
    assert (again.user_config.rate.lr, again.user_config.batch.global_size) == (None, None)
    assert (again.config.rate.lr, again.config.batch.global_size) == (again.pinned["lr"], 10)
    assert again.user_config.batch.size == 5, "the settings of the first command stand where the new one is silent"


def test_precision_is_that_of_the_start() -> None:
    save_checkpoint(spec(amp="bf16"))
    again = spec()
    assert (again.plan.precision, again.plan.precision_reason) == ("bf16", "as the run was started with")
    with pytest.raises(RequestError, match="--amp off differs from bf16, with which run was"):
        spec(amp="off")


def test_the_schedule_is_recomputed_for_a_longer_run() -> None:
    save_checkpoint(spec(epochs=4))
    again = spec(epochs=9)
    assert again.plan.schedule.total_steps == 9 * again.plan.batches.steps_per_epoch
    assert not again.same_length
    assert spec(epochs=4).same_length


def test_nothing_is_to_do_for_the_very_run_that_is_complete() -> None:
    save_checkpoint(spec(epochs=4), step=8)
    assert not spec(epochs=4).is_complete, "without a summary it did not end"
    Path("run/summary.json").write_text('{"status": "stopped"}')
    assert not spec(epochs=4).is_complete
    Path("run/summary.json").write_text('{"status": "completed"}')
    assert spec(epochs=4).is_complete
    assert spec(epochs=5, max_steps=8).is_complete, "as long in steps"
    assert not spec(epochs=5).is_complete
    save_checkpoint(spec(epochs=5), step=9)
    assert spec(epochs=5).is_complete, "it stopped early"


def test_other_data_is_refused() -> None:
    found = spec()
    facts = found.checkpoint_metadata() | {"world_size": 1, "samples": 1234}
    Path("run").mkdir(exist_ok=True)
    Store(Path("run/checkpoints"), 3).save(10, {}, facts)
    with pytest.raises(RequestError, match="60 training samples now, but run was started with 1234"):
        spec()


def arrays(folder: str, **changed: float) -> dict[str, Any]:
    """A dataset in a folder, of which the first number of some arrays is another; the flags that name it."""
    found: dict[str, Any] = {
        f"X_{split}": numpy.linspace(0, 1, 120).reshape(40, 3) for split in ("train", "val", "test")
    }
    found |= {name.replace("X", "y"): numpy.arange(40) % 2 for name in found}
    for name, value in changed.items():
        found[name].flat[0] = value
    Path(folder).mkdir(exist_ok=True)
    numpy.savez(Path(folder, "data.npz"), **found)
    return {"data": "npz", "data_dir": folder}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"X_train": 0.1}, "training samples in --data-dir here differ from"),
        ({"y_train": 1}, ": training samples in"),
        ({"X_val": 0.1, "X_test": 0.1}, ": validation samples, test samples in"),
        ({"y_test": 2}, ": classes, tokens or scales, test samples in"),
    ],
)
def test_as_many_samples_with_other_contents_are_refused_too(changed: dict[str, float], named: str) -> None:
    save_checkpoint(spec(**arrays("here")))
    assert spec(**arrays("here")).resume_point.checkpoint, "written again, but the same"
    with pytest.raises(RequestError) as refused:
        spec(**arrays("here", **changed))
    assert named in refused.value.problem
    assert "run was started with" in refused.value.problem
    assert "--resume never and another --save-dir" in str(refused.value)


def test_data_may_move_to_another_folder() -> None:
    save_checkpoint(spec(**arrays("here")))
    assert spec(**arrays("there")).resume_point.checkpoint


def test_a_checkpoint_from_before_contents_were_marked_goes_on() -> None:
    found = spec(**arrays("here"))
    facts = found.checkpoint_metadata() | {"world_size": 1}
    del facts["data"]
    Path("run").mkdir()
    Store(Path("run/checkpoints"), 3).save(10, {}, facts)
    assert spec(**arrays("here", X_train=0.1)).resume_point.checkpoint


def test_samples_that_are_read_to_count_classes_are_progress_for_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Items, "num_classes")
    monkeypatch.setattr(load, "read_labels", lambda *_: None)
    moves: list[None] = []
    config = resolve(OWN | {"data": "tests.support.user_code:Items"}, [], None)
    found = prepare_spec(config, SINGLE, ALONE, FromConfig(), moved=lambda: moves.append(None))
    assert found.source.num_classes == 3
    assert len(moves) >= len(found.source.train) - 1  # type: ignore[arg-type]


def test_ranks_with_other_data_are_refused_before_anything_is_written() -> None:
    def work(world: World) -> str:
        data = arrays(f"here{world.rank}", X_train=float(world.rank))
        try:
            prepare_spec(
                resolve(OWN | data, [], None), Placement("ddp", (world.device,), 0, "a test"), world, FromConfig()
            )
        except RequestError as error:
            return error.problem
        return ""

    for told in run_on_each_rank(2, work):
        assert told.startswith("--data npz: rank 1 and the others see different data: other contents")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "workers", "named"),
    [
        ({"sync_bn": True}, 1, "--sync-bn works with ddp on GPUs only"),
        ({"amp": "fp16"}, 1, "--amp fp16 needs a GPU"),
        (
            {"early_stopping_patience": 2, "data": "tests.support.user_code:no_validation"},
            1,
            "needs a validation split",
        ),
        ({"grad_compression": "bf16"}, 2, "--grad-compression bf16 needs NCCL"),
        ({"global_batch_size": 2}, 3, "--global-batch-size 2 is below the number of workers"),
        ({"drop_last": True, "global_batch_size": 61}, 1, "--drop-last leaves no step"),
        ({"warmup_epochs": 20.0}, 1, "--warmup-epochs 20: the warm-up does not end within --epochs 20"),
        ({"data": "tests.support.user_code:nowhere"}, 1, "has no 'nowhere'"),
        ({"resume": "elsewhere"}, 1, "--resume elsewhere: contains no checkpoint"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(flags: dict[str, Any], workers: int, named: str) -> None:
    with pytest.raises(RequestError) as refused:
        spec(workers, **flags)
    assert named in refused.value.problem
    assert not Path("run").exists()


def test_sync_bn_needs_as_many_micro_batches_on_every_worker() -> None:
    uneven = spec(3, global_batch_size=64)
    (told,) = check_data(replace(uneven, config=resolve({"sync_bn": True}, [], None)))
    assert "--sync-bn needs the same number of micro-batches" in told.problem


def test_what_is_wrong_with_device_and_data_is_told_together() -> None:
    with pytest.raises(RequestError) as refused:
        spec(amp="fp16", sync_bn=True, data="har")
    assert all(flag in str(refused.value) for flag in ("--amp fp16", "--sync-bn", "--data har needs --data-dir"))


def channels(split: str, seed: int, mode: str) -> Any:
    return tensors(split, seed)


def test_flags_without_effect_here_are_named() -> None:
    assert spec(mode="average").plan.unused_flags == ["--mode"]
    assert spec(mode="average", data="tests.run.test_spec:channels").plan.unused_flags == []
    assert spec(bucket_cap_mb=5, data_on_device="on").plan.unused_flags == ["--bucket-cap-mb", "--data-on-device"]
    assert spec(2, bucket_cap_mb=5).plan.unused_flags == []
    assert spec(bucket_cap_mb="auto", data_on_device="auto").plan.unused_flags == [], "as --print-config writes them"
    assert spec(2, reshard="step", shard_size=2).plan.unused_flags == ["--reshard", "--shard-size"]


def test_dataparallel_counts_its_devices_as_workers() -> None:
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    choice = Placement("dp", devices, 0, "a test")
    plan = prepare_spec(resolve(OWN | {"batch_size": 5, "amp": "off"}, [], None), choice, ALONE, FromConfig()).plan
    assert (plan.batches.workers, plan.batches.global_batch) == (2, 10)


def test_the_datasets_own_model_and_task_are_taken_where_nobody_names_any() -> None:
    found = prepare_spec(resolve({"data": "digits", "save_dir": "run"}, [], None), SINGLE, ALONE, FromConfig())
    assert (found.model, found.task) == ("convnet", "classification")
    assert found.user_config.model.name is None
    assert found.pinned["model"] == "convnet"
    assert found.plan.description == "convnet on digits (1,258 training samples), classification"
    assert (
        spec().plan.description
        == "tests.support.user_code:net on tests.support.user_code:tensors (60 training samples), classification"
    )
