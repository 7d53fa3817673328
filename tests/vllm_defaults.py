"""What vLLM does by default on a GPU, on a CPU: model runner V2, and steps that are planned before the last has ended.

vLLM's CPU build has both and turns them off: it finds no compiler of Triton for CPUs, and needs no steps planned ahead.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def choose_second_runner() -> None:
    """Engines of this process have model runner V2; to be called before vLLM is imported.

    Triton's kernels are interpreted, so a step takes several times as long.
    """
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(
        compiler=None,
        driver=SimpleNamespace(is_active=lambda: True),
    )


def plan_ahead() -> None:
    """Engines of this process plan a step before the last one has ended."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  # streams and events that do nothing
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_plan(cls: type, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_plan)  # type: ignore[assignment, arg-type]
