"""TensorBoard event files, derived from the journal's events as they are written."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SYSTEM = {"samples_per_second", "data_wait_share", "comm_share", "memory", "step_ms"}
_POSITION = {"event", "time", "step", "samples", "split"}


class TensorBoard:
    """A listener of the journal: numbers of `train` go to train/ and system/, those of `eval` to val/ or test/.

    tensorboard itself is imported at the first thing written. After a `resume`, what an earlier attempt had written
    beyond that step is marked as replaced, so that a curve never runs backwards.

    Args:
        folder: where the event files go.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._open: SummaryWriter | None = None
        self._replaced_from: int | None = None
        self._step = 0
        self._plan = ""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take over one event of the journal."""
        if event["event"] != "checkpoint":  # its thread may be behind
            self._step = event.get("step", self._step)
        match event["event"]:
            case "train" | "eval":
                for tag, value in _scalars(event):
                    self._writer().add_scalar(tag, value, self._step, walltime=event["time"])
            case "fault":
                text = f"{event.get('kind', 'fault')}: {event.get('action', '')}"
                self._writer().add_text("faults", text, self._step, walltime=event["time"])
            case "resume":
                self.close()
                self._replaced_from = self._step + 1

    def plan(self, rows: Sequence[tuple[str, str]]) -> None:
        """Keep the plan, label → value, as a table under the Text tab, once something else is written."""
        self._plan = "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)])

    def hyperparameters(self, settings: Mapping[str, Any], final: Mapping[str, float | None]) -> None:
        """Keep the settings beside the final metrics, under the HParams tab.

        Args:
            settings: may be nested; `optimizer: {lr: …}` becomes `optimizer.lr`.
            final: metrics by name; None is left out.
        """
        metrics = {f"final/{name}": value for name, value in final.items() if value is not None}
        self._writer().add_hparams(dict(_flat(settings)), metrics, run_name=".", global_step=self._step)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self) -> "SummaryWriter":
        if self._open is None:
            from torch.utils.tensorboard import SummaryWriter  # late: over a second

            self._open = SummaryWriter(str(self._folder), purge_step=self._replaced_from, flush_secs=30)
            if self._plan:
                self._open.add_text("plan", self._plan, self._step)
        return self._open


def _scalars(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    group = str(event.get("split", "val")) if event["event"] == "eval" else "train"
    for name, value in event.items():
        if name not in _POSITION:
            tag = f"{'system' if name in _SYSTEM else group}/{name}"
            parts = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
            yield from ((f"{tag}/{part}".rstrip("/"), float(number)) for part, number in parts if _is_number(number))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else str(value)
