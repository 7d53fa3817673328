"""Headers at the gateway: those that an answer depends on, those that a browser needs, the one that says why."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway_helpers import (
    ONE,
    OTHER,
    Pair,
    Served,
    Started,
    beside,
    chat,
    kind,
    later,
    near_pair,
    wait_until,
)
from scripted_upstream import Scripted
from semkv.errors import ConfigError
from semkv_gateway import gateway
from semkv_gateway.headers import Separation


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("headers"), ignored_headers=("X-Tier",)) as running:
        yield running


@pytest.fixture
def says(pair: Pair) -> Iterator[list[tuple[bytes, bytes]]]:
    """Headers that the upstream adds to its answers."""
    more: list[tuple[bytes, bytes]] = []
    pair.upstream.says = lambda _: more
    yield more
    pair.upstream.says = lambda _: []


def name_of(answer: httpx.Response) -> str:
    """The upstream names every answer that it computes."""
    found = re.search(r"id-\d+", answer.text)
    assert found is not None
    return found[0]


class TestKey:
    @pytest.mark.parametrize(
        "name",
        [
            "OpenAI-Organization",
            "OpenAI-Project",
            "OpenAI-Beta",
            "Accept-Language",
            "x-model",
            "X-Region",
            "?",
        ],
    )
    def test_a_header_or_query_that_changes_the_answer_is_part_of_it(
        self, pair: Pair, name: str
    ) -> None:
        ways: list[dict[str, Any]] = [{}, {name: "a"}, {name: "b"}]
        url, body = f"{pair.url}/v1/chat/completions", chat(f"by {name}")
        answers = [
            httpx.post(url, json=body, params=way, timeout=120)
            if name == "?"
            else httpx.post(url, json=body, headers=way, timeout=120)
            for way in ways * 2
        ]
        assert [kind(answer) for answer in answers] == ["miss"] * 3 + ["hit"] * 3
        names = [*map(name_of, answers)]
        assert names[:3] == names[3:]
        assert len({*names}) == 3

    def test_near_repeats_stay_within_it(self, tmp_path: Path) -> None:
        with near_pair(tmp_path) as pair:
            german, french = ({"Accept-Language": to} for to in ("de", "fr"))
            pair.post(ONE, headers=german)
            wait_until(lambda: pair.entries == 1)
            assert pair.post(OTHER, headers=french).headers["x-semkv"] == "miss"
            wait_until(lambda: pair.entries == 2)
            assert (
                pair.post(OTHER.upper(), headers=german)
                .headers["x-semkv"]
                .startswith("hit tier=text")
            )
            assert pair.asked == [ONE, OTHER]


# Some of each kind: those of vendors, of proxies that say who asks, and names that nobody has.
SEPARATE = """
    Authorization Cookie X-Portkey-Api-Key X-Portkey-Config Ocp-Apim-Subscription-Key cf-aig-authorization X-Auth-Token
    X-Forwarded-User X-Amz-Security-Token Helicone-Auth X-User-Id X-Session-Id X-Acme-Wristband ticket X_Api_Key
    L5d-Client-Id L5d-Dst-Canonical X-Forwarded-Host X-Original-URI
""".split()
SHARE = """
    User-Agent Accept X-Request-Id traceparent X-B3-TraceId b3 X-Amzn-Trace-Id CF-Ray X-Forwarded-For X-Stainless-Lang
    x-stainless-of-next-year Idempotency-Key Sec-Fetch-Mode X-Tier
