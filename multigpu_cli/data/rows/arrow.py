"""Rows of Arrow files, which are found and memory-mapped: a row is read in place, without the rest of the file.

pyarrow finds the columns; numbers are then read through NumPy's views of the mapping, which takes a random row of fixed
width a microsecond or two, while `datasets` takes a hundred.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multigpu_cli.config.regular_files import read_small
from multigpu_cli.data.files import find_part_files, load_pyarrow, parse_json
from multigpu_cli.data.rows.store import Column, RowStore
from multigpu_cli.errors import RequestError

_IMAGES = "Image"  # Hugging Face's name of the type


class _Chunk(NamedTuple):
    """A column in one record batch."""

    offsets: tuple[np.ndarray, ...]  # of nested lists from the outermost, of bytes or texts; none for a single number
    values: np.ndarray  # the innermost numbers, or bytes; whole rows where all have their length by the type
    bits: int | None = None  # true and false are stored eight in a byte; the first bit of the chunk


class ArrowStore(RowStore):
    """A RowStore of Arrow files, one after the other; each a stream or a file of Arrow, not compressed."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        batches = [batch for file in self.files for batch in _read_batches(file)]
        self._schema = _check_schemas(self.files, batches)
        self._batches = [batch for batch in batches if batch.num_rows]
        sizes = [batch.num_rows for batch in self._batches]
        self._starts = np.cumsum([0, *sizes])
        self._chunks: dict[str, list[_Chunk]] = {}
        self._last: tuple[bytes, list[tuple[int, int]]] = b"", []
        features = read_features(self._schema.metadata, self.label)
        self.columns = {
            field.name: _describe(field, features.get(field.name), [batch.column(at) for batch in self._batches])
            for at, field in enumerate(self._schema)
        }

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, name: str, rows: Sequence[int] | np.ndarray) -> Any:
        column = self.columns[name]
        if column.kind == "number":
            found = np.empty((len(rows), *column.shape), dtype=column.dtype)
            self.read_into(name, rows, found, range(len(rows)))
            return found
        chunks, places = self._open_column(column), self._find_places(np.asarray(rows, dtype=np.int64))
        return [self._read_bytes(chunks[chunk], row, name, column.kind) for chunk, row in places]

    def read_into(self, name: str, rows: Sequence[int] | np.ndarray, out: np.ndarray, at: Sequence[int]) -> None:
        column, places = self.columns[name], self._find_places(np.asarray(rows, dtype=np.int64))
        chunks = self._open_column(column)
        for entry, (number, row) in zip(at, places, strict=True):
            chunk = chunks[number]
            if chunk.bits is not None:
                bit = row + chunk.bits
                out[entry] = chunk.values[bit >> 3] >> (bit & 7) & 1
            else:
                out[entry] = self._read_list(chunk, row, column) if chunk.offsets else chunk.values[row]

    def list_values(self, name: str) -> list[Any]:
        """The different values of a column; reads the whole column, and no other."""
        place = self._schema.get_field_index(name)
        return list({value for batch in self._batches for value in batch.column(place).unique().to_pylist()})

    def _find_places(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """The record batch of each row, and the row in it; asked for once for each column, so the last are kept."""
        key = rows.tobytes()
        if self._last[0] != key:
            numbers = self._starts.searchsorted(rows, side="right") - 1
            places = list(zip(numbers.tolist(), (rows - self._starts[numbers]).tolist(), strict=True))
            self._last = key, places
        return self._last[1]

    def _open_column(self, column: Column) -> list[_Chunk]:
        """Return NumPy's views of a column, which are made once."""
        if column.name not in self._chunks:
            place = self._schema.get_field_index(column.name)
            chunks = [_open_chunk(batch.column(place)) for batch in self._batches]
            if column.shape and not chunks[0].offsets:  # of fixed length
                chunks = [_Chunk((), chunk.values.reshape(-1, *column.shape)) for chunk in chunks]
            self._chunks[column.name] = chunks
        return self._chunks[column.name]

    def _read_list(self, chunk: _Chunk, row: int, column: Column) -> np.ndarray:
        first, last = row, row + 1
        for offsets in chunk.offsets:
            first, last = int(offsets[first]), int(offsets[last])
        if last - first != prod(column.shape):
            raise RequestError(
                f"--data arrow: {self.label}: column {column.name!r} holds {last - first} numbers in one row and "
                f"{prod(column.shape)} in the first",
                remedy="lists of one length, cut or filled up before they are written",
            )
        return chunk.values[first:last].reshape(column.shape)

    def _read_bytes(self, chunk: _Chunk, row: int, name: str, kind: str) -> bytes | str:
        first, last = int(chunk.offsets[0][row]), int(chunk.offsets[0][row + 1])
        if first == last and kind == "bytes":
            problem = f"--data arrow: {self.label}: column {name!r} has a row without bytes, perhaps with a path alone"
            raise RequestError(problem, remedy="images stored in the dataset itself: Hugging Face's Image(), not paths")
        found = chunk.values[first:last].tobytes()
        try:
            return found.decode() if kind == "text" else found
        except UnicodeDecodeError as error:
            problem = f"--data arrow: {self.label}: column {name!r} has a text that is not UTF-8 ({error})"
            raise RequestError(problem, remedy="copy the file again, or write it anew from its source") from error


def _read_batches(file: Path) -> list[Any]:
    pyarrow = load_pyarrow()
    try:
        mapped = pyarrow.memory_map(str(file))
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        before = pyarrow.total_allocated_bytes()
        if is_file:
            reader = pyarrow.ipc.open_file(mapped)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        else:
            batches = list(pyarrow.ipc.open_stream(mapped))
        for column in (column for batch in batches for column in batch.columns):
            _validate(column)
    except (pyarrow.ArrowException, OSError) as error:
        raise RequestError(
            f"--data arrow: {file}: {str(error).splitlines()[0]}", remedy=f"{LAYOUT}; if it is damaged, copy it anew"
        ) from error
    if batches and pyarrow.total_allocated_bytes() - before > batches[0].nbytes // 2 + 2**16:
        remedy = "datasets.load_from_disk(…).save_to_disk(…), or pyarrow.ipc without compression"
        raise RequestError(f"--data arrow: {file} is compressed, so it can't be memory-mapped", remedy=remedy)
    return batches


def _validate(column: Any) -> None:
    """Check lengths and offsets of a column: beyond its buffers lies other memory, and a crash of the interpreter.

    The offsets are read, but neither numbers nor texts. Raises pyarrow.ArrowInvalid if they do not fit.
    """
    column.validate()
    if column.type in ("string", "large_string"):
        column = column.view("binary" if column.type == "string" else "large_binary")  # without a check of its UTF-8
    column.validate(full=True)


def _check_schemas(files: Sequence[Path], batches: Sequence[Any]) -> Any:
    if not sum(batch.num_rows for batch in batches):
        raise RequestError(f"--data arrow: {files[0].parent} holds no rows", remedy="a dataset with rows")
    first = batches[0].schema
    if not all(batch.schema.equals(first) for batch in batches):
        problem = f"--data arrow: the files in {files[0].parent} have different columns"
        raise RequestError(problem, remedy="files of one dataset, all with the same columns and types")
    return first


def _describe(field: Any, feature: Any, chunks: Sequence[Any]) -> Column:
    """What a column holds; its shape is that of its first row."""
    types = load_pyarrow().types
    kind = getattr(field.type, "storage_type", field.type)
    feature = feature if isinstance(feature, dict) else {}
    nulls = sum(chunk.null_count for chunk in chunks)
    known = {"name": field.name, "null_count": nulls, "description": str(field.type)}
    if feature.get("_type") == _IMAGES or types.is_binary(kind) or types.is_large_binary(kind):
        return Column(kind="bytes", **known)
    if types.is_string(kind) or types.is_large_string(kind):
        return Column(kind="text", **known)
    sizes: list[int] = []
    first = getattr(chunks[0], "storage", chunks[0])[:1]
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        first, kind = first.flatten(), kind.value_type
        sizes.append(len(first) // max(1, int(np.prod(sizes))))
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return Column(kind="other", **known)
    if sizes and (types.is_boolean(kind) or _holds_lists_of_fixed_length(field.type)):
        return Column(kind="other", **known)
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    dtype = "bool" if types.is_boolean(kind) else str(np.dtype(kind.to_pandas_dtype()))
    return Column(kind="number", shape=tuple(sizes), dtype=dtype, class_names=tuple(names or ()), **known)


def _holds_lists_of_fixed_length(kind: Any) -> bool:
    """Whether a list of fixed length holds lists of any: its rows can't be found by offsets alone."""
    types = load_pyarrow().types
    if not types.is_fixed_size_list(kind):
        return False
    inner = kind.value_type
    return types.is_list(inner) or types.is_large_list(inner) or _holds_lists_of_fixed_length(inner)


def _open_chunk(chunk: Any) -> _Chunk:
    """NumPy's views of a column's buffers."""
    offsets: list[np.ndarray] = []
    types, chunk = load_pyarrow().types, getattr(chunk, "storage", chunk)
    if types.is_struct(chunk.type):
        chunk = chunk.field("bytes")
    while types.is_list(chunk.type) or types.is_large_list(chunk.type) or types.is_fixed_size_list(chunk.type):
        if not types.is_fixed_size_list(chunk.type):
            ends = np.asarray(chunk.offsets)
            offsets.append(ends - ends[0] if len(ends) and ends[0] else ends)
        elif offsets:
            offsets.append(np.arange(len(chunk) + 1) * chunk.type.list_size)
        chunk = chunk.flatten()
    if types.is_boolean(chunk.type):
        return _Chunk((), np.frombuffer(chunk.buffers()[1], dtype=np.uint8), chunk.offset)
    if types.is_integer(chunk.type) or types.is_floating(chunk.type):
        count = chunk.offset + len(chunk)
        values = np.frombuffer(chunk.buffers()[1], dtype=chunk.type.to_pandas_dtype(), count=count)
        return _Chunk(tuple(offsets), values[chunk.offset :])
    large = types.is_large_binary(chunk.type) or types.is_large_string(chunk.type)
    _, places, data = chunk.buffers()
    count = chunk.offset + len(chunk) + 1
    ends = np.frombuffer(places, dtype=np.int64 if large else np.int32, count=count)[chunk.offset :]
    return _Chunk((ends,), np.frombuffer(data or b"", dtype=np.uint8))


LAYOUT = (  # what --data arrow reads, as messages say it
    "a folder that datasets' save_to_disk(…) wrote, or .arrow files; "
    "multigpu data convert SOURCE --to DIR makes one of Parquet, CSV or JSON lines"
)


def find_arrow_files(data_dir: str | None) -> dict[str, list[Path]]:
    """Return the files of each split: train, val and test, or `train` alone if the data are not divided."""
    return find_part_files("arrow", data_dir, (".arrow",), LAYOUT, _list_files)


def read_features(metadata: dict[bytes, bytes] | None, label: str) -> dict[str, Any]:
    """Return the columns as Hugging Face describes them in the metadata of a schema; none if it did not write it.

    Raises RequestError, with the files' `label`, if the metadata is not JSON, or if a class name is not text.
    """
    remedy = "write it anew with datasets' save_to_disk(…)"
    try:
        features = parse_json((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, TypeError):
        return {}
    except (ValueError, RecursionError) as error:
        problem = f"--data arrow: {label}: Hugging Face's description of the columns is no JSON ({error})"
        raise RequestError(problem, remedy=remedy) from error
    features = features if isinstance(features, dict) else {}
    for column, feature in features.items():
        if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
            continue
        names = feature.get("names") or []
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise RequestError(f"--data arrow: {label}: the names of column {column!r} are no texts", remedy=remedy)
    return features


def _list_files(folder: Path) -> list[Path]:
    """The files in order, as state.json names them."""
    state = folder / "state.json"
    if not state.is_file():
        if files := sorted(folder.glob("[!.]*.arrow")):
            return files
        raise RequestError(f"--data arrow: {folder} holds no .arrow file", remedy=LAYOUT)
    try:
        content = parse_json(read_small(state.resolve()))
        names = [str(entry["filename"]) for entry in content["_data_files"]]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise RequestError(f"--data arrow: {state} can't be read ({error})", remedy="write the folder anew") from error
    if content.get("_indices_data_files") or content.get("_indices_files"):
        problem = f"--data arrow: {folder} holds a selection of rows (flatten_indices was not called)"
        raise RequestError(problem, remedy="dataset.flatten_indices().save_to_disk(…)")
    if odd := [name for name in names if Path(name).name != name]:
        raise RequestError(f"--data arrow: {state} names {odd[0]}, which is not in its folder", remedy=LAYOUT)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise RequestError(f"--data arrow: {folder / missing[0]} is missing", remedy="copy the whole folder")
    return [folder / name for name in names]
