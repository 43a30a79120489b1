"""--data arrow, jsonl and tar: from rows on the disk to a DataSource: inputs, target, and how rows are divided."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import Signature, signature
from operator import attrgetter
from typing import Annotated, Any

import numpy as np

from multigpu_cli.config.types import choice, integer
from multigpu_cli.data.files import find_part_files
from multigpu_cli.data.notation import Notation, describe_numbers_as_classes, is_missing
from multigpu_cli.data.order import RowSelection, divide_rows
from multigpu_cli.data.rows.arrow import ArrowStore, find_arrow_files
from multigpu_cli.data.rows.dataset import ImageRows, NumberRows, RowRoles, TokenRows, read_texts
from multigpu_cli.data.rows.jsonl import JsonStore
from multigpu_cli.data.rows.store import Column, RowStore
from multigpu_cli.data.rows.tar import TarStore
from multigpu_cli.data.source import FEW, DataSource, Kind, check_precision
from multigpu_cli.data.transforms import IMAGENET, Standardised, check_pillow, choose_shorter_side, model_input_shape
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.runtime.model_call import TARGETS

LARGE = 2**24  # rows; more of them are shuffled in blocks
BLOCK = 4096  # rows of such a block
_SCALED_BY = 4096  # training rows that teach means and deviations
_TOKENS = "input_ids"

Parts = Mapping[str, tuple[RowStore, RowSelection]]
Built = tuple[dict[str, Any], dict[str, Any]]  # the samples of each part, and arguments of their DataSource


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The arguments of a dataset of rows; `size` and `resize` are of images, as in --data image-folder."""

    target: str | None = None  # the column to predict; None: the one called label, target or the like
    columns: Sequence[str] | str | None = None  # the inputs; None: all others
    ignore: Sequence[str] | str = ()  # columns to leave out
    kind: Kind = "auto"  # classification, regression, or auto: words, and whole numbers of up to 20 values, are classes
    decimal: Annotated[str, choice("auto", "comma", "point")] = "auto"  # the sign before a fraction in texts
    classes: int | Sequence[Any] | None = None  # how many, or their names or values; None: to be found in the rows
    vocabulary: int | None = None  # how many tokens there are, where rows are tokens
    size: Annotated[int, integer(1)] = 64
    resize: Annotated[int | None, integer(1)] = None
    augment: bool = True  # cut and mirror training images at random


def build_row_source(
    name: str, stores: Mapping[str, RowStore], mode: str, seed: int, options: RowOptions
) -> DataSource:
    """The samples of stores called train, and perhaps val and test; what is missing is divided from train."""
    train = stores["train"]
    target, inputs = _choose_columns(name, train, options)
    for store in stores.values():
        _check_same_columns(name, train, store, [*inputs, target])
    parts = _divide(name, stores, seed)
    block = BLOCK if len(parts["train"][1]) > LARGE else None
    if inputs[0].name == _TOKENS and len(inputs) == 1:
        samples, facts = _build_tokens(inputs[0], target, parts, options)
    else:
        notation, doubt = _learn_notation(name, train, target, options)
        labels, names = (None, ()) if notation else _find_classes(name, train, target, options)
        doubt = doubt or _doubt_classes(train, target, names, options)
        roles = RowRoles(
            inputs=tuple(column.name for column in inputs),
            target=target.name,
            stacked=inputs[0].kind == "number" and not inputs[0].shape,
            labels=labels,
            num_classes=len(names),
            notation=notation,
        )
        images = inputs[0].kind == "bytes"
        rounded = [each for each in inputs if roles.stacked or each.dtype == "float64"] if not images else []
        _check_rounding(name, *parts["train"], [*rounded, *([] if names else [target])], notation)
        samples, facts = (partial(_build_images, name, options) if images else _build_numbers)(parts, roles, mode)
        task = "classification" if names else "regression"
        facts |= {"num_classes": len(names), "class_names": names, "task": task}
        facts["warnings"] = (doubt,) if doubt else ()
    return DataSource(**samples, shuffle_block=block, **facts)


