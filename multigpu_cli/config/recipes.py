"""Finds, lists and reads recipes: small YAML files, named by path or by name."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from multigpu_cli.config.types import parse_path
from multigpu_cli.errors import RequestError, did_you_mean

_LARGEST = 2**20
_PACKAGE = Path(__file__).resolve().parents[1]


def list_folders() -> list[Path]:
    """The folders with recipes: ./configs first, then the shipped ones (in a wheel: inside the package)."""
    packaged = _PACKAGE / "_configs"
    shipped = packaged if packaged.is_dir() else _PACKAGE.parent / "configs"
    return [Path.cwd() / "configs", shipped]


def find_recipes() -> dict[str, Path]:
    """Every recipe by name; a file in ./configs hides a shipped one of its name."""
    found: dict[str, Path] = {}
    for folder in list_folders():
        for file in sorted(folder.glob("*.yaml")):
            found.setdefault(file.stem, file)
    return found


def find_recipe(recipe: str) -> Path:
    """The file that `--config` means: a path, or the name of a recipe (fashion-mnist and fashion_mnist are one)."""
    try:
        path, known = parse_path(recipe), find_recipes()
    except ValueError as error:
        raise RequestError(
            f"--config {error}", remedy="name a file or a recipe; the command recipes lists them"
        ) from error
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
    """The text of a recipe; RequestError where it is no regular file, too large, unreadable or not UTF-8."""
    where = f"--config {path}"
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise RequestError(f"{where}: is a directory", remedy="name the YAML file itself, or a recipe")
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(f"{where}: is not a regular file", remedy="save the settings to a file first")
        if status.st_size > _LARGEST:
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
