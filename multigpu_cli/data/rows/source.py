"""From stores of rows to a DataSource: which columns are inputs, what the target is, and how rows are divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multigpu_cli.data.order import RowSelection, divide_rows
from multigpu_cli.data.pixels import IMAGENET, Standardised, check_pillow, check_sizes, model_input_shape
from multigpu_cli.data.rows.dataset import ImageRows, NumberRows, RowRoles, TokenRows
from multigpu_cli.data.rows.store import Column, RowStore
from multigpu_cli.data.source import FEW, DataSource, to_float
from multigpu_cli.errors import RequestError, did_you_mean
from multigpu_cli.runtime.model_call import TARGETS

LARGE = 2**24  # rows; more of them are shuffled in blocks
BLOCK = 4096  # rows of such a block
_SCALED_BY = 4096  # training rows that teach means and deviations
_TOKENS = "input_ids"


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The arguments of a dataset of rows.

    Attributes:
        target: the column to predict; None where one is called label, target or the like.
        columns: the inputs; None: all others.
        ignore: columns to leave out.
        kind: classification, regression, or auto: texts, and whole numbers of at most 20 values, are classes.
        classes: how many there are, or their names or values; None where they are to be found in the rows.
        vocabulary: how many tokens there are, where rows are tokens.
        size, resize: of images, as in --data image-folder.
        augment: cut and mirror training images at random.
    """

    target: str | None = None
    columns: Sequence[str] | str | None = None
    ignore: Sequence[str] | str = ()
    kind: str = "auto"
    classes: int | Sequence[Any] | None = None
    vocabulary: int | None = None
    size: int = 64
    resize: int | None = None
    augment: bool = True


def build_row_source(
    name: str, stores: Mapping[str, RowStore], mode: str, seed: int, options: RowOptions
) -> DataSource:
    """The samples of stores called train, and perhaps val and test; what is missing is divided from train.

    Raises:
        RequestError: columns that don't exist or don't go together, or too few rows.
    """
    train = stores["train"]
    target, inputs = _choose_columns(name, train, options)
    for store in stores.values():
        _check_same_columns(name, train, store, [*inputs, target])
    parts = _divide(name, stores, seed)
    block = BLOCK if len(parts["train"][1]) > LARGE else None
    if inputs[0].name == _TOKENS and len(inputs) == 1:
        return replace(_build_tokens(inputs[0], target, parts, options), shuffle_block=block)
    labels, names = _find_classes(name, train, target, options)
    roles = RowRoles(
        inputs=tuple(column.name for column in inputs),
        target=target.name,
        stacked=inputs[0].kind == "number" and not inputs[0].shape,
        labels=labels,
        num_classes=len(names),
    )
    if inputs[0].kind == "bytes":
        return replace(_build_images(name, parts, roles, names, mode, options), shuffle_block=block)
    samples = {part: NumberRows(store, rows, roles) for part, (store, rows) in parts.items()}
    return replace(_build_numbers(samples, names, mode), shuffle_block=block)


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
            f"--data {name}: column {unread[0].name!r} holds {unread[0].description}, no numbers and no image",
            remedy=f"data.ignore={unread[0].name}, or data.columns=[…], the inputs among {words}",
        )
    if len(kinds) > 1 or (len(inputs) > 1 and kinds != {("number", False)}):
        raise RequestError(
            f"--data {name}: these inputs don't go together: {words}",
            remedy=f"data.columns={inputs[0].name}, one column, or several of single numbers",
        )
    for used in (*inputs, target):
        if used.gaps:
            raise RequestError(
                f"--data {name}: column {used.name!r} has {used.gaps:,} rows without a value",
                remedy=f"fill or leave out such rows before, or data.ignore={used.name}",
            )
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
    for column in used:
        other = store.columns.get(column.name)
        if other is None or (other.kind, other.shape, other.class_names) != (
            column.kind, column.shape, column.class_names,
        ):  # fmt: skip
            raise RequestError(
                f"--data {name}: column {column.name!r} differs between {train.label} and {store.label}",
                remedy="parts of one dataset, with the same columns",
            )


