"""Pages of other origins: what a browser needs is on every answer, and on none what was meant for another caller."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from gateway_helpers import ONE, OTHER, Pair, Served, a_tenant, beside, chat, near_pair, wait_until
from scripted_upstream import Scripted
from semkv.errors import ConfigError
from semkv.server.settings import ServerSettings

CHROMIUM = shutil.which("chromium")
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
def page() -> Iterator[Any]:
    """An empty page of an origin of its own."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with Served(HTMLResponse("<title>page</title>")) as other, sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = running.new_page()
        shown.set_default_timeout(300_000)
        shown.goto(other.url)
        yield shown
        running.close()


def origin_of(page: Any) -> str:
    return str(page.evaluate("location.origin"))


@pytest.mark.parametrize("how", ["the upstream's", "named", "all"])
def test_a_page_reads_misses_hits_and_errors(page: Any, tmp_path: Path, how: str) -> None:
    origins = {"the upstream's": (), "named": (origin_of(page),), "all": ("*",)}[how]
    upstream = opened(["*"]) if how == "the upstream's" else opened(["https://another.example"])
    with Pair(tmp_path, upstream=upstream, cors_origins=origins) as pair:

        def fetch(text: str, **more: Any) -> list[Any]:
            credentials = "include" if how == "named" else "omit"
            url = f"{pair.url}/v1/chat/completions"
            return list(page.evaluate(FETCH, [url, chat(text, **more), credentials]))

        first, again = fetch("from a page"), fetch("from a page")
        assert (first[:2], again[0], again[1].split()[0]) == ([200, "miss"], 200, "hit")
        assert json.loads(first[2]) == json.loads(again[2])
        streamed = [fetch("streamed", stream=True) for _ in range(2)]
        assert [said.split()[0] for _, said, _ in streamed] == ["miss", "hit"]
        assert all(text.endswith("[DONE]\n\n") and "You" in text for _, _, text in streamed)
        assert fetch("[status=429] busy")[0] == 429
        pair.behind.stop()
        assert fetch("nobody there")[0] == 502
        assert fetch("from a page")[1].startswith("hit")


def to_browser(answer: httpx.Response) -> dict[str, str]:
    """What an answer says to a browser."""
    return {k: v for k, v in answer.headers.items() if k.startswith("access-control-")}


EXPOSED = {"access-control-expose-headers": "X-Semkv, X-Request-Id"}
TO_ALL = {"access-control-allow-origin": "*", **EXPOSED}


def reflected(scope: Any) -> list[tuple[bytes, bytes]]:
    """Headers of an upstream that lets every origin in by its name."""
    asked = dict(scope["headers"])
    more = [(b"x-request-id", asked.get(b"x-request-id", b"none"))]
    if b"origin" in asked:
        more += [(b"access-control-allow-origin", asked[b"origin"]), (b"access-control-allow-credentials", b"true")]
    return more


