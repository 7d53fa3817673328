"""The files in deploy/: they parse, name flags and metrics that exist, and build where there is a container engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from command_line import invoke
from gateway_helpers import NEAR, ONE, OTHER, Pair, wait_until

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"semkv_[a-z_]+")


def queries() -> list[str]:
    """PromQL of the dashboard and of the alerts."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [variable["query"] for variable in dashboard["templating"]["list"]]
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return found + [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_metric_of_dashboard_and_alerts_is_one_of_a_gateway(tmp_path: Path) -> None:
    with Pair(tmp_path, **NEAR, verify_rate=1.0, holdout=1e-12) as pair:
        pair.post(ONE)
        pair.settle()
        assert "hit" in pair.post(OTHER).headers["x-semkv"]
        wait_until(lambda: pair.metric("semkv_hits_checked"))
        text = httpx.get(f"{pair.url}/semkv/metrics").text
    described = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    known = described | {
        line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")
    }
    used = {name for query in queries() for name in METRIC.findall(query)}
    assert len(used) > 10
    assert "sourdough" not in text, "metrics show no prompts"
    labels = {f"{name}_bucket" for name in described}
    assert used <= known | labels | {f"{name}_total" for name in described}, used - known


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_the_files_parse_and_every_flag_is_one_of_serve() -> None:
    parsed = {file.name: [*yaml.safe_load_all(file.read_text())] for file in DEPLOY.glob("*.y*ml")}
    assert all(all(documents) for documents in parsed.values())
    compose = parsed["compose.yaml"][0]["services"]["semkv"]["command"]
    (stateful,) = [each for each in parsed["kubernetes.yaml"] if each["kind"] == "StatefulSet"]
    arguments: list[Any] = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    unit = re.findall(r"ExecStart=(.*)", (DEPLOY / "semkv.service").read_text())
    entry = re.findall(r"ENTRYPOINT (.*)", (DEPLOY / "Containerfile").read_text())
    used = flags_in(" ".join([*compose, *arguments, *unit, *entry]))
    assert len(used) > 3
    assert used <= flags_in(invoke(["serve", "--help"]).stdout)


def test_the_unit_is_sound(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt install systemd")
    unit = tmp_path / "semkv.service"
    unit.write_text(
        (DEPLOY / "semkv.service").read_text().replace("/opt/semkv/bin/semkv", "/bin/true")
    )
    found = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_image_builds() -> None:
    engines = [name for name in ("docker", "podman") if shutil.which(name)]
    works = [
        name
        for name in engines
        if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0
    ]
    if not works:
        pytest.skip("needs a running container engine: docker or podman")
    subprocess.run(
        [works[0], "build", "-f", DEPLOY / "Containerfile", "-t", "semkv-test", ROOT], check=True
    )
    said = subprocess.run(
        [works[0], "run", "--rm", "semkv-test", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--upstream" in said.stdout
