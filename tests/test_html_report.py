"""Reports of sweeps: what is read and computed, and the page in a browser and as Markdown."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsers import chromium
from lab_helpers import record
from semkv.errors import ConfigError, DatasetError
from semkv_lab.metrics import given, summarise, without
from semkv_lab.report import write_report
from semkv_lab.results import Experiment, points, read_logs, wrong_hits
from semkv_lab.samples import Cold, SampleRecord
from vllm_forks import prepare

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = '</script><script>alert("x")</script><img src=https://example.org/x.png onerror=alert(1)> `a|b` {{ 7 * 7 }}'
ROW = {"name": "a", "status": "failed", "error": "no", "settings": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three experiments, in which the data set's labels stand in for a model's answers; and a failed one."""
    folder = tmp_path_factory.mktemp("sweep")
    defaults = {
        "engine": "labels",
        "max-samples": 60,
        "data-dir": str(folder / "data"),
        "baseline": True,
    }
    off = {"embedding-layer": [], "embedding-hook": "none", "disable-semantic-cache": True}
    experiments: list[dict[str, Any]] = [{"name": "exact-only", **off}]
    for vision in (0.9, 0.99):
        layers = {"embedding-layer": ["prompt:384:0.8", f"vision:6912:{vision}"]}
        experiments.append(
            {"name": f"layers-{vision:g}", **layers, "disable-guards": True, "match": "any"}
        )
    (folder / "spec.json").write_text(
        json.dumps({"defaults": defaults, "experiments": experiments})
    )
    command = [
        prepare() / "semkv",
        "sweep",
        "--specs",
        folder / "spec.json",
        "--log-file",
        folder / "sweep.csv",
    ]
    done = subprocess.run(
        [*command, "--samples-dir", folder / "samples"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    failed = {
        "name": f"fails {HOSTILE}",
        "status": "failed",
        "error": HOSTILE,
        "summary": None,
        "samples": None,
    }
    odd = {
        "name": "odd",
        "settings": rows(folder)[1]["settings"] | {"preset": HOSTILE + "$x -->"},
        "samples": None,
    }
    with (folder / "sweep.jsonl").open("a") as file:
        file.writelines(json.dumps(rows(folder)[1] | row) + "\n" for row in (odd, failed))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "sweep.jsonl"
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    return path


# --- what is read and computed


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((ROW, "{broken"), "sweep.jsonl, line 2: not valid JSON"),
        (({"status": "ok"},), "line 1: name"),
        ((ROW, {**ROW, "status": "done"}), "line 2: status"),
        (({**ROW, "summary": 3},), "line 1: summary"),
        ((), "no experiment is logged there"),
    ],
)
def test_a_bad_log_is_named_with_its_line(
    tmp_path: Path, rows: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(DatasetError, match=re.escape(str(tmp_path / "sweep.jsonl"))) as caught:
        read_logs([written(tmp_path, *rows)])
    assert message in str(caught.value)


def test_the_last_row_of_a_name_counts_and_names_of_two_logs_are_kept_apart(tmp_path: Path) -> None:
    first = written(tmp_path, ROW, {**ROW, "status": "ok"}, {**ROW, "name": "b"})
    (tmp_path / "other").mkdir()
    second = written(tmp_path / "other", ROW).rename(tmp_path / "more.jsonl")
    found = read_logs([first, second])
    assert [(e.name, e.status) for e in found] == [
        ("sweep: a", "ok"),
        ("b", "failed"),
        ("more: a", "failed"),
    ]


def test_groups_and_points(folder: Path) -> None:
    experiments = read_logs([folder / "sweep.jsonl"])
    loose, plain = "minigqa, match any, guards off", "minigqa, match all, guards on"
    assert [e.group for e in experiments[:3]] == [plain, loose, loose]
    assert experiments[1].thresholds == "prompt 0.8, vision 0.9, semantic 0.92"
    assert experiments[1].tiers == "exact + semantic + embedding + fusion"
    plane = points(experiments)
    assert [p.experiment.name for p in plane] == [e.name for e in experiments[:4]]
    places = [(p.rate.value or 0, p.accuracy.value or 0) for p in plane]
    unbeaten = {
        a for a in places if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in places)
    }
    front = {p.front: place for p, place in zip(plane, places, strict=True) if p.front}
    assert [front[n] for n in range(1, len(front) + 1)] == sorted(unbeaten)


def wrong_record(score: float, **values: Any) -> SampleRecord:
    base: dict[str, Any] = {
        "question": "q?", "text": "blue", "match": False, "provenance": "text:semantic", "exactness": "approximate",
        "applied": True, "score": score, "donor_answer": "blue", "latency_s": 0.1, "ttft_s": None,
        "donor_question": "p?", "cold": Cold("a", "red", True, 0.1, None, 10, 0),
    }  # fmt: skip
    return record(**{**base, **values})


