"""Merges defaults < YAML < --set < flags into one Config; later ones win, and an unknown key is an error."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.config import paths
from multigpu_cli.config.regular_files import open_regular
from multigpu_cli.config.resume_rules import PRIVATE
from multigpu_cli.config.schema import SECTIONS, SETTINGS, Config
from multigpu_cli.config.types import PARTS, SettingEntry, quote_value
from multigpu_cli.errors import RequestError, TrainingError, make_line, raise_all

NAMES_ELSEWHERE = {
    "adapter lora": "lora use-lora peft use-peft",
    "amp": "precision mixed-precision amp-backend",
    "amp fp16": "fp16 half",
    "amp bf16": "bf16",
    "batch_size": "per-device-train-batch-size per-device-batch-size train-batch-size local-batch-size "
    "train-micro-batch-size-per-gpu",
    "best": "metric-for-best-model monitor load-best-model-at-end",
    "checkpoint_every": "save-steps save-every save-interval save-freq save-strategy every-n-train-steps",
    "compile default": "torch-compile",
    "data": "dataset dataset-name",
    "data.block=128, or max_length N with model_dir": "block-size context-length max-seq-length max-seq-len",
    "data.size=224": "imgsz img-size image-size",
    "data_dir": "data-path data-root dataset-path train-file train-dir",
    "early_stopping_patience": "patience early-stopping",
    "ema": "model-ema ema-decay",
    "epochs": "max-epochs num-train-epochs num-epochs",
    "epochs N: an evaluation follows each epoch": "eval-steps eval-strategy evaluation-strategy val-check-interval",
    "epochs N: training and evaluations need no flag": "do-train do-eval",
    "exact": "deterministic",
    "gpu_ids 0,1; GPUs are used by default, and none with CUDA_VISIBLE_DEVICES=''": "device cuda no-cuda use-cuda",
    "grad_accum_steps": "accumulate gradient-accumulation-steps accumulate-grad-batches accumulation-steps accum-iter",
    "grad_checkpointing": "gradient-checkpointing activation-checkpointing",
    "init_from": "pretrained-weights load-weights",
    "keep": "save-total-limit keep-last save-top-k",
    "log_interval": "logging-steps log-every log-every-n-steps print-freq",
    "logger": "report-to wandb tensorboard",
    "lr": "learning-rate lr0",
    "max_grad_norm": "clip-grad grad-clip gradient-clip-val gradient-clipping max-norm",
    "max_steps": "max-iters max-train-steps total-steps num-steps",
    "model": "arch architecture model-name model-name-or-path",
    "multi_gpu": "strategy accelerator deepspeed distributed-backend distribution",
    "multi_gpu ddp": "ddp use-ddp",
    "multi_gpu fsdp for sharded weights": "fsdp use-fsdp full-shard",
    "nproc_per_node": "num-processes world-size",
    "nproc_per_node N on one node; torchrun, with nnodes of its own, on several": "num-nodes nnodes",
    "nproc_per_node N, or torchrun in the place of torch.distributed.launch": "local-rank",
    "nproc_per_node N for the number, or gpu_ids 0,1 for the choice": (
        "num-gpus num-gpu gpus devices device-ids n-gpu n-gpus ngpus"
    ),
    "nproc_per_node for training processes, or num_workers for those that load data": "workers",
    "num_workers": "dataloader-num-workers num-data-workers",
    "optimizer": "optim opt",
    "optimizer.args.momentum=0.9 with optimizer sgd": "momentum",
    "model.args.dropout=0.1": "dropout",
    "resume": "resume-from-checkpoint resume-from ckpt-path checkpoint ckpt",
    "save_dir": "output-dir output checkpoint-dir save-path logging-dir log-dir default-root-dir work-dir",
    "seed": "seed-everything random-seed",
    "schedule": "lr-scheduler lr-decay lr-scheduler-type scheduler sched",
    "warmup_epochs": "warmup-steps warmup-ratio num-warmup-steps",
    "weight_decay": "wd",
}
"""Names that other trainers (HF Trainer, Lightning, Accelerate, timm, fairseq, torchtitan) have for our settings."""

_PLACE = {"data", "data_dir"}
_MAPPINGS = ("optimizer.rates", "task.class_weights", "data.sample_weights")
_SCALED = ("base_lr", "base_batch_size", "lr_scaling")


class Request(NamedTuple):
    """The merged settings of a command, and the errors in them."""

    config: Config  # the settings; an invalid one has its default
    faults: list[TrainingError]
    invalid_keys: frozenset[str]
    file_keys: frozenset[str]  # the keys that only the recipe gives
    command: Config  # the settings without the recipe
    is_readable: bool  # False if the recipe could not be read at all, so that rules between settings are not checked


def resolve(flags: Mapping[str, Any], sets: Sequence[str], recipe: str | None) -> Config:
    """The settings of flags by key, KEY=VALUE texts, and a YAML file; RequestError: all that is wrong in them."""
    request = gather(flags, sets, recipe)
    raise_all(request.faults)
    return request.config


def gather(flags: Mapping[str, Any], sets: Sequence[str], recipe: str | None, *, in_worker: bool = False) -> Request:
    """Like `resolve`, but returns the errors, so that those of rules between settings can be reported with them.

    --set and flags are one layer, the YAML file is another. A layer that gives --lr replaces the --base-lr of an
    earlier layer, and the reverse; one that names another dataset, model or task drops the earlier one's arguments.
    Without --data, the dataset is recognized by the files at --data-dir. `in_worker`: our own launcher wrote the YAML
    file, which holds `Config.from_files` too.
    """
    faults: list[TrainingError] = []
    broken: set[str] = set()
    noted, written, single = {}, [], []  # type: dict[str, Any], list[SettingEntry], list[SettingEntry]
    if recipe is not None:
        from multigpu_cli.config.yaml_text import from_recipe  # late: flags alone need no YAML

        noted, written = from_recipe(recipe, {"recipe", "from_files"} if in_worker else {"recipe"}, faults)
    readable = not faults
    if sets:
        from multigpu_cli.config.yaml_text import from_sets

        single = from_sets(sets, faults)
    typed = [
        SettingEntry(key, value, key if "." in key else "--" + key.replace("_", "-"))  # Python also passes model.args
        for key, value in flags.items()
        if value is not None
    ]
    filed, given = [_layer(entries, faults, broken) for entries in (written, [*single, *typed])]
    config, command = (_config(_merge_layers(parts), noted) for parts in ([filed, given], [given]))
    return Request(config, faults, frozenset(broken), frozenset(filed.keys() - given.keys()), command, readable)


def list_private(folder: Path) -> list[str]:
    """Return the private settings that the config.yaml of a run has; none if it is missing or can't be read.

    A resume takes none of them: after a stranger's folder was unpacked its files belong to the user, and `notify` names
    a program.
    """
    try:
        with open_regular(folder / "config.yaml") as opened:
            # this very file, whatever its name leads to by now
            config = gather({}, [], f"/dev/fd/{opened.fileno()}").config
    except OSError:  # the mirror has brought the checkpoint without it
        return []
    return sorted(key for key in PRIVATE if config.get(key))


def explicit_dump(config: Config) -> dict[str, Any]:
    """Only the explicit settings, as plain values for JSON; resolving them in a worker gives an equal Config."""
    return config.nest(key for key in SETTINGS if key in config.explicit)


def _layer(entries: Sequence[SettingEntry], faults: list[TrainingError], broken: set[str]) -> dict[str, Any]:
    """The values of one layer, each one checked; later entries of a layer win."""
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for entry in entries:
        try:
            key, value = _parse_entry(entry)
        except RequestError as error:
            faults.append(error)
            broken.add(".".join(entry.key.split(".")[:2]))
            continue
        values[key] = values.get(key, {}) | value if key.endswith(".args") else value
        labels[key] = entry.label
    if paths.is_path(values.get("data", "")):
        try:
            values |= paths.parse_data_path(values, labels["data"])
        except RequestError as error:
            faults.append(error)
            broken.add("data")
    if values.get("lr") is not None and values.get("base_lr") is not None:
        problem = f"{labels['lr']} can't be used with {labels['base_lr']}: only the second one is scaled"
        faults.append(RequestError(problem, remedy="give only one of them"))
        broken |= {"lr", "base_lr"}
    return values


def _parse_entry(entry: SettingEntry) -> tuple[str, Any]:
    """The setting's key and value; an argument of a plug-in is returned under its section as {name: value}."""
    key, value, label = entry
    section, _, argument = key.partition(".args.")
    if argument and section in PARTS:
        if not argument.isidentifier():
            name, _, inner = argument.partition(".")
            remedy = f"use --set {section}.args.NAME=VALUE"
            if f"{section}.{name}" in _MAPPINGS:  # in quotes, for YAML reads *.bias otherwise
                remedy = make_line(f"use --set '{section}.{name}={{\"{inner}\": {value}}}'")
            raise RequestError(f"{label}: {argument!r} is not a valid argument name", remedy=remedy)
        key, value = f"{section}.args", {argument: value}
    if key not in SETTINGS:
        raise RequestError(f"{label}: there is no such setting", remedy=_suggestion(make_line(key)))
    setting = SETTINGS[key]
    if value is None and key.endswith(".args"):
        value = {}
    if value is None:
        if setting.default is not None:
            raise RequestError(f"{label} has no value", remedy=f"the default is {quote_value(setting.default)}")
        return key, None
    return key, setting.kind.read(value, label)


