"""What keeps tenants apart beyond the gateway's own keys, and what labels answers: salts on every route, tags."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_helpers import NEAR, ONE, OTHER, Pair, beside, chat, kind, picture, wait_until
from scripted_upstream import Scripted
from semkv_gateway.tenancy import Client, Tenants


def sent(pair: Pair, path: str, raw: bytes, *, key: str, **headers: str) -> dict[str, Any]:
    """The body that the upstream was sent for this one."""
    before = len(pair.upstream.calls)
    given = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    answer = httpx.post(f"{pair.url}{path}", content=raw, headers=given, timeout=120)
    assert answer.status_code == 200, answer.text
    (body,) = pair.upstream.calls[before:]
    return body


def image(uuid: str | None, url: str | None) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": None if url is None else {"url": url}}
    return part if uuid is None else {**part, "uuid": uuid}


def with_image(text: str, *parts: dict[str, Any]) -> bytes:
    content = [*parts, {"type": "text", "text": text}]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


CHAT = "/v1/chat/completions"
PASSED: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "cacheable": (CHAT, json.dumps(chat("salted")).encode(), {}),
    "bypass": (CHAT, json.dumps(chat("salted")).encode(), {"X-Semkv-Bypass": "1"}),
    "with a query": (CHAT + "?a=b", json.dumps(chat("salted")).encode(), {}),
    "name twice": (
        CHAT,
        b'{"model": "m", "model": "m", "cache_salt": "x", "messages": [{"content": "a"}]}',
        {},
    ),
    "no number": (CHAT, b'{"model": "m", "extra": NaN, "messages": [{"content": "a"}]}', {}),
    "lone surrogate": (CHAT, b'{"model": "m", "messages": [{"content": "\\ud800"}]}', {}),
    "unknown form": (CHAT, b'{"messages": [{"role": "stranger", "content": "a"}]}', {}),
    "remote media": (CHAT, with_image("a", image(None, "http://example.org/x.png")), {}),
    "prompt embeddings": ("/v1/completions", b'{"prompt": "a", "prompt_embeds": "AAAA"}', {}),
    "responses": ("/v1/responses", b'{"model": "m", "input": "a"}', {}),
    "escaped path": (
        "/v1/chat%2Fcompletions",
        json.dumps(chat("salted")).encode(),
        {"Cache-Control": "no-store"},
    ),
}


class TestSalts:
    @pytest.mark.parametrize("how", PASSED)
    def test_every_way_to_the_upstream_carries_the_tenants_salt(self, pair: Pair, how: str) -> None:
        path, raw, headers = PASSED[how]
        salts = [
            sent(pair, path, raw, key=f"{name} {how}", **headers)["cache_salt"]
            for name in ("one", "two")
        ]
        assert len(set(salts)) == 2
        assert all(len(salt) == 64 for salt in salts)

    def test_a_salt_of_the_clients_own_sets_it_apart_within_its_tenant(self, pair: Pair) -> None:
        def salt(own: str, key: str) -> str:
            raw = json.dumps({"model": "m", "input": "a", "cache_salt": own}).encode()
            return str(sent(pair, "/v1/responses", raw, key=key)["cache_salt"])

        assert len({salt("x", "one"), salt("y", "one"), salt("x", "two"), salt("", "one")}) == 4
        assert salt("x", "one") == salt("x", "one")

    def test_a_stranger_cannot_name_anothers_image(self, pair: Pair) -> None:
        raw = with_image("a", image("mine", None), image("mine", "http://example.org/x.png"))

        def uuids(key: str) -> list[str]:
            body = sent(pair, CHAT, raw, key=key)
            return [part["uuid"] for part in body["messages"][0]["content"][:2]]

        one, two = uuids("one"), uuids("two")
        assert one[0] == one[1] != two[0] == two[1]
        assert "mine" not in (*one, *two)
        assert uuids("one") == one

    def test_a_server_that_refuses_salts_gets_none(self, tmp_path: Path) -> None:
        with Pair(tmp_path, salt=False) as plain:
            own = with_image("b", image("mine", "data:image/png;base64,iVBORw0KGgo="))
            for path, raw, headers in (
                PASSED["cacheable"],
                PASSED["bypass"],
                PASSED["responses"],
                (CHAT, own, {}),
            ):
                body = json.dumps(sent(plain, path, raw, key="k", **headers))
                assert "cache_salt" not in body
                assert "uuid" not in body
            answer = httpx.post(f"{plain.url}{CHAT}", content=b"{")
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no request")

    @pytest.mark.parametrize(
        "raw", [b"", b"[]", b"{", b'{"a":' * 10_000, b"\xff", b'{"cache_salt":NaN}']
    )
    def test_what_has_no_place_for_a_salt_does_not_go_on(self, pair: Pair, raw: bytes) -> None:
        before = pair.upstream.total
        for path in (CHAT, "/v1/responses", "/classify"):
            answer = httpx.post(f"{pair.url}{path}", content=raw)
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            )
        assert pair.upstream.total == before


class Strict(Scripted):
    """A server that takes no field which it does not know, and says so as OpenAI or FastAPI do, or packed."""

    form = "named"

    async def _answer(self, scope: Any, raw: bytes, receive: Any, send: Any) -> None:
        if b"cache_salt" not in raw:
            await super()._answer(scope, raw, receive, send)
            return
        self.total += 1
        said = json.dumps(
            {"error": {"message": "Unrecognized request argument supplied: cache_salt"}}
        ).encode()
        headers = [(b"content-type", b"application/json")]
        if self.form == "packed":
            said, headers = gzip.compress(said), [*headers, (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": said})


class TestRefusedSalts:
    @pytest.mark.parametrize("form", ["named", "packed"])
    @pytest.mark.parametrize("how", ["cacheable", "bypass", "responses"])
    def test_it_is_noticed_once_and_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, form: str
    ) -> None:
        upstream = Strict()
        upstream.form = form
        path, raw, headers = PASSED[how]
        with Pair(tmp_path, upstream=upstream) as pair:
            assert pair.metric("semkv_salt_refused") == 0
            assert "cache_salt" not in sent(pair, path, raw, key="one", **headers)
            assert upstream.total == 2, "with a salt, then without"
            for text in ("a", "b"):
                pair.post(text)
            assert upstream.total == 4
            assert pair.metric("semkv_salt_refused") == 1
            assert kind(pair.post("a")) == "hit"
            assert kind(pair.post("a", headers={"Authorization": "Bearer other"})) == "miss", (
                "answers stay apart"
            )
        assert [
            record.message[:34] for record in caplog.records if "cache_salt" in record.message
        ] == ["the upstream refuses cache_salt, s"]

    def test_an_error_that_repeats_what_a_client_wrote_turns_nothing_off(self, pair: Pair) -> None:
        pair.upstream.script = {"my cache_salt": {"status": "400", "says": "cache_salt"}}
        for _ in range(2):
            answer = pair.post("my cache_salt")
            assert answer.status_code == 400
            assert "scripted" in answer.text
        pair.upstream.script = {}
        assert "cache_salt" in sent(
            pair, CHAT, json.dumps(chat("still salted")).encode(), key="one"
        )


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A gateway that believes what its clients say, as if they were proxies."""
    rules = ("prompt:*weather*=weather", "prompt:*rain*=weather", "model:scr*=scripted")
    with Pair(
        tmp_path_factory.mktemp("proxied"), tag_rules=rules, trusted_proxies=("127.0.0.0/8",)
    ) as running:
        yield running


