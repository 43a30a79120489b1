"""TensorBoard event files, derived from the journal's events as they are written."""

import errno
import os
import platform
import struct
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO

from multigpu_cli.capabilities import UNITS
from multigpu_cli.monitor.journal import Warn

_SYSTEM = {
    *(f"{unit}_per_second" for unit in (*UNITS, "all_tokens", "rollout_steps") if unit != "tokens"),
    *("padding_share", "step_ms", "step_p50_ms", "step_p95_ms"),
    *("own_ms", "mfu", "data_wait_share", "comm_share", "straggler_share", "memory", "memory_reserved"),
    *("cpu_utilisation", "gpu_utilisation", "gpu_temperature", "gpu_power", "gpu_memory_used"),
}
_CHARTS = {  # of the page "Custom Scalars": the tags of the curves of each chart, as patterns
    "Learning": {
        "loss": ["train/mean_loss", "val/loss"],
        "validation accuracy": ["val/accuracy"],
        "validation perplexity": ["val/perplexity"],
        "reward of an episode": ["train/episode_reward", "val/reward"],
        "learning rate": ["train/lr"],
        "gradient norm": ["train/grad_norm"],
    },
    "Speed": {
        "samples per second": ["system/samples_per_second"],
        "tokens per second, learned and all": ["train/tokens_per_second", "system/all_tokens_per_second"],
        "share of padding": ["system/padding_share"],
        "milliseconds per optimizer step": ["system/step_ms", "system/step_p50_ms", "system/step_p95_ms"],
        "share of time spent waiting": ["system/data_wait_share", "system/comm_share", "system/straggler_share"],
        "share of the device's peak FLOP/s": ["system/mfu"],
        "gradient noise scale, samples": ["train/noise_scale"],
    },
    "Workers": {
        "peak memory, bytes, one curve a rank": ["system/memory/.*"],
        "own milliseconds per step, one curve a rank": ["system/own_ms/.*"],
        "CPU threads at work, %, one curve a rank": ["system/cpu_utilisation/.*"],
        "GPU utilisation, %, one curve a rank": ["system/gpu_utilisation/.*"],
        "GPU temperature, °C, one curve a rank": ["system/gpu_temperature/.*"],
        "GPU power, watts, one curve a rank": ["system/gpu_power/.*"],
    },
}
_LAYOUT = [
    {"title": page, "chart": [{"title": name, "multiline": {"tag": tags}} for name, tags in charts.items()]}
    for page, charts in _CHARTS.items()
]
_POSITION = {"event", "time", "step", "samples", "split"}
_CRC32C = [reduce(lambda crc, _: crc >> 1 ^ 0x82F63B78 * (crc & 1), range(8), byte) for byte in range(256)]


