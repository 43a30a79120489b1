"""evaluate, and what predict begins with: a run's weights on a split of its data, or on other data, in order."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from multigpu_cli.checkpoint.weights import TrainedWeights, describe_code, load_trained_weights, name_changes
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.config.code_names import NAMING, check_code
from multigpu_cli.config.regular_files import read_small
from multigpu_cli.config.resume_rules import replace_settings
from multigpu_cli.config.schema import SETTINGS, Config, DeviceConfig
from multigpu_cli.data.load import open_data
from multigpu_cli.data.source import Codec, DataSource, wrap_unlabeled
from multigpu_cli.distributed.launch_env import LaunchEnv, refuse_srun_copies
from multigpu_cli.distributed.placement import count_cores
from multigpu_cli.distributed.process_group import join_workers, place_on_machine
from multigpu_cli.distributed.world import World, run_on_all_ranks
from multigpu_cli.errors import RequestError
from multigpu_cli.language.adapter import check_base
from multigpu_cli.language.model_folder import TextModel, describe_tokenizer, find_model_folder, load_text_model
from multigpu_cli.language.text import deserialize_vocabulary
from multigpu_cli.launch import run_in_workers
from multigpu_cli.metrics.load import load_metrics
from multigpu_cli.monitor import format
from multigpu_cli.monitor.console import Console
from multigpu_cli.run.request.spec import FromConfig
from multigpu_cli.runtime.precision import Precision, PrecisionChoice, agree_on_precision
from multigpu_cli.runtime.seeding import set_threads_per_rank
from multigpu_cli.tasks.base import Task


@dataclass(frozen=True)
class LoadedRun:
    """A run's settings, without those that matter only in training, and its model: on the CPU, for evaluation."""

    origin: str  # where its weights come from
    config: Config
    source: DataSource
    model: nn.Module


def load_run(
    weights: TrainedWeights, request: InferenceRequest, *, checks_base: bool = True, parts: Collection[str] = NAMING
) -> LoadedRun:
    """Open the run's dataset, build its network for it, and put the weights in.

    `checks_base`: this process compares files of a pretrained model, and the network's code, with the run's. The parts
    are those of the run that may be its own code, and are used. RequestError: the code is not allowed, the dataset or
    the pretrained model is missing, or the weights do not fit it.
    """
    config, command = _merge_config(weights, request.changes), _make_command_config(request)
    with _explain_objects(weights.origin):
        check_code(config, command, str(weights.origin), parts)
        source = open_data(config, classes=_find_counted_classes(weights, config, request.changes))
        if checks_base:
            check_base(weights.settings.get("base", {}), config, source.codec.record, str(weights.origin))
        before = weights.settings.get("learned")
        if before is not None and before != source.signature():
            reason = f"its training split has other classes, scales or tokens than {weights.origin} was trained with"
            remedy = "the run's own training data, together with other test data"
            if config.data.name == "csv":
                remedy += "; other rows: --set data.test_file=FILE or data.new=FILE"
            raise RequestError(f"--data {config.data.name}: {reason}", remedy=remedy)
        return _load_weights(config, source, weights, warns=checks_base)


def load_run_without_data(weights: TrainedWeights, request: InferenceRequest) -> LoadedRun:
    """Build the network from the run's record of its data, which may be missing: the source has no samples.

    RequestError: the code is not allowed, or the file has no record of the data.
    """
    built_for = dict(weights.settings.get("built_for", {}))
    if not built_for:
        raise RequestError(f"{weights.origin} has no record of its data's shapes", remedy="weights of a newer run")
    config = _merge_config(weights, request.changes)
    config = replace_settings(config, {"model": config.model.name or built_for["model"]})
    check_code(config, _make_command_config(request), str(weights.origin), ["model"])
    nothing = TensorDataset(torch.empty(0), torch.empty(0))
    source = DataSource(
        train=nothing,
        val=None,
        test=None,
        input_shape=tuple(built_for["input_shape"]),
        num_classes=built_for["num_classes"],
        num_outputs=built_for.get("outputs", 1),
        codec=deserialize_vocabulary(built_for["vocabulary"]) if "vocabulary" in built_for else Codec(),
        model=built_for["model"],
        task=built_for["task"],
    )
    check_base(weights.settings.get("base", {}), config, source.codec.record, str(weights.origin))
    return _load_weights(config, source, weights)