def summed(name: str, *records: SampleRecord, mode: str = "live") -> Experiment:
    """An experiment as the log has it: its figures as JSON."""
    settings = {"preset": "x", "cache": {"mode": mode}}
    return Experiment(name, "ok", settings=settings, summary=summarise(records), records=records)


def test_wrong_hits_are_told_once_and_the_surest_first() -> None:
    cold_was_wrong = replace(wrong_record(1.0), cold=Cold("a", "green", False, 0.1, None, 10, 0))
    first = summed("one", wrong_record(0.9), wrong_record(0.99, question="other?"), cold_was_wrong)
    second = summed("two", wrong_record(0.9), wrong_record(0.9))
    found = wrong_hits([first, second])
    assert [(w.score, [e.name for e in w.experiments]) for w in found] == [
        (0.99, ["one"]),
        (0.9, ["one", "two"]),
    ]


def test_what_nothing_judges_is_no_point_and_a_dry_run_is_judged_by_its_donors() -> None:
    blind = {"answer": None, "match": None, "cold": None}
    assert (
        points(
            [
                summed(
                    "unjudged",
                    wrong_record(0.9, **blind),
                    wrong_record(0.9, provenance="", **blind),
                )
            ]
        )
        == []
    )
    spoilt = wrong_record(0.9, text="red", match=True, applied=False)
    fine = replace(spoilt, sample_id="2", donor_answer="red")
    dry = summed("dry", spoilt, fine, mode="dry-run")
    assert points([dry])[0].accuracy.value == 0.5
    (wrong,) = wrong_hits([dry])
    assert (given(wrong.record), without(wrong.record)) == ("blue", "red")


# --- the page


def test_a_page_is_the_same_each_time_trusts_nothing_and_never_replaces_its_log(
    folder: Path, tmp_path: Path
) -> None:
    bare_rows = [
        {**row, "samples": "gone.jsonl" if row["samples"] else None} for row in rows(folder)
    ]
    bare_rows[0]["summary"]["tiers"][0]["saved"]["latency_p50_s"] |= {
        "value": float("inf"),
        "low": float("nan"),
    }
    log = written(tmp_path, *bare_rows)
    for name in ("one.html", "two.html", "one.md"):
        write_report([log], tmp_path / name)
    page, again, markdown = (
        (tmp_path / name).read_text() for name in ("one.html", "two.html", "one.md")
    )
    assert page == again
    assert "fails &lt;/script&gt;&lt;script&gt;alert(&#34;x&#34;)" in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href|srcset)=["'](?!data:|#)""", page)
    assert "single answers cannot be shown" in page
    assert "fails &lt;/script>&lt;script>alert" in markdown
    assert "\\`a\\|b\\` {{ 7 * 7 }}" in markdown
    figures = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert len(figures) == 2
    assert all((tmp_path / figure).read_bytes().startswith(b"\x89PNG") for figure in figures)
    before = log.read_bytes()
    with pytest.raises(ConfigError, match=r"--out: .* another file than that of"):
        write_report([log], log)
    assert log.read_bytes() == before


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Browser, folder: Path, tmp_path: Path) -> Iterator[Callable[[int, Any], Page]]:
    """Opens the page in a window of its own; it says nothing, and asks for nothing else."""
    said: list[str] = []
    page = tmp_path / "report.html"
    write_report([folder / "sweep.csv"], page)

    def open_page(width: int, scheme: Any) -> Page:
        window = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, offline=True
        )
        shown = window.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: said.append(request.url))
        shown.goto(page.as_uri())
        return shown

    yield open_page
    for window in browser.contexts:
        window.close()
    assert {text for text in said if not text.startswith("data:")} == {page.as_uri()}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(visit: Callable[[int, Any], Page], width: int, scheme: str) -> None:
    shown = visit(width, scheme)
    assert (
        shown.evaluate("document.documentElement.scrollWidth") == width
    )  # wide parts scroll in boxes of their own
    sizes = shown.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.clientWidth)")
    assert len(sizes) == 2
    assert all(size > 700 for size in sizes)  # a phone scrolls them: shrunk, they could not be read
    inks = shown.evaluate(
        "[...document.querySelectorAll('h1, svg use')].map(e => getComputedStyle(e).color)"
    )
    assert len(set(inks)) == 1, "figures have the color of the text, in either scheme"
    assert (
        int(re.findall(r"\d+", inks[0])[0]) < 60
        if scheme == "light"
        else int(re.findall(r"\d+", inks[0])[0]) > 200
    )
    assert "answered as if asked" in (shown.locator("table").all_text_contents())[-2]
