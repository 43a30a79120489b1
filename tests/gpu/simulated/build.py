"""Compiles device.cpp once per torch, Python and source text, into the user's cache; workers wait for each other."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

NAME = "simulated_cuda"
SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ["-O0", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]


class NoCompiler(Exception):
    """There is none; says which one was looked for."""


def build_library() -> Path:
    """The library, compiled now if it never was: about a CPU minute.

    Raises:
        NoCompiler: it has to be compiled, and can't be.
    """
    library = _cache() / _key() / f"{NAME}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise NoCompiler(
            f"the simulated CUDA device needs a C++ compiler, and there is no {compiler} (CXX names another)"
        )
    torch = _torch()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    draft = library.with_suffix(f".{os.getpid()}")
    where = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    words = [compiler, *_FLAGS, *(f"-I{each}" for each in includes), str(SOURCE), "-o", str(draft), *where, *libraries]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{compiler} failed on {SOURCE.name}:\n{done.stderr[-4000:]}")
    draft.replace(library)


def _key() -> str:
    """Changes with whatever the library depends on."""
    parts = (SOURCE.read_text(), metadata.version("torch"), sysconfig.get_config_var("SOABI"), _torch(), _FLAGS)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _torch() -> Path:
    """torch's folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multigpu-simulated-cuda"
