"""torchvision as it comes from PyPI, beside a torch for CPUs: its operators are missing, and its import fails.

The schemas of two of them are all that the import, its networks and its transforms need; boxes need the operators
themselves. Python imports a module of this name at its start where its folder is on PYTHONPATH: that is how a process
that a test starts gets them. Nothing is loaded until torchvision is.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_NEEDED_BY = ("torchvision._autograd_registrations", "torchvision._meta_registrations")
_libraries: list[Any] = []  # torch forgets the schemas of one that nobody holds


class DefineSchemas(MetaPathFinder):
    """Finds nothing; before torchvision's registrations are imported, it defines what they expect."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname in _NEEDED_BY and not _libraries:
            from torch import library
            from torchvision import extension

            if not extension._has_ops():
                _libraries.append(library.Library("torchvision", "FRAGMENT"))
                for name in ("nms", "qnms"):
                    _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


if not any(isinstance(finder, DefineSchemas) for finder in sys.meta_path):
    sys.meta_path.insert(0, DefineSchemas())
