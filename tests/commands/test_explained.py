"""Errors in words: short, and readable on a terminal of any width."""

from multigpu_cli.commands.explained import shortened

LONG = "error: --data-dir data/with/a/long/path-to-somewhere holds no such thing\n  try: another folder, or mend it"
LONG += "\n\n    a/"


def test_without_a_terminal_lines_are_left_alone() -> None:
    assert shortened(LONG) == LONG
    assert shortened("\n".join("abc")) == "a\nb\nc"


def test_on_a_terminal_lines_are_folded_between_words_and_paths_stay_whole() -> None:
    assert shortened(LONG, 30).splitlines() == [
        "error: --data-dir",
        "  data/with/a/long/path-to-somewhere",
        "  holds no such thing",
        "  try: another folder, or mend",
        "    it",
        "",
        "    a/",
    ]


def test_what_is_too_long_is_cut_and_said_so() -> None:
    lines = shortened("\n".join(map(str, range(40)))).splitlines()
    assert lines[:13] == [str(number) for number in range(13)]
    assert lines[13:] == ["  … and 27 more lines: --debug shows all"]