def load_text_model_of_run(weights: TrainedWeights, run: LoadedRun) -> TextModel:
    """Tokenizer and ends of the pretrained model of a run."""
    model, record = load_text_model(find_model_folder(run.config.model.dir)), weights.settings.get("base", {})
    found = describe_tokenizer(model.tokenizer, record.get("template"))
    check_base(record, run.config, found, str(weights.origin))
    return model


def _load_weights(config: Config, source: DataSource, weights: TrainedWeights, *, warns: bool = True) -> LoadedRun:
    model = FromConfig().build_model(config, source, reference="reference" in weights.settings)
    weights.load_into(model)
    if warns and (names := name_changes(weights.settings.get("code", {}), describe_code(model))):
        Console("quiet", sys.stderr).warn(f"the model's {names} changed since {weights.origin} was written")
    return LoadedRun(str(weights.origin), config, source, model.eval())


@contextmanager
def _explain_objects(origin: Path) -> Iterator[None]:
    """Explain an error for a run from Python: no name restores its loaders and loss, so its script must evaluate it."""
    try:
        yield
    except RequestError as error:
        if not any(_names_objects(folder / "config.yaml") for folder in origin.parents[:3]):
            raise
        problem = f"{origin} was made by a Python script, whose objects are not here: {error.problem}"
        remedy = "evaluate_with_multi_gpu in that script, or train_with_multi_gpu(…, test_loader=…)"
        raise RequestError(problem, remedy=remedy) from error


def _names_objects(config: Path) -> bool:
    """Return whether a config.yaml is of a run from Python; False if it is missing, or is a trap."""
    try:
        return read_small(config).startswith(b"# with live objects")
    except OSError:  # the error that is explained matters, not this file
        return False


def _make_command_config(request: InferenceRequest) -> Config:
    return replace_settings(Config(), {**request.changes, "own_code": request.own_code})


def _merge_config(weights: TrainedWeights, changes: Mapping[str, Any]) -> Config:
    known = {key: value for key, value in weights.settings.items() if key in SETTINGS}
    if weights.model:
        known["model"] = weights.model
    if changes.get("data", known.get("data")) != known.get("data"):
        known["data.args"] = {}  # the run's are arguments of its own dataset
    args = {key: known.get(key, {}) | changes.get(key, {}) for key in ("data.args", "model.args", "task.args")}
    config = replace_settings(Config(), known | dict(changes) | args)
    plain = replace(config.model, sync_bn=False, grad_checkpointing=False, freeze=(), init_from=None)
    return replace(config, model=plain, data=replace(config.data, num_workers=0))


def _find_counted_classes(weights: TrainedWeights, config: Config, changes: Mapping[str, Any]) -> int | None:
    """Return the number of classes that the run counted; None if the changes may name other samples than the run's."""
    before: dict[str, Any] = {key: weights.settings.get(key) for key in changes if key.startswith(("data", "task"))}
    now: dict[str, Any] = {key: config.get(key) for key in before}
    for settings in (before, now):  # new samples have no classes
        settings["data.args"] = {name: arg for name, arg in (settings.get("data.args") or {}).items() if name != "new"}
    counted: Mapping[str, int] = weights.settings.get("built_for") or {}
    return counted.get("num_classes") if before == now else None


Result = TypeVar("Result")


@dataclass(frozen=True)
class InferencePass:
    """One worker's part of a pass, its model on its device; every worker takes as many samples at once."""

    origin: str
    split: str
    world: World
    model: nn.Module
    task: Task
    loader: Any
    precision: Precision
    batch_size: int
    has_targets: bool
    names: Sequence[str] | None


