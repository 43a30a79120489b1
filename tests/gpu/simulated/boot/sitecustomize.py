"""Found on PYTHONPATH at the start of a process: where the environment names a simulated machine, torch meets its GPUs.

torch is not imported for that; it finds the GPUs when somebody else imports it.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

if os.environ.get("SIMULATED_CUDA"):

    class _AfterTorch:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
            if name != "torch":
                return None
            sys.meta_path.remove(_AfterTorch)
            spec = importlib.util.find_spec("torch")
            loader: Any = spec.loader if spec else None
            if loader is not None:
                load = loader.exec_module

                def exec_module(module: object) -> None:
                    load(module)
                    from tests.gpu.simulated.install import install_from_environment

                    install_from_environment()

                loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _AfterTorch)
