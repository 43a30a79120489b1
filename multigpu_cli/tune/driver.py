"""Runs a study: starts trials as ordinary runs on slots, stops, widens and resumes them, and records their values."""

import math
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from multigpu_cli.checkpoint.files import publish, wait_until_unlocked
from multigpu_cli.config.regular_files import open_new
from multigpu_cli.config.resume_rules import choose_mode
from multigpu_cli.config.sources import resolve
from multigpu_cli.config.yaml_text import dump, dump_value
from multigpu_cli.distributed.processes import die_with_parent, python_command
from multigpu_cli.errors import WRONG_REQUEST, RequestError, TrainingError
from multigpu_cli.monitor.history import History, load_history, load_summary
from multigpu_cli.monitor.journal import Event, Journal, read_events
from multigpu_cli.tune.sampler import export_journal, propose
from multigpu_cli.tune.scheduler import Job, Speeds, assign_slots, choose_widening, decide, measure_use
from multigpu_cli.tune.space import Dimension, Params
from multigpu_cli.tune.trials import RungResult, Study, Trial, read_rung, read_study

FRONT_DOOR = Path(__file__).resolve().parents[2] / "main_multi_gpu.py"
_STEP = ("srun", "--nodes=1", "--ntasks=1", "--exact", "--mem=0", "--input=none")  # --mem=0: steps share the memory
JOURNAL, BASE, EXPORT = "study.jsonl", "base.yaml", "optuna.journal"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # the last one unless nohup ignores it
_POLL, _BEAT, _LOOK, _PATIENCE = 0.05, 10.0, 1.0, 30.0  # seconds; the last for what a killed driver left to end
_TRIES = 3  # starts of a run that ends without a word, and has not come further
_NO_SPACE = ("No space left on device", "Errno 28")
_NAN, _KILLED = "NaN or infinite", "was killed (SIG"


class Slots(NamedTuple):
    """The GPU and the node of each slot, "" for a core and for this machine; and how a process is started there."""

    names: Sequence[str]
    nodes: Sequence[str]
    environ: Mapping[str, str]
    cores: int = 1  # of each, in an allocation
    stop: int = signal.SIGTERM  # the signal after which a run saves a checkpoint
    kill: int = signal.SIGKILL  # and the one that ends it at once, which also follows this process's end

    def pick(self, free: Iterable[int], wanted: int) -> list[int]:
        """So many free slots of one node, or those of the node that has the most."""
        groups = groupby(sorted(free), self.nodes.__getitem__)
        return max((list(group) for _, group in groups), key=len, default=[])[:wanted]

    def start(self, argv: Sequence[str], taken: Sequence[int], **popen: Any) -> subprocess.Popen[Any]:
        """Start the front door on some slots of one node, on CPUs with one thread a worker."""
        gpus, count = ",".join(self.names[each] for each in taken).strip(","), len(taken)
        environ = ({} if gpus else {"OMP_NUM_THREADS": "1"}) | dict(self.environ)
        command, end = python_command(str(FRONT_DOOR), *argv), partial(die_with_parent, os.getpid(), self.kill)
        if node := self.nodes[taken[0]]:  # SLURM itself chooses which GPUs of it
            gres = f"gpu:{count}" if gpus else "none"
            use = [f"--nodelist={node}", f"--cpus-per-task={self.cores * count}", f"--gres={gres}"]
            command = [*_STEP, *use, *command]
        if not (node and gpus):
            environ["CUDA_VISIBLE_DEVICES"] = gpus
        return subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=end, **popen)


@dataclass
class Running:
    """A process that trains."""

    job: Job
    process: subprocess.Popen[Any]
    slots: list[int]
    began: float  # Unix seconds
    ending: bool = False  # at the edge of a step, with a checkpoint