def run_distributed(
    request: InferenceRequest, work: Callable[[InferencePass], Result], needs_targets: bool
) -> Result | None:
    """Call `work` on each worker, started here unless a launcher has; its result, but None on ranks above 0.

    `work` is a function that can be sent to other processes. RequestError, the same on every rank: the run can't be
    loaded, or has no such split.
    """
    wanted = DeviceConfig(multi_gpu="auto", nproc_per_node=request.workers)
    refuse_srun_copies()
    placement = place_on_machine(wanted, LaunchEnv.current())
    if placement.num_processes_to_launch > 1:
        return run_in_workers(placement, run_distributed, request, work, needs_targets)[0]
    with join_workers(wanted, 600.0) as (_, world):
        set_threads_per_rank(world.local_size, count_cores(), exact=False)
        weights = run_on_all_ranks(world, lambda: load_trained_weights(request.run))
        parts = (*NAMING, "metric") if needs_targets else NAMING
        run = run_on_all_ranks(world, lambda: load_run(weights, request, checks_base=world.is_main, parts=parts))
        amp = run.config.precision.amp
        amp = "off" if amp == "fp16" and world.device.type == "cpu" else amp  # of a run on GPUs
        precision = agree_on_precision(amp, world, [world.device])
        part = run_on_all_ranks(world, lambda: _prepare_pass(request, run, world, precision, needs_targets))
        if world.is_main and any(key.startswith("data") for key in request.changes):  # the training has told the others
            for warning in run.source.warnings:
                Console("quiet", sys.stderr).warn(warning)
        with closing(part.loader):
            result = work(part)
        return result if world.is_main else None


def _prepare_pass(
    request: InferenceRequest, run: LoadedRun, world: World, precision: PrecisionChoice, needs_targets: bool
) -> InferencePass:
    config, name = run.config, _choose_split(run.source, request.split, needs_targets=needs_targets)
    split: Dataset[Any] = getattr(run.source, name)
    unlabeled = None if needs_targets or name == "new" else wrap_unlabeled(split, run.source.train, run.source.form)
    changed: dict[str, Any] = {name: unlabeled} if unlabeled else {}
    source = replace(run.source, **changed)
    task = FromConfig().build_task(config, source)
    if needs_targets:
        task.own_metrics = load_metrics(config.metric, source, config.task.name or source.task)
    usual = 2 * config.batch.size if isinstance(config.batch.size, int) else 64
    model, number_format = run.model.to(world.device), Precision(precision.name, world.device)
    if type(task).evaluate is Task.evaluate:  # PPO's check begins to play
        task.check_model(model, number_format)
    task.group_size = config.batch.global_size or 0
    return InferencePass(
        origin=run.origin,
        split=name,
        world=world,
        model=model,
        task=task,
        loader=task.loader(name, config.data, world, config.reproducibility.seed),
        precision=number_format,
        batch_size=request.batch_size or usual,
        has_targets=unlabeled is None and name != "new",
        names=getattr(split, "names", None),
    )


def _choose_split(source: DataSource, wanted: str | None, *, needs_targets: bool) -> str:
    """The requested split, or else the first that exists: new samples, test, validation, training."""
    if needs_targets and source.new is not None:
        raise RequestError("data.args.new: these samples have no targets to compare with", remedy="predict")
    splits = [name for name in ("new", "test", "val", "train") if getattr(source, name) is not None]
    if wanted and wanted not in splits:
        raise RequestError(f"--split {wanted}: the data has no such split", remedy=f"--split {' or '.join(splits)}")
    return wanted or splits[0]


def evaluate_run(request: InferenceRequest) -> dict[str, Any] | None:
    """Metrics over exactly the samples of the split, the same bits on any number of workers; None on ranks above 0."""
    return run_distributed(request, _compute_metrics, needs_targets=True)


def _compute_metrics(part: InferencePass) -> dict[str, Any]:
    evaluated = part.task.evaluate(part.model, part.loader, part.world, part.precision, part.batch_size)
    facts = {"weights": part.origin, "split": part.split, "samples": evaluated.samples, "world_size": part.world.size}
    return facts | evaluated.metrics | evaluated.details


def format_metrics(metrics: dict[str, Any]) -> Iterator[str]:
    """The metrics in one line, and the tables that the task has."""
    apart = {"per_class", "confusion", "world_size"}
    yield format.format_eval_line({name: value for name, value in metrics.items() if name not in apart})
    if rows := metrics.get("per_class"):
        names = [str(row["class"]) for row in rows]
        yield from format.format_class_table(rows, names)
        if "confusion" in metrics:
            yield from format.format_confusion_table(metrics["confusion"], names)
