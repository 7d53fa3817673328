"""What all tests share: the order in which the workers take them, the conditions they run under, tiny checkpoints."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

import tiny_models
import vllm_forks

# Two workers share the machine: an engine that takes all processors, or that binds itself to one, disturbs the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# On a busy machine an example or an answer may take any time. A run draws what every other run draws;
# HYPOTHESIS_PROFILE=random looks further.
slow = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("random", **slow)
hypothesis.settings.register_profile("same", derandomize=True, **slow)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
_patient = inspect.signature(httpx.get).parameters["timeout"].default  # 5 seconds for every request without its own
_patient.connect = _patient.read = _patient.write = _patient.pool = 300.0

vllm_forks.prepare()  # both workers use one

ENGINES = "engine"
"""The group of all files that start vLLM in this process or fork it: one worker has it imported, and runs them."""

SERVERS = ("test_docs", "test_sweep", "test_server_vllm", "test_demo")
"""Files that start vLLM as a user does, in processes of its own."""

LONGEST = (*SERVERS, "test_store_safety", "test_server_hard", "test_server", "test_overlap")
"""Files that take longest, so that no worker is left alone with one of them at the end."""


@functools.cache
def group_of(path: Path) -> str:
    """A worker takes a whole file, so that its fixtures are made once, or all files with engines."""
    text = "" if path.stem in SERVERS else path.read_text(encoding="utf-8")
    return ENGINES if "mark.engine" in text or 'importorskip("vllm"' in text else path.stem


class Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])


# A scheduler of our own: pytest-xdist 3.8 cannot write groups into the node ids of pytest 9.2.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first."""
    rank = {group: number for number, group in enumerate((ENGINES, *LONGEST))}
    items.sort(key=lambda item: rank.get(group_of(item.path), len(rank)))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.Checkpoint:
    """Tiny checkpoints, each made once. They are shared: a test that changes one works on a copy."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.make(family, root / family)
        return made[family]

    return get
