"""The rules between settings and with the launcher, all checked before a run begins, without torch.

Rules that need the devices, the dataset or the number of workers are checked by planning and the engine.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from multigpu_cli import capabilities
from multigpu_cli.capabilities import DATASETS, ENVIRONMENTS, MODELS, TASKS, load
from multigpu_cli.config.code_names import names_environments
from multigpu_cli.config.paths import find_data_errors, find_path_errors
from multigpu_cli.config.resume_rules import without_setting
from multigpu_cli.config.schema import LENGTH, Config
from multigpu_cli.config.types import OWN_CODE
from multigpu_cli.errors import RequestError, did_you_mean

_WHERE = ("nproc_per_node", "max_restarts", "gpu_ids", "multi_gpu")


class Rule(NamedTuple):
    """A check and the settings it reads; it is skipped if one of them is invalid by itself."""

    keys: str
    check: Callable[[Config], Iterator[RequestError]]


def find_rule_errors(
    config: Config, environ: Mapping[str, str] | None = None, *, invalid_keys: Collection[str] = (), only: str = ""
) -> list[RequestError]:
    """Every rule that a request breaks, or of one setting's only; invalid keys were reported already."""
    launched = Rule("multi_gpu gpu_ids nproc_per_node max_restarts", lambda c: find_launcher_errors(c, environ or {}))
    known = [*RULES, launched, *(rule for code in capabilities.RULES for rule in load(code))]
    rules = [rule for rule in known if not set(rule.keys.split()) & set(invalid_keys) and only in ("", rule.keys)]
    return [error for rule in rules for error in rule.check(config)]


def drop_launcher_settings(config: Config, filed: Collection[str], environ: Mapping[str, str]) -> Config:
    """Drop device settings that only a file gives where they conflict with the command or its launcher.

    So the config.yaml of a run on four GPUs can be used on two, under torchrun, or in one process.
    """

    def faults(config: Config) -> int:
        return len([*_devices(config), *_data_parallel(config), *find_launcher_errors(config, environ)])

    given = any(key in config.explicit and key not in filed for key in _WHERE)
    for key in _WHERE if given or is_launched(environ) else ():
        if key in filed and faults(without := without_setting(config, key)) < faults(config):
            config = without
    return config


def _names(config: Config) -> Iterator[RequestError]:
    asked = (
        ("--data", config.data.name, [*DATASETS, *ENVIRONMENTS]),
        ("--model", config.model.name, MODELS),
        ("--task", config.task.name, TASKS),
    )
    for flag, name, known in asked:
        if name is None or name in known or (flag == "--data" and names_environments(config)):
            continue
        if "".join(name.partition("/")[:2]) in known:  # a library's own name, which only that library knows
            continue
        if ":" not in name:
            remedy = f"{did_you_mean(name, known)} (or your own as module:factory)"
            if flag == "--data" and Path(name).exists():
                remedy = f"--data ./{name} for the files in {name}, or {remedy}"
            yield RequestError(f"{flag} {name}: unknown name", remedy=remedy)
        elif not OWN_CODE.fullmatch(name):
            problem = f"{flag} {name}: must be module:factory"
            remedy = f"use {flag} my_file:build for build() in my_file.py, my_folder.my_file:build in a folder"
            yield RequestError(problem, remedy=remedy)


def _rates(config: Config) -> Iterator[RequestError]:
    rate, length = config.rate, config.length
    if rate.lr is not None:
        for key, plain in (("base_lr", (None,)), ("base_batch_size", (32,)), ("lr_scaling", ("auto", "none"))):
            if key in config.explicit and config.get(key) not in plain:
                flag = "--" + key.replace("_", "-")
                reason = f"--lr is used exactly as given, so {flag} has nothing to scale"
                remedy = f"leave out {flag}, or give --base-lr {rate.lr:g} in place of --lr"
                yield RequestError(f"--lr can't be used with {flag}: {reason}", remedy=remedy)
    if rate.warmup_epochs and ":" in rate.schedule:
        reason = "that schedule has its own warm-up"
        problem = f"--warmup-epochs {rate.warmup_epochs:g} can't be used with --schedule {rate.schedule}: {reason}"
        yield RequestError(problem, remedy="leave out --warmup-epochs")
    if rate.warmup_epochs is not None and rate.warmup_epochs >= config.last_epoch:
        problem = f"--warmup-epochs {rate.warmup_epochs:g}: the warm-up does not end within --epochs {length.epochs}"
        yield RequestError(problem, remedy=f"use --warmup-epochs below {length.epochs}, or more --epochs")