def _divide(name: str, stores: Mapping[str, RowStore], seed: int) -> dict[str, tuple[RowStore, RowSelection]]:
    train = stores["train"]
    parts = {part: (store, RowSelection(len(store))) for part, store in stores.items()}
    held = [] if "val" in stores else ["val"] if "test" in stores else ["val", "test"]
    selections = divide_rows(len(train), len(held), seed, f"--data {name}: {train.label}")
    return parts | {part: (train, rows) for part, rows in zip(["train", *held], selections, strict=True)}


def _find_classes(
    name: str, store: RowStore, target: Column, options: RowOptions
) -> tuple[dict[Any, int] | None, tuple[str, ...]]:
    """The class number of each value of the target, where they are not the same; and the names of the classes."""
    if options.kind not in ("auto", "classification", "regression"):
        raise RequestError(f"data.kind: {options.kind!r}", remedy="auto, classification or regression")
    if target.kind not in ("number", "text") or (target.kind == "text" and options.kind == "regression"):
        raise RequestError(
            f"--data {name}: column {target.name!r} holds {target.description}, no {options.kind} target",
            remedy="data.target=…, a column of numbers or labels",
        )
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


def _build_tokens(
    column: Column, target: Column, parts: Mapping[str, tuple[RowStore, RowSelection]], options: RowOptions
) -> DataSource:
    if options.vocabulary is None:
        raise RequestError(
            f"--data: column {column.name!r} holds tokens, of how many?", remedy="--set data.vocabulary=50257, say"
        )
    if not column.is_integer or len(column.shape) != 1 or target.shape != column.shape:
        raise RequestError(
            f"--data: column {column.name!r} holds {column.description}, and {target.name!r} {target.description}",
            remedy="lists of whole numbers, all of one length",
        )
    roles = RowRoles(inputs=(column.name,), target=target.name, num_classes=options.vocabulary)
    samples = {part: TokenRows(store, rows, roles) for part, (store, rows) in parts.items()}
    return DataSource(
        train=samples["train"],
        val=samples.get("val"),
        test=samples.get("test"),
        input_shape=column.shape,
        num_classes=options.vocabulary,
        model="gpt",
        task="language-model",
    )


def _build_images(
    name: str,
    parts: Mapping[str, tuple[RowStore, RowSelection]],
    roles: RowRoles,
    names: tuple[str, ...],
    mode: str,
    options: RowOptions,
) -> DataSource:
    check_pillow(name)
    check_sizes(options.size, options.resize)
    sizes = options.size, options.resize or options.size * 8 // 7
    samples = {
        part: ImageRows(store, rows, roles, sizes, augment=options.augment and part == "train")
        for part, (store, rows) in parts.items()
    }
    return DataSource(
        train=samples["train"],
        val=samples.get("val"),
        test=samples.get("test"),
        input_shape=model_input_shape((3, options.size, options.size), mode),
        num_classes=len(names),
        class_names=names,
        prepare=Standardised(*IMAGENET, mode),
        model="resnet18",
        task="classification" if names else "regression",
    )


def _build_numbers(samples: Mapping[str, NumberRows], names: tuple[str, ...], mode: str) -> DataSource:
    """Single numbers are standardised by what some training rows, spread evenly, teach; arrays stay as they are."""
    train = samples["train"]
    some = np.unique(np.linspace(0, len(train) - 1, min(len(train), _SCALED_BY)).astype(np.int64))
    inputs, targets = train.fetch_batch(some)
    scale = None
    if train.roles.stacked:
        moments = inputs.double()
        mean, deviation = moments.mean(dim=0).tolist(), moments.std(dim=0, correction=0).tolist()
        scale = Standardised(tuple(mean), tuple(deviation), "flatten")
    spread = None if names or targets.ndim > 1 else (float(targets.mean()), float(targets.std(correction=0)) or 1.0)
    return DataSource(
        train=train,
        val=samples.get("val"),
        test=samples.get("test"),
        input_shape=model_input_shape(inputs.shape[1:], mode),
        num_classes=len(names),
        num_outputs=int(targets.shape[1:].numel()),
        class_names=names,
        prepare=scale or to_float,
        target_scale=spread,
        model="mlp",
        task="classification" if names else "regression",
    )
