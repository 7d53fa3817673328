"""vLLM's own tests of its KV offloading, run with our connector, manager and spec in place of vLLM's.

    python bench/vllm_tests.py DIR     (vLLM's source distribution or repository, of the installed version)

Every test runs twice: as vLLM ships it, and with ours. Prints counts and, by name, what passes with theirs and not
with ours; ends with status 1 if there is any. Tests that need a GPU or a package that is not there fail or are skipped
both times, and are told apart from those. pytest loads this file as a plugin, which exchanges the classes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = (
    "tests/v1/kv_connector/unit/offloading_connector",
    "tests/v1/kv_offload/tiering/test_tiering_offloading.py",
    "tests/v1/kv_offload/tiering/test_backpressure.py",
    "tests/v1/kv_offload/tiering/test_metrics.py",
    "tests/v1/kv_offload/test_factory.py",
)


# ------------------------------------------------------------------ the plugin

MODEL = os.environ.get("SEMKV_TESTS_MODEL", "")  # a tiny OPT, which stands for facebook/opt-125m
UTILS = "tests.v1.kv_connector.unit.offloading_connector.utils"
MADE: Counter[str] = Counter()  # of our classes, by name


def exchange_model() -> None:
    """Have vLLM take the tiny OPT for the one that would be fetched."""
    import vllm.config

    make_config = vllm.config.ModelConfig.__init__

    def tiny_config(self: Any, *args: Any, **fields: Any) -> None:
        if str(fields.get("model", "")).startswith("facebook/opt"):
            fields["model"] = MODEL
        make_config(self, *args, **fields)

    vllm.config.ModelConfig.__init__ = tiny_config


def exchange_ours() -> None:
    """Put our classes where vLLM's tests import theirs from."""
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector as offloading
    import vllm.v1.kv_offload.tiering.manager as tiering_manager
    import vllm.v1.kv_offload.tiering.spec as tiering_spec

    from semkv_vllm import KVSettings
    from semkv_vllm.host_memory import Need, region_of
    from semkv_vllm.kv import SemKVConnector
    from semkv_vllm.shared import KVShared
    from semkv_vllm.spec import SemKVManager, SemKVSpec

    def shared() -> KVShared:
        return KVShared(KVSettings(Path(tempfile.mkdtemp())), None, None, dict)

    def translated(config: Any) -> Any:
        """A test's configuration in our words."""
        theirs = config.kv_transfer_config.kv_connector_extra_config
        config = copy.copy(config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        own: dict[str, Any] = {"cache_dir": tempfile.mkdtemp(), "break_even": False}
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
            theirs = config.kv_transfer_config.kv_connector_extra_config
            build = offloading.build_offloading_config

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
                region_of(self._engine).unlink(missing_ok=True)  # a mock of a worker never fills it

        def _reported(self, request: Any, wait: bool, params: Any) -> Any:
            return wait, params  # vLLM's tests compare a request's parameters as a whole

    class Manager(SemKVManager):
        def __init__(self, *args: Any, **fields: Any) -> None:
            MADE["managers"] += 1
            super().__init__(*args, **fields)
            SemKVManager.of(self, shared())

    class Spec(SemKVSpec):
        def __init__(self, config: Any) -> None:
            MADE["specs"] += 1
            super().__init__(
                dataclasses.replace(config, extra_config={**config.extra_config, "semkv": shared()})
            )

    Need.unmet = lambda *_: None  # type: ignore[method-assign]  # vLLM's tests have room for a few blocks
    Connector.__name__ = Connector.__qualname__ = "OffloadingConnector"
    offloading.OffloadingConnector = Connector
    tiering_manager.TieringOffloadingManager = Manager
    tiering_spec.TieringOffloadingSpec = Spec
    # What the mock of a manager may be asked.
    importlib.import_module(UTILS).OffloadingManager = SemKVManager


def pytest_sessionfinish() -> None:
    Path("made.json").write_text(json.dumps(MADE))


if MODEL:
    exchange_model()
if os.environ.get("SEMKV_TESTS_OURS"):
    exchange_ours()


# ------------------------------------------------------------------ the program


def tests_alone(source: Path, folder: Path) -> Path:
    """A copy of the tests without the outermost conftest.py, which imports what tests of models need."""
    root = folder / "alone"
    for path in sorted((source / "tests").rglob("*.py")):
        name = path.relative_to(source)
        if name.parts[1] in ("v1", "__init__.py", "utils.py") and name != Path(
            "tests/v1/conftest.py"
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(path.read_bytes())
    (root / "pytest.ini").write_text("[pytest]\naddopts =\n")
    return root


def run(root: Path, model: Path, *, ours: bool, tests: list[str]) -> dict[str, tuple[str, str]]:
    """Outcome and reason by test."""
    report = root / f"report-{'ours' if ours else 'theirs'}.xml"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(root), os.environ.get("PYTHONPATH", "")]),
        "SEMKV_TESTS_MODEL": str(model),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    environment |= {"SEMKV_TESTS_OURS": "1"} if ours else {}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "vllm_tests",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    command += ["--timeout=600", f"--junitxml={report}", "-o", "junit_family=xunit1", *tests]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if not report.exists():
        raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
    return outcomes(report)


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314
        name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        bad = next(
            (
                case.find(kind)
                for kind in ("failure", "error", "skipped")
                if case.find(kind) is not None
            ),
            None,
        )
        kind = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        found[name] = (
            kind,
            "" if bad is None else (bad.get("message") or bad.text or "").strip()[:300],
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a folder that holds vLLM's folder tests/")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="paths of tests in it")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent / "tests"))
    import tiny_models

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        root = tests_alone(args.source, folder)
        model = tiny_models.make("opt", folder / "opt")
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = (
            2048  # as facebook/opt-125m; no test of these loads the weights
        )
        (model / "config.json").write_text(json.dumps(config))
        theirs, ours = (run(root, model, ours=flag, tests=args.tests) for flag in (False, True))
        made = json.loads((root / "made.json").read_text())
    for name, found in (("theirs", theirs), ("ours", ours)):
        print(f"{name:7}", dict(sorted(Counter(kind for kind, _ in found.values()).items())))
    for reason, number in Counter(
        why for kind, why in theirs.values() if kind == "skipped"
    ).most_common(10):
        print(f"skipped {number} times: {reason}")
    for name, (kind, why) in theirs.items():
        if kind == "failed":
            print(f"FAILS WITHOUT US {name}: {why}")
    new = {
        n: found
        for n, found in ours.items()
        if found[0] == "failed" and theirs.get(n, ("", ""))[0] != "failed"
    }
    for name, (_, why) in new.items():
        print(f"FAILS WITH OURS {name}: {why}")
    missing = [name for name, (kind, _) in theirs.items() if kind == "passed" and name not in ours]
    print("of ours were made:", made)
    print(f"{len(new)} tests pass with vLLM's classes only, {len(missing)} were not run with ours")
    sys.exit(1 if new or missing else 0)


if __name__ == "__main__":
    main()
