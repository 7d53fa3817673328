"""Headers at the gateway: those that an answer depends on, those that a browser needs, the one that says why."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway_helpers import ONE, OTHER, Pair, a_tenant, beside, near_pair, wait_until
from semkv.errors import ConfigError
from semkv.server import gateway
from semkv.server.settings import ServerSettings


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("headers"), vary_headers=("X-Region",)) as running:
        yield running


@pytest.fixture
def says(pair: Pair) -> Iterator[list[tuple[bytes, bytes]]]:
    """Headers that the upstream adds to its answers."""
    more: list[tuple[bytes, bytes]] = []
    pair.upstream.says = lambda _: more
    yield more
    pair.upstream.says = lambda _: []


def kind(answer: httpx.Response) -> str:
    return answer.headers["x-semkv"].split()[0]


def name_of(answer: httpx.Response) -> str:
    """The upstream names every answer that it computes."""
    found = re.search(r"id-\d+", answer.text)
    assert found is not None
    return found[0]


class TestKey:
    @pytest.mark.parametrize(
        "name", ["OpenAI-Organization", "OpenAI-Project", "OpenAI-Beta", "Accept-Language", "x-model", "x-region"]
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_header_that_changes_the_answer_is_part_of_it(self, pair: Pair, name: str, stream: bool) -> None:
        text = f"by {name} {stream}"
        ways = [{}, {name: "a"}, {name: "b"}]
        answers = [pair.post(text, headers=headers, stream=stream) for headers in ways * 2]
        assert [kind(answer) for answer in answers] == ["miss"] * 3 + ["hit"] * 3
        assert [a.headers["x-semkv"] for a in answers[:3]] == ["miss"] * 3
        assert len({*map(name_of, answers)}) == 3
        assert [*map(name_of, answers[:3])] == [*map(name_of, answers[3:])]

    def test_any_other_header_is_not(self, pair: Pair) -> None:
        assert kind(pair.post("others", headers={"X-Other": "a", "Accept-Language": "*"})) == "miss"
        assert kind(pair.post("others", headers={"X-Other": "b"})) == "hit"

    def test_values_and_names_are_not_mixed_up(self, pair: Pair) -> None:
        ways = [{"x-model": "a", "x-region": "b"}, {"x-model": "b", "x-region": "a"}, {"x-model": "a,b"}]
        assert [kind(pair.post("mixed", headers=headers)) for headers in ways] == ["miss"] * 3

    def test_equal_requests_with_other_headers_do_not_join(self, pair: Pair) -> None:
        with beside(pair, "at once", headers={"Accept-Language": "de"}) as first:
            german, french = (pair.soon("at once", headers={"Accept-Language": to}) for to in ("de", "fr"))
            wait_until(lambda: pair.asked.count("at once") == 2)
            wait_until(lambda: pair.readers == 3)
        assert [kind(answer.result()) for answer in (first, german, french)] == ["miss", "joined", "miss"]
        assert name_of(first.result()) == name_of(german.result()) != name_of(french.result())

    def test_near_repeats_stay_within_it(self, tmp_path: Path) -> None:
        with near_pair(tmp_path) as pair:
            german, french = ({**a_tenant(), "Accept-Language": to} for to in ("de", "fr"))
            french["Authorization"] = german["Authorization"]
            pair.post(ONE, headers=german)
            wait_until(lambda: pair.entries == 1)
            assert pair.post(OTHER, headers=french).headers["x-semkv"] == "miss"
            wait_until(lambda: pair.entries == 2)
            assert pair.post(OTHER.upper(), headers=german).headers["x-semkv"].startswith("hit tier=text")
            assert pair.asked == [ONE, OTHER]

    def test_near_repeats_on_their_way_stay_within_it(self, tmp_path: Path) -> None:
        with near_pair(tmp_path) as pair, beside(pair, ONE, headers={"Accept-Language": "de"}) as first:
            french = pair.soon(OTHER, headers={"Accept-Language": "fr"})
            wait_until(lambda: len(pair.asked) == 2)
            german = pair.soon(OTHER, headers={"Accept-Language": "de"})
            wait_until(lambda: pair.readers == 3)
            pair.upstream.gate.set()
            assert kind(first.result()) == kind(french.result()) == "miss"
            assert german.result().headers["x-semkv"].endswith("joined")

    def test_a_name_is_one(self) -> None:
        with pytest.raises(ConfigError, match="--vary-header"):
            ServerSettings(vary_headers=("X Region",))


NOT_KEPT = [
    (b"vary", b"X-Tone", "vary"),
    (b"vary", b"Accept-Encoding, x-tone", "vary"),
    (b"vary", b"*", "vary"),
    (b"Cache-Control", b"max-age=0, No-Store", "no-store"),
    (b"cache-control", b"private", "private"),
    (b"cache-control", b'private="x-a"', "private"),
]
KEPT = [
    (b"vary", b"Origin, Accept-Encoding"),
    (b"vary", b"Authorization, accept-language, X-REGION"),
    (b"cache-control", b"no-cache, must-revalidate"),
]


class TestWhatTheUpstreamSays:
    @pytest.mark.parametrize("header", NOT_KEPT, ids=str)
    @pytest.mark.parametrize("stream", [False, True])
    def test_is_heeded(self, pair: Pair, says: list, header: tuple[bytes, bytes, str], stream: bool) -> None:
        says.append(header[:2])
        answers = [pair.post(f"heeded {header} {stream}", stream=stream) for _ in range(2)]
        assert [kind(answer) for answer in answers] == ["miss"] * 2
        assert name_of(answers[0]) != name_of(answers[1])

    @pytest.mark.parametrize("header", KEPT, ids=str)
    def test_leaves_the_rest_alone(self, pair: Pair, says: list, header: tuple[bytes, bytes]) -> None:
        says.append(header)
        assert [kind(pair.post(f"alone {header}")) for _ in range(2)] == ["miss", "hit"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_nobody_joins_it(self, pair: Pair, says: list, stream: bool) -> None:
        says.append((b"vary", b"x-tone"))
        text = f"of one's own {stream}"
        with beside(pair, text, stream=stream) as first:
            others = [pair.soon(text, stream=stream) for _ in range(3)]
            wait_until(lambda: pair.readers == 4)
            assert pair.asked.count(text) == 1
        answers = [first.result(), *(other.result() for other in others)]
        assert [kind(answer) for answer in answers] == ["miss"] * 4
        assert len({*map(name_of, answers)}) == 4

    @pytest.mark.parametrize("stream", [False, True])
    def test_no_near_repeat_joins_it(self, tmp_path: Path, stream: bool) -> None:
        with near_pair(tmp_path) as pair:
            pair.upstream.says = lambda _: [(b"cache-control", b"private")]
            with beside(pair, ONE, stream=stream) as first:
                other = pair.soon(OTHER, stream=stream)
                wait_until(lambda: pair.readers == 2)
            assert kind(first.result()) == kind(other.result()) == "miss"
            assert pair.asked == [ONE, OTHER]
            pair.settle()
            assert pair.entries == 0

    def test_credentials_are_in_the_key_only_where_they_make_the_tenant(self, tmp_path: Path) -> None:
        with Pair(tmp_path, single_tenant=True) as pair:
            pair.upstream.says = lambda _: [(b"vary", b"Authorization")]
            assert [kind(pair.post("common")) for _ in range(2)] == ["miss"] * 2


def counted(pair: Pair, reason: str) -> float:
    lines = httpx.get(f"{pair.url}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f'semkv_uncacheable_total{{reason="{reason}"}}')
    )


class TestReason:
    @pytest.mark.parametrize(
        ("more", "headers", "expected"),
        [
            ({"temperature": 0.7}, {}, "miss reason=sampled"),
            ({"temperature": None}, {}, "miss reason=sampled"),
            ({}, {"Cache-Control": "no-cache"}, "miss reason=no-cache"),
            ({}, {"Cache-Control": "max-age=0"}, "miss reason=no-cache"),
            ({}, {"X-Semkv-Bypass": "1"}, "pass reason=bypass"),
            ({}, {"X-Semkv-Tenant": "a"}, "pass reason=tenant"),
            ({"stream": 1}, {}, "pass reason=stream_is_no_boolean"),
        ],
    )
    def test_every_miss_and_pass_says_why(self, pair: Pair, more: dict, headers: dict, expected: str) -> None:
        text, reason = f"why {more} {headers}", expected.partition("=")[2]
        assert pair.post(text).headers["x-semkv"] == "miss"
        before = counted(pair, reason.replace("_", " "))
        assert pair.post(text, headers=headers, **more).headers["x-semkv"] == expected
        assert counted(pair, reason.replace("_", " ")) == before + 1
        assert pair.post(text).headers["x-semkv"].startswith("hit")

    @pytest.mark.parametrize("header", NOT_KEPT, ids=str)
    def test_also_what_the_upstream_said(self, pair: Pair, says: list, header: tuple[bytes, bytes, str]) -> None:
        says.append(header[:2])
        assert pair.post(f"said {header}").headers["x-semkv"] == f"miss reason={header[2]}"

    def test_an_answer_that_is_too_old(self, pair: Pair) -> None:
        pair.post("old")
        time.sleep(1.1)
        assert pair.post("old", headers={"Cache-Control": "max-age=1"}).headers["x-semkv"] == "miss reason=too-old"
        assert pair.post("young", headers={"Cache-Control": "max-age=1"}).headers["x-semkv"] == "miss"

    def test_other_routes(self, pair: Pair) -> None:
        assert httpx.get(f"{pair.url}/v1/models", timeout=60).headers["x-semkv"] == "pass reason=route"

    def test_no_temperature_is_explained_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Pair(tmp_path) as pair:
            for temperature in (0, 0.7, None, None):
                pair.post("explain", temperature=temperature)
                said = [record.message for record in caplog.records if "--sampled" in record.message]
                assert len(said) == (temperature is None)
        with Pair(tmp_path, sampled=True) as pair:
            pair.post("explain", temperature=None)
            assert len([record for record in caplog.records if "--sampled" in record.message]) == 1

    def test_a_key_that_is_not_accepted(self, tmp_path: Path) -> None:
        with Pair(tmp_path, sampled=True, single_tenant=True) as pair:
            for expected in ("miss reason=key", "hit"):
                assert pair.post("key", temperature=None).headers["x-semkv"].startswith(expected)

    def test_the_page_names_every_reason(self) -> None:
        page = (Path(__file__).parents[1] / "docs/serving.md").read_text("utf-8")
        sources = [*Path(gateway.__file__).parent.glob("*.py")]
        text = "".join(source.read_text("utf-8") for source in sources)
        reasons = re.findall(r'(?:Unkeyable|Uncacheable)\("([^"]+)"\)', text)
        assert len(set(reasons)) > 15
        assert [reason for reason in reasons if f"`{reason.replace(' ', '_')}`" not in page] == []