def _choose_columns(name: str, store: RowStore, options: RowOptions) -> tuple[Column, list[Column]]:
    """The target and the inputs."""
    ignored, asked = (_list_names(given) for given in (options.ignore, options.columns or ()))
    for setting, column in [("ignore", each) for each in ignored] + [("columns", each) for each in asked]:
        _find_column(store, column, setting)
    target = _find_target(name, store, options.target, ignored)
    chosen = asked or [each for each in store.columns if each not in (target.name, *ignored)]
    if not asked and _TOKENS in store.columns and _TOKENS not in ignored:
        chosen = [_TOKENS]
    if not chosen:
        raise RequestError(f"--data {name}: {store.label} has no column but the target, {target.name!r}")
    inputs = [store.columns[each] for each in chosen]
    kinds = {(column.kind, bool(column.shape)) for column in inputs}
    words = ", ".join(f"{column.name} ({column.description})" for column in inputs[:8])
    if unread := [column for column in inputs if column.kind in ("text", "other")]:
        raise RequestError(
            f"--data {name}: column {unread[0].name!r} holds {unread[0].description}, neither numbers nor images",
            remedy=f"data.ignore={unread[0].name}, or data.columns=[…], the inputs among {words}",
        )
    if len(kinds) > 1 or (len(inputs) > 1 and kinds != {("number", False)}):
        problem = f"--data {name}: these inputs can't be combined: {words}"
        raise RequestError(problem, remedy=f"data.columns={inputs[0].name}, one column, or several of single numbers")
    for used in (*inputs, target):
        if used.null_count:
            location = f", the first at {used.first_null}" if used.first_null else ""
            problem = f"--data {name}: column {used.name!r} has {used.null_count:,} rows without a value{location}"
            raise RequestError(problem, remedy=f"fill or leave out such rows before, or data.ignore={used.name}")
    return target, inputs


def _list_names(given: Sequence[str] | str) -> list[str]:
    return [str(each) for each in ([given] if isinstance(given, str) else given)]


def _find_column(store: RowStore, column: str, setting: str) -> Column:
    if column not in store.columns:
        raise RequestError(
            f"data.{setting}: {store.label} has no column {column!r}", remedy=did_you_mean(column, list(store.columns))
        )
    return store.columns[column]


def _find_target(name: str, store: RowStore, target: str | None, ignored: Sequence[str]) -> Column:
    if target is not None:
        return _find_column(store, str(target), "target")
    known = [each for each in store.columns if each in TARGETS and each not in ignored]
    if not known and _TOKENS in store.columns:
        return store.columns[_TOKENS]
    if len(known) != 1:
        words = ", ".join(list(store.columns)[:10])
        raise RequestError(
            f"--data {name}: which column is the target? ({words})", remedy=f"--set data.target={[*store.columns][-1]}"
        )
    return store.columns[known[0]]


def _check_same_columns(name: str, train: RowStore, store: RowStore, used: Sequence[Column]) -> None:
    get_type = attrgetter("kind", "shape", "class_names")
    for column in used:
        other = store.columns.get(column.name)
        if other is None or get_type(other) != get_type(column):
            problem = f"--data {name}: column {column.name!r} differs between {train.label} and {store.label}"
            raise RequestError(problem, remedy="parts of one dataset, with the same columns")


def _divide(name: str, stores: Mapping[str, RowStore], seed: int) -> Parts:
    train = stores["train"]
    parts = {part: (store, RowSelection(len(store))) for part, store in stores.items()}
    held = [] if "val" in stores else ["val"] if "test" in stores else ["val", "test"]
    selections = divide_rows(len(train), len(held), seed, f"--data {name}: {train.label}")
    return parts | {part: (train, rows) for part, rows in zip(["train", *held], selections, strict=True)}


_DECIMALS = {"auto": ".,", "comma": ",", "point": "."}  # the likeliest first


