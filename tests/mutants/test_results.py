"""What was found is kept one by one, and summed up with what is known to change nothing."""

from pathlib import Path

import pytest

from tests.mutants.mutations import Mutation, files, mutations_of
from tests.mutants.results import Result, Results, equivalents, interval, key, summary

ROOT = Path(__file__).resolve().parents[2]
TOY = mutations_of("toy.py", "def f():\n    a.b = 1\n    return c < d\n")


def result(mutation: Mutation, verdict: str) -> Result:
    return Result(mutation.name, verdict, "", 1, 2.0, mutation.diff())


def test_a_torn_line_costs_its_own_result_alone(tmp_path):
    kept = Results(tmp_path / "results.jsonl")
    for one in TOY[:2]:
        kept.add(result(one, "killed"))
    text = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(text[:-20])
    again = Results(tmp_path / "results.jsonl")
    assert [again.of(one) for one in TOY[:2]] == [result(TOY[0], "killed"), None]
    again.add(result(TOY[1], "survived"))
    assert Results(tmp_path / "results.jsonl").of(TOY[1]) == result(TOY[1], "survived")


def test_the_share_is_of_those_that_change_something(tmp_path):
    kept = Results(tmp_path / "results.jsonl")
    for one, verdict in zip(TOY, ["survived", "killed", "timeout", "broken"], strict=True):
        kept.add(result(one, verdict))
    text, share = summary(TOY, kept, {})
    assert share == pytest.approx(1 / 3)
    assert "4 mutants: 1 broken, 1 killed, 1 survived, 1 timeout, 0 equivalent" in text
    assert TOY[0].diff() in text
    text, share = summary(TOY, kept, {key(TOY[0]): "it is one already"})
    assert share == 0
    assert "1 equivalent\nsurvived: 0.0% of 2 (95 % interval 0.0% to 65.8%)" in text
    assert "equivalent, it is one already" in text


def test_the_interval_is_wilsons():
    assert interval(15, 300) == pytest.approx((0.03054, 0.08083), abs=1e-4)
    assert interval(0, 0) == (0, 1)


def test_each_listed_equivalent_is_still_there_and_says_why():
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files(ROOT)}
    possible = {key(one) for file in {file for file, *_ in equivalents()} for one in mutations_of(file, texts[file])}
    assert not equivalents().keys() - possible
    assert all(len(why) > 10 for why in equivalents().values())
