"""What can be changed in a source file, one small fault at a time.

Edits are made in the text at the places that the syntax tree names, so all else in the file stays as it is. Never
changed: strings, annotations, decorators, asserts (and zip's `strict`, which is one), `TYPE_CHECKING` blocks,
`__all__`, and calls that only tell the user something.
"""

import ast
import hashlib
import io
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

from tests.mutants.tracing import ROOMS

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NEGATED = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn  # their swap is their negation already
_WORDY = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp  # other operands than numbers: a certain TypeError


class Edit(NamedTuple):
    """The bytes from `start` to before `stop` become `text`."""

    start: int
    stop: int
    text: str


class Mutation(NamedTuple):
    """One small fault.

    Attributes:
        file: where, relative to the root.
        place: the qualified name of the function or class; "" at the top of the file.
        line: the number of the first line that changes.
        before, after: the text of the lines that change.
        again: how many mutations with the same texts come before it in the place.
        edit: what makes it.
        inside: the lines, counted from the function's first, one of which runs if the mutation can matter; none
            where it matters from the import on.
    """

    file: str
    place: str
    line: int
    before: str
    after: str
    again: int
    edit: Edit
    inside: tuple[int, ...]

    @property
    def name(self) -> str:
        """Short, and the same for as long as the texts and the place are."""
        told = "\0".join([self.file, self.place, self.before, self.after, str(self.again)])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def made(self, text: str) -> str:
        """The file's text with the fault."""
        data = text.encode()
        return (data[: self.edit.start] + self.edit.text.encode() + data[self.edit.stop :]).decode()

    def touches(self, lines: Set[int]) -> bool:
        """Whether one of these lines is among those that change."""
        return any(line in lines for line in range(self.line, self.line + len(self.before.splitlines())))

    def diff(self) -> str:
        head = f"{self.file}:{self.line} {self.place}".rstrip()
        lines = [f"-{line}" for line in self.before.splitlines()] + [f"+{line}" for line in self.after.splitlines()]
        return "\n".join([head, *lines])


def files(root: Path) -> list[str]:
    """The files of ROOMS, relative to the root."""
    rooms = [root / "multigpu_cli" / room for room in ROOMS]
    found = [file for room in rooms for file in (room.rglob("*.py") if room.is_dir() else [room])]
    return sorted(file.relative_to(root).as_posix() for file in found)