def _batch(config: Config) -> Iterator[RequestError]:
    batch = config.batch
    if batch.global_size is None or batch.grad_accum_steps is None or not isinstance(batch.size, int):
        return
    share = batch.size * batch.grad_accum_steps
    if batch.global_size % share:
        given = f"--grad-accum-steps {batch.grad_accum_steps} disagrees with --global-batch-size {batch.global_size}"
        reason = f"{batch.grad_accum_steps} x --batch-size {batch.size} = {share} samples per device do not divide it"
        remedy = "leave out --grad-accum-steps: it is derived from --global-batch-size"
        yield RequestError(f"{given}: {reason}", remedy=remedy)


def _exact(config: Config) -> Iterator[RequestError]:
    if not config.reproducibility.exact:
        return
    compresses = config.communication.grad_compression != "none"
    rivals = (
        ("--multi-gpu dp", config.device.multi_gpu == "dp", "its replicas sum gradients in another order"),
        ("--batch-size auto", config.batch.size == "auto", "the largest batch depends on the number of workers"),
        ("--sync-bn", config.model.sync_bn, "statistics over all workers depend on their number"),
        ("--grad-compression", compresses, "its rounding depends on the number of workers"),
    )
    for flag, given, reason in rivals:
        if given:
            yield RequestError(f"--exact can't be used with {flag}: {reason}", remedy=f"leave out --exact or {flag}")


def _starting_weights(config: Config) -> Iterator[RequestError]:
    if config.model.init_partial and config.model.init_from is None:
        yield RequestError("--init-partial without --init-from: there are no weights to take a part of")


def _mixture(config: Config) -> Iterator[RequestError]:
    data = config.data
    if data.mix and data.name != "mixture":
        yield RequestError(f"data.mix can't be used with --data {data.name}", remedy="only one of them")
    if data.mix and data.dir is not None:
        yield RequestError("data.mix can't be used with --data-dir", remedy="data_dir: … of each dataset in data.mix")
    for name in [str(entry["data"]) for entry in data.mix if ":" not in entry["data"]]:
        if name not in DATASETS:
            yield RequestError(f"data.mix: {name}: unknown name", remedy=did_you_mean(name, DATASETS))
    if data.shuffle_block is not None and data.sample_weights is not None:
        problem = "data.shuffle_block can't be used with data.sample_weights: these are drawn from all samples"
        yield RequestError(problem, remedy="only one of them")
    if data.mix and data.sample_weights is not None:
        yield RequestError("data.mix can't be used with data.sample_weights", remedy="weight: … of each dataset")


def _unfreezing(config: Config) -> Iterator[RequestError]:
    epoch, length = config.model.unfreeze_at, config.length.epochs
    if epoch is None:
        return
    if not config.model.freeze:
        yield RequestError("model.unfreeze_at without --freeze: nothing is frozen", remedy="--freeze 'features.*'")
    if config.task.episodes is None and epoch > config.last_epoch:
        problem = f"model.unfreeze_at {epoch}: that is after the last epoch (--epochs {length})"
        yield RequestError(problem, remedy="more --epochs")


def _devices(config: Config) -> Iterator[RequestError]:
    device = config.device
    if device.nproc_per_node is not None and device.multi_gpu in ("dp", "none"):
        problem = f"--nproc-per-node can't be used with --multi-gpu {device.multi_gpu}: that mode uses one process"
        yield RequestError(problem, remedy="use --multi-gpu ddp, or leave out --nproc-per-node")
    if device.gpu_ids is None:
        return
    ids = ",".join(map(str, device.gpu_ids))
    if device.multi_gpu == "none" and len(device.gpu_ids) > 1:
        problem = f"--gpu-ids {ids} can't be used with --multi-gpu none: that mode uses one device"
        yield RequestError(problem, remedy="give one id, or use --multi-gpu ddp")
    if device.nproc_per_node not in (None, len(device.gpu_ids)) and device.multi_gpu not in ("dp", "none"):
        mode = "ddp" if device.multi_gpu == "auto" else device.multi_gpu
        given = f"--nproc-per-node {device.nproc_per_node} disagrees with --gpu-ids {ids}"
        yield RequestError(f"{given}: {mode} uses one process per GPU", remedy="leave out --nproc-per-node")


