"""Requests made from the options of a command, checked before torch is loaded: a Config, a run's weights, a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from multigpu_cli.config import rules
from multigpu_cli.config.code_names import describe_origin
from multigpu_cli.config.rules import is_self_launched
from multigpu_cli.config.schema import SETTINGS, Config
from multigpu_cli.config.sources import gather, resolve
from multigpu_cli.config.types import ValueType, choice, integer, number
from multigpu_cli.errors import RequestError, raise_all

_CHANGED = {"data", "data.args", "data.inputs", "data_dir", "model", "model.args", "model_dir", "task", "task.args"}
_EXPORT_PACKAGES: Mapping[str, tuple[str, ...]] = {
    ".safetensors": (),
    ".pt": (),
    ".pt2": (),
    ".onnx": ("onnx", "onnxscript", "onnxruntime"),
}
_FOLDER_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers",),
    "adapter": ("transformers", "peft"),
    "merged": ("transformers", "peft"),
}


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """The options of evaluate, predict, sample and export."""

    run: Path
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from the run's, such as data_dir
    split: str | None = None  # train, val or test; None takes new samples, or else the last split that exists
    batch_size: int | None = None  # samples at once; None takes twice the run's
    workers: int | None = None  # processes to start; None starts one for each GPU
    own_code: bool = False


class ExportTarget(NamedTuple):
    """What export writes."""

    path: Path  # of the file, or folder
    format: str | None = None  # hf, adapter or merged, a folder for transformers and peft; None: a file, by its ending
    dtype: str | None = None  # bf16 or fp16, for weights alone and whole models; None: as they were trained


def build_config(values: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """The settings of the options; RequestError: all that is wrong with the request, as far as shows without torch."""
    flags = {key: values[key] for key in SETTINGS if values.get(key) not in (None, False, [])}
    wrong = []
    if values.get("no_amp"):
        if flags.get("amp", "off") != "off":
            wrong.append(RequestError(f"--no-amp can't be used with --amp {flags['amp']}", remedy="only one of them"))
        flags["amp"] = "off"
    file, in_worker = values.get("config"), is_self_launched(environ)
    config, faults, broken, filed, command, readable = gather(flags, values.get("set") or (), file, in_worker=in_worker)
    if readable:
        config = rules.drop_launcher_settings(config, filed, environ)
        faults += rules.find_rule_errors(config, environ, invalid_keys=broken)
    raise_all([*wrong, *faults])
    origin = config.from_files if in_worker else describe_origin(config, command, f"--config {file}")
    return replace(config, from_files=origin)


def parse_inference_request(run: str, given: Mapping[str, Any], *, own_code: bool) -> InferenceRequest:
    """Read the options of evaluate, predict, sample and export; None where one was not given."""
    if not Path(run).exists():
        raise RequestError(f"{run}: there is no such file or folder", remedy="the --save-dir of a run")
    flags = {name: given.get(name) for name in ("data", "data_dir", "model", "model_dir", "task")}
    config = resolve(flags, list(given.get("set") or ()), None)
    if others := sorted(config.explicit - _CHANGED):
        raise RequestError(f"--set {others[0]}: only data, model and task can differ", remedy="data.args.NAME=…")
    return InferenceRequest(
        run=Path(run),
        changes={key: config.get(key) for key in config.explicit},
        split=parse_option(choice("train", "val", "test"), "--split", given.get("split")),
        batch_size=parse_option(integer(1, 2**31), "--batch-size", given.get("batch_size")),
        workers=parse_option(integer(1, 1024), "--nproc-per-node", given.get("nproc_per_node")),
        own_code=own_code,
    )


def parse_sampling(length: str, temperature: str, top_k: str | None, seed: str) -> dict[str, Any]:
    """Read the options of sample: count, temperature, top_k and seed."""
    return {
        "count": parse_option(integer(1, 10**6), "--length", length),
        "temperature": parse_option(number(0, 100), "--temperature", temperature),
        "top_k": parse_option(integer(1, 10**6), "--top-k", top_k),
        "seed": parse_option(integer(0), "--seed", seed),
    }


def parse_option(kind: ValueType, flag: str, value: str | None) -> Any:
    """The value of an option, None where it was not given."""
    return None if value is None else kind.read(value, flag)


def parse_worker_counts(text: str) -> list[int]:
    """The numbers of --workers in ascending order, and 1, with which the others are compared."""
    return sorted({1, *(parse_option(integer(1), "--workers", word) for word in text.split(","))})


def parse_prediction_target(out: str) -> Path:
    """What predict writes, in a folder that exists: a new .csv, .npy or .npz, or a new folder, for images."""
    target = Path(out)
    if target.suffix not in (".csv", ".npy", ".npz", ""):
        problem = f"--out {out}: must end in .csv, .npy or .npz, or be a new folder for images"
        raise RequestError(problem, remedy="--out predictions.csv")
    if not target.suffix and find_spec("PIL") is None:
        raise RequestError(f"--out {out}: images need Pillow", remedy="pip install Pillow; or --out predictions.npy")
    _check_new_file("--out", target)
    return target


def parse_export_target(to: str, format: str | None = None, dtype: str | None = None) -> ExportTarget:
    """The new file, or with a format the folder, that export writes; what the format needs has to be installed."""
    target, what = Path(to), f"--format {format}" if format else f"--to {to}"
    if format is None and target.suffix not in _EXPORT_PACKAGES:
        problem = f"--to {to}: must end in {', '.join(_EXPORT_PACKAGES)}"
        remedy = f"--to weights.safetensors; or --format {' or '.join(_FOLDER_PACKAGES)} for a folder"
        raise RequestError(problem, remedy=remedy)
    if format and target.suffix in _EXPORT_PACKAGES:
        raise RequestError(f"--to {to}: --format {format} writes a folder, not a file", remedy="--to FOLDER")
    parse_option(choice(*_FOLDER_PACKAGES), "--format", format)
    packages = _FOLDER_PACKAGES[format] if format else _EXPORT_PACKAGES[target.suffix]
    if dtype:
        parse_option(choice("bf16", "fp16"), "--dtype", dtype)
        if format == "adapter" or (format is None and target.suffix not in (".pt", ".safetensors")):
            remedy = "leave it out; it is for --format hf and merged, .safetensors and .pt"
            raise RequestError(f"--dtype {dtype} can't be used with {what}", remedy=remedy)
    if missing := [package for package in packages if find_spec(package) is None]:
        raise RequestError(f"{what} needs {', '.join(missing)}", remedy=f"pip install {' '.join(packages)}")
    _check_new_file("--to", target)
    return ExportTarget(target, format, dtype)


def _check_new_file(flag: str, target: Path) -> None:
    if target.exists():
        raise RequestError(f"{flag} {target}: it already exists", remedy="another name, or remove it")
    if not target.parent.is_dir():
        raise RequestError(f"{flag} {target}: there is no folder {target.parent}", remedy="create it first")
