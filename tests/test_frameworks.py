"""LangChain, LiteLLM and LlamaIndex over the cache, in an environment of their own.

Their requirements and vLLM's exclude each other. The environment has the frameworks, and below them what this one has.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from test_distributions import ENVIRONMENT, TOP, UV, uv

FRAMEWORKS = ("langchain-openai==1.7.4", "llama-index-llms-openai-like==0.8.1")

pytestmark = pytest.mark.skipif(not UV, reason="uv is not installed")


def test_each_framework_with_its_own_client(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    python = folder / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable, folder)
    uv("pip", "install", "--quiet", "--python", python, *FRAMEWORKS)
    (packages,) = folder.glob("lib/python*/site-packages")
    below = sysconfig.get_path("purelib")
    (packages / "zz_below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    command = [python, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, TOP / "tests" / "frameworks_checks.py"],
        cwd=TOP,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(TOP / "tests")},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
