"""What browsers meet: the dashboard with the admin routes behind it, and pages of other origins."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from gateway_helpers import ADMIN, Pair, Served, chat, kind, wait_until
from scripted_upstream import Scripted
from semkv.errors import ConfigError
from semkv_gateway.serve import Protocol
from semkv_gateway.settings import ServerSettings

CHROMIUM = shutil.which("chromium")
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("dashboard"), semantic=True) as running:
        yield running


class TestAdminRoutes:
    def test_they_need_the_key(self, pair: Pair, tmp_path: Path) -> None:
        assert pair.admin("stats").status_code == 200
        for path in ("invalidate", "wrong"):
            assert httpx.post(f"{pair.url}/semkv/api/{path}", json={}).status_code == 401
        for key in ("x", ADMIN + "x", "ä"):
            answer = httpx.get(
                f"{pair.url}/semkv/api/stats", headers={"Authorization": f"Bearer {key}".encode()}
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                401,
                "authentication_error",
            )
        with Pair(tmp_path, environment={"SEMKV_SECRET": "x" * 16}) as closed:
            assert closed.admin("stats").status_code == 403

    def test_invalidation_counts_before_it_removes(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for text in ("news of day 0", "news of day 1", "something else"):
            pair.post(text)
        assert pair.admin("invalidate", {"prefix": "news"}).json() == {"count": 2, "dry_run": True}
        assert kind(pair.post("news of day 1")) == "hit"
        assert pair.admin("invalidate", {"prefix": "news", "dry_run": False}).json()["count"] == 2
        assert pair.admin("invalidate", {"prefix": "news"}).json()["count"] == 0
        assert kind(pair.post("something else")) == "hit"
        for by in ("key", "tag", "model", "partition", "prefix"):
            assert pair.admin("invalidate", {by: "none such"}).json() == {
                "count": 0,
                "dry_run": True,
            }
        assert (
            pair.admin("invalidate", {"model": "scripted", "partition": "none such"}).json()[
                "count"
            ]
            == 0
        )
        assert pair.admin("invalidate", {"model": "scripted"}).json()["count"] > 0
        for careless in (
            {},
            {"dry_run": False},
            {"tag": 3},
            {"tga": "x"},
            {"tag": ""},
            [],
            {"tag": "x", "dry_run": 1},
        ):
            assert pair.admin("invalidate", careless).status_code == 400
        monkeypatch.setattr(pair.app.gateway.cache.responses, "invalidate", None)
        answer = pair.admin("invalidate", {"prefix": "news", "dry_run": False})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            503,
            "the store failed: TypeError",
        )

    def test_a_wrong_hit_is_removed_with_its_donor(self, pair: Pair) -> None:
        donor, asked = "Where is the Eiffel tower?", "where is  the Eiffel tower?"
        near_repeat(pair, donor, asked)
        hit = next(h for h in pair.admin("hits").json()["hits"] if h["tier"] == "text:normalised")
        assert (hit["asked"][0]["text"], hit["donor"][0]["text"]) == (asked, donor)
        assert pair.admin("wrong", {"id": hit["id"]}).json() == {"removed": 1}
        assert pair.post(donor).headers["x-semkv"] == "miss"
        assert pair.admin("wrong", {"id": "unknown"}).status_code == 404


def near_repeat(pair: Pair, first: str, second: str) -> None:
    """A request, and another that is answered through it."""
    before = pair.metric("semkv_semantic_entries")
    assert pair.post(first).headers["x-semkv"] == "miss"
    wait_until(
        lambda: pair.metric("semkv_semantic_entries") > before
    )  # recorded beside the requests
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


def on_a_phone(browser: Any, pair: Pair) -> Any:
    """The dashboard, where somebody gave the key."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.set_default_timeout(300_000)
    page.goto(f"{pair.url}/semkv")
    page.fill("#key", ADMIN)
    page.click("#login button")
    return page


def test_the_dashboard_says_why_most_requests_cannot_be_kept(tmp_path: Path, browser) -> None:
    with Pair(tmp_path) as pair:
        page = on_a_phone(browser, pair)
        page.wait_for_selector("#board:not([hidden])")
        assert page.locator("#advice").is_hidden()
        for n in range(20):
            pair.post(f"drawn {n}", temperature=None)
        page.wait_for_selector("#advice:has-text('--default-temperature 0')")
        assert page.evaluate(TOO_WIDE) <= 0
        page.close()