def _data_parallel(config: Config) -> Iterator[RequestError]:
    kind = config.device.multi_gpu
    if kind == "dp" and config.model.sync_bn:
        problem = "--sync-bn can't be used with --multi-gpu dp: SyncBatchNorm needs ddp"
        yield RequestError(problem, remedy="use --multi-gpu ddp")
    if kind in ("dp", "none") and config.fault.max_restarts:
        problem = f"--max-restarts can't be used with --multi-gpu {kind}: only self-launched runs restart"
        yield RequestError(problem, remedy="use --multi-gpu ddp --nproc-per-node 1, or leave out --max-restarts")


RULES = (
    Rule("data model task", _names),
    Rule(" ".join(("lr base_lr base_batch_size lr_scaling warmup_epochs schedule", *LENGTH)), _rates),
    Rule("batch_size grad_accum_steps global_batch_size", _batch),
    Rule("exact multi_gpu batch_size sync_bn grad_compression", _exact),
    Rule("init_from init_partial", _starting_weights),
    Rule("data data_dir data.mix data.shuffle_block data.sample_weights", _mixture),
    Rule(" ".join(("freeze model.unfreeze_at", *LENGTH)), _unfreezing),
    Rule("multi_gpu gpu_ids nproc_per_node", _devices),
    Rule("multi_gpu sync_bn max_restarts", _data_parallel),
    Rule("data data_dir", find_data_errors),
    Rule("init_from save_dir resume", find_path_errors),
)

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OWN_RUN_ID = "multigpu-"  # the prefix of the run ids of self-launched processes


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def is_self_launched(environ: Mapping[str, str]) -> bool:
    """Whether our own launcher started this process; the settings that it passes on have been applied already."""
    return environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN_ID)


def find_launcher_errors(config: Config, environ: Mapping[str, str]) -> Iterator[RequestError]:
    """The settings that conflict with the launcher that started this process."""
    if not is_launched(environ) or is_self_launched(environ):
        return
    faults = list(find_environment_errors(environ))
    yield from faults or _find_conflicts(config, environ)


def find_environment_errors(environ: Mapping[str, str]) -> Iterator[RequestError]:
    """Missing or invalid variables, given that a launcher has set some of them."""
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        present = [name for name in _NEEDED if name not in missing]
        problem = f"the environment variables of DDP are incomplete: {', '.join(present)} without {', '.join(missing)}"
        yield RequestError(problem, remedy=f"start with torchrun, which sets all of them, or unset {' '.join(present)}")
        return
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not environ.get(name, "0").isdecimal():
            problem = f"{name}={environ[name]} in the environment is not a whole number"
            yield RequestError(problem, remedy="start with torchrun")
            return
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if rank >= size:
        problem = f"RANK={rank} with WORLD_SIZE={size} in the environment: ranks must be from 0 to WORLD_SIZE - 1"
        yield RequestError(problem, remedy="start with torchrun")


def _find_conflicts(config: Config, environ: Mapping[str, str]) -> Iterator[RequestError]:
    device, size = config.device, int(environ["WORLD_SIZE"])
    if device.multi_gpu == "dp":
        problem = f"--multi-gpu dp under torchrun: dp uses one process for several GPUs, and torchrun started {size}"
        yield RequestError(problem, remedy="use torchrun … --multi-gpu ddp, or python main_multi_gpu.py --multi-gpu dp")
    if device.multi_gpu == "none" and size > 1:
        problem = f"--multi-gpu none under torchrun: {size} processes would each train alone in the same folder"
        remedy = "use torchrun … --multi-gpu ddp, or python main_multi_gpu.py --multi-gpu none"
        yield RequestError(problem, remedy=remedy)
    if device.gpu_ids is not None and device.multi_gpu not in ("dp", "none"):
        ids = ",".join(map(str, device.gpu_ids))
        problem = f"--gpu-ids {ids} under torchrun: every process uses the GPU of its local rank"
        remedy = f"use CUDA_VISIBLE_DEVICES={ids} torchrun --nproc-per-node={len(device.gpu_ids)} …"
        yield RequestError(problem, remedy=remedy)
    here = environ.get("LOCAL_WORLD_SIZE")
    if device.nproc_per_node is not None and here and device.nproc_per_node != int(here):
        reason = f"disagrees with torchrun, which started {here} processes here"
        remedy = "leave it out after the script's name: torchrun's own --nproc-per-node decides"
        yield RequestError(f"--nproc-per-node {device.nproc_per_node} {reason}", remedy=remedy)
    if config.fault.max_restarts:
        problem = f"--max-restarts {config.fault.max_restarts} under torchrun: torchrun does the restarts"
        remedy = f"use torchrun --max-restarts={config.fault.max_restarts} … before the script's name"
        yield RequestError(problem, remedy=remedy)
