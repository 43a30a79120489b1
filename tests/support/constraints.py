"""Writes constraints/: for each version of Python, the versions of all packages that a fresh environment gets today.

`make quickstart`, `make test` and CI install these, so pip need not search for versions that go together, and a new
release of a package can't break them. torch, torchvision and what NVIDIA makes are left out: machines differ in these.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

from tests.support.pythons import PROJECT, VERSIONS, find_python, list_requirements, locate_constraints

UNPINNED = re.compile(r"(torch|torchvision|triton|pytorch-triton.*|nvidia-.*|cuda-.*)")


def resolve(python: Path) -> list[str]:
    """Return name==version of each package that pip would install with all extras, sorted; takes minutes."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        install, report = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet"], Path(folder, "report.json")
        subprocess.run([*install, "--upgrade", "pip"], check=True)
        requirements = sorted({*list_requirements(), *list_requirements(*PROJECT["optional-dependencies"])})
        subprocess.run([*install, "--dry-run", "--report", str(report), *requirements], check=True)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    names = {package["name"].lower().replace("_", "-"): package["version"] for package in packages}
    return sorted(f"{name}=={version}" for name, version in names.items() if not UNPINNED.fullmatch(name))


def main() -> None:
    for version in VERSIONS:
        if python := find_python(version):
            file = locate_constraints(version)
            lines = ["# written by `make constraints`", *resolve(python)]
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join(lines) + "\n")
            print(f"{file.name}: {len(lines) - 1} packages")
        else:
            print(f"Python {version} is not on this machine: its file stays as it is")


if __name__ == "__main__":
    main()
