"""What all tests share: the order in which the workers take them, the conditions they run under, tiny checkpoints."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import httpx
import hypothesis
import pytest

import tiny_models

# Two workers share the machine: an engine that takes all processors, or that binds itself to one, disturbs the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# On a busy machine an example or an answer may take any time.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")
_patient = inspect.signature(httpx.get).parameters["timeout"].default  # 5 seconds for every request without its own
_patient.connect = _patient.read = _patient.write = _patient.pool = 300.0

ENGINES = "engine"
"""The group of all tests that start vLLM: one worker runs them, so that two engines never run at once."""

IMPORT_VLLM = {"test_connectors", "test_matrix"}
"""Files that do not start it and import it: they belong to the worker that has it."""

LONGEST = ("test_store_safety", "test_kept_graphs", "test_server_hard", "test_sweep", "test_server", "test_overlap")
"""Files that take longest, so that no worker is left alone with one of them at the end."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes a whole file, so that its fixtures are made once; the longest come first."""
    rank = {group: number for number, group in enumerate((ENGINES, *LONGEST))}
    order = {}
    for item in items:
        alone = item.get_closest_marker("engine") is None and item.path.stem not in IMPORT_VLLM
        group = item.path.stem if alone else ENGINES
        item.add_marker(pytest.mark.xdist_group(group))
        order[item] = rank.get(group, len(rank))
    items.sort(key=order.__getitem__)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.Checkpoint:
    """Tiny checkpoints, each made once. They are shared: a test that changes one works on a copy."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.make(family, root / family)
        return made[family]

    return get
