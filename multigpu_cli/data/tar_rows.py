"""--data tar: WebDataset shards, read by the places of their members."""

from collections.abc import Sequence
from typing import Any

from multigpu_cli.data.data_source import DataSource
from multigpu_cli.data.part_files import find_part_files
from multigpu_cli.data.row_source import RowOptions, build_row_source
from multigpu_cli.data.tar_store import TarStore

_LAYOUT = "a .tar shard or a folder with several, whose members are KEY.jpg and KEY.cls, say"


def load(
    data_dir: str | None,
    mode: str,
    seed: int,
    target: str | None = None,
    columns: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str = (),
    kind: str = "auto",
    classes: int | Sequence[Any] | None = None,
    size: int = 64,
    resize: int | None = None,
    augment: bool = True,
) -> DataSource:
    """The samples of shards; the arguments are those of RowOptions.

    Where nothing is said, the target is .cls, and the input the only image or array.

    Raises:
        RequestError: no such files, compressed shards, or members that make no samples.
    """
    files = find_part_files("tar", data_dir, (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"), _LAYOUT)
    stores = {part: TarStore(each) for part, each in files.items()}
    known = stores["train"].columns
    if target is None and "cls" in known:
        target = "cls"
    wide = [name for name, column in known.items() if column.kind == "bytes" or column.shape]
    if columns is None and len(wide) == 1:
        columns = wide
    options = RowOptions(
        target=target,
        columns=columns,
        ignore=ignore,
        kind=kind,
        classes=classes,
        size=size,
        resize=resize,
        augment=augment,
    )
    return build_row_source("tar", stores, mode, seed, options)
