"""Scripts that spawned processes can't import are refused before any process starts."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest

from multigpu_cli.distributed.processes import check_spawned_script
from multigpu_cli.errors import RequestError
from tests.support.fork import write_output_to

TRAINS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from train_multi_gpu import train_with_multi_gpu

class Net(torch.nn.Linear):
    pass

data = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)), 4)
"""
CALL = "train_with_multi_gpu(Net(2, 2), data, world_size=2, num_epochs=1, save_dir='run')"
ROOT = Path(__file__).resolve().parents[2]


def run_stdin(text: str, folder: Path) -> tuple[int | None, str]:
    program, env = [sys.executable, "-"], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, input=text, capture_output=True, text=True, cwd=folder, env=env, timeout=60)
    return done.returncode, done.stderr


def run_words(text: str, folder: Path) -> tuple[int | None, str]:
    """As python -c would."""

    def act() -> None:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(text, vars(sys.modules["__main__"]))

    return run_in_fork(act, folder)


def run_in_fork(act: Callable[[], object], folder: Path) -> tuple[int | None, str]:
    """How it ends, and what it writes to stderr, its traceback too."""

    def begin() -> None:
        os.chdir(folder)
        said = open("said", "w")  # noqa: SIM115 - a traceback of the fork's comes last
        write_output_to(said, said)
        act()

    process = get_context("fork").Process(target=begin)
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode, Path(folder, "said").read_text()


def test_a_script_without_its_guard_ends_with_the_lines_to_add(tmp_path: Path) -> None:
    Path(tmp_path, "script.py").write_text(f"{TRAINS}\nif torch.tensor(1):\n    {CALL}\n")
    code, said = run_in_fork(lambda: runpy.run_path("script.py", run_name="__main__"), tmp_path)
    assert code == 1
    assert said.endswith(
        "RequestError: script.py, line 12: this starts processes, each of which imports the script and would start "
        "them again\n"
        "  try: move the training code into a function, `def main():`, and end the script with\n"
        '    if __name__ == "__main__":\n'
        "        main()\n"
    )
    assert said.count("Traceback") == 1
    assert not Path(tmp_path, "run").exists()


@pytest.mark.parametrize(("start", "named"), [(run_stdin, "the script"), (run_words, "Net")])
def test_a_script_without_a_file_is_refused(
    tmp_path: Path, start: Callable[[str, Path], tuple[int | None, str]], named: str
) -> None:
    code, said = start(f"{TRAINS}\n{CALL}\n", tmp_path)
    assert code == 1
    assert said.endswith(
        f"RequestError: {named} comes from stdin, python -c or a notebook: worker processes can't import it\n"
        "  try: put it into a .py file, or train in one process with world_size=1\n"
    )
    assert said.count("Traceback") == 1
    assert not Path(tmp_path, "run").exists()


@pytest.mark.parametrize(
    ("test", "safe"),
    [
        ('__name__ == "__main__"', True),
        ('__name__ != "__mp_main__" and True', True),
        ("multiprocessing.parent_process() is None", True),
        ("multiprocessing.cpu_count() > 0", False),
    ],
)
def test_a_guard_is_a_test_that_is_false_in_a_spawned_process(tmp_path: Path, test: str, safe: bool) -> None:
    script = Path(tmp_path, "own.py")
    script.write_text(f"import multiprocessing\ndef main():\n    check()\nif {test}:\n    main()\n")
    names = {"__name__": "__main__", "__file__": str(script), "check": check_spawned_script}
    program = compile(script.read_text(), script, "exec")
    if safe:
        exec(program, names)
        return
    with pytest.raises(RequestError, match=r"^own\.py, line 5: this starts processes"):
        exec(program, names)
