"""Faults are drawn by seed, from what does something, and each is one that Python can read."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.mutants.mutations import Mutation, changed_lines, draw_mutations, files, mutations_of

ROOT = Path(__file__).resolve().parents[2]
NEVER = '''"""Module 1."""
from typing import TYPE_CHECKING, Literal, cast
if TYPE_CHECKING:
    a = 1
__all__ = ["f"[0:]]
Either = int | None

@decorator(frozen=True)
def f(x: "Literal[1]", *, y: int | None = None) -> tuple[int, Literal[2]] | None:
    """Docstring 2."""
    z: int | None = cast("int | None", g("text" + x, f"{x + 1} {x > 2}"))
    assert x > 3, "message"
    console.note(f"{x} {1}")
    zip(x, z, strict=True)
'''


def after(text: str) -> set[str]:
    return {one.after for one in mutations_of("toy.py", text)}


def test_words_types_and_what_is_only_told_stay():
    assert [one.diff() for one in mutations_of("toy.py", NEVER)] == ["toy.py:14 f\n-zip(x, z, strict=True)\n+pass"]


def test_each_kind_of_fault():
    assert after("a = b < c") == {"a = b <= c"}
    assert after("a = b is not c") == {"a = b is c"}
    assert after("a = b not in (c)") == {"a = b in (c)"}
    assert after("a = (b) and c") == {"a = (b) or c"}
    assert after("a = not b") == {"a = b"}
    assert after("a = 3 if b else True") == {
        "a = 4 if b else True",
        "a = 3 if not (b) else True",
        "a = 3 if b else False",
    }
    assert after("a = min(b)") == {"a = max(b)"}
    assert after("a = any(b)") == {"a = all(b)"}
    assert after("a = [b for b in c if d.e]") == {"a = [b for b in c if not (d.e)]"}
    assert after("while a:\n    break") == {"while not (a):", "continue"}
    assert after("def f(a=1): a.b = c") == {"def f(a=2): a.b = c", "def f(a=1): pass"}
    assert after("def f():\n  a(b)\n  return -c") == {"pass", "return None", "return c"}
    assert after("def f():\n  a += b + c") == {"a -= b + c", "a = b + c", "a += b - c"}


def test_characters_of_several_bytes_and_several_lines_are_no_hindrance():
    text = 'def f():\n    return g("× – ü", a <  # ≤ <\n        b, "…")\n'
    [swapped] = [one for one in mutations_of("toy.py", text) if "None" not in one.after]
    assert swapped.made(text) == text.replace("a <  #", "a <=  #")
    assert (swapped.line, swapped.place, swapped.inside) == (2, "f", (1,))
    [gone] = [one for one in mutations_of("toy.py", text) if "None" in one.after]
    assert gone.made(text) == "def f():\n    return None\n"
    assert gone.inside == (1, 2)


def test_alike_lines_of_one_place_have_names_of_their_own():
    found = mutations_of("toy.py", "def f():\n    a()\n    b\n    a()\n")
    assert [one.again for one in found] == [0, 1]
    assert len({one.name for one in found}) == 2


def test_since_a_commit_only_lines_that_changed_are_drawn_from(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "moved.py").write_text("a = 1\nb = 2\nc = 3\nd = 4\n" + 9 * "same\n")
    for name in ("same.py", "gone.py"):
        (tmp_path / name).write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("mv", "moved.py", "room.py")
    git("rm", "-q", "gone.py")
    text = "a = 1\nb = 2\nc = 30\nd = 4\ne = f(\n    5,\n    x,\n)\n" + 9 * "same\n"
    (tmp_path / "room.py").write_text(text)
    lines = changed_lines(tmp_path, "HEAD")
    assert lines == {"/dev/null": set(), "room.py": {3, 5, 6, 7, 8}}
    touched = [one for one in mutations_of("room.py", text) if one.touches(lines["room.py"])]
    assert [one.after for one in touched] == ["c = 31", "6,"]
    git("commit", "-q", "-a", "-m", "second")
    assert changed_lines(tmp_path, "HEAD") == {}
    assert changed_lines(tmp_path, "HEAD~1") == lines
    with pytest.raises(SystemExit, match="--since nowhere: "):
        changed_lines(tmp_path, "nowhere")


def real() -> list[Mutation]:
    return [one for file in files(ROOT) for one in mutations_of(file, (ROOT / file).read_text(encoding="utf-8"))]


def test_a_seed_draws_the_same_and_a_change_elsewhere_moves_none():
    everything = real()
    first = draw_mutations(everything, 1, 300)
    assert len({one.name for one in first}) == 300
    assert draw_mutations(everything[::-1], 1, 300) == first
    assert draw_mutations(everything, 1, 100) == first[:100]
    assert {one.name for one in draw_mutations(everything, 2, 300)} != {one.name for one in first}
    assert {one.file.split("/")[1] for one in first} >= {"run", "strategies", "checkpoint", "planning", "mirror"}
    without = [one for one in everything if one.file != first[0].file]
    assert [one for one in draw_mutations(without, 1, 300) if one in first] == [one for one in first if one in without]


def test_python_can_read_each_and_it_is_another_program():
    for one in draw_mutations(real(), 5, 40):
        text = (ROOT / one.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(one.made(text))) != ast.dump(ast.parse(text)), one.diff()
