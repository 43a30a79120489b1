import traceback

import pytest
import torch

from multigpu_cli.faults.explain import describe_innermost_line, is_library_file


def test_the_innermost_line_is_the_users_not_the_librarys() -> None:
    with pytest.raises(TypeError) as raised:
        torch.nn.functional.cross_entropy(torch.zeros(2, 2), "wrong")  # type: ignore[arg-type]
    line = describe_innermost_line(traceback.extract_tb(raised.value.__traceback__))
    assert "test_stack_lines.py:" in line
    assert line.endswith("in test_the_innermost_line_is_the_users_not_the_librarys")


def test_files_of_python_and_of_installed_packages_are_library_files() -> None:
    assert is_library_file(traceback.__file__)
    assert is_library_file(torch.__file__)
    assert not is_library_file(__file__)
