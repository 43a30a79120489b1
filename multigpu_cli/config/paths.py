"""Finds recipes, and checks the files and folders that settings name, before torch or YAML is loaded."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice, takewhile
from pathlib import Path
from shlex import quote
from typing import Any

from multigpu_cli.capabilities import FILES
from multigpu_cli.config import types
from multigpu_cli.config.regular_files import UnsafeFolder, read_small, refuse_links
from multigpu_cli.config.schema import Config
from multigpu_cli.errors import RequestError, did_you_mean

BEGAN = ".began_from"  # file in a run folder: the name of its older checkpoint that --resume restarted it from

_WEIGHT_FILES = ("best.pt", "state.pt", "*.index.json", "*.safetensors", "pytorch_model.bin")
_USUAL = ("model", "pytorch_model")  # of Hugging Face's, where a folder has several


def read_rewind_checkpoint(run: Path) -> str | None:
    """The name of the older checkpoint that a run was restarted from, which may have been removed since; or None."""
    try:
        return read_small(run / BEGAN).decode(errors="replace")
    except OSError:
        return None


def find_path_errors(config: Config) -> Iterator[RequestError]:
    """One error per path that is missing, of the wrong kind or not accessible."""
    if config.model.init_from is not None:
        yield from _init_from(Path(config.model.init_from))
    if config.checkpoint.save_dir is not None:
        yield from _save_dir(config.checkpoint.save_dir)
    path = Path(config.checkpoint.resume)
    if str(path) in ("auto", "never") or path.exists() or read_rewind_checkpoint(path.parent.parent) == path.name:
        return
    remedy = suggest_path(path, ("auto", "never")) or "use auto, never, or the path of a run folder"
    yield RequestError(f"--resume {path}: there is no such run folder or checkpoint", remedy=remedy)


def _init_from(path: Path) -> Iterator[RequestError]:
    if path.is_dir():
        if find_weight_file(path) is None:
            problem = f"--init-from {path}: is a folder with no weights file, or several"
            yield RequestError(problem, remedy="name the file, for instance best.pt of a run folder")
    elif not path.exists():
        if near := suggest_path(path, folders=False):
            yield RequestError(f"--init-from {path}: there is no such file", remedy=near)
        else:
            problem = f"--init-from {path}: there is no such file or folder, and nothing is downloaded"
            remedy = "the path of what you have downloaded: its folder, or the model.safetensors in it"
            yield RequestError(problem, remedy=remedy)
    elif not path.is_file():
        yield RequestError(f"--init-from {path}: is not a regular file", remedy="name the best.pt of a run folder")
    elif not os.access(path, os.R_OK):
        yield RequestError(f"--init-from {path}: cannot be read", remedy="check its permissions")


def find_weight_file(folder: Path) -> Path | None:
    """The file of weights in a folder of a run, checkpoint or Hugging Face; None: none, or several of no usual name."""
    for pattern in _WEIGHT_FILES:
        found = sorted(folder.glob(pattern))
        usual = found if len(found) < 2 else [file for file in found if file.name.partition(".")[0] in _USUAL]
        if found:
            return usual[0] if len(usual) == 1 else None
    return None


def _save_dir(given: str) -> Iterator[RequestError]:
    for folder in (path := Path(given).absolute(), *path.parents):
        if folder.is_symlink() and not folder.exists():
            target = os.path.realpath(folder)
            problem = f"--save-dir {given}: {folder} is a symbolic link to {target}, which is not there"
            yield RequestError(problem, remedy=f"mkdir -p {quote(target)}; or another --save-dir")
            return
        if folder.name in ("checkpoints", "logs", "tensorboard") and (folder.parent / "journal.jsonl").exists():
            problem = f"--save-dir {given}: is inside the folder of another run, {folder}"
            yield RequestError(problem, remedy=f"use --save-dir {folder.parent}")
            return
    try:
        refuse_links(Path(given))
    except UnsafeFolder as error:
        yield error
    there = next(folder for folder in (Path(given), *Path(given).absolute().parents) if folder.exists())
    if not there.is_dir():
        inside = "" if there == Path(given) else f": {there}"
        yield RequestError(f"--save-dir {given}{inside} is a file, not a folder", remedy="use another --save-dir")
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"--save-dir {given}: no permission to write in {there}"
        yield RequestError(problem, remedy="use another --save-dir, or change the permissions")


def suggest_path(path: Path, words: tuple[str, ...] = (), *, folders: bool = True) -> str:
    """A question with the closest match to a missing path among `words` and its neighbor folders (or files); or ""."""
    names = {word: word for word in words}
    if path.parent.is_dir() and os.access(path.parent, os.R_OK | os.X_OK):
        there = [entry for entry in path.parent.iterdir() if entry.is_dir() == folders and entry.name[0] != "."]
        names |= {entry.name: str(path.parent / entry.name) for entry in there}
    close = get_close_matches(path.name, names, n=1)
    return f"did you mean {names[close[0]]!r}?" if close else ""


IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

_ARRAYS = ("train.bin", "train.npy")  # of tokens
_ARROW = "dataset_dict.json"  # Hugging Face's list of parts
_LISTS = (_ARROW, "train.json")  # other .json files describe a dataset
_MAX_FOLDERS, _MAX_FILES = 1000, 100  # in which an image is looked for
_SUPPORTED = (
    ".csv or .tsv (also .gz), .jsonl, .json, .parquet, .npz, .txt, .arrow, .tar, a folder with one of these, or one "
    "with a folder of images for each class; any other dataset needs --data NAME or --data module:factory"
)


_OF_SYSTEMS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")


def is_hidden(name: str) -> bool:
    """Return whether a name marks a file or folder that is not data: dot files, and folders of operating systems."""
    return (name.startswith(".") and name not in (".", "..")) or name in _OF_SYSTEMS


def is_path(data: str) -> bool:
    """Whether --data is a path, as table.csv or ./photos; the name of a dataset has neither dot nor slash."""
    return ":" not in data and ("/" in data or "." in data)


def parse_data_path(given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The settings that `--data PATH` means: the dataset recognized there, and PATH as --data-dir."""
    place = types.path.read(given["data"], label)
    if "data_dir" in given:
        raise RequestError(f"{label} {place} can't be used with --data-dir {given['data_dir']}", remedy="one of them")
    if not os.access(place, os.F_OK):
        near = suggest_path(Path(place), folders=False) or f"give a path relative to {Path.cwd()}, or an absolute one"
        problem = f"{label} {place}: there is no such file or folder"
        raise RequestError(problem, remedy=f"{near} (or your own code as module:factory)")
    return {"data": _recognize(Path(place), f"{label} {place}"), "data_dir": place}