def translate_name(name: str, *, flags: bool) -> str | None:
    """Return our settings for another trainer's name of one, as flags or as keys; None if it is not in the table."""
    word = name.lower().replace("_", "-")
    ours = next((ours for ours, theirs in NAMES_ELSEWHERE.items() if word in theirs.split()), None)
    if ours is None or not flags:
        return ours
    words = [f"--{word.replace('_', '-')}" if word in SETTINGS else word for word in ours.split(" ")]
    return " ".join(["--set", *words] if "=" in words[0] else words)


def _suggestion(key: str) -> str:
    if ours := translate_name(key, flags=False):
        first, _, more = ours.partition(" ")
        name, equals, _ = first.partition("=")  # without the example's value: a search space has an expression there
        if not equals:
            return f"{ours}, which is the name here"
        return f"{name}, which is the name here" + f", {more}" * bool(more)
    part, _, inner = key.partition(".")
    name = inner if inner in SETTINGS else f"{part}_{inner}"
    if part in PARTS and name in SETTINGS:
        return f"use {name} for the setting, {part}.args.{inner} for an argument of the plug-in"
    known = [*SETTINGS, *(f"{part}.{word}" for part, word in PARTS.items())]
    close = get_close_matches(key.lower().replace("-", "_"), known, n=1)
    argument = f"; or, for an argument, optimizer.args.{key} or model.args.{key}"
    suggestion = f"did you mean {close[0]!r}?" if close else "--help lists the settings (--batch-size is batch_size)"
    return suggestion if inner or (close and "." not in close[0]) else suggestion + argument


