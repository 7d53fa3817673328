"""``semkv report``: what is read, what is computed, and how the page looks and works in a real browser."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from lab_helpers import record
from semkv.errors import ConfigError, DatasetError
from semkv_lab.metrics import given, summarise, without
from semkv_lab.report import differing, write_report
from semkv_lab.results import Experiment, facts, points, read_logs, wrong_hits
from semkv_lab.samples import Cold, SampleRecord
from vllm_forks import prepare

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '</script><script>alert("x")</script><img src=https://example.org/x.png onerror=alert(1)> `a|b` {{ 7 * 7 }}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of five experiments, in which the data set's labels stand in for a model's answers; and a failed one."""
    folder = tmp_path_factory.mktemp("sweep")
    defaults = {"engine": "labels", "max-samples": 60, "data-dir": str(folder / "data"), "baseline": True}
    off = {"embedding-layer": [], "embedding-hook": "none", "disable-semantic-cache": True}
    experiments: list[dict[str, Any]] = [{"name": "exact-only", **off}]
    for prompt, vision in ((0.8, 0.9), (0.8, 0.99), (0.95, 0.9), (0.95, 0.99)):
        layers = [f"prompt:384:{prompt}", f"vision:6912:{vision}"]
        name = f"layers-{prompt:g}-{vision:g}"
        experiments.append({"name": name, "embedding-layer": layers, "disable-guards": True, "match": "any"})
    (folder / "spec.json").write_text(json.dumps({"defaults": defaults, "experiments": experiments}))
    command = [prepare() / "semkv", "sweep", "--specs", folder / "spec.json", "--log-file", folder / "sweep.csv"]
    done = subprocess.run([*command, "--samples-dir", folder / "samples"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failed = {
        **rows(folder)[1],
        "name": f"fails {HOSTILE}",
        "status": "failed",
        "error": f"EngineError: {HOSTILE}\nmore",
    }
    with (folder / "sweep.jsonl").open("a") as file:
        file.write(json.dumps({**rows(folder)[1], **failed, "summary": None, "samples": None}) + "\n")
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    out = folder / "out" / "report.html"
    write_report([folder / "sweep.csv"], out, title="A <b> title")
    return out


# --- reading


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


ROW = {"name": "a", "status": "failed", "error": "no", "settings": {}}


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
def test_a_bad_log_is_named_with_its_line(tmp_path: Path, rows: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DatasetError, match=re.escape(str(tmp_path / "sweep.jsonl"))) as caught:
        read_logs([written(tmp_path, *rows)])
    assert message in str(caught.value)


def test_the_last_row_of_a_name_counts_and_names_of_two_logs_are_kept_apart(tmp_path: Path) -> None:
    first = written(tmp_path, ROW, {**ROW, "status": "ok"}, {**ROW, "name": "b"})
    (tmp_path / "other").mkdir()
    second = written(tmp_path / "other", ROW).rename(tmp_path / "more.jsonl")
    found = read_logs([first, second])
    assert [(e.name, e.status) for e in found] == [("sweep: a", "ok"), ("b", "failed"), ("more: a", "failed")]


# --- what is computed


def test_groups_and_points(folder: Path) -> None:
    experiments = read_logs([folder / "sweep.jsonl"])
    loose, plain = "minigqa, guards off, match any", "minigqa, guards on, match all"
    assert [e.group for e in experiments[:5]] == [plain, *[loose] * 4]
    assert experiments[1].thresholds == "prompt 0.8, vision 0.9, semantic 0.92"
    assert experiments[1].tiers == "exact + semantic + embedding + fusion"
    plane = points(experiments)
    assert [p.experiment.name for p in plane] == [e.name for e in experiments[:5]]
    places = [(p.rate.value or 0, p.accuracy.value or 0) for p in plane]
    unbeaten = {a for a in places if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in places)}
    front = {p.front: place for p, place in zip(plane, places, strict=True) if p.front}
    assert set(front.values()) == unbeaten
    assert [front[n] for n in range(1, len(front) + 1)] == sorted(unbeaten)


def wrong_record(score: float, **values: Any) -> SampleRecord:
    base: dict[str, Any] = {
        "question": "q?", "text": "blue", "match": False, "provenance": "text:semantic", "exactness": "approximate",
        "applied": True, "score": score, "donor_answer": "blue", "latency_s": 0.1, "ttft_s": None,
        "donor_question": "p?", "cold": Cold("a", "red", True, 0.1, None, 10, 0),
    }  # fmt: skip
    return record(**{**base, **values})


def test_wrong_hits_are_told_once_and_the_surest_first() -> None:
    def experiment(name: str, *records: SampleRecord) -> Experiment:
        return Experiment(name, "ok", settings={"preset": "x"}, records=records)

    cold_was_wrong = replace(wrong_record(1.0), cold=Cold("a", "green", False, 0.1, None, 10, 0))
    first = experiment("one", wrong_record(0.9), wrong_record(0.99, question="other?"), cold_was_wrong)
    second = experiment("two", wrong_record(0.9), wrong_record(0.9))
    found = wrong_hits([first, second])
    assert [(w.score, [e.name for e in w.experiments]) for w in found] == [(0.99, ["one"]), (0.9, ["one", "two"])]


def summed(name: str, *records: SampleRecord, mode: str = "live") -> Experiment:
    """An experiment as the log has it: its figures as JSON."""
    summary = json.loads(json.dumps(summarise(records)))
    settings = {"preset": "x", "cache": {"mode": mode}}
    return Experiment(name, "ok", settings=settings, summary=summary, records=records)


def headlines(*experiments: Experiment) -> dict[str, str]:
    return {what: where for _, what, where in facts(experiments)}


def right(**values: Any) -> SampleRecord:
    return wrong_record(0.9, **{"text": "red", "donor_answer": "red", "match": True, **values})


def test_no_headline_claims_what_nothing_judges() -> None:
    blind = {"answer": None, "match": None, "cold": None}
    unjudged = summed("unjudged", wrong_record(0.9, **blind), wrong_record(0.9, provenance="", **blind))
    half = summed("half", right(), wrong_record(0.9, cold=None))
    found = headlines(unjudged, half)
    assert "most hits without a wrong one" not in found
    assert "most hits at all, wrong hits a request: -" in headlines(unjudged)
    assert points([unjudged]) == []
    assert headlines(summed("good", right()))["most hits without a wrong one"] == "good"


def test_a_dry_run_is_judged_by_its_donors_and_saves_nothing() -> None:
    spoilt = wrong_record(0.9, text="red", match=True, applied=False)
    dry = summed("dry", spoilt, right(applied=False, sample_id="2"), mode="dry-run")
    assert "most hits without a wrong one" not in headlines(dry)
    assert points([dry])[0].accuracy.value == 0.5
    (wrong,) = wrong_hits([dry])
    assert (given(wrong.record), without(wrong.record)) == ("blue", "red")
    fine = summed("fine", right(applied=False, latency_s=0.01), mode="dry-run")
    assert headlines(fine)["most hits without a wrong one"] == "fine"
    what = "most time saved a request without a wrong hit"
    slower, faster = summed("slower", right(latency_s=0.2)), summed("faster", right(latency_s=0.05))
    assert what not in headlines(fine) | headlines(slower)
    assert headlines(slower, faster)[what] == "faster"


def test_no_report_takes_the_place_of_its_log(tmp_path: Path) -> None:
    path = written(tmp_path, ROW)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"--out: .* another file than that of"):
        write_report([path], path)
    assert path.read_bytes() == before


