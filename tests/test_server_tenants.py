"""What keeps tenants apart beyond the gateway's own keys, and what labels answers: salts on every route, tags."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_helpers import NEAR, ONE, OTHER, PATIENT, Pair, chat, picture, wait_until
from semkv.server.tenancy import NoPlace, salted


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("gateway")) as running:
        yield running


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
    "name twice": (CHAT, b'{"model": "m", "model": "m", "cache_salt": "x", "messages": [{"content": "a"}]}', {}),
    "no number": (CHAT, b'{"model": "m", "extra": NaN, "messages": [{"content": "a"}]}', {}),
    "lone surrogate": (CHAT, b'{"model": "m", "messages": [{"content": "\\ud800"}]}', {}),
    "unknown form": (CHAT, b'{"messages": [{"role": "stranger", "content": "a"}]}', {}),
    "remote media": (CHAT, with_image("a", image(None, "http://example.org/x.png")), {}),
    "prompt embeddings": ("/v1/completions", b'{"prompt": "a", "prompt_embeds": "AAAA"}', {}),
    "responses": ("/v1/responses", b'{"model": "m", "input": "a"}', {}),
    "escaped path": ("/v1/chat%2Fcompletions", json.dumps(chat("salted")).encode(), {"Cache-Control": "no-store"}),
}


class TestSalts:
    @pytest.mark.parametrize("how", PASSED)
    def test_every_way_to_the_upstream_carries_the_tenants_salt(self, pair: Pair, how: str) -> None:
        path, raw, headers = PASSED[how]
        salts = [sent(pair, path, raw, key=f"{name} {how}", **headers)["cache_salt"] for name in ("one", "two")]
        assert len(set(salts)) == 2
        assert all(len(salt) == 64 for salt in salts)

    def test_a_salt_of_the_clients_own_sets_it_apart_within_its_tenant(self, pair: Pair) -> None:
        def salt(own: str, key: str) -> str:
            raw = json.dumps({"model": "m", "input": "a", "cache_salt": own}).encode()
            return str(sent(pair, "/v1/responses", raw, key=key)["cache_salt"])

        assert len({salt("x", "one"), salt("y", "one"), salt("x", "two"), salt("", "one")}) == 4
        assert salt("x", "one") == salt("x", "one")

    def test_nothing_else_is_changed(self, pair: Pair) -> None:
        raw = (
            b'{"model": "m", "big": 12345678901234567890, "f": 1e-7, "messages": [{"role": "x", "content": "\\u00fc"}]}'
        )
        body = sent(pair, CHAT, raw, key="k")
        assert body.pop("cache_salt")
        assert body == json.loads(raw)

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
            data = "data:image/png;base64,iVBORw0KGgo="
            for path, raw, headers in (
                (CHAT, json.dumps(chat("a")).encode(), {}),
                (CHAT, with_image("b", image("mine", data)), {}),
                (CHAT, json.dumps(chat("c")).encode(), {"X-Semkv-Bypass": "1"}),
                ("/v1/responses", b'{"model": "m", "input": "a"}', {}),
            ):
                assert not {"cache_salt", "uuid"} & words(sent(plain, path, raw, key="k", **headers))
            answer = httpx.post(f"{plain.url}{CHAT}", content=b"{")
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no request")

    @pytest.mark.parametrize(
        "raw", [b"", b"[]", b"{", b'"x"', b"[" * 10_000, b'{"a":' * 10_000, b"\xff", b'{"cache_salt":NaN}']
    )
    def test_what_has_no_place_for_a_salt_does_not_go_on(self, pair: Pair, raw: bytes) -> None:
        with pytest.raises(NoPlace):
            salted(raw, "tenant", b"secret")
        before = pair.upstream.total
        for path in (CHAT, "/v1/responses"):
            answer = httpx.post(f"{pair.url}{path}", content=raw)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert pair.upstream.total == before


def words(value: Any) -> set[str]:
    """Every name in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(words, value.values()))
    return set().union(*map(words, value)) if isinstance(value, list) else set()


