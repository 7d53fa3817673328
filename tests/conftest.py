"""What all tests share: the order in which the workers take them, the conditions they run under, tiny checkpoints."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from _pytest.assertion import rewrite

import tiny_models
import vllm_forks

for _name, _value in vllm_forks.ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# An example or an answer may take any time, and a run draws what every other run draws; HYPOTHESIS_PROFILE=random looks
# further.
hypothesis.settings.register_profile(
    "random", hypothesis.settings.get_profile("ci"), derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
_patient = (
    inspect.signature(httpx.get).parameters["timeout"].default
)  # 5 seconds for every request without its own
_patient.connect = _patient.read = _patient.write = _patient.pool = 300.0
# A request without a client of its own makes one, and with it a TLS context: 20 ms of processor time, each.
httpx._transports.default.create_ssl_context = functools.cache(
    httpx._transports.default.create_ssl_context
)

vllm_forks.prepare()  # one for all workers
vllm_forks.be_plain()

LONGEST = (
    "test_sweep", "test_kv_load", "test_positions", "test_docs", "test_guards", "test_families", "test_server_vllm",
    "test_frameworks", "test_demo", "test_connectors", "test_configuration", "test_semantic", "test_kv_peers",
    "test_sweep_ray", "test_bucket", "test_document_reuse", "test_contamination", "test_distributions",
    "test_near_repeats", "test_notebook", "test_server_browser", "test_kv_kinds", "test_serve", "test_stop",
    "test_gateway_redis", "test_html_report", "test_shared_directory", "test_engine_vllm", "test_document_order",
    "test_server_hard", "test_reading", "test_matrix", "test_quality", "test_store_safety", "test_kv_sessions",
    "test_kv_resets", "test_cli", "test_server_attacks", "test_upstreams",
)  # fmt: skip
"""Files that take longest, so that no worker is left alone with one of them at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """The workers of a run of all tests are forks too: the heavy libraries are imported once, and meanwhile the
    assertions of the tests are rewritten."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        python = str(vllm_forks.prepare() / "python")
        with subprocess.Popen([python, "-c", "pass"]):
            rewrite_tests(config)
        for spec in specs:
            spec.python = shlex.quote(python)


def rewrite_tests(config: pytest.Config) -> None:
    """Do once what every worker would do: pytest rewrites the assertions of a file before it compiles it.

    These names are not pytest's API. A pytest without them rewrites the tests in each worker.
    """
    with contextlib.suppress(AttributeError, KeyError, OSError, TypeError):
        state = config.stash[rewrite.assertstate_key]
        for path in Path(__file__).parent.glob("test_*.py"):
            cached = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(path, cached) is None:
                stat, code = rewrite._rewrite_test(path, config)
                cached.parent.mkdir(exist_ok=True)
                rewrite._write_pyc(state, code, stat, cached)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first; without vLLM, what needs it is skipped."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(
                    pytest.mark.skip(reason="needs vLLM: pip install 'semkv[cpu]' or 'semkv[gpu]'")
                )


def pytest_collection_finish() -> None:
    """No garbage collection looks at the modules again: with all libraries that takes most of a second."""
    getattr(gc, "really_freeze", gc.freeze)()  # see `quicken`


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.Checkpoint:
    """Tiny checkpoints, each made once. They are shared: a test that changes one works on a copy."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.make(family, root / family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gateway in front of a scripted upstream, for the tests of one file."""
    from gateway_helpers import Pair

    with Pair(tmp_path_factory.mktemp("gateway")) as running:
        yield running