class TestTags:
    def count(self, pair: Pair, tag: str, *, dry_run: bool = True) -> int:
        return int(pair.admin("invalidate", {"tag": tag, "dry_run": dry_run}).json()["count"])

    def test_by_rule(self, proxied: Pair) -> None:
        for text in ("The WEATHER of today?", "Will there be rain?", "Where is the tram?"):
            proxied.post(text)
        assert self.count(proxied, "weather") == self.count(proxied, "weather", dry_run=False) == 2
        assert self.count(proxied, "weather") == 0
        assert kind(proxied.post("Will there be rain?")) == "miss"
        assert kind(proxied.post("Where is the tram?")) == "hit"
        assert self.count(proxied, "scripted", dry_run=False) >= 2
        assert kind(proxied.post("Where is the tram?")) == "miss"

    def test_by_header_of_a_trusted_proxy(self, proxied: Pair) -> None:
        for text, tags in (
            ("a", "doc:1"),
            ("b", "doc:1, doc:2"),
            ("c", "doc:2,, doc:2"),
            ("d", ""),
        ):
            asked = [proxied.post(text, headers={"X-Semkv-Tags": tags}) for _ in range(2)]
            assert [kind(answer) for answer in asked] == ["miss", "hit"]
        assert [self.count(proxied, tag) for tag in ("doc:1", "doc:2", "doc")] == [2, 2, 0]
        assert self.count(proxied, "doc:1", dry_run=False) == 2
        assert self.count(proxied, "doc:2") == 1
        assert "x-semkv-tags" not in proxied.upstream.headers[-1]

    def test_an_answer_is_served_under_its_own_tags_alone(self, proxied: Pair) -> None:
        """Else what is removed by a tag would not be all that was served under it."""
        answers = [
            proxied.post("shared?", headers={"X-Semkv-Tags": tags})
            for tags in ("x", "y", "x,y", "y, x", "")
        ]
        assert [kind(answer) for answer in answers] == ["miss", "miss", "miss", "hit", "miss"]

    @pytest.mark.parametrize(
        "tags", ["x" * 65, ",".join(f"t{i}" for i in range(17)), "a b", "ü", "a\tb", '"a"']
    )
    def test_what_cannot_be_labelled_is_not_kept(self, proxied: Pair, tags: str) -> None:
        for _ in range(2):
            answer = proxied.post("odd labels", headers={"X-Semkv-Tags": tags.encode()})
            assert (answer.status_code, answer.headers["x-semkv"]) == (200, "pass reason=tags")

    def test_a_client_has_no_say(self, pair: Pair) -> None:
        pair.post("not mine to label", headers={"X-Semkv-Tags": "theirs"})
        assert kind(pair.post("not mine to label")) == "hit"
        assert self.count(pair, "theirs") == 0
        assert "x-semkv-tags" not in pair.upstream.headers[-1]


