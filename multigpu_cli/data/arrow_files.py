"""The Arrow files of a dataset: a folder that Hugging Face's `save_to_disk` wrote, or the files alone."""

import json
from pathlib import Path
from typing import Any

from multigpu_cli.errors import RequestError

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""What the parts of a dataset are called by those who publish them."""

LAYOUT = (
    "a folder that datasets' save_to_disk(…) wrote, or .arrow files; "
    "multigpu data convert SOURCE --to DIR makes one of Parquet, CSV or JSON lines"
)
"""What --data arrow reads, as messages say it."""


def find_arrow_files(data_dir: str | None) -> dict[str, list[Path]]:
    """The files of each part: of train, val and test, or of `train` alone where nothing is divided.

    Raises:
        RequestError: no such folder, a part without files, or one that is not finished.
    """
    if data_dir is None:
        raise RequestError("--data arrow needs --data-dir, the folder that holds it", remedy=LAYOUT)
    place = Path(data_dir).expanduser()
    if not place.exists():
        raise RequestError(f"--data-dir {data_dir}: there is no such file or folder", remedy=LAYOUT)
    if place.is_file():
        return {"train": [place]}
    folders = {part: _find_part(place, names) for part, names in SPLIT_NAMES.items()}
    found = {part: _list_files(folder) for part, folder in folders.items() if folder is not None}
    if (place / "dataset_dict.json").is_file() or found:
        if "train" not in found:
            raise RequestError(f"--data arrow: {place} has no part called train", remedy=LAYOUT)
        return found
    return {"train": _list_files(place)}


def read_features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """The columns as Hugging Face describes them in the metadata of a file's schema; none if it did not write it."""
    try:
        found = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _find_part(place: Path, names: tuple[str, ...]) -> Path | None:
    return next((place / name for name in names if (place / name).is_dir()), None)


def _list_files(folder: Path) -> list[Path]:
    """The files in order, as state.json names them."""
    state = folder / "state.json"
    if not state.is_file():
        if files := sorted(folder.glob("*.arrow")):
            return files
        raise RequestError(f"--data arrow: {folder} holds no .arrow file", remedy=LAYOUT)
    try:
        content = json.loads(state.read_text())
        names = [str(entry["filename"]) for entry in content["_data_files"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RequestError(f"--data arrow: {state} can't be read ({error})", remedy="write the folder anew") from error
    if content.get("_indices_data_files") or content.get("_indices_files"):
        raise RequestError(
            f"--data arrow: {folder} holds a choice of rows beside its files",
            remedy="dataset.flatten_indices().save_to_disk(…)",
        )
    if odd := [name for name in names if Path(name).name != name]:
        raise RequestError(f"--data arrow: {state} names {odd[0]}, which is not in its folder", remedy=LAYOUT)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise RequestError(f"--data arrow: {folder / missing[0]} is missing", remedy="copy the whole folder")
    return [folder / name for name in names]
