import re
from math import log10
from pathlib import Path

import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.tune.space import list_corners, list_points, parse_search


def test_expressions_from_flags_and_a_file_are_one_space_by_name(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("lr: log(1e-4, 1e-1)\noptimizer.args.momentum: range(0.8,0.99) when optimizer=sgd\n")
    space = parse_search(["optimizer=choice(sgd,adamw)", str(file), "model.args.width=int(8,64)"])
    assert [each.key for each in space] == ["lr", "model.args.width", "optimizer", "optimizer.args.momentum"]
    assert [each.values for each in space] == [(1e-4, 1e-1), (8, 64), ("sgd", "adamw"), (0.8, 0.99)]
    assert [each.parent for each in space] == ["", "", "", "optimizer"]


def test_a_grid_has_its_points_and_leaves_out_what_no_condition_allows() -> None:
    space = parse_search(["lr=log(1e-3,1e-1):3", "n=int(1,2)", "o=choice(a,b)", "m=range(0,1):2 when o=a"])
    found = list(list_points(space, grid=True))
    assert sorted({round(log10(point["lr"])) for point in found}) == [-3, -2, -1]
    assert len(found) == 3 * 2 * (2 + 1)
    assert [point["m"] for point in found if point["o"] == "a"] == [0, 1] * 6
    assert not any("m" in point for point in found if point["o"] == "b")


def test_few_corners_have_each_value_of_each_setting() -> None:
    space = parse_search([f"k{at}=choice(1,2,3,4)" for at in range(5)] + ["m=range(0,1) when k0=4"])
    assert len(list(list_points(space))) == 4**4 * (3 + 2)
    few = list_corners(space, 20)
    assert len(few) < 25
    assert {(key, value) for point in few for key, value in point.items()} == {
        *((f"k{at}", value) for at in range(5) for value in (1, 2, 3, 4)),
        *(("m", value) for value in (0, 1)),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "neither KEY=EXPR nor a YAML file"),
        ("lr=lgo(1,2)", "did you mean 'log'"),
        ("lr=0.1", "no expression"),
        ("lr=uniform(0,1)", "did you mean 'range'"),
        ("optimizer.momentum=uniform(0,1)", "optimizer.momentum=range("),
        ("lr=loguniform(1e-4,1)", "did you mean 'log'"),
        ("lr=randint(1,9)", "did you mean 'int'"),
        ("lr=categorical(a,b)", "did you mean 'choice'"),
        ("lr=log(1e-4,1e-1", "a bracket is missing"),
        ("lr=log(0,1)", "begins above 0"),
        ("lr=range(2,1)", "the greater one last"),
        ("lr=int(1,2.5)", "two whole numbers"),
        ("lr=range(1)", "two numbers"),
        ("lr=choice(1,1)", "different values"),
        ("lr=choice([1],2)", "words and numbers only"),
        ("lr=choice(a:", "no expression"),
        ("lr=choice({a)", "malformed YAML"),
        ("epochs=int(1,9)", "the study itself decides"),
        ("lr=log(1e-4,1) when optimizer=sgd", "optimizer must be a choice"),
    ],
)
def test_a_wrong_expression_is_one_message(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as error:
        parse_search([text])
    assert "--search" in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [("- lr", "not lines of KEY: EXPR"), ("", "not lines of KEY: EXPR"), ("lr: {", "malformed"), ("\udcff", "utf-8")],
)
def test_a_file_that_is_no_space_is_one_message(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RequestError, match=f"neither KEY=EXPR nor a YAML file of them \\([^()]*{says}[^()]*\\)\n"):
        parse_search([str(file)])


def test_a_condition_on_what_is_never_chosen_is_refused() -> None:
    with pytest.raises(RequestError, match="optimizer is never lion"):
        parse_search(["optimizer=choice(sgd,adamw)", "lr=log(1e-4,1) when optimizer=lion"])
    with pytest.raises(RequestError, match="given twice"):
        parse_search(["lr=log(1e-4,1)", "lr=log(1e-4,1)"])