class TestNames:
    """Names of tenants come in a header; nothing in one may make two tenants one."""

    def test_a_client_cannot_slip_a_name_past_its_proxy(self, proxied: Pair) -> None:
        def ask(*names: str) -> str:
            lines = [("X-Semkv-Tenant", name) for name in names]
            return str(
                httpx.post(f"{proxied.url}{CHAT}", json=chat("mine"), headers=lines).json()["id"]
            )

        victim = ask("victim")
        assert victim == ask("victim")
        assert victim not in (ask("victim", "me"), ask("me", "victim"))

    @pytest.mark.parametrize(
        ("client", "believed"),
        [(("10.0.0.1", 5), True), (("::ffff:10.0.0.1", 5), True), (("10.0.0.1", 0), False), (None, False),
         (("11.0.0.1", 5), False), (("somewhere", 5), False)],
    )  # fmt: skip
    def test_whose_word_counts(self, client: tuple[str, int] | None, believed: bool) -> None:
        """Port 0 is what uvicorn writes where it took the address from a header, which anybody may send."""
        tenants = Tenants(b"secret", trusted=(ip_network("10.0.0.0/8"),))

        def asks(*headers: tuple[bytes, bytes]) -> Client:
            return tenants.client({"client": client, "headers": headers})

        name, key, other = (
            (b"x-semkv-tenant", b"a"),
            (b"authorization", b"k"),
            (b"authorization", b"other"),
        )
        assert asks(name, key).believed is believed
        assert (asks(name, key).tenant == asks(name, other).tenant) is believed
        assert asks(name, key).tenant != asks(key).tenant


