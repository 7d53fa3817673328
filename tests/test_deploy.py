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
from semkv.command_line import Environment, parse
from semkv_dashboard.names import read_names
from semkv_gateway.settings import ServerSettings

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


_SAMPLE = re.compile(r"^(\w+?)(?:_total|_bucket|_sum|_count)?(?:\{(.*)\})? ", re.MULTILINE)


def test_every_row_of_pages_dashboard_and_alerts_is_one_of_a_gateway(tmp_path: Path) -> None:
    """What Grafana, the alerts and the documentation name is there, with the labels that they select by."""
    with Pair(tmp_path, **NEAR, verify_rate=1.0, holdout=1e-12) as pair:
        pair.post(ONE)
        pair.settle()
        hit = pair.post(OTHER)
        assert "hit" in hit.headers["x-semkv"]
        wait_until(lambda: pair.metric("semkv_hits_checked"))
        pair.post("drawn", temperature=1)
        pair.post("[status=500] failed")
        pair.admin("stats", key="a wrong key")
        told = {"id": hit.headers["x-semkv-hit"]}
        httpx.post(f"{pair.url}/v1/semkv/feedback", json=told)
        pair.app.gateway.metrics.fault("of a test")
        for _ in range(9):
            pair.post("often")
        text = httpx.get(f"{pair.url}/semkv/metrics").text
    assert "sourdough" not in text, "metrics show no prompts"
    labels: dict[str, set[str]] = {}
    for name, given in _SAMPLE.findall(text):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", given))
    described = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    helped = re.findall(r"^# HELP (\S+) (.*)", text, re.MULTILINE)
    assert [name for name, said in helped if not said] == []
    empty = {name for name in described if name.removesuffix("_total") not in labels}
    uncounted = {"semkv_document_reuse", "semkv_documents", "semkv_header_values"}
    # No judge, one upstream that is up and has no peer.
    uncounted |= {"semkv_judged", "semkv_upstream_failed", "semkv_upstream_moved"}
    assert empty <= {f"{name}_total" for name in uncounted}, "nothing counts them"
    used = queries()
    assert len(used) > 40
    for query in used:
        names = {_base(name) for name in METRIC.findall(query)}
        assert names <= labels.keys(), query
        grouped = " ".join(re.findall(r"by \(([\w, ]+)\)", query))
        selected = {*re.findall(r"(\w+)!?=~?\"", query), *re.findall(r"\w+", grouped)}
        known = set().union({"instance", "job", "le"}, *(labels[name] for name in names))
        assert selected <= known, query
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    parts = {path.name for path in ROOT.glob("packages/*/src/semkv_*")}
    others = {
        "semkv_refused_loads",
        "semkv_document_mismatches",
        "semkv_bucket_errors",
        "semkv_kept_blocks",
        "semkv_unkept_blocks",
        "semkv_tenant_evicted_blocks",
    }  # of the connectors
    named = {name for page in pages for name in METRIC.findall(page.read_text("utf-8"))}
    bases = {_base(name) for name in named - parts - others}
    assert bases <= labels.keys() | uncounted


def _base(name: str) -> str:
    """The metric that a sample belongs to."""
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


def rendered_chart() -> list[Any]:
    """The manifests of the chart, by helm where it is installed. Else what its templates use of it is put in here:
    values, as they are or as JSON, and the release's name."""
    chart = DEPLOY / "helm"
    if shutil.which("helm"):
        command = ["helm", "template", "semkv", chart]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [*yaml.safe_load_all(text)]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    text = (
        (chart / "templates" / "gateway.yaml").read_text().replace("{{ .Release.Name }}", "semkv")
    )
    text = re.sub(
        r"\{\{ toJson \.Values\.(\w+) \}\}", lambda found: json.dumps(values[found[1]]), text
    )
    text = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda found: str(values[found[1]]), text)
    return [*yaml.safe_load_all(text)]


def test_the_chart_says_what_the_manifests_say(tmp_path: Path) -> None:
    chart = {each["kind"]: each for each in rendered_chart()}
    plain = {
        each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }
    assert chart.keys() == plain.keys() | {"ConfigMap"}
    (ours,) = chart["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (theirs,) = plain["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    same = theirs.keys() - {"args", "volumeMounts"}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert flags_in(" ".join(ours["args"])) <= flags_in(invoke(["serve", "--help"]).stdout)
    files = chart["ConfigMap"]["data"]
    names = tmp_path / "names.toml"
    names.write_text(files["names.toml"])
    config = tmp_path / "semkv.toml"
    config.write_text(files["semkv.toml"].replace("/etc/semkv/names.toml", str(names)))
    found = parse(ServerSettings, [], Environment({"SEMKV_CONFIG": str(config)}))
    assert found.tenant_names == names
    assert read_names(names) == {}
    names.write_text(files["names.toml"].replace("# ", ""))
    assert list(read_names(names).values()) == ["Search team"]


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
