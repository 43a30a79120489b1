"""What `pip install` gets: every package, the recipes, the launcher, the licence."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.pythons import VERSIONS, list_requirements, locate_constraints

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves its traces where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(
        ".git", ".venv*", "tests", "checkpoints", "build", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "project", ignore=unwanted)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--wheel-dir", str(folder), "."),
        ],
        cwd=folder / "project",
        check=True,
    )
    return next(folder.glob("multigpu_cli-*.whl"))


def test_every_package_is_named() -> None:
    packages = {file.parent.relative_to(ROOT) for file in ROOT.glob("multigpu_cli/**/__init__.py")}
    named = set(PROJECT["tool"]["setuptools"]["packages"]) - {"multigpu_cli._configs"}
    assert named == {".".join(package.parts) for package in packages}


def test_every_folder_of_code_is_a_package() -> None:
    folders = {file.parent for file in ROOT.glob("multigpu_cli/**/*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_wheel_holds_code_recipes_launcher_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"main_multi_gpu.py", "train_multi_gpu.py", "multigpu_cli/planning/batch.py"} <= names
    pages = ("commands/report/page.html", *(f"watch/page.{suffix}" for suffix in ("html", "css", "js")))
    assert {f"multigpu_cli/{page}" for page in pages} <= set(names)
    assert "multigpu_cli/py.typed" in names, "type checkers read the package's own annotations"
    recipes = {f"multigpu_cli/_configs/{file.name}" for file in ROOT.glob("configs/*.yaml")}
    assert recipes
    assert recipes <= names
    assert any(name.endswith(".data/scripts/launch_multi_gpu.sh") for name in names)
    assert any(name.endswith("LICENSE") for name in names)
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"main_multi_gpu.py", "train_multi_gpu.py", "multigpu_cli"}


def test_an_installed_program_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from multigpu_cli.config import paths; print(*sorted(paths.find_recipes()), paths.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    *found, source = result.stdout.split()
    assert source.startswith(str(tmp_path))
    assert found == sorted(file.stem for file in ROOT.glob("configs/*.yaml"))


def test_project_wheel_and_changelog_name_the_same_version(wheel: Path) -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == PROJECT["project"]["version"]
    assert wheel.name.startswith(f"multigpu_cli-{newest[1]}-"), "from its metadata comes __version__"


def test_each_supported_python_is_classified_and_has_constraints() -> None:
    classified = [name.rpartition(" :: ")[2] for name in PROJECT["project"]["classifiers"] if ":: Python ::" in name]
    assert classified == list(VERSIONS)
    assert {file.name for file in ROOT.glob("constraints/*")} == {f"python{version}.txt" for version in VERSIONS}


def test_constraints_pin_each_requirement_within_its_range() -> None:
    needed = [*list_requirements(), *list_requirements(*PROJECT["project"]["optional-dependencies"])]
    requirements = [Requirement(text) for text in needed]
    for version in VERSIONS:
        lines = [line for line in locate_constraints(version).read_text().splitlines() if not line.startswith("#")]
        pins = dict(line.split("==") for line in lines)
        unpinned = {each.name.lower() for each in requirements if each.name.lower() not in pins}
        assert unpinned == {"torch", "torchvision", "nvidia-ml-py"}
        wrong = [
            str(each)
            for each in requirements
            if each.name.lower() in pins and pins[each.name.lower()] not in each.specifier
        ]
        assert not wrong, "make constraints"


def test_installed_torchvision_is_the_release_for_torch() -> None:
    torch, torchvision = (Version(metadata.version(name)) for name in ("torch", "torchvision"))
    assert (torchvision.major, torchvision.minor) == (0, torch.minor + 15), "see `doctor`"