def test_as_one_tenant_a_key_counts_once_the_upstream_has_accepted_it(tmp_path: Path) -> None:
    with Pair(tmp_path, single_tenant=True) as pair:

        def ask(key: str, text: str = "common") -> httpx.Response:
            return pair.post(text, headers={"Authorization": f"Bearer {key}"})

        assert [kind(ask(key)) for key in ("a", "b", "b")] == ["miss", "miss", "hit"]
        for status in (429, 400, 503, 401):
            pair.upstream.script = {"common": {"status": str(status)}}
            assert [ask("stranger").status_code for _ in range(2)] == [status] * 2, (
                "only a success lets a key in"
            )
        assert kind(ask("b")) == "hit"


def test_who_joined_a_request_that_is_refused_asks_for_itself(pair: Pair) -> None:
    pair.upstream.script = {"whose key?": {"status": "401"}}
    with beside(pair, "whose key?") as first:
        pair.upstream.script = {}
        second = pair.soon("whose key?")
        wait_until(lambda: pair.readers == 2)
    assert [answer.result().status_code for answer in (first, second)] == [401, 200]


KEY = {"Authorization": "Bearer revoked"}


def revoke(pair: Pair) -> None:
    assert [kind(pair.post("before", headers=KEY)) for _ in range(2)] == ["miss", "hit"]
    assert pair.post("after [status=401]", headers=KEY).status_code == 401
    pair.settle()


def test_a_refused_key_reads_nothing_after_a_restart_until_it_is_accepted(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        revoke(pair)
    with Pair(tmp_path) as pair:
        pair.upstream.script = {"before": {"status": "401"}}
        assert [pair.post("before", headers=KEY).status_code for _ in range(2)] == [401, 401]
        pair.upstream.script = {}
        assert pair.post("before", headers=KEY).headers["x-semkv"] == "miss reason=key"
        pair.settle()
    with Pair(tmp_path) as pair:
        assert kind(pair.post("before", headers=KEY)) == "hit", "accepted again, and noted"
    assert b"revoked" not in b"".join(
        file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()
    )


def test_a_key_that_another_gateway_saw_refused_reads_no_more_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semkv_gateway.tenancy._GOOD_S", 0.2)
    file = str(tmp_path / "shared.sqlite")
    with Pair(tmp_path, store=file) as one, Pair(tmp_path, store=file) as other:
        revoke(one)
        wait_until(lambda: kind(other.post("before", headers=KEY)) == "miss")
        assert kind(one.post("before", headers=KEY)) == "miss"
        for pair in (one, other):
            pair.settle()
            wait_until(lambda pair=pair: kind(pair.post("before", headers=KEY)) == "hit")


def test_nobody_else_can_read_what_is_kept(tmp_path: Path) -> None:
    folder, before = tmp_path / "cache", os.umask(0o022)
    try:
        with Pair(folder, **NEAR, verify_rate=1.0) as pair:
            pair.post(ONE)
            pair.post([picture("red"), {"type": "text", "text": "What is it?"}])
            wait_until(lambda: pair.entries)
            assert "hit" in pair.post(OTHER).headers["x-semkv"]
            wait_until(lambda: pair.metric("semkv_hits_checked"))
            found = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
        found |= {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    finally:
        os.umask(before)
    assert {path.name for path in found} >= {"catalog.sqlite", "catalog.sqlite-wal", "media"}
    assert {path: mode for path, mode in found.items() if mode not in (0o600, 0o700)} == {}


def test_users_that_bodies_name_are_tenants_where_that_is_asked_for(tmp_path: Path) -> None:
    with Pair(tmp_path, separate_users=True, **NEAR) as pair:
        named = [{"user": "ann"}, {"user": "bob"}, {"safety_identifier": "ann"}, {}]
        salts = set()
        for who in named:
            assert kind(pair.post(ONE, **who)) == "miss"
            salts.add(pair.upstream.calls[-1]["cache_salt"])
            assert kind(pair.post(ONE, **who)) == "hit"
            pair.settle()
            assert kind(pair.post(OTHER, **who)) == "hit"
        assert len(salts) == len(named)
        hit = pair.post(ONE, user="ann").headers["x-semkv-hit"]
        said = [
            httpx.post(f"{pair.url}/v1/semkv/feedback", json={"id": hit, **who}, timeout=60)
            for who in ({"user": "bob"}, {"user": "ann"})
        ]
        assert [answer.status_code for answer in said] == [404, 200]