def find_datasets(place: Path) -> dict[str, str]:
    """The datasets that a file or folder may be, by name, each with the reason."""
    if not (os.access(place, os.F_OK) and place.is_dir()):  # a file, or a folder that can't be entered
        endings = {ending: name for name, kinds in FILES.items() for ending in kinds}
        fits = [ending for ending in endings if place.name.lower().endswith(ending)]
        return {endings[fits[0]]: f"{place.name} is a {fits[0]} file"} if fits else {}
    visible = sorted(name for name in _list_names(place) if not is_hidden(name))
    names = [name for name in visible if not name.endswith(".json") or name in _LISTS]
    found = {name: [each for each in names if each.lower().endswith(kinds)] for name, kinds in FILES.items()}
    if len(found["text"]) > 1 or found["csv"] or found["npz"]:
        found["text"] = []  # a README.txt or license
    found["text"] += [name for name in _ARRAYS if name in names]
    found["arrow"] += [_ARROW] if _ARROW in names else []
    kinds = {name: f"{place.name or place} holds {files[0]}" for name, files in found.items() if files}
    if _holds_images(place):
        kinds["image-folder"] = f"{place.name or place} holds folders of images"
    if len(kinds) > 1:
        kinds.pop("tar", None)  # the archive that the others come from
    return kinds


def explain_dataset(config: Config) -> str:
    """The files at --data-dir by which its dataset is recognized, for the plan; empty if it is not."""
    return find_datasets(Path(config.data.dir)).get(config.data.name, "") if config.data.dir else ""


def find_data_errors(config: Config) -> Iterator[RequestError]:
    """What is wrong with --data-dir, as far as its name and its list of files show."""
    if (given := config.data.dir) is None:
        return
    place, name = Path(given), config.data.name
    if not os.access(place, os.F_OK):
        remedy = suggest_path(place) or suggest_path(place, folders=False)
        remedy = remedy or f"give a path relative to {Path.cwd()}, or an absolute one"
        yield RequestError(f"--data-dir {given}: there is no such file or folder", remedy=remedy)
    elif not os.access(place, os.R_OK | (os.X_OK if place.is_dir() else 0)):
        yield RequestError(f"--data-dir {given}: cannot be read", remedy="check its permissions")
    elif "data" not in config.explicit:
        folder, resume = config.checkpoint.save_dir, config.checkpoint.resume
        has_checkpoint = resume not in ("auto", "never") or (folder and _list_names(Path(folder, "checkpoints")))
        if not has_checkpoint:  # which names the dataset
            try:
                _recognize(place, f"--data-dir {given}")
            except RequestError as error:
                yield error
    elif not place.is_dir() and ":" not in name and name not in FILES:
        kinds = " or ".join(f"--data {kind}" for kind in find_datasets(place))
        remedy = kinds or "name the folder with the unpacked data"
        yield RequestError(f"--data-dir {given}: is a file; --data {name} needs a folder", remedy=remedy)