class TensorBoard:
    """A listener of the journal: numbers of `train` go to train/ and system/, those of `eval` to val/ or test/.

    Of tensorboard its messages alone are imported, with the first event: its writers load cloud clients, 13 MiB. After
    a `resume`, events of an earlier attempt beyond that step are marked as replaced: a curve never runs backwards.

    torch's own SummaryWriter writes in a thread, so that a full disk shows a traceback and raises in the training loop.
    Here a file that can't be written is closed with a warning, and the next event tries another one.
    """

    def __init__(self, folder: Path | str, warn: Warn = warnings.warn) -> None:
        self._folder, self._warn = Path(folder), warn
        self._file: BinaryIO | None = None
        self._in_trouble = False
        self._replaced_from: int | None = None
        self._step = 0
        self._plan = ""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take over one event of the journal."""
        if event["event"] != "checkpoint":  # which a thread writes, perhaps later
            self._step = event.get("step", self._step)
        match event["event"]:
            case "train" | "eval":
                self._add(_scalars(list_scalars(event)), event["time"])
            case "samples":
                texts = (_quote_sample(sample) for sample in event["samples"])
                self._add([_text(f"samples/{at}", text) for at, text in enumerate(texts, 1)], event["time"])
            case "fault":
                self._add([_text("faults", f"{event.get('kind', 'fault')}: {event.get('action', '')}")], event["time"])
            case "resume":
                self.close()
                self._replaced_from = self._step + 1

    def plan(self, rows: Sequence[tuple[str, str]]) -> None:
        """Store the plan, label → value, as a table under the Text tab, together with the next event."""
        self._plan = "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)])

    def hyperparameters(self, settings: Mapping[str, Any], final: Mapping[str, float | None]) -> None:
        """Write the settings, which may be nested, with the final metrics, under the HParams tab."""
        from google.protobuf.struct_pb2 import Value
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        kinds, values = [], {}
        for name, value in flatten(settings):
            if value != {}:
                number = isinstance(value, int | float)
                kinds.append({"name": name, "type": "DATA_TYPE_FLOAT64" if number else "DATA_TYPE_STRING"})
                values[name] = Value(number_value=value) if number else Value(string_value=str(value))
        metrics = _scalars((f"final/{name}", value) for name, value in final.items() if value is not None)
        shown = {
            "experiment": {"hparam_infos": kinds, "metric_infos": [{"name": {"tag": each["tag"]}} for each in metrics]},
            "session_start_info": {"hparams": values},
            "session_end_info": {"status": "STATUS_SUCCESS"},
        }
        pages = [
            _page(f"_hparams_/{name}", "hparams", content=HParamsPluginData(**{name: part}).SerializeToString())
            for name, part in shown.items()
        ]
        self._add([*pages, *metrics], time.time())

    def close(self) -> None:
        """Close the event file; the next event opens another."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._complain(error)

    def _add(self, values: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Write values of a summary at the current step, or warn that they are lost."""
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            if self._file and os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "they were removed", str(self._folder))
            if self._file is None:
                self._folder.mkdir(exist_ok=True)
                # TensorBoard reads the files of a folder in the order of their names
                name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
                self._file = open(self._folder / name, "xb")  # noqa: SIM115 - `close` does
                for event in self._head():
                    self._file.write(_record(event))
            self._file.write(_record(Event(wall_time=seconds, step=self._step, summary={"value": values})))
            self._file.flush()
            self._in_trouble = False
        except FileNotFoundError as error:  # a new file in its place would be another program's
            self._complain(error)
        except OSError as error:
            self._complain(error)
            self.close()

    def _head(self) -> Iterator[Any]:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

        yield Event(wall_time=time.time(), file_version="brain.Event:2")
        if self._replaced_from is not None:
            again, self._replaced_from = self._replaced_from, None
            yield Event(wall_time=time.time(), step=again, session_log=SessionLog(status=SessionLog.START))
        values = [_page("custom_scalars__config__", "custom_scalars", Layout(category=_LAYOUT).SerializeToString())]
        if self._plan:
            values.append(_text("plan", self._plan))
        yield Event(wall_time=time.time(), step=self._step, summary={"value": values})

    def _complain(self, error: OSError) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            self._warn(f"TensorBoard's curves have a gap ({error}); the journal has all values")


def _record(event: Any) -> bytes:
    """An event as a file has it: its length and itself, each followed by a checksum."""
    content = event.SerializeToString()
    return b"".join(part + _checksum(part) for part in (struct.pack("<Q", len(content)), content))


def _checksum(data: bytes) -> bytes:
    """CRC-32C (RFC 3720, B.4), turned and shifted as TensorFlow has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _scalars(values: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"tag": tag, "simple_value": value} for tag, value in values]


def _text(tag: str, text: str) -> dict[str, Any]:
    return _page(f"{tag}/text_summary", "text", text.encode())


def _page(tag: str, plugin: str, text: bytes = b"", content: bytes = b"") -> dict[str, Any]:
    """What the page of a plugin shows, in the tensor or, of hyperparameters, beside it."""
    about = {"plugin_data": {"plugin_name": plugin, "content": content}}
    return {"tag": tag, "metadata": about, "tensor": {"dtype": "DT_STRING", "string_val": [text]}}


def _quote_sample(sample: Mapping[str, Any]) -> str:
    """Prompt and answer as they are: TensorBoard reads Markdown, in which an indented text is quoted."""
    answer = sample["answer"] if sample["ended"] else sample["answer"] + " …"
    return "\n\n---\n\n".join("    " + text.replace("\n", "\n    ") for text in (sample["prompt"], answer))


def list_scalars(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a `train` or `eval` event by their tags, such as train/loss; loggers use the same names."""
    group = str(event.get("split", "val")) if event["event"] == "eval" else "train"
    for name, value in event.items():
        if name not in _POSITION:
            tag = f"{'system' if name in _SYSTEM else group}/{name}"
            parts: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
            if isinstance(value, Mapping) and name in _SYSTEM:  # of many ranks
                parts = value.items()
            for part, number in parts:
                if isinstance(number, int | float) and not isinstance(number, bool):
                    yield f"{tag}/{part}".rstrip("/"), float(number)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by names with dots; an empty mapping is a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
