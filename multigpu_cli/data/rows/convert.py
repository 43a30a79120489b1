"""Writes Parquet, CSV or JSON lines as Arrow files once, a piece at a time, laid out as by `save_to_disk`."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from multigpu_cli.checkpoint.files import flush_folder
from multigpu_cli.config.regular_files import refuse_special_file
from multigpu_cli.config.types import path
from multigpu_cli.data.files import load_pyarrow
from multigpu_cli.errors import RequestError, pluralize

_ENDINGS = {
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "json": (".jsonl", ".jsonl.gz", ".ndjson"),
}
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
_ESCAPE = re.compile(rb"\\.")
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"\n'))
_STEPS = np.zeros(256, np.int64)  # by which a byte outside texts changes the depth
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_DEEPEST = 100  # levels
_PIECE = 2**23  # bytes of text that are parsed at once; the first piece decides the types
_BATCH = 2**25  # bytes of a record batch
_FILE = 2**29  # bytes of an Arrow file
_AS_STORED: dict[str, Any] = {  # of what `datasets.load_from_disk` reads beside the files: all columns, as they are
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}
_SUPPORTED = "a .parquet, .csv, .tsv or .jsonl file (text may be gzipped), or a folder with files of one of these kinds"


def convert_to_arrow(source: Path, target: Path) -> dict[str, Any]:
    """Write the rows of a file, or of the files of a folder in the order of their names, to a new folder.

    The folder appears whole or not at all. Memory holds about two record batches of 32 MB, and of Parquet a row group.
    Returns what was written, for JSON: rows, bytes, files, and the type of each column in Arrow's words.
    """
    if os.path.lexists(target):
        raise RequestError(f"--to {target} exists already", remedy="a new folder, or remove that one first")
    refuse_special_file(source, "SOURCE")
    files, draft = _find_files(source), target.with_name(f".{target.name}.{uuid4().hex}.draft")
    try:
        draft.mkdir(parents=True)
        written = _write_folder(files, draft)
        draft.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        raise RequestError(f"--to {target}: {error}", remedy="a folder with room that can be written") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # it has its name by now, or it is half a folder
    return written


def _find_files(source: Path) -> list[Path]:
    if not source.exists():
        raise RequestError(f"{source}: there is no such file or folder", remedy=_SUPPORTED)
    files = sorted(each for each in source.glob("[!.]*") if each.is_file()) if source.is_dir() else [source]
    files = [file for file in files if _find_kind(file)]
    kinds = {_find_kind(file) for file in files}
    if len(kinds) != 1:
        holds = f"holds files of {len(kinds)} kinds" if kinds else "holds nothing that can be converted"
        raise RequestError(f"{source} {holds}", remedy=_SUPPORTED)
    return files


def _find_kind(file: Path) -> str:
    return next((kind for kind, endings in _ENDINGS.items() if file.name.lower().endswith(endings)), "")


def _write_folder(files: list[Path], folder: Path) -> dict[str, Any]:
    pyarrow = load_pyarrow()
    written: list[Path] = []
    rows, schema, sink, writer = 0, None, None, None
    with ExitStack() as opened:
        for table in _join_batches(files):
            schema = schema or table.schema
            if writer is None or sink is None or sink.tell() >= _FILE:
                opened.close()
                written.append(folder / f"{len(written):05d}.arrow")
                sink = opened.enter_context(pyarrow.OSFile(str(written[-1]), "wb"))
                writer = opened.enter_context(pyarrow.ipc.new_stream(sink, schema))
            for batch in table.combine_chunks().to_batches():
                writer.write_batch(batch)
            rows += table.num_rows
    if schema is None or not rows:
        raise RequestError(f"{files[0]}: no rows", remedy=_SUPPORTED)
    count = f"of-{len(written):05d}"
    stored = [file.rename(folder / f"data-{number:05d}-{count}.arrow") for number, file in enumerate(written)]
    (folder / "dataset_info.json").write_text("{}\n")
    entries = [{"filename": file.name} for file in stored]
    state = {"_data_files": entries, "_fingerprint": os.urandom(8).hex(), **_AS_STORED}
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    for each in (*stored, folder / "state.json", folder):
        flush_folder(each)
    columns = {field.name: str(field.type) for field in schema}
    size = sum(file.stat().st_size for file in stored)
    return {"rows": rows, "bytes": size, "files": len(stored), "columns": columns}


def _join_batches(files: list[Path]) -> Iterator[Any]:
    """Tables of about `_BATCH` bytes, with the columns of the first file; an error names file and row."""
    pyarrow = load_pyarrow()
    schema, waiting, size = None, [], 0
    codes: set[str] | None = None  # found in the first file, since its types hold for all
    for file in files:
        row = 0
        try:
            codes = _find_codes(file) if codes is None else codes
            for batch in _read_batches(file, codes):
                table = _decode_dictionaries(pyarrow.Table.from_batches([batch]))
                schema = schema or table.schema
                if table.schema.names != schema.names:
                    raise RequestError(
                        f"{file} has other columns than {files[0]}", remedy=f"in all files: {', '.join(schema.names)}"
                    )
                waiting.append(table.cast(schema))
                row, size = row + batch.num_rows, size + batch.nbytes
                if size >= _BATCH:
                    yield pyarrow.concat_tables(waiting)
                    waiting, size = [], 0
        except (pyarrow.ArrowException, OSError, UnicodeError) as error:
            raise RequestError(
                f"{file}: after {pluralize(row, 'row')}: {str(error).splitlines()[0]}",
                remedy="one type for each column, as the first rows have it, and in JSON lines the same fields",
            ) from error
    if waiting:
        yield pyarrow.concat_tables(waiting)


def _open_csv(file: Path, texts: Collection[str]) -> Any:
    from pyarrow import csv

    separator = "\t" if ".tsv" in file.name.lower() else ","
    types = csv.ConvertOptions(column_types=dict.fromkeys(texts, load_pyarrow().string()))
    parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    return csv.open_csv(file, csv.ReadOptions(block_size=_PIECE), parse, types)


def _find_codes(file: Path) -> set[str]:
    """Return the columns of a CSV file in whose first piece a number has leading zeros, as codes do: 007 is not 7."""
    if _find_kind(file) != "csv":
        return set()
    types, schema = load_pyarrow().types, _open_csv(file, ()).schema
    numbers = {field.name for field in schema if types.is_integer(field.type) or types.is_floating(field.type)}
    columns = (column for batch in islice(_open_csv(file, schema.names), 1) for column in batch.to_pydict().items())
    return {name for name, cells in columns if name in numbers and any(map(_LEADING_ZERO.match, cells))}


def _read_batches(file: Path, texts: Collection[str]) -> Iterator[Any]:
    kind = _find_kind(file)
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(file, pre_buffer=False) as opened:
            yield from opened.iter_batches(batch_size=8192)
    elif kind == "csv":
        yield from _open_csv(file, texts)
    else:
        from pyarrow import json as arrow_json

        _check_nesting(file)
        yield from arrow_json.open_json(file, arrow_json.ReadOptions(block_size=_PIECE))


def _check_nesting(file: Path) -> None:
    """Check that JSON lines are not nested so deep that pyarrow's parser, which recurses, would end the process.

    A value may span several lines, so depth is counted over the file. Marks that do not match are refused, too,
    since pyarrow starts each piece afresh and might find more depth there. RequestError: names the file.
    """
    depth, in_text, rest = 0, 0, b""
    with load_pyarrow().input_stream(str(file)) as opened:  # unpacked as pyarrow's reader does it
        while piece := opened.read(_PIECE):
            piece = _ESCAPE.sub(b"", rest + piece)  # a quote behind a backslash ends no text
            rest = b"\\" if piece.endswith(b"\\") else b""
            marks = np.frombuffer(piece.translate(None, _NO_MARKS).replace(b'""', b""), np.uint8)  # texts without marks
            is_text = (np.cumsum(marks == ord('"'), dtype=np.int32) + in_text) % 2
            depths = depth + np.cumsum(np.where(is_text, 0, _STEPS[marks]))
            if depths.max(initial=0) > _DEEPEST:
                problem = f"{file}: JSON that is nested more than {_DEEPEST} levels deep"
                raise RequestError(problem, remedy="columns of numbers, texts, and lists or objects of these")
            if depths.min(initial=0) < 0 or (is_text & (marks == ord("\n"))).any():
                problem = f"{file}: not JSON: brackets that close nothing, or a text without its end"
                raise RequestError(problem, remedy="one JSON object per line, as UTF-8")
            if len(marks):
                depth, in_text = int(depths[-1]), int(is_text[-1])


def _decode_dictionaries(table: Any) -> Any:
    """Categories as their values, since a dataset's files have no dictionaries."""
    pyarrow = load_pyarrow()
    for at, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            table = table.set_column(at, field.name, table.column(at).cast(field.type.value_type))
    return table


def convert_data(source: str, to: str) -> dict[str, Any]:
    """The same of what the command is given, with the folder."""
    written = convert_to_arrow(Path(path.read(source, "SOURCE")), Path(path.read(to, "--to")))
    return {"to": str(Path(to)), **written}


def format_conversion(found: dict[str, Any]) -> list[str]:
    """What was written, as lines."""
    files = pluralize(found["files"], "file")
    return [
        f"{found['to']}: {pluralize(found['rows'], 'row')}, {found['bytes']:,} bytes in {files}",
        *(f"  {name}: {kind}" for name, kind in found["columns"].items()),
        f"train on it: multigpu --data arrow --data-dir {found['to']} --set data.target=COLUMN",
    ]
