"""What browsers meet: the dashboard with the admin routes behind it, and pages of other origins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from browsers import chromium
from command_line import invoke
from gateway_helpers import (
    ADMIN,
    NEAR,
    ONE,
    OTHER,
    Pair,
    Served,
    a_tenant,
    chat,
    kind,
    wait_until,
)
from scripted_upstream import Scripted
from semkv.errors import ConfigError, StoreError
from semkv_dashboard.names import read_names
from semkv_gateway.serve import Protocol
from semkv_gateway.settings import ServerSettings

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
            answer = guess(pair, key)
            assert answer.json()["error"]["type"] == "authentication_error"
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
        hit = next(h for h in pair.admin("recent").json()["hits"] if h["tier"] == "text:normalised")
        assert (hit["asked"][0]["text"], hit["donor"][0]["text"]) == (asked, donor)
        assert pair.admin("wrong", {"id": hit["id"]}).json() == {"removed": 1}
        assert pair.post(donor).headers["x-semkv"] == "miss"
        assert pair.admin("wrong", {"id": "unknown"}).status_code == 404

    def test_what_is_stored_is_found_read_and_deleted(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("semkv_dashboard.entries.PAGE", 2)
        mine, theirs = a_tenant(), a_tenant()
        animals = ("a narwhal", "a walrus", "a seal")
        for text in animals:
            pair.post(f"Describe {text}.", headers=mine)
        for _ in range(3):
            assert kind(pair.post("Describe a seal.", headers=mine)) == "hit"
        pair.post("Describe a narwhal.", headers=theirs)
        first = pair.admin("entries?text=DESCRIBE").json()
        assert [entry["prompt"] for entry in first["entries"]] == [
            "Describe a narwhal.",
            "Describe a seal.",
        ]
        seal = first["entries"][1]
        assert (seal["uses"], seal["model"]) == (3, "scripted")
        digits = seal["tenant"][:8]
        query = f"entries?text=describe&tenant={digits}"
        page = pair.admin(query).json()
        rest = pair.admin(f"{query}&after={page['next']}").json()
        found = [entry["prompt"] for entry in (*page["entries"], *rest["entries"])]
        assert found == [f"Describe {text}." for text in reversed(animals)]
        assert rest["next"] == ""
        for filters, count in (
            ("uses=3", 1),
            ("uses=4", 0),
            ("order=used", 1),
            ("older=3600", 0),
            ("younger=3600&model=SCRIPT", 1),
            ("model=another", 0),
        ):
            found = pair.admin(f"entries?text=seal&{filters}").json()["entries"]
            assert len(found) == count, filters
        for odd in ("order=x", "uses=x", "older=x"):
            assert pair.admin(f"entries?{odd}").status_code == 400
        whole = pair.admin(f"entry?key={seal['key']}").json()
        assert whole["answer"] == "You said: Describe a seal."
        wait_until(lambda: not pair.app.gateway.pending)
        gone = pair.admin("delete", {"key": seal["key"]}).json()
        assert gone == {"answers": 1, "donors": 1}
        assert pair.admin(f"entry?key={seal['key']}").status_code == 404
        assert kind(pair.post("Describe a  seal.", headers=mine)) == "miss", "no donor is left"
        assert pair.admin("delete", {}).status_code == 400

    def test_what_was_nearly_a_hit_is_shown_with_its_reason(self, pair: Pair) -> None:
        me = a_tenant() | {"X-Request-Id": "of-this-test"}
        safe, guitar = "Is it safe to eat raw eggs?", "What is the best way to learn the guitar?"
        heating = "How do I turn the heating on?"
        asked = {
            safe: "Is it not safe to eat raw eggs?",
            guitar: "How do I learn to play the guitar?",
            heating: "How do I turn the heating off?",
        }
        others = (
            "Who wrote Emma?",
            "Where do storks spend the winter?",
        )  # few texts are not encoded
        for text in (*asked, *others):
            pair.post(text, headers=me)
        wait_until(lambda: not pair.app.gateway.pending)
        for text in asked.values():
            assert pair.post(text, headers=me).headers["x-semkv"] == "miss"
        rows = [row["near"] for row in pair.admin("recent?id=of-this-test").json()["near"]]
        near = {row["donor"]: row for row in rows}
        assert {row["donor"]: row["asked"] for row in rows} == asked
        assert near[safe]["reason"] == "veto:antonym"
        assert near[guitar]["reason"] == "other words"  # a little below the threshold
        assert near[heating]["reason"] == "veto:direction"
        assert 0.5 < near[guitar]["score"] < 0.92

    def test_a_miss_is_found_by_its_request_id(self, pair: Pair) -> None:
        sent = {"cut": "[length] cut off", "drawn": "drawn", "failed": "[status=500] failed"}
        for name, text in sent.items():
            more = {"temperature": 0.7} if name == "drawn" else {}
            pair.post(text, headers={"X-Request-Id": f"id-{name}"}, **more)
        rows = {}
        for name in sent:
            (rows[name],) = pair.admin(f"recent?id=id-{name}").json()["misses"]
        assert rows["drawn"]["reason"] == "sampled"
        assert (rows["cut"]["status"], rows["cut"]["prompt"]) == (200, "[length] cut off")
        assert rows["cut"]["unkept"] == "unfinished"
        assert rows["failed"]["status"] == 500
        assert pair.admin("recent?id=none").json() == {"hits": [], "near": [], "misses": []}

    def test_figures_of_each_window(self, pair: Pair) -> None:
        me = a_tenant()
        for _ in range(3):
            pair.post("by time", headers=me, model="m of a window")
        for window in ("1 hour", "24 hours", "7 days"):
            traffic = pair.admin(f"stats?window={window}").json()["traffic"]
            assert traffic["sums"]["model hit"]["m of a window"] == 2
            assert traffic["sums"]["model miss"]["m of a window"] == 1
            assert sum(n for _, n in traffic["tiers"][-1:] for n in n.values()) > 0
            assert all(at > traffic["now"] - 604_800 - 7200 for at, _ in traffic["tiers"])
        assert pair.admin("stats?window=1 year").status_code == 400
        assert pair.admin("stats?days=0").status_code == 400


class TestFeedback:
    """A client calls a hit wrong."""

    def tell(self, pair: Pair, who: dict[str, str], body: Any) -> httpx.Response:
        return httpx.post(f"{pair.url}/v1/semkv/feedback", headers=who, json=body, timeout=60)

    def test_a_pair_that_was_wrong_is_refused_from_then_on(self, tmp_path: Path) -> None:
        with Pair(tmp_path, **NEAR) as pair:
            me = a_tenant()
            pair.post(ONE, headers=me)
            pair.settle()
            hit = pair.post(OTHER, headers=me)
            assert "text:semantic" in hit.headers["x-semkv"]
            given = {"id": hit.headers["x-semkv-hit"]}
            assert self.tell(pair, a_tenant(), given).status_code == 404, "another's"
            broken = {"id": given["id"][:-2] + "xx"}
            assert self.tell(pair, me, broken).status_code == 404
            said = self.tell(pair, me, given).json()
            assert said == {"refused_from_now_on": True, "removed": 0}
            assert pair.post(OTHER, headers=me).headers["x-semkv"] == "miss"
            assert kind(pair.post(ONE, headers=me)) == "hit", "its own question"
            assert pair.semantic.stats().barred == 1
            again = self.tell(pair, me, given | {"delete": True}).json()
            assert again["removed"] == 1
            assert "tier=exact" not in pair.post(ONE, headers=me).headers["x-semkv"]
            assert pair.metric('semkv_feedback_total{outcome="heard"}') == 2

    def test_an_exact_hit_goes_unless_it_is_newer(self, pair: Pair) -> None:
        me = a_tenant()
        pair.post("exactly", headers=me)
        given = {"id": pair.post("exactly", headers=me).headers["x-semkv-hit"]}
        later = pair.app.gateway.cache.responses
        assert self.tell(pair, me, given).json() == {"refused_from_now_on": False, "removed": 1}
        clock = later._clock
        later._clock = lambda: clock() + 10
        assert kind(pair.post("exactly", headers=me)) == "miss"
        later._clock = clock
        assert self.tell(pair, me, given).json()["removed"] == 0
        assert kind(pair.post("exactly", headers=me)) == "hit"
        for odd in ({}, [], {"id": 3}, {"id": given["id"], "delete": "yes"}, {"id": "é"}):
            assert self.tell(pair, me, odd).status_code in (400, 404)
        assert self.tell(pair, me, {"id": "x" * 5000}).status_code == 413
        with mock.patch.object(pair.app.gateway.cache, "remove", side_effect=StoreError("away")):
            assert self.tell(pair, me, given).status_code == 503

    def test_it_is_limited(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        with Pair(tmp_path, feedback=2) as pair:
            pair.post("often")
            given = {"id": pair.post("often").headers["x-semkv-hit"]}
            codes = [self.tell(pair, {}, given).status_code for _ in range(3)]
            assert codes == [200, 200, 429]
            assert self.tell(pair, a_tenant(), given).status_code == 404, "others are not held up"
        (line, _) = [r for r in caplog.records if r.getMessage() == "a client calls a hit wrong"]
        assert line.fields["removed"] == 1  # type: ignore[attr-defined]
        with Pair(tmp_path, feedback=0) as pair:
            assert self.tell(pair, {}, given).status_code == 403


def test_tenants_have_names(tmp_path: Path) -> None:
    key = "sk-of-the-search-team"
    names = tmp_path / "names.toml"
    names.write_text(f'{hashlib.sha256(key.encode()).hexdigest()} = "Search team"\n')
    proxied = {"X-Semkv-Tenant": "café <b>".encode()}
    settings: dict[str, Any] = {"tenant_names": names, "trusted_proxies": ("127.0.0.0/8",)}
    prices = ("scripted=input=0 output=1000000",)
    with Pair(tmp_path / "cache", prices=prices, **settings) as pair:
        for headers in ({"Authorization": f"Bearer {key}"}, proxied, a_tenant()):
            for _ in range(10):
                pair.post("named", headers=headers)
        stats = pair.admin("stats").json()
        called = set(stats["names"].values())
        assert called == {"Search team", "café <b>"}
        assert set(stats["names"]) < set(stats["traffic"]["sums"]["tenant hit"])
        entries = pair.admin("entries?tenant=search").json()["entries"]
        assert [entry["prompt"] for entry in entries] == ["named"]
        assert pair.metric('semkv_requests_saved_total{model="scripted",tenant="Search team"}') == 9
        text = httpx.get(f"{pair.url}/metrics").text
        assert key not in text
        assert key not in json.dumps(stats)
    with Pair(tmp_path / "cache") as pair:  # without the file
        assert set(pair.admin("stats").json()["names"].values()) == called
    shown = invoke(["stats", "--cache-dir", str(tmp_path / "cache")]).stdout
    assert "Search team" in shown
    (tenant,) = {entry["tenant"] for entry in entries}
    invoke(["purge", "--cache-dir", str(tmp_path / "cache"), "--tenant", tenant])
    with Pair(tmp_path / "cache") as pair:
        stats = pair.admin("stats").json()
        assert "Search team" not in stats["names"].values()
        assert tenant[:8] not in stats["traffic"]["sums"]["tenant hit"]


@pytest.mark.parametrize(
    "wrong", ['"sk-live-1234" = "a"', "3fa9c1d2 = 3", '3fa9c1d2 = ""', '3fa = "a"', "3fa9c1d2"]
)
def test_a_file_of_names_that_is_none_ends_the_start(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "names.toml"
    file.write_text(wrong)
    with pytest.raises(ConfigError, match="--tenant-names") as refused:
        read_names(file)
    assert "sk-live" not in str(refused.value), "it may be a key"


def guess(pair: Pair, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}".encode()}
    return httpx.get(f"{pair.url}/semkv/api/stats", headers=headers)


def test_guesses_at_the_admin_key_are_limited_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Pair(tmp_path) as pair:
        codes = [guess(pair, f"guess {number}").status_code for number in range(12)]
        assert codes == [401] * 10 + [429] * 2
        answer = guess(pair, ADMIN)
        assert answer.status_code == 429, "the right one tells nothing either"
        assert 0 < int(answer.headers["retry-after"]) <= 6
        assert pair.metric('semkv_admin_refused_total{reason="wrong key"}') == 10
        assert kind(pair.post("others go on")) == "miss"
    said = [line for line in caplog.messages if "wrong admin key" in line]
    assert len(said) == 11
    assert "guess" not in "".join(said)
    assert "127.0.0.1" in said[0]


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
    with chromium() as running:
        yield running


def opened_dashboard(browser: Any, pair: Pair, **size: int) -> Any:
    """The dashboard behind its key."""
    width, height = size.get("width", 390), size.get("height", 844)
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.set_default_timeout(300_000)
    page.goto(f"{pair.url}/semkv")
    page.fill("#key", ADMIN)
    page.click("#login button")
    page.wait_for_selector("#board:not([hidden])")
    return page


def go(page: Any, name: str) -> None:
    page.click(f"#nav a[href='#{name}']")
    page.wait_for_selector(f"#{name}:not([hidden])")
    assert page.evaluate(TOO_WIDE) <= 0, name


def test_the_dashboard_says_why_most_requests_cannot_be_kept(tmp_path: Path, browser) -> None:
    with Pair(tmp_path) as pair:
        page = opened_dashboard(browser, pair)
        assert page.locator("#advice").is_hidden()
        for name in ("worth", "entries", "requests", "faults", "overview"):
            go(page, name)  # with nothing to show
        assert "Nothing is stored yet" in page.text_content("#found")
        for n in range(20):
            pair.post(f"drawn {n}", temperature=None)
        page.wait_for_selector("#advice:has-text('--default-temperature 0')")
        page.wait_for_selector("#reasons tr:has-text('sampled')")
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
        for _ in range(8):
            account.spent("semantic_text", 3600.0)
        pair.app.gateway.upstreams.members[0].salts.refused = True
        page = opened_dashboard(browser, pair)
        go(page, "worth")
        page.wait_for_selector("#worth-day td.number")
        said = {name: page.text_content(f"#worth-{name}") for name in ("requests", "money")}
        assert said == {"requests": "2", "money": f"{2 * tokens}.00"}
        assert page.text_content("#worth-requests-note").startswith("of 3, ")
        assert page.text_content("#worth-money-note") == f"what was sent cost {tokens}.00"
        for kind, name in (("day", "20"), ("model", "scripted"), ("tenant", "")):
            (cells,) = page.locator(f"#worth-{kind} tr").all()
            shown = cells.locator("td").all_text_contents()
            assert shown[0].startswith(name)
            assert (shown[1], shown[2], shown[4]) == ("2", "3", f"{2 * tokens}.00")
            assert re.fullmatch(r"[\d.]+ m?s", shown[3])
        cells = page.locator("#worth-tiers tr", has_text="semantic_text").locator("td")
        assert cells.all_text_contents()[1:] == ["0", "8.0 h", "0.0 ms", "1 in 32"]
        exact = page.locator("#worth-tiers tr").filter(has=page.get_by_text("exact", exact=True))
        assert exact.locator("td").all_text_contents()[1] == "2"
        assert "Held out from near-hits: 3 requests" in page.text_content("#holdout")
        page.click("#days button:has-text('today')")
        page.wait_for_selector("#days [aria-pressed=true]:has-text('today')")
        assert page.text_content("#worth-requests") == "2"
        assert "the upstream refuses cache_salt" in page.text_content("#trouble")
        assert page.evaluate(TOO_WIDE) <= 0
        page.close()


def test_the_dashboard_in_a_browser(pair: Pair, browser) -> None:
    near_repeat(pair, f"Look at this. What is {EVIL}?", f"look at this. What is {EVIL}?")
    tower = "How tall is the Eiffel tower in Paris?"
    near_repeat(pair, tower, "how tall is the  Eiffel tower in Paris?")
    pair.post("What is hidden\U000e0073 here?")
    pair.post("drawn at random", temperature=0.7)
    failed = pair.post("[status=500] it failed", headers={"X-Request-Id": "looked-for"})
    assert failed.status_code == 500
    pair.app.gateway.metrics.fault("store")
    complaints: list[str] = []
    outside: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(300_000)
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

    page.click("#overview .windows button:has-text('24 hours')")
    page.wait_for_selector("#overview .windows [aria-pressed=true]:has-text('24 hours')")
    every_row_has_something(page, "overview")
    normalised = page.locator("#tiers tr", has_text="text:normalised").text_content()
    assert "ms" in normalised
    assert "sampled" in page.text_content("#reasons")
    assert page.locator("#models tr", has_text="scripted").count() == 1
    go(page, "worth")
    every_row_has_something(page, "worth")
    go(page, "faults")
    every_row_has_something(page, "faults")
    assert "Look at the disk" in page.locator("#faulty tr", has_text="store").text_content()
    assert page.locator("#statuses tr", has_text="500").count() == 1

    go(page, "requests")
    page.fill("#search", "looked-for")
    page.wait_for_selector("#rows li:has-text('the answer was an error, 500')")
    page.fill("#search", "nobody asked this")
    page.wait_for_selector("#norows:has-text('None of the latest requests')")
    page.fill("#search", "")
    page.click("#kinds button:has-text('Near-repeats served')")
    page.wait_for_selector(".hit")
    assert EVIL in page.text_content("#rows")
    page.fill("#search", "TOWER in Paris")
    assert page.locator(".hit").count() == 1
    assert page.locator("#rows img, #rows script").count() == 0
    assert page.title() == "semkv"
    hit = page.locator(".hit", has_text="How tall").first
    hit.get_by_role("button", name="This hit was wrong").click()
    page.wait_for_selector(".hit button:has-text('Removed')")
    assert pair.post(tower).headers["x-semkv"] == "miss"

    go(page, "entries")
    page.fill("#find [name=text]", "HIDDEN")
    page.click("#find button")
    page.wait_for_selector("#found:has-text('1 shown')")
    page.click("#stored .stored")
    page.wait_for_selector("#entry[open]")
    assert page.text_content("#entry-prompt") == "What is hidden[U+E0073] here?"
    assert page.text_content("#entry-answer").startswith("You said: What is hidden[U+E0073]")
    page.click("#delete")
    page.click("#delete:has-text('Really delete')")
    page.wait_for_selector("#deleted:has-text('1 answer')")
    page.click("#close")
    assert page.locator("#stored li").count() == 0

    page.click("#entries summary")
    page.fill("#invalidate [name=prefix]", "How tall")
    page.click("#count")
    page.wait_for_selector("#counted:has-text('1 answer would be removed.')")
    page.fill("#invalidate [name=model]", "another")
    assert page.locator("#remove").is_disabled(), "what was counted is not what would be removed"
    page.fill("#invalidate [name=model]", "")
    page.click("#count")
    page.wait_for_selector("#remove:enabled")
    page.click("#remove")
    page.wait_for_selector("#counted:has-text('1 answer was removed.')")

    page.emulate_media(color_scheme="dark")
    page.reload()  # the key outlives a reload, in this tab
    page.wait_for_selector("#entries:not([hidden])")
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("overview", "worth", "entries", "requests", "faults"):
        go(page, name)
    page.click("#leave")
    assert page.locator("#board").is_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    assert complaints == []
    assert outside == []


def every_row_has_something(page: Any, name: str) -> None:
    """Each tile, table and list of a page has a figure, or says that there is none."""
    script = """name => [...document.querySelectorAll(
        `#${name} tbody, #${name} strong, #${name} small[id], #${name} dl, #${name} ul`
    )].filter(node => !node.textContent.trim()).map(node => node.id)"""
    page.wait_for_function(f"name => !({script})(name).length", arg=name)
    shown = page.locator(f"#{name} td.number, #{name} strong").all_text_contents()
    assert len(shown) >= 3
    odd = [text for text in shown if re.search(r"NaN|undefined|null|Infinity", text) or not text]
    assert odd == []


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
    "access-control-expose-headers": "X-Semkv, X-Semkv-Hit, X-Request-Id",
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
