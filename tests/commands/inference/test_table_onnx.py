"""What `export` puts before a network; tests/commands/inference/test_export.py runs the files."""

from pathlib import Path

import pytest

from multigpu_cli.commands.table_onnx import add_preprocessing, list_raw_inputs
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError


def open_table(folder: Path, head: str) -> DataSource:
    (folder / "t.csv").write_text(head + "\n" + "".join(f"{at},{'ab'[at % 2]},x{at % 3}\n" for at in range(30)))
    return load_data_source(DataConfig(name="csv", dir=str(folder), args={"target": "kind"}), 42)


def test_a_column_with_the_name_of_an_output_is_refused(tmp_path: Path) -> None:
    source = open_table(tmp_path, "prediction,colour,kind")
    with pytest.raises(RequestError, match="column 'prediction' has the same name as an output"):
        add_preprocessing(b"", source, "classification")


def test_raw_inputs_are_the_first_training_rows(tmp_path: Path) -> None:
    source = open_table(tmp_path, "size,colour,kind")
    found = list_raw_inputs(source.codec)  # type: ignore[arg-type]
    assert {name: value.dtype.kind for name, value in found.items()} == {"size": "f", "colour": "O"}
    words = ["ab"[int(size) % 2] for size in found["size"]]
    assert found["colour"].tolist() == words
    assert len(words) == 16
