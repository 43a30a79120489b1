"""The names that a shell pattern of a setting matches."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatch

from multigpu_cli.errors import RequestError


def match_names(names: Sequence[str], pattern: str, origin: str, kind: str = "parameter") -> list[str]:
    """The names that match a shell pattern.

    Raises:
        RequestError: none does; it begins with `origin`, and says which names are near.
    """
    chosen = [name for name in names if fnmatch(name, pattern)]
    if not chosen:
        near = get_close_matches(pattern.rstrip("*"), names, n=4, cutoff=0.5) or list(names[:4])
        raise RequestError(f"{origin} matches no {kind}", remedy=f"names are like {', '.join(near)}")
    return chosen