def changed_lines(root: Path, since: str) -> dict[str, set[int]]:
    """The lines of each file that have changed since that commit, for git's eyes; a moved file is no change.

    Raises:
        SystemExit: git does not know the commit.
    """
    command = [
        "git",
        "diff",
        "--unified=0",
        "--find-renames",
        "--no-color",
        "--no-ext-diff",
        "--dst-prefix=b/",
        since,
        "--",
        "*.py",
    ]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if told.returncode:
        sys.exit(f"--since {since}: {told.stderr.strip()}")
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in told.stdout.splitlines():
        if line.startswith("+++ "):  # of a deleted file /dev/null, with no lines
            lines = found.setdefault(line.removeprefix("+++ ").removeprefix("b/"), set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.update(range(first, first + count))
    return found


def draw_mutations(mutations: list[Mutation], seed: int, count: int) -> list[Mutation]:
    """So many of them by lot; a change of the code elsewhere leaves the lot of each as it was."""
    return sorted(mutations, key=lambda one: hashlib.sha256(f"{seed} {one.name}".encode()).digest())[:count]


def mutations_of(file: str, text: str) -> list[Mutation]:
    """All that can be changed, in the order of the text; no two make the same text."""
    reader = _Reader(text)
    reader.read(ast.parse(text), _Where())
    found: list[Mutation] = []
    for edit, where in sorted(set(reader.found)):
        first, last = reader.lines_of(edit)
        before, after = reader.changed(edit)
        if before != after:
            same = [one for one in found if (one.place, one.before, one.after) == (where.place, before, after)]
            known = any(one.line == first for one in same)
            inside = tuple(range(min(where.line, first) - where.first, last - where.first + 1)) if where.first else ()
            if not known:
                found.append(Mutation(file, where.place, first, before, after, len(same), edit, inside))
    return found


class _Where(NamedTuple):
    """Where the reader stands: the place's name, its first line (0: what runs at import), the statement's line."""

    place: str = ""
    first: int = 0
    line: int = 0

    def below(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> "_Where":
        """Inside a definition, named as Python's `__qualname__`."""
        within = f"{self.place}.<locals>." if self.first else f"{self.place}." if self.place else ""
        first = 0 if isinstance(node, ast.ClassDef) else min(each.lineno for each in [node, *node.decorator_list])
        return _Where(within + node.name, first, first)


class _Reader:
    """Goes through a tree and notes every edit with where it is."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        lines = text.splitlines(keepends=True)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self._tokens = [
            (self._starts[row - 1] + len(lines[row - 1][:column].encode()), word)
            for _, word, (row, column), _, _ in tokens
            if word and row <= len(lines)
        ]
        self.found: list[tuple[Edit, _Where]] = []

    def read(self, node: ast.AST, where: _Where) -> None:
        if isinstance(node, ast.stmt):
            where = where._replace(line=node.lineno)
        self.found += [(edit, where) for edit in self._edits(node, where)]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            where = where.below(node)
        for part in _parts(node, where):
            self.read(part, where)

    def lines_of(self, edit: Edit) -> tuple[int, int]:
        """The numbers of the first and the last line that it changes."""
        return bisect_right(self._starts, edit.start), bisect_right(self._starts, max(edit.start, edit.stop - 1))

    def changed(self, edit: Edit) -> tuple[str, str]:
        """The text of these lines without and with it."""
        first, last = self.lines_of(edit)
        start, stop = self._starts[first - 1], self._starts[last]
        after = self._data[start : edit.start] + edit.text.encode() + self._data[edit.stop : stop]
        return _strip_indentation(self._data[start:stop].decode()), _strip_indentation(after.decode())

    def _edits(self, node: ast.AST, where: _Where) -> Iterator[Edit]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
                    yield self._swap(_COMPARISONS[type(operator)], left, right)
            case ast.BoolOp():
                word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield self._swap((word, other), left, right)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield Edit(self._start(node), self._start(node) + (4 if isinstance(node.op, ast.Not) else 1), "")
            case ast.BinOp(left=left, right=right) if type(node.op) in _OPERATORS and where.place:
                if not any(isinstance(side, _WORDY) or _is_text(side) for side in (left, right)):
                    yield self._swap(_OPERATORS[type(node.op)], left, right)
            case ast.AugAssign() if type(node.op) in _OPERATORS:
                sign, other = _OPERATORS[type(node.op)]
                yield self._swap((f"{sign}=", "="), node.target, node.value)
                yield self._swap((f"{sign}=", f"{other}="), node.target, node.value)
            case ast.Constant(value=bool() as value):
                yield self._whole(node, repr(not value))
            case ast.Constant(value=int() | float() as value):
                yield self._whole(node, repr(2 * value if value and isinstance(value, float) else value + 1))
            case ast.Return(value=value) if value is not None and not _is_none(value):
                yield self._whole(node, "return None")
            case ast.Break() | ast.Continue():
                yield self._whole(node, "continue" if isinstance(node, ast.Break) else "break")
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
                yield self._whole(node.func, _NAMES[name])
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield from self._negate(node.test)
        if isinstance(node, ast.comprehension):
            yield from (edit for test in node.ifs for edit in self._negate(test))
        if where.place and _can_go(node):
            yield self._whole(node, "pass")

    def _negate(self, test: ast.expr) -> Iterator[Edit]:
        twice = isinstance(test, ast.UnaryOp | ast.Constant) or "TYPE_CHECKING" in ast.unparse(test)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            twice |= isinstance(test.ops[0], _NEGATED)
        if not twice:
            yield self._whole(test, f"not ({self._data[self._start(test) : self._stop(test)].decode()})")

    def _swap(self, words: tuple[str, str], left: ast.AST, right: ast.AST) -> Edit:
        """Another operator between two operands; `is not` and `not in` are two tokens."""
        begin, end = self._stop(left), self._start(right)
        first, *more = words[0].split()
        at = [(start, word) for start, word in self._tokens if begin <= start < end]
        start = next(start for start, word in at if word == first)
        last = next(position for position, word in at if position > start and word == more[0]) if more else start
        return Edit(start, last + len(more[0] if more else first), words[1])

    def _whole(self, node: ast.AST, text: str) -> Edit:
        return Edit(self._start(node), self._stop(node), text)

    def _start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined,no-any-return]

    def _stop(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined,no-any-return]


def _parts(node: ast.AST, where: _Where) -> Iterator[ast.AST]:
    """The nodes below that may be changed."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            yield from [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            yield from [node.body] if isinstance(node, ast.Lambda) else node.body
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [node.value] if node.value else []
        case ast.Assert() | ast.JoinedStr() | ast.keyword(arg="strict"):
            pass
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            yield from node.orelse
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            pass
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
            yield node.args[0]
        case ast.Call(func=ast.Name(id="cast" | "TypeVar")):
            yield from node.args[1:]
        case _:
            yield from ast.iter_child_nodes(node)


def _can_go(node: ast.AST) -> bool:
    """A call for its effect, or an assignment that others see; what is only told to the user does not count."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        told = ast.unparse(node.value.func)
        return "console." not in told and told not in {"warnings.warn", "print"}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _strip_indentation(text: str) -> str:
    """Without the indentation, so that a block may move."""
    return "\n".join(line.strip() for line in text.splitlines())
