"""`Plan`: the resolved values of a run with their reasons, as --dry-run shows them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from multigpu_cli.capabilities import PLAN_NOTES
from multigpu_cli.errors import pluralize
from multigpu_cli.planning.batch import BatchPlan
from multigpu_cli.planning.schedule import Rate, Schedule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The resolved values of a run, with reasons."""

    placement_reason: str  # strategy and device, with the reason
    strategy: str  # a single word, for the journal
    device: str  # a single word, for the journal
    batches: BatchPlan
    rate: Rate
    schedule: Schedule
    base_lr: float | None  # that the learning rate was scaled from
    base_batch_size: int
    precision: str  # number format, with the reason
    precision_reason: str
    description: str  # data, model and task
    resume_reason: str  # what the run starts or resumes from
    save_dir: str  # the run folder
    epochs: int  # passes over the data, as requested
    threads: int  # CPU threads of each worker
    unused_flags: list[str]  # flags that were given and have no effect in this run
    scheduler_every: int = 0  # optimizer steps for each step of the user's own scheduler; 0 without one
    batch_size_reason: str = ""  # the reason for the micro-batch, if --batch-size did not give it
    notes: Mapping[str, str | list[str]] = field(default_factory=dict)  # what not every run has, by PLAN_NOTES' keys
    data: str = ""  # what a language model's samples are made of, where that is too long for the description
    optimizer: str = ""  # its name, weight decay and clipping; empty before it is built

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the printed plan."""
        idle, threads = self.unused_flags, pluralize(self.threads, "CPU thread")
        return [
            ("what", self.description),
            *([("data", self.data)] if self.data else []),
            ("where", self.placement_reason + ("" if self.device == "cpu" else f"; {self.device}")),
            ("batch", self._batch()),
            ("learning rate", self.rate.reason + ("" if self.scheduler_every else f"; {self.schedule.shape} schedule")),
            *([("optimizer", self.optimizer)] if self.optimizer else []),
            ("length", self._length()),
            ("warm-up", self._warmup()),
            ("precision", f"{self.precision} ({self.precision_reason}), {threads} per worker"),
            *self._note_rows(),
            ("starts", self.resume_reason),
            ("saves to", self.save_dir),
            *([("no effect", f"{', '.join(idle)}: not with this device, strategy or dataset")] if idle else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the journal and --json."""
        batches, schedule = self.batches, self.schedule
        notes = {key: self.notes.get(key, [] if "{}" in label else "") for key, label in PLAN_NOTES.items()}
        notes.pop("compiled", None)
        return {
            "strategy": self.strategy,
            "because": self.placement_reason,
            "device": self.device,
            "workers": batches.workers,
            "batch_size": batches.micro_batch,
            "grad_accum_steps": batches.accumulation,
            "global_batch_size": batches.global_batch,
            "samples": batches.samples,
            "left_over": batches.last_batch_samples,
            "drop_last": batches.drop_last,
            "learning_rate": schedule.peak,
            "base_lr": self.base_lr,
            "base_batch_size": self.base_batch_size,
            "lr_rule": self.rate.rule,
            "schedule": schedule.shape,
            "warmup_steps": schedule.warmup_steps,
            "steps_per_epoch": batches.steps_per_epoch,
            "total_steps": schedule.total_steps,
            "precision": self.precision,
            "threads": self.threads,
            **notes,
            "contents": f"{self.description}; {self.data}" if self.data else self.description,
            "optimizer": self.optimizer,
            "resume": self.resume_reason,
            "save_dir": self.save_dir,
        }

    def warnings(self) -> Iterator[str]:
        """What a user should change before a long run."""
        b = self.batches
        if b.micro_batches < b.workers:
            fitting = -(-b.global_batch // b.workers)
            yield (
                f"only {b.micro_batches} of {b.workers} workers have work: a step of {b.global_batch} samples is that "
                f"many micro-batches; try --batch-size {fitting} (in Python, the DataLoader's batch_size)"
            )

    def _note_rows(self) -> Iterator[tuple[str, str]]:
        for key, label in PLAN_NOTES.items():
            note = self.notes.get(key, "")
            for number, text in enumerate([note] if isinstance(note, str) else note, 1):
                if text:
                    yield label.format(number), text

    def _batch(self) -> str:
        b = self.batches
        text = f"{b.micro_batch} per device × {b.accumulation} accumulation × {pluralize(b.workers, 'worker')}"
        product = b.micro_batch * b.accumulation * b.workers
        reason = f" ({self.batch_size_reason})" if self.batch_size_reason else ""
        if product == b.global_batch:
            return f"{text} = {b.global_batch} global batch{reason}"
        up_to = f"of up to {b.micro_batch}{reason}"
        text = f"global batch {b.global_batch} as {pluralize(b.micro_batches, 'micro-batch')} {up_to}"
        shared = f", at most {b.accumulation} on each of {pluralize(b.workers, 'worker')}"
        idle = b.workers - b.micro_batches
        return text + shared + (f"; {pluralize(idle, 'worker')} idle" if idle > 0 else "")

    def _length(self) -> str:
        b, total = self.batches, self.schedule.total_steps
        steps, epochs = pluralize(total, "optimizer step"), pluralize(total / b.steps_per_epoch, "epoch")
        text = f"{steps}: {b.steps_per_epoch} per epoch, {epochs}"
        if total < b.steps_per_epoch * self.epochs:
            text += f" of {self.epochs}, cut by --max-steps"
        if b.last_batch_samples:
            fate = "left out (--drop-last)" if b.drop_last else "trained as a short batch"
            verb = "is" if b.last_batch_samples == 1 else "are"
            last = "last " if b.last_batch_samples < b.samples else ""
            text += f"; the epoch's {last}{pluralize(b.last_batch_samples, 'sample')} {verb} {fate}"
        return text

    def _warmup(self) -> str:
        warmup, total = self.schedule.warmup_steps, self.schedule.total_steps
        if not warmup:
            return "none"
        text = f"{pluralize(warmup, 'optimizer step')} from near zero to {self.schedule.peak:.4g}"
        return text + f", which --max-steps cuts short at {total}" if warmup >= total else text
