"""Errors in words: short, and readable on a terminal of any width."""

import shlex

import pytest

import main_multi_gpu
from multigpu_cli.faults.explain import _ELSEWHERE, shorten_message

LONG = "error: --data-dir data/with/a/long/path-to-somewhere holds no such thing\n  try: another folder, or mend it"
LONG += "\n\n    a/"


def test_without_a_terminal_lines_are_left_alone() -> None:
    assert shorten_message(LONG) == LONG
    assert shorten_message("\n".join("abc")) == "a\nb\nc"


def test_on_a_terminal_lines_are_folded_between_words_and_paths_stay_whole() -> None:
    assert shorten_message(LONG, 30).splitlines() == [
        "error: --data-dir",
        "  data/with/a/long/path-to-somewhere",
        "  holds no such thing",
        "  try: another folder, or mend",
        "    it",
        "",
        "    a/",
    ]


def test_what_is_too_long_is_cut_and_said_so() -> None:
    lines = shorten_message("\n".join(map(str, range(40)))).splitlines()
    assert lines[:13] == [str(number) for number in range(13)]
    assert lines[13:] == ["  … and 27 more lines: --debug shows all"]


@pytest.mark.parametrize("flag", _ELSEWHERE)
def test_flags_of_other_programs_are_translated_into_ours(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run([flag, "1"]) == 2
    told = capsys.readouterr().err
    assert told == f"error: no such option: {flag}\n  try: {_ELSEWHERE[flag]}\n"
    ours = [word for word in shlex.split(_ELSEWHERE[flag]) if word.startswith("--")]
    assert ours
    for name in ours:
        assert main_multi_gpu.run([name]) == 2
        assert f"'{name}' requires an argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "way_out"),
    [("export here", "--to PATH"), ("--lr", "--help"), ("--zzz", "--help"), ("--adapter.r 8", "--set adapter.r=")],
)
def test_what_an_option_takes_is_said(argv: str, way_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(argv.split()) == 2
    assert capsys.readouterr().err.splitlines()[1].startswith(f"  try: {way_out}")


def test_a_missing_argument_is_shown_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_multi_gpu.run(["verify", "here"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: missing argument 'RUN_B'",
        f"  try: {main_multi_gpu._program_name()} verify [OPTIONS] RUN_A RUN_B",
    ]