""".split()


class TestTenants:
    """By headers alone: with a salt, a key and a namespace of their own."""

    def seen(self, pair: Pair, text: str, headers: Any) -> tuple[str, str, str]:
        """What the cache said, whose answer it was, and the latest salt that the upstream was sent."""
        answer = pair.post(text, headers=headers)
        return kind(answer), name_of(answer), pair.upstream.calls[-1]["cache_salt"]

    @pytest.mark.parametrize("name", SEPARATE)
    def test_a_header_that_nobody_has_reviewed_makes_a_tenant(self, pair: Pair, name: str) -> None:
        found = [self.seen(pair, f"for {name}", {name: value}) for value in ("one", "two", "one")]
        assert [said for said, _, _ in found] == ["miss", "miss", "hit"]
        assert found[0][1] == found[2][1] != found[1][1]
        assert found[0][2] != found[1][2]

    @pytest.mark.parametrize("name", SHARE)
    def test_a_harmless_one_does_not(self, pair: Pair, name: str) -> None:
        found = [self.seen(pair, f"for {name}", {name: value}) for value in ("one", "two")]
        assert [said for said, _, _ in found] == ["miss", "hit"]

    @pytest.mark.parametrize(
        ("name", "harmless", "other"),
        [
            ("Forwarded", "for={};proto=https", "host={};proto=https"),
            ("Forwarded", "for={};proto=http", "for=192.0.2.1 host={}"),
            ("baggage", "sentry-trace_id={}, sentry-release=1", "sentry-release=1,tenant={}"),
            ("baggage", "sentry-release={}", "sentry-release=1;tenant={}"),
            ("tracestate", "dd=s:2;p:{},33@nr=0-0", "dd=s:2,routing-key={}"),
            ("ot-baggage", "sentry-trace_id={}", "{}"),
        ],
    )
    def test_a_field_of_anybodys_in_a_harmless_header_makes_a_tenant(
        self, pair: Pair, name: str, harmless: str, other: str
    ) -> None:
        for form, second in ((other, "miss"), (harmless, "hit")):
            found = [self.seen(pair, form, {name: form.format(value)})[0] for value in ("a", "b")]
            assert found == ["miss", second]

    def test_a_body_in_other_letters_passes(self, pair: Pair) -> None:
        for charset, said in (("UTF-8", "miss"), ("utf-7", "pass reason=content_type")):
            named = {"Content-Type": f"application/json; charset={charset}"}
            assert pair.post(f"in {charset}", headers=named).headers["x-semkv"] == said

    def test_a_key_in_the_query_makes_a_tenant_and_a_version_does_not(self, pair: Pair) -> None:
        def salt(query: str) -> str:
            url = f"{pair.url}/v1/chat/completions?{query}"
            assert httpx.post(url, json=chat(f"by {query}"), timeout=120).status_code == 200
            return str(pair.upstream.calls[-1]["cache_salt"])

        assert salt("key=a") != salt("key=b")
        assert salt("api-version=1") == salt("api-version=2") == salt("beta=true")
        assert salt("api-version=1&sig=a") != salt("api-version=1&sig=b")

    def test_neither_do_near_repeats_nor_requests_on_their_way_cross_it(
        self, tmp_path: Path
    ) -> None:
        one, two = {"X-Acme-Wristband": "one"}, {"X-Acme-Wristband": "two"}
        with near_pair(tmp_path) as pair:
            with beside(pair, "at once", headers=one) as first:
                second = pair.soon("at once", headers=two)
                wait_until(lambda: pair.asked.count("at once") == 2)
            assert name_of(first.result()) != name_of(second.result())
            pair.post(ONE, headers=one)
            wait_until(lambda: pair.entries == 3)
            assert pair.post(OTHER, headers=two).headers["x-semkv"] == "miss"
            assert (
                pair.post(OTHER.upper(), headers=one).headers["x-semkv"].startswith("hit tier=text")
            )

    @pytest.mark.parametrize(("settings", "more"), [
        ({"single_tenant": True}, {}),
        ({"trusted_proxies": ("127.0.0.0/8",)}, {"X-Semkv-Tenant": "acme"}),
    ])  # fmt: skip
    def test_under_another_word_for_the_tenant_credentials_share_and_the_rest_separates(
        self, tmp_path: Path, settings: dict[str, Any], more: dict[str, str]
    ) -> None:
        with Pair(tmp_path, **settings) as pair:
            for name, said in (
                ("X-Api-Key", "hit"),
                ("X-Forwarded-User", "hit"),
                ("X-Portkey-Config", "miss"),
            ):
                headers = [{name: value, **more} for value in ("one", "two")]
                for way in headers:  # each key is let in by a success of its own
                    pair.post(f"in by {name} {way}", headers=way)
                found = [self.seen(pair, f"for {name}", way) for way in headers]
                assert [what for what, _, _ in found] == ["miss", said]
                assert found[0][2] == found[1][2]

    def test_a_metric_names_those_that_split_most(self, tmp_path: Path) -> None:
        with Pair(tmp_path) as pair:
            for number in range(20):
                pair.post(
                    "a",
                    headers={
                        "X-Visit": f"visit {number}",
                        f"X-Made-Up-{number}": "x",
                        "X-Steady": "same",
                    },
                )
            text = httpx.get(f"{pair.url}/metrics").text
            assert pair.metric("semkv_header_values_total") == 20 + 20 + 1
            names = re.findall(r'semkv_header_values_total\{header="([^"]+)"\}', text)
            assert sorted(names) == ["others", "x-visit"]
            assert "visit 7" not in text

    def test_a_known_credential_cannot_be_ignored(self) -> None:
        assert Separation(["X-Visit"]).sort({"headers": [(b"x-visit", b"1")]}).unknown == []
        for name in ("Authorization", "x-api-key", "COOKIE", "X-Forwarded-User"):
            with pytest.raises(ConfigError, match="--ignore-header"):
                Separation([name])


def test_every_header_of_the_clients_in_the_tests_is_harmless_or_known(pair: Pair) -> None:
    """Clients of OpenAI and Anthropic share a tenant between their calls, whatever they say of themselves."""
    before = pair.metric("semkv_header_values_total")
    for _ in range(2):
        pair.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "by a client"}]
        )
        anthropic.Anthropic(base_url=pair.url, api_key="key", max_retries=0).messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "by a client"}]
        )
    assert pair.metric("semkv_header_values_total") == before


class TestWhatTheUpstreamSays:
    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("vary", "Accept-Encoding, User-Agent", "vary"),
            ("vary", "x-tier", "vary"),
            ("vary", "*", "vary"),
            ("Cache-Control", "max-age=0, No-Store", "no-store"),
            ("cache-control", 'private="x-a"', "private"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_is_heeded_and_nobody_joins_it(
        self, pair: Pair, says: list, name: str, value: str, reason: str, stream: bool
    ) -> None:
        says.append((name.encode(), value.encode()))
        text = f"heeded {name} {value} {stream}"
        with beside(pair, text, stream=stream) as first:
            others = [pair.soon(text, stream=stream) for _ in range(2)]
            wait_until(lambda: pair.readers == 3)
            assert pair.asked.count(text) == 1
        answers = [
            first.result(),
            *(other.result() for other in others),
            pair.post(text, stream=stream),
        ]
        assert [answer.headers["x-semkv"] for answer in answers] == [f"miss reason={reason}"] * 4
        assert len({*map(name_of, answers)}) == 4

    def test_no_cache_is_a_habit(self, pair: Pair, says: list) -> None:
        """OpenAI says so of every answer."""
        says.append((b"cache-control", b"no-cache, must-revalidate"))
        assert [kind(pair.post("with no-cache")) for _ in range(2)] == ["miss", "hit"]

    def test_credentials_are_in_the_key_only_where_they_make_the_tenant(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        with Pair(tmp_path, single_tenant=True) as single:
            for gateway, said in ((pair, ["miss", "hit"]), (single, ["miss", "miss"])):
                gateway.upstream.says = lambda _: [(b"vary", b"Authorization")]
                assert [kind(gateway.post("common")) for _ in range(2)] == said
        pair.upstream.says = lambda _: []


class TestReason:
    @pytest.mark.parametrize(
        ("more", "headers", "expected"),
        [
            ({"temperature": 0.7}, {}, "miss reason=sampled"),
            ({"temperature": None}, {}, "miss reason=sampled"),
            ({}, {"Cache-Control": "max-age=0"}, "miss reason=no-cache"),
            ({}, {"X-Semkv-Bypass": "1"}, "pass reason=bypass"),
            ({}, {"X-Semkv-Tenant": "a"}, "pass reason=tenant"),
            ({"stream": 1}, {}, "pass reason=stream_is_no_boolean"),
        ],
    )
    def test_every_miss_and_pass_says_why(
        self, pair: Pair, more: dict, headers: dict, expected: str
    ) -> None:
        text, reason = f"why {more} {headers}", expected.partition("=")[2].replace("_", " ")
        assert pair.post(text).headers["x-semkv"] == "miss"
        counter = f'semkv_uncacheable_total{{reason="{reason}"}}'
        before = pair.metric(counter)
        for times in (1, 2):
            assert pair.post(text, headers=headers, **more).headers["x-semkv"] == expected
            assert pair.metric(counter) == before + times
        assert kind(pair.post(text)) == "hit"

    def test_the_page_names_every_reason(self) -> None:
        page = (Path(__file__).parents[1] / "docs/serving.md").read_text("utf-8")
        text = "".join(
            source.read_text("utf-8") for source in Path(gateway.__file__).parent.glob("*.py")
        )
        reasons = re.findall(r'Unkeyable\("([^"]+)"\)', text)
        assert len(set(reasons)) > 15
        assert [reason for reason in reasons if f"`{reason.replace(' ', '_')}`" not in page] == []


def test_a_requests_id_goes_to_the_upstream_and_back(pair: Pair, says: list) -> None:
    def answered(given: str | None) -> tuple[str, str]:
        answer = pair.post(
            f"id {given!r}", headers={} if given is None else {"X-Request-Id": given}
        )
        return answer.headers["x-request-id"], pair.upstream.headers[-1]["x-request-id"]

    assert answered("mine-1") == ("mine-1", "mine-1")
    for odd in (None, "", "x" * 129, "two words", "a,b", "tab\there"):
        back, sent = answered(odd)
        assert re.fullmatch("[0-9a-f]{32}", back)
        assert back == sent
    says.append((b"x-request-id", b"theirs"))
    answers = [pair.post("their id", headers={"X-Request-Id": name}) for name in "ab"]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["theirs"], ["b"]]


@pytest.mark.parametrize("stream", [False, True])
def test_who_joins_gets_nothing_that_is_meant_for_the_first(
    pair: Pair, says: list, stream: bool
) -> None:
    says += [(b"set-cookie", b"session=1"), (b"x-request-id", b"theirs")]
    with beside(pair, f"of the first {stream}", stream=stream):
        joined = later(pair, f"of the first {stream}", waits=True, stream=stream)
    assert kind(joined) == "joined"
    assert "set-cookie" not in joined.headers
    assert joined.headers["x-request-id"] != "theirs"


class TestSpans:
    """Through a real gateway, into the SDK's own exporter in memory."""

    @pytest.fixture
    def exported(self, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
        exporter = InMemorySpanExporter()
        monkeypatch.setattr(
            "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter",
            lambda: exporter,
        )
        return exporter

    def test_a_span_says_what_became_of_a_request(
        self, tmp_path: Path, exported: InMemorySpanExporter
    ) -> None:
        with Pair(tmp_path, otel=True) as pair:
            for more in ({}, {}, {"stream": True}, {"temperature": 1}):
                pair.post("a prompt for spans", **more, headers={"X-Request-Id": "mine"})
            httpx.get(f"{pair.url}/v1/models")
            pair.post("not there", headers={"Cache-Control": "only-if-cached"})
            pair.behind.stop()
            assert pair.post("nobody there").status_code == 502
        spans = exported.get_finished_spans()
        assert [span.name for span in spans] == ["chat scripted"] * 4 + [
            "GET",
            "chat scripted",
            "chat scripted",
        ]
        assert [span.status.is_ok for span in spans] == [True] * 6 + [False]
        said = [dict(span.attributes or {}) for span in spans]
        tokens = len("You said: a prompt for spans")
        own = ("http.request.method", "url.path", "http.response.status_code", "semkv.tenant")
        common = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "scripted",
            "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": tokens,
            "semkv.request.id": "mine",
            **{name: said[0][name] for name in own},
        }
        hit = {"semkv.cache": "hit", "semkv.tier": "exact", "semkv.tokens_saved": tokens}
        sampled = {"semkv.cache": "miss", "semkv.reason": "sampled"}
        assert said[:4] == [
            {**common, **more} for more in ({"semkv.cache": "miss"}, hit, hit, sampled)
        ]
        assert (said[4]["semkv.cache"], said[4]["semkv.reason"]) == ("pass", "route")
        assert "a prompt for spans" not in str(said)

    def test_a_trace_goes_on_to_the_upstream(
        self, tmp_path: Path, exported: InMemorySpanExporter
    ) -> None:
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        with Pair(tmp_path, otel=True) as pair:
            pair.post(
                "traced", headers={"traceparent": f"00-{trace}-{parent}-01", "tracestate": "a=1"}
            )
            pair.post("a trace of its own")
            first, other = (headers["traceparent"].split("-") for headers in pair.upstream.headers)
        spans = exported.get_finished_spans()
        assert first[1:3] == [trace, f"{spans[0].context.span_id:016x}"]
        assert spans[0].parent is not None
        assert f"{spans[0].parent.span_id:016x}" == parent
        assert pair.upstream.headers[0]["tracestate"] == "a=1"
        assert other[1] == f"{spans[1].context.trace_id:032x}" != trace

    def test_without_the_package_it_says_what_to_install(self) -> None:
        program = (
            "import sys; sys.modules['opentelemetry'] = None; from semkv.cli import main\n"
            "sys.argv = ['semkv', 'serve', '--otel', '--no-semantic', '--port=0']; main()"
        )
        said = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert said.returncode == 2
        last = said.stderr.splitlines()[-1]
        assert (
            last
            == "semkv: --otel needs opentelemetry: in a checkout of semkv, pip install '.[otel]'"
        )


