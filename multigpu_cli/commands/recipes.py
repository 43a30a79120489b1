"""The recipes that --config takes by name."""

import json
from typing import NamedTuple

from multigpu_cli.config.recipes import find_recipes, read_description


class Recipe(NamedTuple):
    """A recipe as the list shows it."""

    name: str
    description: str
    path: str


def list_recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [Recipe(name, read_description(path), str(path)) for name, path in sorted(find_recipes().items())]


def print_recipes(recipes: list[Recipe], *, as_json: bool) -> None:
    """Print them as JSON or one a line."""
    if as_json:
        print(json.dumps([recipe._asdict() for recipe in recipes], indent=2))
        return
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        print(f"{recipe.name:<{width}}  {recipe.description}")
    if not recipes:
        print("no recipes here: they are looked up in ./configs")