class TestWithoutOrigins:
    @pytest.fixture(scope="class")
    @staticmethod
    def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        with Pair(tmp_path_factory.mktemp("reflecting")) as running:
            running.upstream.says = reflected
            yield running

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_hit_has_nothing_of_the_first_caller(self, pair: Pair, stream: bool) -> None:
        first, again = (
            pair.post(f"hit {stream}", headers={"Origin": f"https://{name}", "X-Request-Id": name}, stream=stream)
            for name in ("a", "b")
        )
        assert to_browser(first)["access-control-allow-origin"] == "https://a"
        assert [answer.headers["x-request-id"] for answer in (first, again)] == ["a", "b"]
        assert "X-Semkv" in to_browser(first)["access-control-expose-headers"]
        assert again.headers["x-semkv"].startswith("hit")
        assert to_browser(again) == {}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("text", ["join", "[status=500] join"])
    def test_nor_has_a_join(self, pair: Pair, stream: bool, text: str) -> None:
        said = f"{text} {stream}"
        with beside(pair, said, stream=stream, headers={"Origin": "https://a", "X-Request-Id": "a"}) as first:
            other = pair.soon(said, stream=stream, headers={"Origin": "https://b", "X-Request-Id": "b"})
            wait_until(lambda: pair.readers == 2)
        assert other.result().headers["x-semkv"] == "joined"
        assert to_browser(first.result())["access-control-allow-origin"] == "https://a"
        assert to_browser(other.result()) == {}
        assert other.result().headers["x-request-id"] == "b"

    @pytest.mark.parametrize("first_streams", [False, True])
    def test_nor_has_a_join_in_another_form(self, pair: Pair, first_streams: bool) -> None:
        said = f"another form {first_streams}"
        with beside(pair, said, stream=first_streams, headers={"Origin": "https://a"}):
            other = pair.soon(said, stream=not first_streams, headers={"Origin": "https://b"})
            wait_until(lambda: pair.readers == 2)
        assert to_browser(other.result()) == {}

    def test_nor_has_a_similar_request(self, tmp_path: Path) -> None:
        with near_pair(tmp_path) as pair:
            pair.upstream.says, pair.upstream.hold_at = reflected, 2
            with beside(pair, ONE, stream=True, headers={**a_tenant(), "Origin": "https://a"}) as first:
                tenant = {"Authorization": pair.upstream.headers[-1]["authorization"]}
                other = pair.soon(OTHER, stream=True, headers={**tenant, "Origin": "https://b"})
                wait_until(lambda: pair.readers == 2)
            assert other.result().headers["x-semkv"].endswith("joined")
            assert to_browser(first.result())["access-control-allow-origin"] == "https://a"
            assert to_browser(other.result()) == {}

    def test_what_is_open_to_all_is_open_on_a_hit(self, tmp_path: Path) -> None:
        with Pair(tmp_path, upstream=opened(["*"])) as pair:
            assert to_browser(pair.post("open")) == {}
            assert to_browser(pair.post("open", headers={"Origin": PAGE})) == {}, "nobody knows yet"
            assert to_browser(pair.post("more", headers={"Origin": PAGE})) == TO_ALL
            assert to_browser(pair.post("open", headers={"Origin": "https://b"})) == TO_ALL
            assert to_browser(pair.post("open")) == {}
            pair.upstream.allow_all_origins, pair.upstream.simple_headers = False, {}
            assert to_browser(pair.post("closed", headers={"Origin": PAGE})) == {}
            assert to_browser(pair.post("open", headers={"Origin": PAGE})) == {}

    def test_a_preflight_is_the_upstreams(self, tmp_path: Path) -> None:
        with Pair(tmp_path, upstream=opened([PAGE]), single_tenant=True) as pair:
            assert preflight(pair, PAGE).headers["access-control-allow-origin"] == PAGE
            assert preflight(pair, "https://other").status_code == 400
            pair.post("common", headers=a_tenant())
            assert not pair.post("common").headers["x-semkv"].startswith("hit"), "a preflight lets nobody in"


def preflight(pair: Pair, origin: str) -> httpx.Response:
    wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    return httpx.options(f"{pair.url}/v1/chat/completions", headers={"Origin": origin, **wants}, timeout=120)


class TestWithOrigins:
    def test_the_named_ones_are_let_in(self, tmp_path: Path) -> None:
        with Pair(tmp_path, cors_origins=(PAGE,), max_body_mib=1) as pair:
            pair.upstream.says = reflected
            named = {"access-control-allow-origin": PAGE, "access-control-allow-credentials": "true", **EXPOSED}
            for origin, expected in ((PAGE, named), ("https://other", {}), ("null", {})):
                asked = {"Origin": origin}
                texts = (f"from {origin}", f"from {origin}", f"[status=500] {origin}", "x" * 2_000_000)
                for text, said in zip(texts, ("miss", "hit", "miss", None), strict=True):
                    answer = pair.post(text, headers=asked)
                    assert (answer.headers.get("x-semkv") or "").split(" ")[0] == (said or "")
                    assert to_browser(answer) == expected
                    assert "Origin" in answer.headers["vary"]
                models = httpx.get(f"{pair.url}/v1/models", headers=asked, timeout=120)
                assert models.headers.get("access-control-allow-origin") == (PAGE if expected else None)
                asks = preflight(pair, origin)
                assert asks.headers.get("access-control-allow-origin") == (PAGE if expected else None)
                assert (asks.status_code, asks.headers["access-control-allow-headers"]) == (200, "authorization")
            assert all("[status" in text or text.startswith("from ") for text in pair.asked)

    def test_all_are_let_in_without_credentials(self, tmp_path: Path) -> None:
        with Pair(tmp_path, cors_origins=("*",)) as pair:
            pair.upstream.says = reflected
            for _ in range(2):
                answer = pair.post("to all", headers={"Origin": PAGE})
                assert to_browser(answer) == TO_ALL

    @pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://Page.example", "null", ""])
    def test_an_origin_is_one(self, origin: str) -> None:
        with pytest.raises(ConfigError, match="--cors-origin"):
            ServerSettings(cors_origins=(origin,))