def _learn_notation(name: str, store: RowStore, target: Column, options: RowOptions) -> tuple[Notation | None, str]:
    """Return how the target's texts write numbers, with a warning or ""; None if the texts are labels.

    Amounts, dates and fractions are numbers, as in --data csv. Whole numbers that are texts are labels, except if
    data.kind asks for a regression. RequestError: it does, and a text is not a number.
    """
    if target.kind != "text" or options.kind == "classification" or options.classes is not None:
        return None, ""
    rows = _spread_evenly(len(store))
    cells = dict.fromkeys(text for text in store.read(target.name, rows) if not is_missing(text))
    notation, doubt = Notation.learn(cells, _DECIMALS[options.decimal])
    if options.kind == "regression":
        read_texts(store, target.name, rows, notation)
        return notation, doubt
    numbers = [number for cell in cells if (number := notation.read(cell)) is not None]
    are_numbers = len(numbers) == len(cells) and (notation.is_amount or not all(map(float.is_integer, numbers)))
    return (notation, doubt) if are_numbers else (None, "")


def _doubt_classes(store: RowStore, target: Column, names: Sequence[str], options: RowOptions) -> str:
    """Return a warning if the texts of the target look like numbers, and each became a class; otherwise ""."""
    if target.kind != "text" or options.kind != "auto" or options.classes is not None:
        return ""
    return describe_numbers_as_classes(f"{store.label}: column {target.name!r}", names, len(store))


def _find_classes(
    name: str, store: RowStore, target: Column, options: RowOptions
) -> tuple[dict[Any, int] | None, tuple[str, ...]]:
    """Return the class number of each target value (None: values are used as they are), and the class names."""
    if target.kind not in ("number", "text"):
        problem = f"--data {name}: column {target.name!r} holds {target.description}, no {options.kind} target"
        raise RequestError(problem, remedy="data.target=…, a column of numbers or labels")
    if options.kind == "regression" or (target.kind == "number" and (target.shape or not target.is_integer)):
        if options.kind == "classification":
            raise RequestError(f"data.kind: column {target.name!r} holds {target.description}", remedy="regression")
        return None, ()
    if options.classes is None and target.class_names:
        return None, target.class_names
    if isinstance(options.classes, int):
        if options.classes < 2:
            raise RequestError(f"data.classes: {options.classes}", remedy="at least 2, or the values of the classes")
        return None, tuple(map(str, range(options.classes)))
    values = store.list_values(target.name) if options.classes is None else list(options.classes)
    if options.kind == "auto" and options.classes is None and target.kind == "number" and len(values) > FEW:
        return None, ()
    values.sort()
    return {value: number for number, value in enumerate(values)}, tuple(map(str, values))


def _build_tokens(column: Column, target: Column, parts: Parts, options: RowOptions) -> Built:
    if options.vocabulary is None:
        problem = f"--data: column {column.name!r} holds tokens, and the size of their vocabulary is not known"
        raise RequestError(problem, remedy="for example --set data.vocabulary=50257")
    if not column.is_integer or len(column.shape) != 1 or target.shape != column.shape:
        problem = f"--data: column {column.name!r} holds {column.description}, and {target.name!r} {target.description}"
        raise RequestError(problem, remedy="lists of whole numbers, all of one length")
    roles = RowRoles(inputs=(column.name,), target=target.name, num_classes=options.vocabulary)
    samples = {part: TokenRows(store, rows, roles) for part, (store, rows) in parts.items()}
    facts = {"input_shape": column.shape, "num_classes": options.vocabulary, "model": "gpt", "task": "language-model"}
    return samples, facts


def _build_images(name: str, options: RowOptions, parts: Parts, roles: RowRoles, mode: str) -> Built:
    check_pillow(name)
    sizes = options.size, choose_shorter_side(options.size, options.resize)
    samples = {
        part: ImageRows(store, rows, roles, sizes, augment=options.augment and part == "train")
        for part, (store, rows) in parts.items()
    }
    shape = model_input_shape((3, options.size, options.size), mode)
    return samples, {"input_shape": shape, "prepare": Standardised(*IMAGENET, mode), "model": "resnet18"}