def _recognize(place: Path, label: str) -> str:
    kinds = find_datasets(place)
    if len(kinds) == 1:
        return next(iter(kinds))
    if kinds:
        apart = f" --data-dir {place}" if label.startswith("--data ") else ""  # the path stood in the name's place
        flags = " or ".join(f"--data {name}{apart}" for name in kinds)
        raise RequestError(f"{label} could be several datasets: {', '.join(kinds.values())}", remedy=f"add {flags}")
    found = "no dataset is recognized in this folder" if place.is_dir() else "not a file of a known dataset"
    raise RequestError(f"{label}: {found}", remedy=_SUPPORTED)


def _holds_images(place: Path) -> bool:
    """Return whether a folder within this one, or within its train/ or its divided images/, holds an image."""
    parent = place / "images" if (place / "images/train").is_dir() else place
    root = place / "train" if (place / "train").is_dir() else parent
    folders = [root / name for name in _list_names(root, _MAX_FOLDERS) if not is_hidden(name)]
    names = (name for folder in folders for name in _list_names(folder, _MAX_FILES) if not is_hidden(name))
    return any(name.lower().endswith(IMAGES) for name in names)


def _list_names(folder: Path, most: int | None = None) -> list[str]:
    """Names in a folder, in no order; none if it can't be read, or is a file."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, most)]
    except OSError:
        return []


_PACKAGE = Path(__file__).resolve().parents[1]


def list_folders() -> list[Path]:
    """The folders with recipes: ./configs first, then the shipped ones (in a wheel: inside the package)."""
    packaged = _PACKAGE / "_configs"
    return [Path.cwd() / "configs", packaged if packaged.is_dir() else _PACKAGE.parent / "configs"]


def find_recipes() -> dict[str, Path]:
    """Every recipe by name; a file in ./configs hides a shipped one of its name."""
    return {file.stem: file for folder in reversed(list_folders()) for file in folder.glob("*.yaml")}


def find_recipe(recipe: str) -> Path:
    """The file that `--config` means: a path, or the name of a recipe (fashion-mnist and fashion_mnist are one)."""
    wanted = types.path.read(recipe, "--config", "name a file or a recipe; the command recipes lists them")
    path, known = Path(wanted), find_recipes()
    if "/" not in recipe and path.suffix not in (".yaml", ".yml"):
        for name in (recipe, recipe.replace("-", "_"), recipe.replace("_", "-")):
            if name in known:
                return known[name]
    if path.exists():
        return path
    near = sorted({str(file.relative_to(Path.cwd())) for file in _beside(path)} or known)
    remedy = did_you_mean(recipe, near) if near else f"name a file, or a recipe in {list_folders()[0]}"
    raise RequestError(f"--config {recipe}: no such file or recipe", remedy=remedy)


@dataclass(frozen=True)
class Recipe:
    """A recipe as the list shows it, with the comment that leads it as one line."""

    name: str
    description: str
    path: str


def list_recipes() -> list[Recipe]:
    """All recipes, by name."""
    found = []
    for name, path in sorted(find_recipes().items()):
        comment = takewhile(lambda line: line.startswith("#"), read_recipe(path).splitlines())
        found.append(Recipe(name, " ".join(line.lstrip("# ").rstrip() for line in comment), str(path)))
    return found


def format_recipes(recipes: list[Recipe]) -> Iterator[str]:
    """One line each."""
    width = max((len(recipe.name) for recipe in recipes), default=0)
    yield from (f"{recipe.name:<{width}}  {recipe.description}" for recipe in recipes)
    if not recipes:
        yield "no recipes found: they are looked up in ./configs"


def read_recipe(path: Path) -> str:
    """Return the text of a recipe; RequestError if it is not a regular file, too large, unreadable or not UTF-8."""
    where = f"--config {path}"
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise RequestError(f"{where}: is a directory", remedy="name the YAML file itself, or a recipe")
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(f"{where}: is not a regular file", remedy="save the settings to a file first")
        if status.st_size > 2**20:
            raise RequestError(f"{where}: {status.st_size:,} bytes is too large for settings (at most 1 MB)")
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{where}: cannot be read ({error.strerror})") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RequestError(f"{path}:{line}: not UTF-8 text", remedy="save it in UTF-8, or name another file") from error


def _beside(path: Path) -> list[Path]:
    """The YAML files in the folder of a missing path, if that folder is below the working directory."""
    folder = path.parent.resolve()
    if "/" not in str(path) or not folder.is_dir() or not folder.is_relative_to(Path.cwd()):
        return []
    return [file for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern)]