def test_the_dashboard_shows_what_it_is_worth(tmp_path: Path, browser) -> None:
    prices = ("scripted=input=0 output=1000000",)  # 1 a token
    with Pair(tmp_path, prices=prices, semantic=True, holdout=1 - 2**-40) as pair:
        for _ in range(3):
            answer = pair.post("worth")
        tokens = answer.json()["usage"]["completion_tokens"]
        account = pair.app.gateway.cache.account
        account.auto = True
        account.pays("semantic_text")
        account.spent("semantic_text", 3600.0)
        pair.app.gateway.upstreams.members[0].salts.refused = True
        page = on_a_phone(browser, pair)
        page.wait_for_selector("#worth:not([hidden])")
        said = page.text_content("#worth-sum")
        assert said.startswith("2 requests not sent of 3, ")
        assert f"would have cost {2 * tokens}.00; what was sent upstream cost {tokens}.00" in said
        assert page.text_content("#worth-days") == "30"
        for kind, name in (("day", "20"), ("model", "scripted"), ("tenant", "")):
            (cells,) = page.locator(f"#worth-{kind} tr").all()
            shown = cells.locator("td").all_text_contents()
            assert shown[0].startswith(name)
            assert (shown[1], shown[3]) == ("2", f"{2 * tokens}.00")
            assert re.fullmatch(r"[\d.]+ m?s", shown[2])
        cells = page.locator("#worth-tiers tr", has_text="semantic_text").locator("td")
        assert cells.all_text_contents()[1:] == ["0", "60 min", "0.0 ms", "1 in 32"]
        exact = page.locator("#worth-tiers tr").filter(has=page.get_by_text("exact", exact=True))
        assert exact.locator("td").all_text_contents()[1] == "2"
        assert "Held out from near-hits: 3 requests" in page.text_content("#holdout")
        assert "the upstream refuses cache_salt" in page.text_content("#state")
        assert page.evaluate(TOO_WIDE) <= 0
        page.close()


