"""What an export asks for: all that can be wrong with it before torch is loaded."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from multigpu_cli.errors import RequestError

_NEEDS: Mapping[str, tuple[str, ...]] = {
    ".safetensors": ("safetensors",),
    ".pt": (),
    ".pt2": (),
    ".onnx": ("onnx", "onnxscript", "onnxruntime"),
}


def target_of(to: str, checkpoint: str) -> Path:
    """The file that shall be written.

    Raises:
        RequestError: its kind is unknown, or something that it needs is missing, or it is there already.
    """
    target = Path(to)
    if target.suffix not in _NEEDS:
        raise RequestError(f"--to {to}: a file of what kind?", remedy=f"a name that ends in {', '.join(_NEEDS)}")
    packages = _NEEDS[target.suffix]
    if missing := [package for package in packages if find_spec(package) is None]:
        raise RequestError(f"--to {to} needs {', '.join(missing)}", remedy=f"pip install {' '.join(packages)}")
    if target.exists():
        raise RequestError(f"--to {to}: there is such a file already", remedy="another name, or remove it")
    if not target.parent.is_dir():
        raise RequestError(f"--to {to}: there is no folder {target.parent}", remedy="make it, or another place")
    if not Path(checkpoint).exists():
        raise RequestError(f"{checkpoint}: there is no such file or folder", remedy="the --save-dir of a run")
    return target