def _build_numbers(parts: Parts, roles: RowRoles, mode: str) -> Built:
    """Single numbers are standardised by what some training rows, spread evenly, teach; arrays stay as they are."""
    samples = {part: NumberRows(store, rows, roles) for part, (store, rows) in parts.items()}
    train = samples["train"]
    for rows in samples.values():
        if roles.stacked and rows is not train:
            rows.fetch_batch(_spread_evenly(len(rows)))  # most NaN is refused before training, the rest with its batch
    inputs, targets = train.fetch_batch(_spread_evenly(len(train)))
    facts: dict[str, Any] = {
        "input_shape": model_input_shape(inputs.shape[1:], mode),
        "num_outputs": int(targets.shape[1:].numel()),
        "model": "mlp",
    }
    if roles.stacked:
        moments = inputs.double()
        mean, deviation = moments.mean(dim=0).tolist(), moments.std(dim=0, correction=0).tolist()
        facts["prepare"] = Standardised(tuple(mean), tuple(deviation), "flatten")
    if not roles.num_classes and targets.ndim == 1:
        facts["target_scale"] = float(targets.mean()), float(targets.std(correction=0)) or 1.0
    return samples, facts


def _spread_evenly(count: int) -> np.ndarray:
    """Return up to `_SCALED_BY` indices below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, _SCALED_BY)).astype(np.int64))


def _check_rounding(
    name: str, store: RowStore, selection: RowSelection, columns: Sequence[Column], notation: Notation | None
) -> None:
    """Raise RequestError if float32 rounds what tells some rows' numbers apart, in a column that becomes float32."""
    rows = selection.find_rows(_spread_evenly(len(selection)))
    for column in columns:
        values = store.read(column.name, rows)
        if notation and column.kind == "text":
            values = read_texts(store, column.name, rows, notation)
        check_precision(values, f"--data {name}: {store.label}: column {column.name!r}")


_TAR = "a .tar shard or a folder with several, with members such as KEY.jpg and KEY.cls"
_JSON = "one .jsonl file, one JSON object per line; or a folder with train.jsonl, validation.jsonl, test.jsonl"

Load = Callable[..., DataSource]


def take_options(*but: str) -> Callable[[Load], Load]:
    """Let a function of `RowOptions` take them one by one, as the user's data.args name them, but for some."""

    def decorate(load: Load) -> Load:
        @wraps(load)
        def load_with_options(data_dir: str | None, mode: str, seed: int, **options: Any) -> DataSource:
            return load(data_dir, mode, seed, RowOptions(**options))

        own = list(signature(load).parameters.values())[:-1]
        taken = [each for name, each in signature(RowOptions).parameters.items() if name not in but]
        load_with_options.__signature__ = Signature([*own, *taken])  # type: ignore[attr-defined]
        return load_with_options

    return decorate


@take_options()
def load_arrow_rows(data_dir: str | None, mode: str, seed: int, options: RowOptions) -> DataSource:
    """The rows of a folder that `save_to_disk` wrote, of a Dataset or a DatasetDict; or of .arrow files."""
    stores = {part: ArrowStore(files) for part, files in find_arrow_files(data_dir).items()}
    return build_row_source("arrow", stores, mode, seed, options)


@take_options("vocabulary")
def load_tar_rows(data_dir: str | None, mode: str, seed: int, options: RowOptions) -> DataSource:
    """The samples of shards; where nothing is said, the target is .cls, and the input the only image or array."""
    files = find_part_files("tar", data_dir, (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"), _TAR)
    stores = {part: TarStore(each) for part, each in files.items()}
    known = stores["train"].columns
    if options.target is None and "cls" in known:
        options = replace(options, target="cls")
    wide = [name for name, column in known.items() if column.kind == "bytes" or column.shape]
    if options.columns is None and len(wide) == 1:
        options = replace(options, columns=wide)
    return build_row_source("tar", stores, mode, seed, options)


@take_options("size", "resize", "augment")
def load_json_rows(data_dir: str | None, mode: str, seed: int, options: RowOptions) -> DataSource:
    """The records of a file or folder."""
    files = find_part_files("jsonl", data_dir, (".jsonl", ".ndjson"), _JSON)
    return build_row_source("jsonl", {part: JsonStore(each) for part, each in files.items()}, mode, seed, options)
