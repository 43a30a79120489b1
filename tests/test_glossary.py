"""The banned names stay out of the code: no module, class, function, field or parameter has one of them."""

import ast
import re
from collections.abc import Container, Iterator

import pytest

from tests.test_house_rules import ROOT, Tree, parse, walk, whole_tree

GLOSSARY = ROOT / "CONTRIBUTING.md"
BANNED = {
    "Settled": "RunSpec, prepare_spec, spec",
    "settle": "RunSpec, prepare_spec, spec",
    "settled": "RunSpec, prepare_spec, spec",
    "Kept": "TrainState, state",
    "kept": "TrainState, state",
    "Learner": "TrainComponents",
    "Brought": "FromObjects, factories",
    "brought": "FromObjects, factories",
    "Rhythm": "CheckpointSchedule",
    "Rendezvous": "LaunchEnv, launch_env",
    "meeting": "LaunchEnv, launch_env",
    "Choice": "Placement",
    "aside": "rank_output, RankOutput",
    "Aside": "rank_output, RankOutput",
    "told": "the name of what is said: fields, exits, message",
    "heard": "the name of what is said: fields, exits, message",
    "said": "the name of what is said: fields, exits, message",
    "because": "reason",
    "lanes": "replicas_per_process",
    "greatest": "all_reduce_max, all_gather, broadcast_object, all_gather_object",
    "gathered": "all_reduce_max, all_gather, broadcast_object, all_gather_object",
    "from_main": "all_reduce_max, all_gather, broadcast_object, all_gather_object",
    "collected": "all_reduce_max, all_gather, broadcast_object, all_gather_object",
    "together": "run_on_all_ranks, run_on_main_rank",
    "decided": "run_on_all_ranks, run_on_main_rank",
    "joined": "process_group, rendezvous, init_process_group",
    "met": "process_group, rendezvous, init_process_group",
    "grouped": "process_group, rendezvous, init_process_group",
    "unfit": "device_and_data_rules, check_ranks_agree_on_data_and_machine",
    "alike": "device_and_data_rules, check_ranks_agree_on_data_and_machine",
    "rehearse": "fit_batch_sizes_to_memory",
    "rehearsal": "fit_batch_sizes_to_memory",
    "judge": "evaluate_epoch, or what is checked",
    "unanswered": "unlabeled",
}
"""Names of an earlier vocabulary → what to write instead."""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""Reason by (path, name): readers of old files, and names that users or PyTorch have chosen."""


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of classes, functions, parameters, attributes and module variables, with their lines."""
    for node in walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        if isinstance(node, ast.ClassDef | ast.Module):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                yield from ((target.id, target.lineno) for target in targets if isinstance(target, ast.Name))


def banned_uses(tree: Tree, banned: Container[str]) -> Iterator[tuple[str, str, int]]:
    """Path, name and line of each banned name in the product's code, and of each module that is named so."""
    for path, text in tree.items():
        if path.startswith("tests/"):
            continue
        if (module := path.rpartition("/")[2].removesuffix(".py")) in banned:
            yield path, module, 0
        yield from ((path, name, line) for name, line in defined_names(parse(text, path)) if name.lstrip("_") in banned)


def test_no_banned_name_is_used() -> None:
    uses = [f"{p}:{line}: {name}" for p, name, line in banned_uses(whole_tree(), BANNED) if (p, name) not in EXCEPTIONS]
    assert uses == []


def test_every_exception_is_needed() -> None:
    uses = {(path, name) for path, name, _ in banned_uses(whole_tree(), BANNED)}
    assert [exception for exception in EXCEPTIONS if exception not in uses] == []


def test_the_glossary_lists_terms() -> None:
    words = GLOSSARY.read_text(encoding="utf-8").partition("## Words\n")[2].partition("\n## ")[0]
    assert 10 <= len(re.findall(r"^\| (?!term|-)", words, re.MULTILINE)) <= 20


@pytest.mark.parametrize(
    "text",
    [
        "class Settled: pass",
        "def told(): pass",
        "def print_all(because): pass",
        "class Rate:\n    because: str",
        "lanes = 1",
        "print(run.kept)",
        "def _told(): pass",
    ],
)
def test_a_banned_name_is_noticed(text: str) -> None:
    assert len(list(banned_uses({"multigpu_cli/data/home.py": text}, BANNED))) == 1


@pytest.mark.parametrize("text", ["def f():\n    told = 1", "# because", "reason = 'because'", "import told"])
def test_what_is_no_definition_is_let_pass(text: str) -> None:
    assert list(banned_uses({"multigpu_cli/data/home.py": text}, BANNED)) == []
