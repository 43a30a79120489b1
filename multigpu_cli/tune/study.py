"""From options to a study: its settings, the check of its space, its forecast, an attempt, its winner, its disk."""

import json
import math
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from multigpu_cli.checkpoint.files import fail_on_write_error, lock_folder, publish
from multigpu_cli.commands.clean import Cleaning, clean_folders
from multigpu_cli.commands.options import print_result, reject_idle_flags
from multigpu_cli.commands.requests import build_config, parse_option
from multigpu_cli.config.code_names import NAMING
from multigpu_cli.config.resume_rules import without_setting
from multigpu_cli.config.rules import find_rule_errors
from multigpu_cli.config.schema import LENGTH, Config
from multigpu_cli.config.sources import explicit_dump, gather, resolve
from multigpu_cli.config.types import ValueType, best, choice, integer
from multigpu_cli.config.yaml_text import dump, dump_value
from multigpu_cli.distributed.processes import python_command
from multigpu_cli.errors import STOPPED, RequestError, TrainingError, combine_errors, pluralize
from multigpu_cli.monitor.console import Console
from multigpu_cli.monitor.format import format_bytes, format_duration
from multigpu_cli.monitor.journal import dump_json, read_events, read_json
from multigpu_cli.tune.driver import BASE, FRONT_DOOR, JOURNAL, Driver, Slots, list_sets, parse_budget, read_error
from multigpu_cli.tune.sampler import SAMPLERS, VERSIONS
from multigpu_cli.tune.scheduler import list_front, list_needed, measure_use, plan_epochs, rank_trials
from multigpu_cli.tune.space import Dimension, list_corners, list_points, parse_search
from multigpu_cli.tune.trials import STUDY, Study, continue_study, read_study