class TestTags:
    RULES = ("prompt:*weather*=weather", "prompt:*rain*=weather", "model:scr*=scripted")

    @pytest.fixture(scope="class")
    def tagged(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        folder = tmp_path_factory.mktemp("tags")
        with Pair(folder, tag_rules=self.RULES, trusted_proxies=("127.0.0.0/8",)) as running:
            yield running

    def count(self, pair: Pair, tag: str, *, dry_run: bool = True) -> int:
        return int(pair.admin("invalidate", {"tag": tag, "dry_run": dry_run}).json()["count"])

    def test_by_rule(self, tagged: Pair) -> None:
        for text in ("The WEATHER of today?", "Will there be rain?", "Where is the tram?"):
            tagged.post(text)
        assert self.count(tagged, "weather") == 2
        assert self.count(tagged, "weather", dry_run=False) == 2
        assert self.count(tagged, "weather") == 0
        assert tagged.post("Will there be rain?").headers["x-semkv"] == "miss"
        assert tagged.post("Where is the tram?").headers["x-semkv"].startswith("hit")
        assert self.count(tagged, "scripted", dry_run=False) >= 2
        assert tagged.post("Where is the tram?").headers["x-semkv"] == "miss"

    def test_by_header_of_a_trusted_proxy(self, tagged: Pair) -> None:
        for text, tags in (("a", "doc:1"), ("b", "doc:1, doc:2"), ("c", "doc:2,, doc:2"), ("d", "")):
            assert tagged.post(text, headers={"X-Semkv-Tags": tags}).headers["x-semkv"] == "miss"
            assert tagged.post(text, headers={"X-Semkv-Tags": tags}).headers["x-semkv"].startswith("hit")
        assert (self.count(tagged, "doc:1"), self.count(tagged, "doc:2"), self.count(tagged, "doc")) == (2, 2, 0)
        assert self.count(tagged, "doc:1", dry_run=False) == 2
        assert self.count(tagged, "doc:2") == 1
        assert "x-semkv-tags" not in tagged.upstream.headers[-1]

    def test_an_answer_is_served_under_its_own_tags_alone(self, tagged: Pair) -> None:
        """Else what is removed by a tag would not be all that was served under it."""

        def said(tags: str) -> str:
            return str(tagged.post("shared?", headers={"X-Semkv-Tags": tags}).headers["x-semkv"].split()[0])

        assert [said(tags) for tags in ("x", "y", "x,y", "y, x", "")] == ["miss", "miss", "miss", "hit", "miss"]

    @pytest.mark.parametrize("tags", ["x" * 65, ",".join(f"t{i}" for i in range(17)), "a b", "ü", "a\tb", '"a"'])
    def test_what_cannot_be_labelled_is_not_kept(self, tagged: Pair, tags: str) -> None:
        for _ in range(2):
            answer = tagged.post("odd labels", headers={"X-Semkv-Tags": tags.encode()})
            assert (answer.status_code, answer.headers["x-semkv"]) == (200, "pass reason=tags")

    def test_a_client_has_no_say(self, pair: Pair) -> None:
        pair.post("not mine to label", headers={"X-Semkv-Tags": "theirs"})
        assert pair.post("not mine to label").headers["x-semkv"].startswith("hit")
        assert self.count(pair, "theirs") == 0
        assert "x-semkv-tags" not in pair.upstream.headers[-1]


class TestNamedTenants:
    """Names come in a header; nothing in one may make two tenants one."""

    def test_a_client_cannot_slip_a_name_past_its_proxy(self, tmp_path: Path) -> None:
        with Pair(tmp_path, trusted_proxies=("127.0.0.1",)) as pair:

            def ask(*names: str) -> str:
                lines = [("X-Semkv-Tenant", name) for name in names]
                return str(httpx.post(f"{pair.url}{CHAT}", json=chat("mine"), headers=lines).json()["id"])

            victim = ask("victim")
            assert victim == ask("victim")
            assert victim not in (ask("victim", "me"), ask("me", "victim"))


KEY = {"Authorization": "Bearer revoked"}


def revoke(pair: Pair) -> None:
    assert pair.post("before", headers=KEY).headers["x-semkv"].startswith("miss")
    assert pair.post("before", headers=KEY).headers["x-semkv"].startswith("hit")
    assert pair.post("after [status=401]", headers=KEY).status_code == 401
    pair.settle()


def test_a_refused_key_reads_nothing_after_a_restart_until_it_is_accepted(tmp_path: Path) -> None:
    with Pair(tmp_path, **PATIENT) as pair:
        revoke(pair)
    with Pair(tmp_path, **PATIENT) as pair:
        pair.upstream.script = {"before": {"status": "401"}}
        assert [pair.post("before", headers=KEY).status_code for _ in range(2)] == [401, 401]
        pair.upstream.script = {}
        assert pair.post("before", headers=KEY).headers["x-semkv"].startswith("miss")
        pair.settle()
    with Pair(tmp_path, **PATIENT) as pair:
        assert pair.post("before", headers=KEY).headers["x-semkv"].startswith("hit"), "accepted again, and noted"
    assert b"revoked" not in b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_a_key_that_another_gateway_saw_refused_reads_no_more_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semkv.server.tenancy._GOOD_S", 0.2)
    file = str(tmp_path / "shared.sqlite")
    with Pair(tmp_path, store=file, **PATIENT) as one, Pair(tmp_path, store=file, **PATIENT) as other:
        revoke(one)
        wait_until(lambda: other.post("before", headers=KEY).headers["x-semkv"].startswith("miss"))
        assert one.post("before", headers=KEY).headers["x-semkv"].startswith("miss")
        for pair in (one, other):
            pair.settle()
            wait_until(lambda pair=pair: pair.post("before", headers=KEY).headers["x-semkv"].startswith("hit"))


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
    assert {path.name for path in found} >= {"catalog.sqlite", "catalog.sqlite-wal", "media", "ahead"}
    assert {path: mode for path, mode in found.items() if mode not in (0o600, 0o700)} == {}
