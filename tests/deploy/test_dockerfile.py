"""deploy/Dockerfile: hadolint, and what the image must be; building it needs docker."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "Dockerfile"


def lines() -> list[str]:
    joined = FILE.read_text().replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([str(hadolint), "--no-color", str(FILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_nobody_special_under_tini() -> None:
    found = lines()
    assert found.index("USER 1000") > max(number for number, line in enumerate(found) if line.startswith("RUN"))
    assert 'ENTRYPOINT ["tini", "--", "multigpu"]' in found


def test_its_torch_is_one_that_we_take() -> None:
    [wanted] = [
        word
        for word in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if word.startswith("torch>")
    ]
    least, beyond = (tuple(map(int, version.split("."))) for version in re.findall(r"[\d.]+", wanted))
    [base] = re.findall(
        r"^ARG BASE=pytorch/pytorch:(\d+)\.(\d+)\.\d+-cuda[\d.]+-cudnn\d+-runtime$", FILE.read_text(), re.MULTILINE
    )
    assert least <= tuple(map(int, base)) < beyond


def test_all_that_the_wheel_is_built_from_is_copied() -> None:
    copied = {
        word for line in lines() if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]
    }
    assert all((ROOT / word).exists() for word in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = {project["project"]["readme"], *project["project"]["license-files"]}
    named |= {f"{module}.py" for module in project["tool"]["setuptools"]["py-modules"]}
    named |= set(project["tool"]["setuptools"]["script-files"]) | {"configs", "multigpu_cli", "pyproject.toml"}
    assert copied == named


def test_it_can_compile() -> None:
    """Triton and torch's own compiler build with gcc and g++, and a runtime image has neither (pytorch#116696)."""
    [final] = [number for number, line in enumerate(lines()) if line == "FROM ${BASE}"]
    [installed] = [line for line in lines()[final:] if "apt-get install" in line]
    assert {"g++", "tini"} <= set(installed.split("apt-get install")[1].split("&&")[0].split())
