"""--data arrow: a dataset that Hugging Face's `save_to_disk` wrote, read where it lies."""

from collections.abc import Sequence
from typing import Any

from multigpu_cli.data.arrow_files import find_arrow_files
from multigpu_cli.data.arrow_store import ArrowStore
from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.row_source import RowOptions, build_row_source


def load(
    data_dir: str | None,
    mode: str,
    seed: int,
    target: str | None = None,
    columns: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str = (),
    kind: str = "auto",
    classes: int | Sequence[Any] | None = None,
    vocabulary: int | None = None,
    size: int = 64,
    resize: int | None = None,
    augment: bool = True,
) -> DataSource:
    """The rows of a folder; the arguments are those of RowOptions.

    Args:
        data_dir: written by `save_to_disk`, of a Dataset or a DatasetDict; or .arrow files.

    Raises:
        RequestError: no such files, no pyarrow, or columns that make no samples.
    """
    stores = {part: ArrowStore(files) for part, files in find_arrow_files(data_dir).items()}
    options = RowOptions(
        target=target,
        columns=columns,
        ignore=ignore,
        kind=kind,
        classes=classes,
        vocabulary=vocabulary,
        size=size,
        resize=resize,
        augment=augment,
    )
    return build_row_source("arrow", stores, mode, seed, options)
