"""The dashboard and the admin routes, the former in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway_helpers import ADMIN, Pair, wait_until
from semkv.server.metrics import Live, Metrics, RecentHits
from semkv.stores.responses.base import StoredResponse
from semkv.tiers.response import Found
from semkv.types import Exactness, Match, Namespace, Plan, Request, ReuseReport, Role, TextSegment

CHROMIUM = shutil.which("chromium")
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
SHOTS = os.environ.get("SEMKV_SHOTS", "")  # a folder to leave screenshots in


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("dashboard"), semantic=True) as running:
        yield running


@pytest.mark.parametrize(("turns", "length", "shown"), [(900, 990, 7), (900, 3, 76), (3, 100_000, 1), (3, 1000, 3)])
def test_a_long_conversation_is_held_from_its_end(turns: int, length: int, shown: int) -> None:
    texts = [f"{turn} ".ljust(length, "x") for turn in range(turns)]
    asked = Request("", Namespace(), tuple(TextSegment(text, Role.CONTEXT) for text in texts))
    match = Match("semantic_text", "donor", 0.95, Exactness.APPROXIMATE)
    report = ReuseReport(asked, Plan(asked.segments, turns, match), {})
    journal = RecentHits(Metrics())
    found = Found(StoredResponse("key", "tenant", "model", b"{}", 0.0), 0.0, False)
    journal.hit(tier="text:semantic", score=0.95, seconds=0.1, tenant="t", found=found, asked=asked, report=report)
    (hit,) = journal.recent(1)
    assert hit.shown["asked"] == hit.shown["donor"]
    parts = [part["text"] for part in hit.shown["asked"]]
    assert sum(map(len, parts)) < 9000
    if shown < turns:
        assert parts.pop(0) == f"({turns - shown} more)"
    assert parts == [text[:4000] for text in texts[-shown:]]


def test_live_figures_reach_back_a_day_in_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    live, now = Live(), 1_000_000_000
    monkeypatch.setattr("semkv.server.metrics.time.time", lambda: now)
    for second in range(2 * 86_400 // 60):
        now = 1_000_000_000 + 60 * second
        live.add("exact" if second % 4 else "miss", 0.001)
        live.ended(f"model {second}", "tenant", "hit")
    view = live.view()
    assert {len(window["bins"]) for window in view["windows"].values()} <= {5, 60, 100}
    sums = {name: sum(n.total() for _, n in window["bins"]) for name, window in view["windows"].items()}
    assert sums["5 minutes"] == 5
    assert sums["1 hour"] == 60
    assert 1425 <= sums["24 hours"] <= 1440
    assert len(view["by"]["model"]) == 51
    assert view["by"]["model"][0][0] == "others"
    now -= 3600  # the clock is set back
    live.add("miss", 0.001)
    assert live.view()["windows"]["24 hours"]["bins"]


class TestAdminRoutes:
    def test_they_need_the_key(self, pair: Pair, tmp_path: Path) -> None:
        assert pair.admin("stats").status_code == 200
        for key in ("x", "wrong", ADMIN + "x", "ä"):
            answer = httpx.get(f"{pair.url}/semkv/api/stats", headers={"Authorization": f"Bearer {key}".encode()})
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("invalidate", "wrong"):
            assert httpx.post(f"{pair.url}/semkv/api/{path}", json={}).status_code == 401
        with Pair(tmp_path, environment={"SEMKV_SECRET": "x" * 16}) as closed:
            assert closed.admin("stats").status_code == 403

    def test_invalidation_counts_before_it_removes(self, pair: Pair) -> None:
        for i in range(3):
            pair.post(f"news of day {i}")
        pair.post("something else")
        assert pair.admin("invalidate", {"prefix": "news"}).json() == {"count": 3, "dry_run": True}
        assert pair.post("news of day 1").headers["x-semkv"].startswith("hit")
        assert pair.admin("invalidate", {"prefix": "news", "dry_run": False}).json()["count"] == 3
        assert pair.admin("invalidate", {"prefix": "news"}).json()["count"] == 0
        assert pair.post("something else").headers["x-semkv"].startswith("hit")

    @pytest.mark.parametrize("body", [{}, {"dry_run": False}, {"tag": 3}, {"tga": "x"}, [], {"tag": "x", "dry_run": 1}])
    def test_a_careless_invalidation_is_refused(self, pair: Pair, body: object) -> None:
        assert pair.admin("invalidate", body).status_code == 400

    def test_a_store_that_fails_is_no_answer_of_ours(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pair.app.gateway.cache.responses, "invalidate", None)
        answer = pair.admin("invalidate", {"prefix": "news", "dry_run": False})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the store failed: TypeError")

    def test_a_wrong_hit_is_removed_with_its_donor(self, pair: Pair) -> None:
        near_repeat(pair, "Where is the Eiffel tower?", "where is  the Eiffel tower?")
        hit = next(h for h in pair.admin("hits").json()["hits"] if h["tier"] == "text:normalised")
        assert (hit["asked"][0]["text"], hit["donor"][0]["text"]) == (
            "where is  the Eiffel tower?",
            "Where is the Eiffel tower?",
        )
        assert pair.admin("wrong", {"id": hit["id"]}).json() == {"removed": 1}
        assert pair.post("Where is the Eiffel tower?").headers["x-semkv"] == "miss"
        assert pair.admin("wrong", {"id": "unknown"}).status_code == 404

    def test_metrics(self, pair: Pair) -> None:
        pair.post("a private matter")
        pair.post("a private matter")
        text = httpx.get(f"{pair.url}/metrics").text
        assert 'semkv_requests_total{status="200",tier="exact"}' in text
        for name in (
            "semkv_request_seconds_bucket",
            "semkv_response_bytes",
            "semkv_flights",
            "semkv_tokens_saved_total",
        ):
            assert name in text
        assert "private" not in text, "no prompt is shown to whoever reads metrics"


def near_repeat(pair: Pair, first: str, second: str) -> None:
    """A request, and another that is answered through it."""
    before = pair.metric("semkv_semantic_entries")
    assert pair.post(first).headers["x-semkv"] == "miss"
    wait_until(lambda: pair.metric("semkv_semantic_entries") > before)  # recorded beside the requests
    assert pair.post(second).headers["x-semkv"].startswith("hit tier=text:normalised")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def test_the_dashboard_in_a_browser(pair: Pair, browser) -> None:
    near_repeat(pair, f"Look at this. What is {EVIL}?", f"look at this. What is {EVIL}?")
    near_repeat(pair, "How tall is the Eiffel tower in Paris?", "how tall is the  Eiffel tower in Paris?")
    for _ in range(5):
        pair.post("How tall is the Eiffel tower in Paris?")
    pair.post("drawn at random", temperature=0.7)
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(300_000)
    complaints: list[str] = []
    outside: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(pair.url) else outside.append(request.url))
    page.goto(f"{pair.url}/semkv")
    assert page.locator("#board").is_hidden()
    page.fill("#key", "wrong")
    page.click("#login button")
    page.wait_for_selector("#refused:has-text('wrong admin key')")
    complaints.clear()  # the browser notes the 401
    page.fill("#key", ADMIN)
    page.click("#login button")
    page.wait_for_selector("#board:not([hidden])")

    assert page.text_content("#rate").endswith("%")
    assert "ms" in page.text_content("#latency")
    assert page.locator("#tiers tr", has_text="text:normalised").count() == 1
    assert "ms" in page.locator("#tiers tr", has_text="text:normalised").text_content()
    assert "sampled" in page.text_content("#reasons")
    assert page.locator("#models tr", has_text="scripted").count() == 1
    assert page.locator("#tenants tr").count() == 1
    page.click("#windows button:has-text('24 hours')")
    assert page.text_content(".tile .window") == "24 hours"
    assert page.text_content("#rate").endswith("%")
    assert EVIL in page.text_content("#hits")
    page.fill("#search", "TOWER in Paris")
    assert page.locator(".hit").count() == 1
    page.fill("#search", "nobody asked this")
    assert "None of the latest hits" in page.text_content("#nohits")
    page.fill("#search", "")
    assert page.locator("#hits img, #hits script").count() == 0
    assert page.title() == "semkv"
    shoot(page, "light")

    hit = page.locator(".hit", has_text="How tall").first
    hit.get_by_role("button", name="This hit was wrong").click()
    page.wait_for_selector(".hit button:has-text('Removed')")
    assert pair.post("How tall is the Eiffel tower in Paris?").headers["x-semkv"] == "miss"

    page.fill("[name=prefix]", "How tall")
    page.click("#count")
    page.wait_for_selector("#counted:has-text('1 answer would be removed.')")
    page.fill("[name=model]", "another")
    assert page.locator("#remove").is_disabled(), "what was counted is not what would be removed"
    page.fill("[name=model]", "")
    page.click("#count")
    page.wait_for_selector("#remove:enabled")
    page.click("#remove")
    page.wait_for_selector("#counted:has-text('1 answer was removed.')")

    page.emulate_media(color_scheme="dark")
    page.reload()  # the key outlives a reload, in this tab
    page.wait_for_selector("#board:not([hidden])")
    shoot(page, "dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(2200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    shoot(page, "phone")
    page.click("#leave")
    assert page.locator("#board").is_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    assert complaints == []
    assert outside == []


def shoot(page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)
