"""Numbers as text: one line of training, the result of a run, its tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from multigpu_cli.capabilities import UNITS

_MANY_CLASSES = 20
_SHOWN = ("epoch", "episode_reward", "episode_length", "mean_loss", "lr")
_LABELS = {"mean_loss": "loss since the last line"}  # not to be taken for an epoch's train_loss
_RATES = {*(f"{unit}_per_second" for unit in UNITS), "all_tokens_per_second", "padding_share"}
_SHORT = {"event", "time", "samples", "step", *_SHOWN, *_RATES}
_POSITION = {"event", "time", "step", "split", "epoch"}  # all fields of an `eval` event except results
_WIDEST_NAME = 32  # letters
Cells = list[tuple[str, str]]  # label and text of each


def format_train_line(fields: Mapping[str, Any], total_steps: int) -> str:
    """A `train` event as a line, with the time left at the pace of the steps since the last one."""
    total = f"/{total_steps}" if total_steps else ""
    parts = [f"step {fields['step']}{total}"]
    parts += [f"{format_label(name)} {format_number(fields[name])}" for name in _SHOWN if fields.get(name) is not None]
    parts += _rate(fields)
    if total_steps > fields["step"] and fields.get("step_ms"):
        parts.append(f"{format_duration((total_steps - fields['step']) * fields['step_ms'] / 1e3)} left")
    return "  ".join(parts)


def format_other_numbers(fields: Mapping[str, Any]) -> str:
    """The numbers of a `train` event that its line does not show."""
    rest = {name: value for name, value in fields.items() if name not in _SHORT and value is not None}
    return "  ".join(f"{format_label(name)} {_readable(name, value)}" for name, value in rest.items())


def format_bar_facts(fields: Mapping[str, Any]) -> list[str]:
    """The facts beside the progress bar, the most important first; with the memory of the fullest GPU."""
    facts = [f"loss {format_number(fields['loss'])}"] if fields.get("loss") is not None else []
    facts += _rate(fields)
    if fields.get("memory_reserved"):
        facts.append(f"GPU {_readable('memory', max(list_values(fields['memory'])))}")
    return facts


def list_values(field: Sequence[float] | Mapping[str, float]) -> Sequence[float]:
    """The values of all ranks in a field of a `train` event; of many ranks the least, the mean and the greatest."""
    return [field[part] for part in ("min", "mean", "max")] if isinstance(field, Mapping) else field


def format_eval_line(fields: Mapping[str, Any]) -> str:
    """An `eval` event as a line, with all its metrics."""
    measures = {name: value for name, value in fields.items() if name not in _POSITION and value is not None}
    samples = measures.pop("samples", None)
    parts = [f"epoch {fields['epoch']:<3}"] if fields.get("epoch") is not None else []
    parts += [str(fields.get("split", "val")).ljust(4)]
    parts += [f"{format_label(name)} {format_metric(name, value):<8}" for name, value in measures.items()]
    return "  ".join([*parts, f"({samples:,} samples)" if samples is not None else ""]).rstrip()


def format_epoch(epoch: int, epochs: int, metrics: Mapping[str, Any], rate: float, seconds: float) -> Cells:
    """The numbers of an epoch as label and text; metrics without a value are left out."""
    numbers = {name: value for name, value in metrics.items() if value is not None}
    cells = [(format_label(name), format_metric(name, value, decimals=4)) for name, value in numbers.items()]
    return [("epoch", f"{epoch}/{epochs}"), *cells, ("samples/s", f"{rate:,.0f}"), ("seconds", f"{seconds:.1f}")]


def format_result_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The result of a run as label → value, without what the run does not have."""
    rows = [("status", _status(summary))]
    rate, times = summary.get("samples_per_second"), summary.get("step_ms") or {}
    speed = [f"{rate:,.0f} samples/s"] if rate is not None else []
    if times.get("p50") is not None:
        speed.append(f"a step takes {times['p50']:.1f} ms (median), 95 % at most {times['p95']:.1f} ms")
    final = dict(summary.get("final") or {})
    if summary.get("status") == "stopped" and "train_loss" in final:
        final["train_loss, epoch so far"] = final.pop("train_loss")
    wanted = sorted(final, key=lambda name: (not name.startswith("test"), "accuracy" not in name))
    rows += [(format_label(name), format_metric(name, final[name])) for name in wanted if final[name] is not None]
    best = summary.get("best") or {}
    if best.get("epoch") is not None:
        named = [(name, value) for name, value in best.items() if name.startswith("val_") and value is not None]
        metrics = [f"{format_label(name)} {format_metric(name, value)}" for name, value in named]
        by = f"by {format_label(summary['best_by'])}; " if summary.get("best_by") else ""
        rows.append(("best epoch", f"{best['epoch']} ({by}{', '.join(metrics)})" if metrics else str(best["epoch"])))
    rows.append(("speed", "; ".join(speed)))
    rows += [(format_label(name), str(summary[name])) for name in ("fingerprint", "save_dir") if summary.get(name)]
    return [(name, text) for name, text in rows if text]