class Driver:
    """One attempt at a study."""

    def __init__(self, path: Path, space: Sequence[Dimension], slots: Slots, say: Callable[[str], None]) -> None:
        self.path, self.space, self.slots, self.say = path, space, slots, say
        self.study, self.trials = read_study(path)
        self._running: dict[Job, Running] = {}
        self._free = set(range(len(slots.names)))
        self._signals: list[int] = []  # that ask for a stop
        self._speeds = Speeds()
        self._reached: dict[Job, RungResult] = {}
        self._tries: Counter[tuple[int, int, int]] = Counter()
        self._batches: dict[int, tuple[list[str], int]] = {}  # a trial's settings, and micro-batches of a step
        self._looked = self._beat = 0.0

    def run(self) -> str:
        """Until all is done ("completed"), the budget is spent ("budget"), or a signal came ("stopped")."""
        settings = {"best": self.study.best} | self.study.settings
        publish(self.path / BASE, dump(settings).encode(), mode=choose_mode(settings.get))
        old = {each: signal.signal(each, self._hear) for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        with closing(Journal(self.path / JOURNAL, warn=self.say)) as self._journal:
            self._journal.write("open", slots=len(self.slots.names))
            try:
                for job in self._list_waiting():  # a driver was killed before it came to that
                    if (result := read_rung(self._folder(job), self.study, job.epochs)).values is not None:
                        self._record(job, result)
                while self._advance():
                    self._start_waiting()
                    self._widen()
                    time.sleep(_POLL)
                    self._collect()
            finally:
                self._end(self._running.values())
                for each in self._running.values():
                    each.process.wait()
                self._collect()
                self._journal.write("close")
                for number, handler in old.items():
                    signal.signal(number, handler)
        self._export()
        over = not any(decide(self.study, self.trials, idle=True))
        return "stopped" if self._signals else "completed" if over else "budget"

    def _hear(self, number: int, _: object) -> None:
        if number == signal.SIGINT and number in self._signals:  # a second Ctrl-C: without another checkpoint
            for each in self._running.values():
                each.process.send_signal(self.slots.kill)
        self._signals.append(number)

    @property
    def epochs(self) -> int:
        """Epochs that were trained, up to the rungs that have values."""
        return self.study.seeds * sum(max(trial.values, default=0) for trial in self.trials)

    def _advance(self) -> bool:
        """Decide what can be decided; False where nothing is left to wait for."""
        first = self.trials[: self.study.generation]
        failed = Counter(trial.error for trial in first if trial.state == "failed")
        if failed.total() == min(self.study.generation, self.study.trials):
            problem = f"all of the first {len(first)} trials failed: {failed.most_common(1)[0][0]}"
            raise TrainingError(problem, remedy="settings that can be trained, and another --save-dir")
        least = self.study.gpus_per_trial
        idle = len(self.slots.pick(self._free, least)) == least and not self._list_waiting()
        decision = decide(self.study, self.trials, idle)
        wants = any(decision) and not self._signals
        amount, unit = parse_budget(self.study.budget or "")
        hours = wants and unit == "slot-hours"
        if not wants or amount <= (measure_use(read_events(self.path / JOURNAL))[0] / 3600 if hours else self.epochs):
            return not self._signals and any(trial.state == "waiting" for trial in self.trials)
        for trial in decision.promote:
            trial.rung, trial.state = trial.rung + 1, "waiting"
            self._write(trial)
            self.say(f"trial {trial.number}: goes on to epoch {self.study.rungs[trial.rung]}")
        if decision.ask:
            before = len(self.trials) // self.study.group * self.study.group  # a killed driver wrote some of a group
            count = min(self.study.group, self.study.trials - before)
            for params in propose(self.study, self.space, self.trials[:before], count)[len(self.trials) - before :]:
                self.trials.append(Trial(len(self.trials), params))
                self._write(self.trials[-1])
                self.say(f"trial {self.trials[-1].number}: {', '.join(list_sets(params))}")
        return True

    def _write(self, trial: Trial) -> None:
        trial.write(self.path)
        self._export()

    def _export(self) -> None:
        """Write Optuna's journal: after each change of a trial, and at the end, since a driver may have been killed."""
        export_journal(self.path / EXPORT, self.study, self.space, self.trials, read_events(self.path / JOURNAL))

    def _list_waiting(self) -> list[Job]:
        """The runs that are neither at work nor at their rung, in the order of the trials."""
        waiting = (trial for trial in self.trials if trial.state == "waiting")
        jobs = (self._job(trial, run) for trial in waiting for run in range(self.study.seeds))
        return [job for job in jobs if job not in self._running and job not in self._reached]

    def _job(self, trial: Trial, run: int) -> Job:
        if trial.number not in self._batches:
            self._batches[trial.number] = plan_batch(self.study, trial.params, str(self.path / BASE))
        return Job(trial.number, run, self.study.rungs[trial.rung], self._batches[trial.number][1])

    def _start_waiting(self) -> None:
        waiting, least = {job: float(job.epochs) for job in self._list_waiting()}, self.study.gpus_per_trial
        for job, wanted in assign_slots(waiting, len(self._free), least, self._speeds).items():
            if len(taken := self.slots.pick(self._free, wanted)) < least:
                return
            folder, kind = self._folder(job), self.study.multi_gpu
            if folder.resolve() != self.path.resolve() / folder.relative_to(self.path):
                raise RequestError(f"{folder}: leads elsewhere by a symbolic link", remedy="remove the link")
            if not wait_until_unlocked(folder, patience=_PATIENCE):
                problem = f"{folder}: a process that an earlier driver started is still at work"
                raise TrainingError(problem, remedy="end it, and run the same command again")
            several = ["--multi-gpu", "ddp" if kind == "auto" else kind, "--nproc-per-node", str(len(taken))]
            argv = several if len(taken) > 1 or kind == "fsdp" else ["--multi-gpu", "none"]
            sets = [*self._batches[job.trial][0], f"seed={self.study.seed + job.run}", f"tune.pause_at={job.epochs}"]
            argv += ["--config", str(self.path / BASE), *(word for each in sets for word in ("--set", each))]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "output.log").unlink(missing_ok=True)  # an earlier log; the target of a link stays
            with open_new(folder / "output.log") as log:
                pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = self.slots.start([*argv, "--save-dir", str(folder), "--quiet"], taken, **pipes)
            self._free -= set(taken)
            self._running[job] = Running(job, process, taken, time.time())
            self._journal.write("start", trial=job.trial, run=job.run, epochs=job.epochs, slots=len(taken))

    def _collect(self) -> None:
        """See which runs have ended, how fast they were, what their start has cost, and what became of them."""
        for each in [each for each in self._running.values() if each.process.poll() is not None]:
            del self._running[each.job]
            self._free |= set(each.slots)
            history, line = self._look(each)
            trained = (own := history.attempts[-1]).last - own.start["time"] if history else 0.0
            about = {"trial": each.job.trial, "run": each.job.run, "slots": len(each.slots)}
            self._journal.write("end", **about, start_seconds=max(0.0, time.time() - each.began - trained))
            if history:
                self._speeds.starts.append(history.attempts[-1].start["time"] - each.began)
            if line and line["samples_per_second"]:
                self._speeds.rates.setdefault(each.job.trial, {})[len(each.slots)] = line["samples_per_second"]
            self._record_end(each)
        if (now := time.monotonic()) - self._beat > _BEAT:
            self._beat = now
            self._journal.write("beat")

    def _look(self, each: Running) -> tuple[History | None, Event | None]:
        """The journal of a run and its newest line, as far as this start has written them."""
        folder = self._folder(each.job)
        history = load_history(folder) if (folder / "journal.jsonl").is_file() else History()
        if not history.attempts or history.attempts[-1].start["time"] < each.began:
            return None, None
        line = history.last_train
        return history, line if line and line["time"] > each.began else None

    def _record_end(self, each: Running) -> None:
        """Record what a run that has ended has reached, or why it never will; else it waits for another start."""
        job, folder, trial = each.job, self._folder(each.job), self.trials[each.job.trial]
        result = read_rung(folder, self.study, job.epochs)
        if trial.state != "waiting":
            return
        if result.values is not None:
            self._record(job, result)
        elif not each.ending:
            said, summary = read_error((folder / "output.log").read_text(errors="replace")), load_summary(folder)
            message = said or f"exit code {each.process.returncode}"
            reason = str(summary.get("error", message))
            if any(words in reason for words in _NO_SPACE):
                problem = f"the disk of {self.path} is full, so the study pauses: {reason}"
                raise TrainingError(problem, remedy="free some space, and run the same command again")
            self._tries[job.trial, job.run, result.epochs] += 1
            final = each.process.returncode == WRONG_REQUEST or summary.get("status") == "failed"
            if (final and _KILLED not in message) or self._tries[job.trial, job.run, result.epochs] >= _TRIES:
                self._fail(trial, "diverged" if _NAN in reason else "failed", reason)

    def _record(self, job: Job, result: RungResult) -> None:
        """A run has reached its rung; so has its trial, if the runs of all seeds have."""
        self._reached[job] = result
        trial = self.trials[job.trial]
        jobs = [self._job(trial, run) for run in range(self.study.seeds)]
        results = [self._reached[each] for each in jobs if each in self._reached]
        if len(results) < len(jobs):
            return
        every = zip(*(each.values or () for each in results), strict=True)
        values = [float(f"{math.fsum(each) / len(each):.6g}") for each in every]  # below is rounding of sums
        if not all(map(math.isfinite, values)):
            self._fail(trial, "diverged", f"NaN after epoch {job.epochs}")
            return
        whole = all(each.completed for each in results)
        trial.state, trial.values[job.epochs] = "completed" if whole else "paused", values
        if whole:  # perhaps since it stopped early
            trial.values[self.study.rungs[-1]] = values
            trial.fingerprint = " ".join(str(each.fingerprint) for each in results)
        self._write(trial)
        self.say(f"trial {trial.number}: {', '.join(f'{value:g}' for value in values)} after epoch {job.epochs}")

    def _fail(self, trial: Trial, state: str, error: str) -> None:
        trial.state, trial.error = state, error
        self._write(trial)
        self.say(f"trial {trial.number}: {state}: {error}")
        self._end(each for each in self._running.values() if each.job.trial == trial.number)

    def _end(self, running: Iterable[Running]) -> None:
        for each in running:
            each.ending = True
            each.process.send_signal(self.slots.stop)

    def _widen(self) -> None:
        """Stop a run that goes on with the free slots as well, where that is worth a restart."""
        if not self._free or not self._speeds.starts or self._list_waiting() or time.monotonic() < self._looked + _LOOK:
            return
        self._looked, needs = time.monotonic(), {}
        for each in self._running.values():
            most = len(self.slots.pick(self._free | set(each.slots), len(self.slots.names)))
            wider = not each.ending and each.job.widen(len(each.slots), most)
            history, line = self._look(each) if wider else (None, None)
            if history and line and line["samples_per_second"]:
                left = each.job.epochs * history.plan["samples"] - line["samples"]
                seconds = left / line["samples_per_second"] - (time.time() - line["time"])
                needs[each.job] = (len(each.slots), most, max(0.0, seconds))
        if chosen := choose_widening(needs, self._speeds, median(self._speeds.starts)):
            self.say(f"trial {chosen[0].trial}: goes on with {chosen[1]} slots")
            self._end([self._running[chosen[0]]])

    def _folder(self, job: Job) -> Path:
        return self.study.run_folder(self.path, job.trial, job.run)


def read_error(printed: str) -> str:
    """The last error message that a process has printed, but for srun's note of its exit code; "" for none."""
    return ["", *re.sub(r"srun: error: .* Exited with exit code \d+", "", printed).split("error: ")[1:]][-1].strip()


def list_sets(params: Params) -> list[str]:
    """A trial's settings as --set takes them."""
    return [f"{key}={dump_value(value)}" for key, value in params.items()]


def plan_batch(study: Study, params: Params, base: str) -> tuple[list[str], int]:
    """A trial's settings with its global batch, for any number of workers; and the micro-batches of a step."""
    batch = resolve({}, list_sets(params), base).batch
    whole = batch.global_size or int(batch.size) * (batch.grad_accum_steps or 1) * study.gpus_per_trial
    return [*list_sets(params), "grad_accum_steps=null", f"global_batch_size={whole}"], -(-whole // int(batch.size))


def parse_budget(text: str) -> tuple[float, str]:
    """'16slot-hours' or '200epochs', "" for no limit; ValueError: neither."""
    if not (form := re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)(slot-hours|epochs)|", text)):
        raise ValueError("must be so many slot-hours or epochs, such as 16slot-hours or 200epochs")
    return float(form[1] or "inf"), form[2]