def test_the_access_log_tells_everything_but_what_was_said(tmp_path: Path) -> None:
    """A gateway as it is started."""
    key, said = "sk-the-key-of-a-client", "a private prompt"
    ids = {"X-Request-Id": "mine"}
    headers = {"Authorization": f"Bearer {key}", **ids}
    with Served(Scripted()) as behind, Started(behind.url, tmp_path, "--access-log") as front:
        for more in ({}, {}, {"temperature": None}, {"temperature": 1}, {"model": "two\nlines"}):
            httpx.post(
                f"{front.url}/v1/chat/completions",
                json=chat(said, **more),
                headers=headers,
                timeout=120,
            )
        httpx.get(f"{front.url}/v1/models?q={key}", headers=headers, timeout=120)
        wait_until(lambda: front.log.read_text().count("/v1/models") == 1)
        text = front.log.read_text()
    assert key not in text
    assert "private prompt" not in text
    assert "You said" not in text
    every = [json.loads(line) for line in text.splitlines()]
    lines = [line for line in every if line["message"] == "request"]
    assert all(set(line) >= {"time", "level", "message"} for line in every)
    assert [line["cache"].split(" age")[0] for line in lines] == [
        "miss", "hit tier=exact", "miss reason=sampled", "miss reason=sampled", "miss", "pass reason=route"
    ]  # fmt: skip
    assert {(line["request_id"], line["status"], len(line["tenant"])) for line in lines} == {
        ("mine", 200, 8)
    }
    assert {line["tenant"] for line in lines[:-1]} == {lines[0]["tenant"]} != {lines[-1]["tenant"]}
    assert [line.get("model") for line in lines] == ["scripted"] * 4 + ["two\nlines", None]
    assert lines[-1]["route"] == "/v1/models"
    assert all(0 <= line["ms"] < 3e5 for line in lines)