def test_what_differs_between_two_questions_is_marked() -> None:
    own, donor = differing("Is the  cat left of the dog?", "is the cat right of the dog ?")
    assert [[text.strip() for text, differs in side if differs] for side in (own, donor)] == [["left"], ["right"]]
    assert "".join(text for text, _ in own).split() == "Is the cat left of the dog?".split()


# --- the files


def test_the_page_stands_alone_and_trusts_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "fails &lt;/script&gt;&lt;script&gt;alert(&#34;x&#34;)" in text
    assert "{{ 7 * 7 }}" in text
    assert text.count("<script") == text.count("</script") == 1
    assert "<title>A &lt;b&gt; title</title>" in text
    assert not re.findall(r"""(?:src|href|srcset)=["'](?!data:)""", text)
    assert "default-src 'none'" in text


def test_a_page_without_samples_says_so(folder: Path, tmp_path: Path) -> None:
    bare_rows = [{**row, "samples": "gone.jsonl" if row["samples"] else None} for row in rows(folder)]
    for out in (tmp_path / "bare.html", tmp_path / "again.html"):
        write_report([written(tmp_path, *bare_rows)], out)
    bare = (tmp_path / "bare.html").read_text(encoding="utf-8")
    assert bare == (tmp_path / "again.html").read_text(encoding="utf-8"), "equal logs give equal pages"
    assert "its samples are gone: gone.jsonl" in bare
    assert "single answers cannot be shown" in bare


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser, page: Path) -> Iterator[Callable[[int, Any], Page]]:
    """Opens the page in a window of its own; it says nothing, and asks for nothing else."""
    said: list[str] = []
    asked: list[str] = []

    def open_page(width: int, scheme: Any) -> Page:
        window = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme, offline=True)
        shown = window.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(page.as_uri())
        return shown

    yield open_page
    for window in browser.contexts:
        window.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(visit: Callable[[int, Any], Page], width: int, scheme: str) -> None:
    shown = visit(width, scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    # The wide table scrolls in a box of its own.
    assert shown.evaluate("(t => t.scrollWidth > t.parentElement.clientWidth)(document.querySelector('#experiments'))")
    ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", ground)[0])
    assert red < 60 if scheme == "dark" else red > 230
    images = shown.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth, i.clientWidth, i.alt])")
    assert all(all(row) for row in images)
    figures = [row for row in images if row[2].startswith(("Accuracy", "Hit rate"))]
    assert len(figures) == 2
    assert all(row[1] > 700 for row in figures)  # a phone scrolls them: shrunk, they could not be read
    sources = shown.evaluate("[...document.querySelectorAll('figure img')].map(i => atob(i.currentSrc.split(',')[1]))")
    assert all("prefers-color-scheme" in svg for svg in sources)
    with Image.open(io.BytesIO(shown.locator("figure img").first.screenshot())) as drawn:
        darkest, brightest = drawn.convert("L").getextrema()
    assert brightest - darkest > 180  # ink and ground are as far apart in either scheme
    cards = shown.locator("article")
    assert cards.first.locator("img").count() == 2  # a wrong hit shows both pictures
    assert cards.first.locator("mark").count() > 0
    assert "answer given" in (cards.first.text_content() or "")


def test_the_table_sorts(visit: Callable[[int, Any], Page]) -> None:
    shown = visit(1280, "light")

    def column(number: int) -> list[str]:
        rows = "[...document.querySelectorAll('#experiments tbody tr')]"
        found: list[str] = shown.evaluate(f"{rows}.map(r => r.cells[{number}].textContent.trim())")
        return found

    heads = shown.locator("#experiments thead th")
    rate = [name.strip() for name in heads.all_text_contents()].index("hit rate")
    for order in ("descending", "ascending"):
        heads.nth(rate).get_by_role("button").click()
        *values, last = column(rate)
        assert last == "-"  # the failed one has no figure: last, whichever way
        numbers = [float(v.split()[0].rstrip("%")) for v in values]
        assert numbers == sorted(numbers, reverse=order == "descending")
        assert heads.nth(rate).get_attribute("aria-sort") == order
    heads.nth(0).get_by_role("button").press("Enter")
    assert column(0)[0] == "exact-only"
    assert heads.nth(rate).get_attribute("aria-sort") == "none"