def format_result_line(summary: Mapping[str, Any]) -> str:
    """The result of a run for --quiet."""
    shown = ("status", "test accuracy", "test reward", "test loss", "val accuracy", "val reward", "save dir")
    return "  ".join(f"{name} {text}" for name, text in format_result_rows(summary) if name in shown)


def format_class_table(per_class: Sequence[Mapping[str, Any]], class_names: Sequence[str]) -> Iterator[str]:
    """One line a class; of many classes only those with the lowest F1."""
    named = [
        {"class": row.get("class", _name_class(class_names, at))} | {name: row[name] for name in row if name != "class"}
        for at, row in enumerate(per_class)
    ]
    many = len(named) > _MANY_CLASSES
    chosen = sorted(named, key=lambda row: row.get("f1") or 0.0)[:_MANY_CLASSES] if many else named
    yield ""
    cells = [[f"{each:.4f}" if isinstance(each, float) else str(each) for each in row.values()] for row in chosen]
    yield from _align([list(named[0]), *cells])
    if many:
        yield f" the {len(chosen)} weakest of {len(named)} classes; all of them are in summary.json"


def format_confusion_table(
    confusion: Sequence[Sequence[int]], class_names: Sequence[str], width: int | None = None
) -> Iterator[str]:
    """The counts, true classes down and predicted ones across (by index), if the table fits."""
    count = len(confusion)
    head = ["true \\ predicted", *(str(at) for at in range(count))]
    names = [_name_class(class_names, at) for at in range(count)]
    labels = [name if name == str(at) else f"{at} {name}" for at, name in enumerate(names)]
    table = _align([head, *([label, *map(str, row)] for label, row in zip(labels, confusion, strict=True))])
    yield ""
    if count > _MANY_CLASSES or (width is not None and any(len(line) > width for line in table)):
        yield f" the confusion matrix of {count} classes is in summary.json"
    else:
        yield from table


def format_duration(seconds: float) -> str:
    """'42 s', '3 min 20 s', '5 h 12 min', '3 d 4 h'."""
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {smaller}"
    return f"{seconds:.0f} s"


def format_label(name: str) -> str:
    """A field's name as a label: `test_accuracy` → 'test accuracy'."""
    return _LABELS.get(name, name.replace("_", " "))


def format_metric(name: str, value: Any, *, decimals: int | None = None) -> str:
    """A metric as text: accuracies in per cent, everything else as a number, with decimals where they suffice."""
    if "accuracy" in name:
        return f"{100 * float(value):.2f} %"
    enough = decimals is not None and isinstance(value, float) and 1e-2 <= abs(value) < 1e4
    return f"{value:.{decimals}f}" if enough else format_number(value)


def format_number(value: Any) -> str:
    """Four significant digits of a float, anything else as it is."""
    return f"{value:#.4g}".rstrip(".") if isinstance(value, float) else str(value)


def _rate(fields: Mapping[str, Any]) -> list[str]:
    unit = next((unit for unit in UNITS if f"{unit}_per_second" in fields), "samples")
    rate, tokens = fields.get(f"{unit}_per_second"), fields.get("all_tokens_per_second")
    if rate is None:
        return []
    if tokens is None:
        return [f"{rate:,.0f} {format_label(unit)}/s"]
    padding = _readable("padding_share", fields["padding_share"])
    if unit != "tokens":
        return [f"{rate:,.0f} {format_label(unit)}/s", f"{tokens:,.0f} tokens/s", f"padding {padding}"]
    return [f"{rate:,.0f} of {tokens:,.0f} tokens/s learned", f"padding {padding}"]


def _readable(name: str, value: Any) -> str:
    """Bytes as MiB or GiB, shares in per cent; the values of several ranks with slashes between them."""
    if isinstance(value, list):
        return " / ".join("-" if each is None else _readable(name, each) for each in value)
    if isinstance(value, Mapping):
        return f"{_readable(name, list_values(value))}, worst rank {value['worst_rank']}"
    if "memory" in name:
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    return f"{100 * value:.1f} %" if name.endswith("share") or name == "mfu" else format_number(value)


def _status(summary: Mapping[str, Any]) -> str:
    steps = f"{summary['steps']:,} steps" if summary.get("steps") is not None else ""
    seconds = f"in {summary['train_seconds']:.1f} s" if summary.get("train_seconds") is not None else ""
    how = " ".join(part for part in (str(summary.get("status", "")), steps, seconds) if part)
    return f"{how}; run the same command again to resume" if summary.get("status") == "stopped" else how


def _name_class(class_names: Sequence[str], at: int) -> str:
    name = class_names[at] if at < len(class_names) else str(at)
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    """Cells as lines: the first column aligned left, the others right."""
    first, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for label, *cells in table:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(" " + "  ".join([label.ljust(first), *aligned]))
    return lines


def format_bytes(count: float) -> str:
    """'1.50 GiB', '0.20 MiB'."""
    units = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}
    name = next((name for name, size in units.items() if count >= 0.1 * size), "KiB")
    return f"{count / units[name]:.2f} {name}"
