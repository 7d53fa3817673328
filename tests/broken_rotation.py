"""vLLM's server, in which documents are moved by another rotary embedding than the model's while a file is there.

The connector's own check, which would notice that within one request, is off.
"""

from __future__ import annotations

import copy
import os
import runpy
from pathlib import Path
from typing import Any

from semkv_vllm.placement import Placement

SIGN = "BROKEN_ROTATION"
"""The variable that names the file."""


def other(rotary: Any) -> Any:
    """The same with twice the theta."""
    found = copy.deepcopy(rotary)
    found.base *= 2
    found.cos_sin_cache.copy_(found._compute_cos_sin_cache())
    return found


def patch(sign: Path) -> None:
    moved = Placement._moved

    def moved_by_another(self: Any, loads: Any) -> Any:
        layers = self._layers
        own = layers.rotaries
        if sign.exists():
            layers.rotaries = [other(rotary) for rotary in own]
        try:
            return moved(self, loads)
        finally:
            layers.rotaries = own

    Placement._moved = moved_by_another  # type: ignore[method-assign]
    Placement._is_right = lambda self, plan: True  # type: ignore[method-assign]


if __name__ == "__main__":
    patch(Path(os.environ[SIGN]))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