SUMMARY = "summary.json"
_OWN = ("multi_gpu", "gpu_ids", "save_dir", "seed", "tune.pause_at")  # the study's
_NOT_HERE = {"resume", "mirror", "nproc_per_node", "max_restarts"}
_OPTIONS = dict.fromkeys(("trials", "generation", "seeds", "gpus_per_trial"), integer(1)) | {
    "order": choice("fixed", "async"),
    "sampler": choice(*SAMPLERS),
    "budget": ValueType("", parse_budget),
}
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from multigpu_cli.tune import check; check.main(sys.argv[1])"
_NODE = ("SLURMD_NODENAME", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE")
_LOOK = f"import os; print('node', *(os.environ.get(name, 0) for name in {_NODE}))"


def run_study(given: Mapping[str, Any], values: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Start or continue a study, and return the exit code. RequestError: nothing was written."""
    config = build_config(reject_idle_flags("tune", {**values, "dry_run": False}), environ)
    space, path = parse_search(given["search"]), Path(config.checkpoint.save_dir or "")
    study, console = build_study(given, config, space), Console("normal", json=bool(values["json"]))
    if (path / STUDY).is_file():
        study = continue_study(path, *read_study(path), study)
    elif any(path.glob("[!.]*")):
        raise RequestError(f"--save-dir {path}: holds something else", remedy="a new folder")
    found = check_space(study, config, space, measure=bool(values["dry_run"]))
    wanted = parse_option(integer(1, 4096), "--slots", given["slots"])
    where = choose_slots(wanted, study.gpus_per_trial, found, environ, srun=given["srun"])
    if values["dry_run"]:
        rows = forecast(study, len(where.names), found["forecast"], found["start"])
        print_result(rows, (f"{name:12} {text}" for name, text in rows.items()), as_json=values["json"])
        return 0
    with lock_folder(path), fail_on_write_error(path):
        study.write(path)
        driver = Driver(path, space, where, console.note)
        summary = summarize(driver, driver.run())
    console.print_json(summary)
    if winner := summary["best"]:
        test = "".join(f", test {name} {value:.6g}" for name, value in (winner.get("test") or {}).items())
        console.note(f"best: trial {winner['number']} of {len(summary['trials'])}: {winner['value']}{test}")
    shares = f"{summary['idle_share']:.1%} of the time, and started runs for {summary['start_share']:.1%}"
    console.note(f"slots were idle for {shares}; details: multigpu tune report {path}")
    return STOPPED if summary["status"] == "stopped" else 0


def build_study(given: Mapping[str, Any], config: Config, space: Sequence[Dimension]) -> Study:
    """The study that the options ask for; RequestError: an option is wrong by itself."""
    options = {name: parse_option(kind, f"--{name.replace('_', '-')}", given[name]) for name, kind in _OPTIONS.items()}
    length, own, banned = config.length.epochs, config, sorted(config.explicit & _NOT_HERE)
    rungs = [parse_option(integer(1), "--rungs", each) for each in given["rungs"].split(",") if each]
    goals = [parse_option(best, "--objective", each) for each in given["objective"]]
    kind, names = config.device.multi_gpu, [each.partition(":")[0] for each in goals]
    mixed = len(goals) > 1 and (rungs or options["order"] == "async")
    other = next((each for each in goals if not each.startswith("val_")), "")
    near = f"val_{other.removeprefix('train_').removeprefix('test_')}"
    limit = next((each for each in LENGTH[1:] if config.get(each) is not None), "")
    by_epochs = rungs or "epochs" in (given["budget"] or "")
    # runs of --env-steps have another number of epochs than the default
    by_epochs = by_epochs or (config.last_epoch > length and "epochs" not in config.explicit)
    auto_batch = "auto" in (config.batch.size, *(v for each in space if each.key == "batch_size" for v in each.values))
    rules = (
        (config.checkpoint.save_dir is None, "tune needs --save-dir", "--save-dir studies/NAME"),
        (banned, f"tune can't be used with {', '.join(banned)}: it starts the runs", "--slots, --gpus-per-trial"),
        (kind not in ("auto", "ddp", "fsdp"), f"tune can't be used with --multi-gpu {kind}", "ddp, or leave it out"),
        (given["srun"] and own.device.gpu_ids, "--gpu-ids can't be used with --srun: SLURM chooses", "leave it out"),
        (auto_batch, "tune can't be used with --batch-size auto: trials would depend on the memory", "a number"),
        (rungs != sorted({0, length + 1, *rungs})[1:-1], "--rungs must ascend, up to --epochs", f"up to {length}"),
        (not goals, "tune needs --objective", "--objective val_accuracy:max"),
        (other, f"--objective {other}: must be a number of the validation split", f"did you mean {near}?"),
        (len(set(names)) < len(names), f"--objective {', '.join(goals)}: a number is named twice", "name each once"),
        (limit and by_epochs, f"{limit}: may end a run within its epochs", f"use --epochs, and --set {limit}=null"),
        (mixed, "several --objective can't be used with --rungs or --order async", "leave out one of them"),
    )
    if wrong := [RequestError(problem, remedy=remedy) for broken, problem, remedy in rules if broken]:
        raise combine_errors(wrong)
    if options["sampler"] == "grid":
        options["trials"] = len(list(islice(list_points(space, grid=True), options["trials"])))
    for key in _OWN:
        own = without_setting(own, key)
    options |= {"rungs": [*(each for each in rungs if each < length), length], "budget": given["budget"]}
    options |= {"search": {each.key: each.text for each in space}, "objectives": goals, "multi_gpu": kind}
    options |= {"seed": config.reproducibility.seed, "best": config.metric.best or goals[0]}
    return Study(versions=VERSIONS, settings=explicit_dump(own), **options)


def check_space(study: Study, config: Config, space: Sequence[Dimension], *, measure: bool) -> dict[str, Any]:
    """Refuse what the trainer would, by rules at all corners, by building the model at a few; or GPUs, forecast."""
    with TemporaryDirectory(prefix="multigpu-tune-") as name:
        base = Path(name, BASE)
        base.write_text(dump({"best": study.best} | study.settings))
        requests = (gather({}, list_sets(params), str(base)) for params in islice(list_points(space), 4096))
        said = (str(combine_errors(each.faults or find_rule_errors(each.config, {}))) for each in requests)
        if wrong := next(filter(None, said), ""):
            raise RequestError(wrong.replace("--set ", "--search "))
        corners = [list_sets(params) for params in list_corners(space, 16)]
        wanted = {"corners": corners, "measure": measure, "objectives": study.objectives}
        wanted |= {"gpus_per_trial": study.gpus_per_trial, "gpu_ids": config.device.gpu_ids, "began": time.time()}
        Path(name, "check.json").write_text(json.dumps(wanted))
        command = python_command("-c", _START, str(FRONT_DOOR.parent), name)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TrainingError(f"the check of the search space failed: {done.stderr.strip()[-500:]}")
        found: dict[str, Any] = json.loads(Path(name, "found.json").read_text())
    if found["error"]:
        for parent, each in product(space, space):  # an argument of a part that varies: perhaps not each one has it
            others = [value for value in parent.values if f"{parent.key}={value}" not in found["corner"]]
            if parent.kind == "choice" and each.key.startswith(f"{parent.key}.args.") and not each.parent and others:
                condition = f"when {parent.key}={others[0]}"
                found["error"] += f"; or give it a condition: --search '{each.key}={each.text} {condition}'"
        raise RequestError(found["error"].replace("--set ", "--search "))
    return found


def choose_slots(
    wanted: int | None, least: int, found: Mapping[str, Any], environ: Mapping[str, str], *, srun: bool
) -> Slots:
    """The slots of this machine, or of the allocation: GPUs, or else cores, which on this machine may be shared.

    RequestError: there are fewer than wanted, or no node has the `least` that a trial needs.
    """
    visible = (environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(1024)))).split(",")
    names = [visible[gpu] for gpu in found["gpus"]] or [""] * (wanted or found["cores"])
    there = find_allocation(environ) if srun else Slots(names, [""] * len(names), environ)
    count = wanted or len(there.names)
    if count > len(there.names) or max(Counter(there.nodes[:count]).values()) < least:
        kind = pluralize(len(there.names), "GPU" if there.names[0] else "core")
        problem = f"--slots {count}, {least} per trial: there are {kind} on {pluralize(len(set(there.nodes)), 'node')}"
        raise RequestError(problem, remedy="another --slots, or --gpus-per-trial")
    return there._replace(names=there.names[:count], nodes=there.nodes[:count])


def find_allocation(environ: Mapping[str, str]) -> Slots:
    """The GPUs, or else the cores, of all nodes of the allocation that this process is in; RequestError: it is in none.

    srun hands SIGUSR1 on to a step, and ends the step at once where it gets SIGTERM. From the environment it would take
    what was asked for the job as asked for the step.
    """
    job, count = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NUM_NODES")
    if not job or not count or not shutil.which("srun"):
        problem = "--srun: this is no SLURM allocation (no SLURM_JOB_ID and SLURM_JOB_NUM_NODES, or no srun)"
        raise RequestError(problem, remedy="the same command in a job of sbatch or salloc; or leave out --srun")
    own = {name: value for name, value in environ.items() if not re.match("SRUN_|SLURM_(?!CONF$|JOB_ID$)", name)}
    look = ["srun", "--overlap", f"--nodes={count}", "--ntasks-per-node=1", *python_command("-c", _LOOK)]
    done = subprocess.run(look, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    said = sorted(re.findall(r"^node (\S+) (\d+) (\d+)$", done.stdout, re.MULTILINE))  # a prolog may print as well
    if done.returncode or not said:
        raise RequestError(f"--srun: {read_error(done.stderr)}", remedy="an allocation that can run steps")
    nodes = [(name, int(cpus), int(gpus)) for name, cpus, gpus in said]
    any_gpu = any(gpus for *_, gpus in nodes)
    if poor := [name for name, cpus, gpus in nodes if cpus < gpus]:
        raise RequestError(f"--srun: {poor[0]} has fewer cores than GPUs", remedy="a job with --cpus-per-gpu")
    slots = [name for name, cpus, gpus in nodes for _ in range(gpus if any_gpu else cpus)]
    cores = min(cpus // gpus for _, cpus, gpus in nodes if gpus) if any_gpu else 1
    return Slots(["gpu" if any_gpu else ""] * len(slots), slots, own, cores, signal.SIGUSR1, signal.SIGTERM)


def forecast(study: Study, slots: int, measured: Sequence[Mapping[str, float]], start: float) -> dict[str, str]:
    """Forecast a study in which no trial fails, from steps at the first and the last corner of the space.

    `start`: seconds of a process that does not train yet.
    """
    epochs, starts = plan_epochs(study)
    hours = sorted((epochs * each["epoch"] + starts * start) / 3600 for each in measured)
    walls = [format_duration(3600 * each / slots) for each in hours]
    disk = [format_bytes(study.trials * study.seeds * each) for each in sorted(each["bytes"] for each in measured)]
    ends = {"slot-hours": [f"{each:.3g}" for each in hours], "wall time": walls, "disk": disk}
    rows = {"epochs": f"{epochs}, of {study.trials * study.seeds * study.rungs[-1]} without rungs"}
    rows["starts"] = f"{starts}, of {start:.1f} s each"
    return rows | {name: " to ".join(dict.fromkeys(each)) for name, each in ends.items()}


def summarize(driver: Driver, status: str) -> dict[str, Any]:
    """Write summary.json; where the study is over, with the winner's metrics of the test split, evaluated once."""
    file, trials = driver.path / SUMMARY, driver.trials
    (busy, starting, total), winner = measure_use(read_events(driver.path / JOURNAL)), dict[str, Any]()
    if ranked := rank_trials(driver.study, trials):
        content, before = ranked[0].as_dict(), read_json(file, "study's summary").get("best") or {}
        winner = {"number": ranked[0].number, "params": ranked[0].params, "epochs": max(ranked[0].values)}
        winner["value"] = content["values"][winner["epochs"]]
        if status != "stopped":
            known = before.get("test") if before.get("number") == winner["number"] else None
            winner["test"] = known or evaluate_trial(driver, winner["number"])
    summary: dict[str, Any] = {"status": status, "best": winner or None, "epochs": driver.epochs}
    summary |= {"slot_hours": busy / 3600, "idle_share": 1 - busy / total if total else 0.0}
    summary["start_share"] = starting / total if total else 0.0
    summary |= {"trials": [t.as_dict() for t in trials], "front": [t.number for t in list_front(driver.study, trials)]}
    publish(file, (dump_json(summary, indent=1) + "\n").encode())
    return summary


def evaluate_trial(driver: Driver, number: int) -> dict[str, float] | None:
    """The test metrics of a trial's best weights, as means over its seeds; None where there is no test split."""
    found, pipe = [], subprocess.PIPE
    for run in range(driver.study.seeds):
        folder = driver.study.run_folder(driver.path, number, run)
        argv = ["evaluate", str(folder), "--split", "test", "--json", *_name_code(driver, number)]
        with driver.slots.start(argv, [0], stdout=pipe, stderr=pipe, text=True) as process:
            printed, complaint = process.communicate()
        if process.returncode:
            driver.say(f"trial {number}: no test metrics: {read_error(complaint)}")
            return None
        found.append(json.loads(printed))
    names = [name for name, value in found[0].items() if isinstance(value, float)]
    return {name: math.fsum(each[name] for each in found) / len(found) for name in names}


def _name_code(driver: Driver, number: int) -> list[str]:
    """Return the words that allow an evaluation to import the code that this study's own settings name, and no other.

    The trial's folder may be a stranger's, and name something else.
    """
    config = resolve({}, list_sets(driver.trials[number].params), str(driver.path / BASE))
    words = ["--own-code"] if config.checkpoint.own_code else []
    for part in NAMING:
        if ":" in str(config.get(part)):
            words += [f"--{part}", str(config.get(part))]
        for name, value in (config.get(f"{part}.args") or {}).items():
            if ":" in str(value):
                words += ["--set", f"{part}.args.{name}={dump_value(value)}"]
    return words


def clean_study(path: Path, *, remove: bool) -> list[Cleaning]:
    """List the checkpoints of each trial that can be removed, and remove them if requested.

    RequestError: there is no study, or `remove` is requested while a driver is running.
    """
    read_study(path)  # before a lock is written into the folder
    with lock_folder(path) if remove else nullcontext():
        study, trials = read_study(path)
        needed = list_needed(study, trials)
        trial_of = {study.run_folder(path, each.number, run): each for each in trials for run in range(study.seeds)}
        runs = [folder for folder in trial_of if (folder / "journal.jsonl").is_file()]
        return clean_folders(runs, lambda run: "the study may need it" * (trial_of[run] in needed), remove=remove)
