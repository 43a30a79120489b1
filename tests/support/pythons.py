"""Other versions of Python on this machine, each with an environment of its own for a training."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = ("3.11", "3.12", "3.13")


def find_python(version: str) -> Path | None:
    """Return the interpreter of this version from PATH or pyenv; None if none of them starts."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    named = shutil.which(f"python{version}")
    for path in [*([Path(named)] if named else []), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]:
        # pyenv's shim is on PATH, too, and fails unless its version is selected
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        started = subprocess.run([path, "-c", code], capture_output=True, text=True)
        if started.stdout.strip() == version:
            return path
    return None


def list_requirements(*extras: str) -> Iterator[str]:
    """Yield what the project requires with these extras, whose references to other extras are resolved."""
    needed = list(PROJECT["dependencies"]) if not extras else []
    for extra in extras:
        needed += PROJECT["optional-dependencies"][extra]
    for requirement in needed:
        inner = re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement)
        yield from list_requirements(*inner[1].split(",")) if inner else [requirement]


def locate_constraints(version: str) -> Path:
    """Return the file of tested versions of all packages for this version of Python, which `make` installs."""
    return ROOT / "constraints" / f"python{version}.txt"


def make_environment(version: str, python: Path) -> Path:
    """Return the interpreter of an environment with what a training requires; made once for each checkout.

    Takes a minute and some GiB where pip finds torch with CUDA. Raises CalledProcessError if pip fails.
    """
    folder = ROOT / f".venv-python{version}"
    folder.mkdir(exist_ok=True)
    requirements, constraints = list(list_requirements()), locate_constraints(version)
    content = "\n".join([*requirements, constraints.read_text()])
    installed, stamp = folder / "environment" / "bin" / "python", folder / ".installed"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two tests, or `make test` in two terminals
        if not stamp.exists() or stamp.read_text() != content:
            stamp.unlink(missing_ok=True)
            print(f"an environment for Python {version}, in {folder.name}: a minute or two", flush=True)
            subprocess.run([python, "-m", "venv", "--clear", folder / "environment"], check=True)
            command = [str(installed), "-m", "pip", "install", "--quiet", "--no-compile"]
            subprocess.run([*command, "--constraint", str(constraints), *requirements], check=True)
            stamp.write_text(content)
    return installed


def main() -> None:
    """Make the environment of each other version that this machine has, before `make test` begins."""
    for version in VERSIONS:
        python = find_python(version)
        if python and version != f"{sys.version_info.major}.{sys.version_info.minor}":
            make_environment(version, python)


if __name__ == "__main__":
    main()
