"""A plugin for pytest: vLLM's own tests of offloading, with our connector, manager and spec in place of vLLM's.

``bench/vllm_tests.py`` runs it. ``SEMKV_TESTS_MODEL`` names a tiny OPT, which stands for facebook/opt-125m; with
``SEMKV_TESTS_OURS`` unset only that is exchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import vllm.config
import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector as offloading
import vllm.v1.kv_offload.tiering.manager as tiering_manager
import vllm.v1.kv_offload.tiering.spec as tiering_spec

MODEL = os.environ.get("SEMKV_TESTS_MODEL", "")
TESTS = "tests.v1.kv_connector.unit.offloading_connector.utils"
MADE: Counter[str] = Counter()  # of our classes, by name
RealManager, make_config = tiering_manager.TieringOffloadingManager, vllm.config.ModelConfig.__init__


def tiny_config(self: Any, *args: Any, **fields: Any) -> None:
    """A ``ModelConfig`` of the tiny OPT for the one that would be fetched."""
    if str(fields.get("model", "")).startswith("facebook/opt"):
        fields["model"] = MODEL
    make_config(self, *args, **fields)


def exchange_ours() -> None:
    """Put our classes where vLLM's tests import theirs from."""
    from semkv.connectors.kv import SemKVConnector
    from semkv.connectors.settings import KVSettings
    from semkv.connectors.shared import KVShared
    from semkv.connectors.spec import SemKVManager, SemKVSpec

    def shared() -> KVShared:
        return KVShared(KVSettings(Path(tempfile.mkdtemp())), None, None, dict)

    def translated(config: Any) -> Any:
        """A test's configuration in our words."""
        theirs = config.kv_transfer_config.kv_connector_extra_config
        config = copy.copy(config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        own: dict[str, Any] = {"cache_dir": tempfile.mkdtemp(), "break_even": False}
        own |= {"report": False}  # vLLM's tests compare a request's parameters as a whole
        if "cpu_bytes_to_use" in theirs:
            own["host_bytes"] = int(theirs["cpu_bytes_to_use"])
        config.kv_transfer_config.kv_connector_extra_config = own
        return config

    class Connector(SemKVConnector):
        """Ours over what a test asks for: a mock of a spec, most often."""

        def __new__(cls, config: Any, role: Any, kv_cache_config: Any) -> Any:
            return super().__new__(cls, translated(config), role, kv_cache_config)

        def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
            MADE["connectors"] += 1
            theirs, build = config.kv_transfer_config.kv_connector_extra_config, offloading.build_offloading_config

            def merged(own_config: Any, own_cache: Any) -> Any:
                extra = own_config.kv_transfer_config.kv_connector_extra_config
                ours = extra["semkv"]
                extra.clear()
                extra.update(theirs, semkv=ours)
                return build(own_config, own_cache)

            offloading.build_offloading_config = merged
            try:
                super().__init__(translated(config), role, kv_cache_config)
            finally:
                offloading.build_offloading_config = build

    class Manager(SemKVManager):
        def __init__(self, primary_tier: Any, secondary_tiers: Any = ()) -> None:
            MADE["managers"] += 1
            super().__init__(RealManager(primary_tier=primary_tier, secondary_tiers=secondary_tiers), shared())

    class Spec(SemKVSpec):
        def __init__(self, config: Any) -> None:
            MADE["specs"] += 1
            super().__init__(dataclasses.replace(config, extra_config={**config.extra_config, "semkv": shared()}))

    Connector.__name__ = Connector.__qualname__ = "OffloadingConnector"
    offloading.OffloadingConnector = Connector
    tiering_manager.TieringOffloadingManager = Manager
    tiering_spec.TieringOffloadingSpec = Spec
    importlib.import_module(TESTS).OffloadingManager = SemKVManager  # what the mock of a manager may be asked


def pytest_sessionfinish() -> None:
    Path("made.json").write_text(json.dumps(MADE))


vllm.config.ModelConfig.__init__ = tiny_config
if os.environ.get("SEMKV_TESTS_OURS"):
    exchange_ours()
