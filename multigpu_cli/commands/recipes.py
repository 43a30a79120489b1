"""The recipes that --config takes by name."""

from collections.abc import Iterator
from dataclasses import dataclass

from multigpu_cli.config.recipes import find_recipes, read_description


@dataclass(frozen=True)
class Recipe:
    """A recipe as the list shows it."""

    name: str
    description: str
    path: str


def list_recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [Recipe(name, read_description(path), str(path)) for name, path in sorted(find_recipes().items())]


def format_recipes(recipes: list[Recipe]) -> Iterator[str]:
    """One line each."""
    width = max((len(recipe.name) for recipe in recipes), default=0)
    yield from (f"{recipe.name:<{width}}  {recipe.description}" for recipe in recipes)
    if not recipes:
        yield "no recipes found: they are looked up in ./configs"
