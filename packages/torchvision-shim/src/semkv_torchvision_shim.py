"""Lets PyPI's torchvision be imported beside a CPU-only torch.

PyPI's Linux wheel of torchvision is built for CUDA. Beside CPU torch its compiled operators do not load, and its
import stops at ``operator torchvision::nms does not exist``. vLLM's image processors need none of them. This module
declares the two schemas that the import looks for, just before torchvision is first imported and only in that
mismatch. It is started by a ``.pth`` file because vLLM runs helper processes of its own.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class _Finder:
    """A meta path finder that acts once, on the first import of torchvision, and finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec("torchvision")
            if spec is not None and spec.origin is not None and _built_for_cuda(Path(spec.origin)):
                _declare_operators()
        return None


def _built_for_cuda(init_file: Path) -> bool:
    try:
        return (
            re.search(
                r"__version__ = '[^']*\+cu", init_file.with_name("version.py").read_text("utf-8")
            )
            is not None
        )
    except OSError:
        return False


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


def install() -> None:
    """Register the finder, where both packages are installed. Costs a few microseconds."""
    waiting = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if (
        not waiting
        and "torchvision" not in sys.modules
        and importlib.util.find_spec("torch") is not None
    ):
        sys.meta_path.insert(0, _Finder())