def _merge_layers(layers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for layer in layers:
        plain = ("lr",) if layer.get("base_lr") is not None else ()
        replaced: tuple[str, ...] = _SCALED if layer.get("lr") is not None else plain
        for part in PARTS:
            if part in values and layer.get(part) not in (None, values[part]):
                replaced += tuple(key for key in values if key.startswith(f"{part}."))
        kept = {key: value for key, value in values.items() if key not in replaced}
        merged_args = {key: kept.get(key, {}) | value for key, value in layer.items() if key.endswith(".args")}
        values = {key: value for key, value in (kept | layer | merged_args).items() if value is not None}
    return values


def _config(values: dict[str, Any], noted: Mapping[str, Any]) -> Config:
    """The settings; a dataset recognized at --data-dir is not explicit, so that a checkpoint's dataset is kept."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    found = list(paths.find_datasets(Path(values["data_dir"]))) if values.keys() & _PLACE == {"data_dir"} else []
    implied = {"data": found[0]} if len(found) == 1 else {"data": "mixture"} if values.get("data.mix") else {}
    for key, value in (implied | values).items():
        sections[SETTINGS[key].section][SETTINGS[key].attribute] = value
    parts: dict[str, Any] = {name: kind(**sections[name]) for name, kind in SECTIONS.items()}
    return Config(**parts, **noted, explicit=frozenset(values))
