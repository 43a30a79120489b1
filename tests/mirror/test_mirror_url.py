"""--mirror: which URLs are taken, and that no password is shown or kept."""

import pytest

from multigpu_cli.mirror import rules
from multigpu_cli.mirror.rules import find_url_errors, make_absolute


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:/mnt/run", "file:///mnt/run", "file:run"])
def test_a_folder_is_taken(url: str) -> None:
    assert list(find_url_errors(url)) == []


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("/mnt/run", "--mirror /mnt/run: is not the URL of a folder"),
        ("http://host/run", "--mirror http://host/run: is not the URL of a folder"),
        ("s3:bucket/run", "--mirror s3:bucket/run: is not the URL of a folder"),
        ("file://mnt/run", "--mirror file://mnt/run: names a machine, mnt"),
        ("file:", "--mirror file:: is not the URL of a folder"),
        ("s3://key:hush@bucket/run", "--mirror s3://…@bucket/run: holds credentials or options"),
        ("ftp://key:hush@host/run", "--mirror ftp://…@host/run: is not the URL of a folder"),
        ("s3://bucket/run?secret=hush", "--mirror s3://bucket/run: holds credentials or options"),
        ("gs://bucket/run", "--mirror gs://bucket/run: needs gcsfs, which is not installed\n  try: pip install gcsfs"),
    ],
)
def test_anything_else_is_refused_without_its_password(url: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    (error,) = find_url_errors(url)
    assert str(error).startswith(told)
    assert "hush" not in str(error)


def test_a_relative_folder_is_one_below_the_present_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_absolute("file:run") == f"file:{tmp_path}/run"
    assert make_absolute("file:/run") == "file:/run"
    assert make_absolute("s3://bucket/run") == "s3://bucket/run"