def test_the_dashboard_in_a_browser(pair: Pair, browser) -> None:
    near_repeat(pair, f"Look at this. What is {EVIL}?", f"look at this. What is {EVIL}?")
    near_repeat(
        pair, "How tall is the Eiffel tower in Paris?", "how tall is the  Eiffel tower in Paris?"
    )
    for _ in range(5):
        pair.post("How tall is the Eiffel tower in Paris?")
    pair.post("drawn at random", temperature=0.7)
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(300_000)
    complaints: list[str] = []
    outside: list[str] = []
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(pair.url) else outside.append(request.url),
    )
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
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function(  # the next refresh
        "shown => document.querySelector('#state').textContent !== shown",
        arg=page.text_content("#state"),
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#leave")
    assert page.locator("#board").is_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    assert complaints == []
    assert outside == []


# -- pages of other origins: what a browser needs is on every answer, and on none what another caller was told ----

PAGE = "https://page.example"
FETCH = """async ([url, body, credentials]) => {
    const headers = {"Content-Type": "application/json", "Authorization": "Bearer browser"};
    const answer = await fetch(url, {method: "POST", headers, credentials, body: JSON.stringify(body)});
    return [answer.status, answer.headers.get("x-semkv"), await answer.text()];
}"""


def opened(origins: list[str], *, credentials: bool = False) -> Any:
    """An upstream that answers pages of these origins, as vLLM does."""
    allowed = {"allow_methods": ["*"], "allow_headers": ["*"], "allow_credentials": credentials}
    return CORSMiddleware(Scripted(), allow_origins=origins, **allowed)


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    """An empty page of an origin of its own."""
    with Served(HTMLResponse("<title>page</title>")) as other:
        shown = browser.new_page()
        shown.set_default_timeout(300_000)
        shown.goto(other.url)
        yield shown
        shown.close()


@pytest.mark.parametrize("how", ["the upstream's", "named", "all"])
def test_a_page_reads_misses_hits_and_errors(page: Any, tmp_path: Path, how: str) -> None:
    origins = {"the upstream's": (), "named": (page.evaluate("location.origin"),), "all": ("*",)}[
        how
    ]
    upstream = opened(["*"]) if how == "the upstream's" else opened(["https://another.example"])
    with Pair(tmp_path, upstream=upstream, cors_origins=origins) as pair:

        def fetch(text: str, **more: Any) -> tuple[int, str, str]:
            credentials = "include" if how == "named" else "omit"
            url = f"{pair.url}/v1/chat/completions"
            status, said, body = page.evaluate(FETCH, [url, chat(text, **more), credentials])
            return status, (said or "").split(" ")[0], body

        first, again = fetch("from a page"), fetch("from a page")
        assert (first[:2], again[:2]) == ((200, "miss"), (200, "hit"))
        assert json.loads(first[2]) == json.loads(again[2])
        streamed = [fetch("streamed", stream=True) for _ in range(2)]
        assert [said for _, said, _ in streamed] == ["miss", "hit"]
        assert all(text.endswith("[DONE]\n\n") and "You" in text for _, _, text in streamed)
        assert fetch("[status=429] busy")[0] == 429
        pair.behind.stop()
        assert fetch("nobody there")[0] == 502
        assert fetch("from a page")[1] == "hit"


def to_browser(answer: httpx.Response) -> dict[str, str]:
    """What an answer says to a browser."""
    return {k: v for k, v in answer.headers.items() if k.startswith("access-control-")}


TO_ALL = {
    "access-control-allow-origin": "*",
    "access-control-expose-headers": "X-Semkv, X-Request-Id",
}


def reflected(scope: Any) -> list[tuple[bytes, bytes]]:
    """Headers of an upstream that lets every origin in by its name."""
    asked = dict(scope["headers"])
    more = [(b"x-request-id", asked.get(b"x-request-id", b"none"))]
    if b"origin" in asked:
        more += [
            (b"access-control-allow-origin", asked[b"origin"]),
            (b"access-control-allow-credentials", b"true"),
        ]
    return more


def test_a_hit_has_nothing_of_the_first_caller(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.upstream, "says", reflected)
    for stream in (False, True):
        first, again = (
            pair.post(
                f"hit {stream}",
                headers={"Origin": f"https://{name}", "X-Request-Id": name},
                stream=stream,
            )
            for name in ("a", "b")
        )
        assert to_browser(first)["access-control-allow-origin"] == "https://a"
        assert "X-Semkv" in to_browser(first)["access-control-expose-headers"]
        assert [answer.headers["x-request-id"] for answer in (first, again)] == ["a", "b"]
        assert (kind(again), to_browser(again)) == ("hit", {})


def test_what_is_open_to_all_is_open_on_a_hit(tmp_path: Path) -> None:
    with Pair(tmp_path, upstream=opened(["*"])) as pair:

        def told(text: str, origin: str = PAGE) -> dict[str, str]:
            return to_browser(pair.post(text, headers={"Origin": origin} if origin else {}))

        assert told("open", "") == {}
        assert told("open") == {}, "nobody knows yet"
        assert told("more") == TO_ALL
        assert told("open", "https://b") == TO_ALL
        assert told("open", "") == {}
        pair.upstream.allow_all_origins, pair.upstream.simple_headers = False, {}
        assert told("closed") == {}
        assert told("open") == {}


def preflight(pair: Pair, origin: str) -> httpx.Response:
    wants = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    return httpx.options(
        f"{pair.url}/v1/chat/completions", headers={"Origin": origin, **wants}, timeout=120
    )


def test_named_origins_are_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(tmp_path, cors_origins=(PAGE,), max_body_mib=1) as pair:
        pair.upstream.says = reflected
        for origin, allowed in ((PAGE, PAGE), ("https://other", None), ("null", None)):
            asked = {"Origin": origin}
            texts = (f"from {origin}", f"from {origin}", f"[status=500] {origin}", "x" * 2_000_000)
            for text, said in zip(texts, ("miss", "hit", "miss", None), strict=True):
                answer = pair.post(text, headers=asked)
                assert (answer.headers.get("x-semkv") or "").split(" ")[0] == (said or "")
                assert answer.headers.get("access-control-allow-origin") == allowed
                assert answer.headers["access-control-allow-credentials"] == "true"
            models = httpx.get(f"{pair.url}/v1/models", headers=asked, timeout=120)
            assert models.headers.get("access-control-allow-origin") == allowed
            asks = preflight(pair, origin)
            assert asks.headers.get("access-control-allow-origin") == allowed
            assert asks.status_code == (200 if allowed else 400)
        assert all("[status" in text or text.startswith("from ") for text in pair.asked)
        monkeypatch.setattr(Protocol, "most", 0)
        answer = pair.post("too many connections", headers={"Origin": PAGE})
        assert answer.status_code == 503
        assert answer.headers["access-control-allow-origin"] == PAGE, (
            "who is turned away can read why"
        )
        assert pair.metric("semkv_turned_away_total") == 1
    with Pair(tmp_path, cors_origins=("*",)) as pair:
        pair.upstream.says = reflected
        assert [to_browser(pair.post("to all", headers={"Origin": PAGE})) for _ in range(2)] == [
            TO_ALL
        ] * 2


@pytest.mark.parametrize(
    "origin", ["page.example", "https://page.example/", "https://Page.example", "null", ""]
)
def test_an_origin_is_one(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        ServerSettings(cors_origins=(origin,))
