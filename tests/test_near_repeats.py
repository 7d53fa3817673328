"""Near-repeats at a gateway: who joins a request that is on its way, and when a last turn matches by its words.

A last turn, or a question after a document, is compared only where all before it is equal: without that beginning it
may mean anything ("And in winter?"), so nothing of another beginning may answer it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from gateway_helpers import (
    NEAR,
    ONE,
    OTHER,
    Held,
    Pair,
    a_tenant,
    asks,
    beside,
    later,
    near_pair,
    picture,
    said,
    wait_until,
    words,
)

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with near_pair(tmp_path_factory.mktemp("near")) as pair:
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    """A gateway that leaves out no lookup."""
    running.app.gateway.cache.found_share = 1.0
    yield running
    running.settle()


@pytest.fixture
def all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream's answer names everything that it was sent."""

    def everything(body: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()

    monkeypatch.setattr("scripted_upstream.prompt_of", everything)


# -- while the first is on its way ------------------------------------------------------------------------------------

STARTS = ("How do I", "How can I", "How could I", "How would I", "How should I")
THINGS = ("sourdough bread", "a sourdough bread", "a loaf of sourdough bread", "my sourdough bread")
ENDS = ("at home?", "at home", "in my home?", "at my home?", "at home, please?")
HUNDRED = [f"{a} bake {b} {c}" for a, b, c in itertools.product(STARTS, THINGS, ENDS)]
NOT = "How do I not bake sourdough bread at home?"


@pytest.mark.parametrize("delay", ["0", "3"])
def test_100_paraphrases_at_once_reach_the_upstream_once(pair: Pair, delay: str) -> None:
    """A quick upstream has answered before the last of them is looked up, a slow one has not."""
    tenant, pair.upstream.script = a_tenant(), {text: {"delay": delay} for text in HUNDRED}
    asked = [pair.soon(text, stream=i % 2 == 1, headers=tenant) for i, text in enumerate(HUNDRED)]
    answers = [one.result() for one in asked]
    assert len(set(HUNDRED)) == 100
    assert len(pair.asked) == 1
    assert {said(answer) for answer in answers} == {f"You said: {pair.asked[0]}"}
    kinds = sorted(answer.headers["x-semkv"].split(" score=")[0] for answer in answers)
    assert kinds == ["hit tier=text:semantic"] * 99 + ["miss"]


@pytest.mark.parametrize("stream", [(False, False), (True, False), (False, True), (True, True)])
def test_each_who_joins_gets_the_answer_in_its_own_form(
    pair: Pair, stream: tuple[bool, bool]
) -> None:
    tenant, joins = a_tenant(), 'semkv_single_flight_joins_total{kind="similar"}'
    before = pair.metric(joins)
    with beside(pair, stream=stream[0], headers=tenant) as first:
        answer = later(pair, OTHER, waits=True, stream=stream[1], headers=tenant)
    assert pair.asked == [ONE]
    assert said(answer) == said(first.result()) == f"You said: {ONE}"
    assert answer.text.startswith("data:") == stream[1]
    assert re.fullmatch(
        r"hit tier=text:semantic score=0\.[89]\d\d age=\d+ joined", answer.headers["x-semkv"]
    )
    assert pair.metric(joins) == before + 1
    wait_until(lambda: not pair.app.gateway.pending)
    assert (
        pair.post(OTHER, headers=tenant).headers["x-semkv"].startswith("hit tier=text:semantic")
    ), "not its own entry"
    shown = [
        (hit["asked"][0]["text"], hit["donor"][0]["text"])
        for hit in pair.admin("recent").json()["hits"][:2]
    ]
    assert shown == [(OTHER, ONE)] * 2


def test_a_joined_answer_is_checked_as_any_approximate_hit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    semantic = pair.semantic
    monkeypatch.setattr(semantic._checking, "_rate", 1.0)
    monkeypatch.setattr(semantic, "same_answer", lambda first, second: first == second)
    for stream in (False, True):
        tenant, checked = a_tenant(), semantic.stats().checked_wrong
        pair.upstream.calls.clear()
        with beside(pair, headers=tenant, stream=stream):
            later(pair, OTHER, waits=True, headers=tenant, stream=stream)
        wait_until(lambda before=checked: semantic.stats().checked_wrong == before + 1)
        assert pair.asked == [ONE, OTHER], (
            "the scripted server says what it was asked, so the answers differ"
        )
        own = pair.post(OTHER, headers=tenant)
        assert own.headers["x-semkv"].startswith("hit tier=exact")
        assert said(own) == f"You said: {OTHER}"


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (NOT, {}),
        ("Who was the first emperor of Rome?", {}),
        (OTHER, {"max_tokens": 7}),
        (OTHER, {"model": "another"}),
        (OTHER, {"temperature": 0.7}),
        (OTHER, {"tools": [{"type": "function", "function": {"name": "look"}}]}),
        (OTHER, {"headers": {"Cache-Control": "no-cache"}}),
        (OTHER, {"headers": {"Cache-Control": "no-store"}}),
        (OTHER, {"headers": {"Authorization": "of a stranger"}}),
    ],
)
def test_what_differs_in_more_than_words_joins_nobody(pair: Pair, text: str, more: dict) -> None:
    for stream in (False, True):
        pair.upstream.calls.clear()
        tenant = a_tenant()
        headers = (
            a_tenant()
            if "Authorization" in more.get("headers", {})
            else tenant | more.get("headers", {})
        )
        own: dict[str, Any] = {"stream": stream, **more, "headers": headers}
        with beside(pair, headers=tenant, stream=stream):
            answer = later(pair, text, waits=False, **own)
        assert pair.asked == [ONE, text]
        assert said(answer) == f"You said: {text}"


@pytest.mark.parametrize("text", [ONE, OTHER])
def test_after_an_invalidation_nobody_joins_what_began_before(pair: Pair, text: str) -> None:
    tenant = a_tenant()
    with beside(pair, headers=tenant):
        pair.admin("invalidate", {"prefix": "How", "dry_run": False})
        later(pair, text, waits=False, headers=tenant)
    assert pair.asked == [ONE, text]


@pytest.mark.parametrize(
    ("how", "stream"),
    [
        ({"status": "500"}, False),
        ({"status": "429"}, True),
        ({"length": ""}, True),
        ({"big": "9000000", "events": "90"}, False),
    ],
)
def test_where_the_first_fails_who_has_had_nothing_goes_himself(
    pair: Pair, how: dict[str, str], stream: bool
) -> None:
    """The first is no stream, so nothing of its answer is passed on before it is known to be no good."""
    tenant = a_tenant()
    pair.upstream.script = {ONE: how}
    with beside(pair, headers=tenant):
        answer = later(pair, OTHER, waits=True, stream=stream, headers=tenant)
    assert (answer.headers["x-semkv"], answer.status_code) == ("miss", 200)
    assert said(answer) == f"You said: {OTHER}"
    assert pair.asked == [ONE, OTHER]
    assert pair.post(OTHER, headers=tenant).headers["x-semkv"].startswith("hit tier=exact")


def test_no_store_keeps_no_picture(pair: Pair) -> None:
    """A look for similar pictures would write this one for later donors."""
    folder = pair.app.gateway.settings.cache_dir / "media"

    def pictures(**headers: str) -> int:
        content = [picture("red", (8, 9)), words("What color is it?")]  # no other test's
        assert pair.post(content, headers=headers).headers["x-semkv"] == "miss"
        return sum(file.is_file() for file in folder.rglob("*"))

    before = sum(file.is_file() for file in folder.rglob("*"))
    assert pictures(**{"Cache-Control": "no-store"}) == before
    assert pictures() == before + 1


# -- while the lookup of the second runs ------------------------------------------------------------------------------


@pytest.fixture
def tenant(pair: Pair) -> dict[str, str]:
    """A tenant whose key the upstream has accepted."""
    given = a_tenant()
    before = pair.entries
    pair.post("Let me in.", headers=given)
    wait_until(lambda: pair.entries == before + 1)
    pair.upstream.calls.clear()
    return given


@pytest.mark.parametrize("began", ["before", "meanwhile"])
def test_a_paraphrase_uses_what_was_recorded_while_its_lookup_ran(
    pair: Pair, tenant: dict[str, str], monkeypatch: pytest.MonkeyPatch, began: str
) -> None:
    """The lookup searched before the record was there, and ends when the other request has its answer. An equal
    request that comes even later shares the lookup, so it uses the record too."""
    cache = pair.app.gateway.cache
    before = pair.entries
    look_up = cache.look_up
    looks = list[object]()
    asked = []

    def counted(*given: Any, **more: Any) -> Any:
        looks.append(given)
        return look_up(*given, **more)

    monkeypatch.setattr(cache, "look_up", counted)

    def ask() -> None:
        asked.append(pair.soon(OTHER, headers=tenant))
        wait_until(held.waiting.is_set)

    with Held(pair.semantic, "try_reuse", asks(OTHER), after=True) as held:
        if began == "meanwhile":
            ask()
        with beside(pair, ONE, headers=tenant):
            if began == "before":
                ask()
        wait_until(lambda: pair.entries == before + 1)
        ask()
        wait_until(lambda: len(looks) == 3)
        assert pair.asked == [ONE]
    for answer in (one.result() for one in asked):
        assert said(answer) == f"You said: {ONE}"
        assert answer.headers["x-semkv"].startswith("hit tier=text:semantic")
    assert pair.asked == [ONE]
    wait_until(lambda: not pair.app.gateway.pending)
    assert not cache._running


def test_a_paraphrase_joins_none_that_has_failed_meanwhile(
    pair: Pair, tenant: dict[str, str]
) -> None:
    """Though it is the nearest of those that were on their way during the lookup."""
    failed = OTHER.replace("?", ", please?")
    pair.upstream.script = {failed: {"status": "503"}}
    with Held(pair.semantic, "try_reuse", asks(OTHER), after=True) as held:
        second = pair.soon(OTHER, headers=tenant)
        wait_until(held.waiting.is_set)
        assert pair.post(failed, headers=tenant).status_code == 503
        with beside(pair, ONE, headers=tenant):
            held.go.set()
            wait_until(lambda: pair.readers == 2)
    assert said(second.result()) == f"You said: {ONE}"
    assert pair.asked == [failed, ONE]


def test_where_few_find_anything_a_lookup_behind_many_is_left_out(
    pair: Pair, tenant: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pair.app.gateway.cache
    pair.post(ONE, headers=tenant)
    recorded(pair)
    cache.found_share = 1.0
    for times, rarely, found in ((190, False, False), (1, True, False)):
        for _ in range(times):
            cache._count(found=found)
        assert cache.rarely_finds is rarely
    lookups = pair.semantic.stats().lookups
    monkeypatch.setattr("semkv_gateway.cache_client._UNLIKELY", -1)
    assert pair.post(OTHER, headers=tenant).headers["x-semkv"] == "miss"
    assert pair.semantic.stats().lookups == lookups
    for _ in range(4):
        cache._count(found=True)
    assert not cache.rarely_finds
    answer = pair.post(OTHER + " ", headers=tenant)
    assert answer.headers["x-semkv"].startswith(("hit tier=exact", "hit tier=text:semantic"))


@pytest.mark.parametrize("rarely", [False, True])
def test_of_64_near_repeats_at_once_each_hits_or_is_counted_with_its_reason(
    pair: Pair, rarely: bool
) -> None:
    """Where lookups find something none is given up; where they rarely do, one behind many others may be."""
    texts = HUNDRED[:64]
    tenant = a_tenant()
    pair.post(texts[0], headers=tenant)
    recorded(pair)
    cache = pair.app.gateway.cache
    cache.found_share = 0.0 if rarely else 1.0
    before = crowded_out(pair)
    asked = [pair.soon(text, headers=tenant) for text in texts[1:]]
    kinds = [one.result().headers["x-semkv"].split()[0] for one in asked]
    assert kinds.count("hit") + crowded_out(pair) - before >= 63
    assert rarely or kinds.count("hit") == 63


def crowded_out(pair: Pair) -> float:
    """Lookups that were left out since many waited."""
    return pair.app.gateway.cache.sizes()["events"]["semantic crowded out"]


# -- what looking costs -----------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of each pass of the encoder from now on."""
    encoder = pair.semantic._plain_encoder
    work = encoder.encode
    passes = list[list[str]]()

    def counted(texts: Sequence[str]) -> Any:
        passes.append(list(texts))
        return work(texts)

    monkeypatch.setattr(encoder, "encode", counted)
    return passes


def test_a_miss_that_cannot_hit_encodes_nothing(pair: Pair, encoded: list[list[str]]) -> None:
    """Nor does its record. The second text of a partition is encoded together with the first."""
    headers = a_tenant()
    form = FORMS["second turn"]
    send(pair, form(ONE), headers)
    recorded(pair)
    send(pair, FORMS["turn 21"](OTHER), headers)
    recorded(pair)
    assert encoded == []
    assert send(pair, form(OTHER), headers)[0] == "text:semantic"
    assert encoded == [[OTHER, ONE]]


def test_what_is_on_its_way_is_encoded_with_the_first_who_might_join_it(
    pair: Pair, encoded: list[list[str]]
) -> None:
    headers = a_tenant()
    with beside(pair, headers=headers):
        assert encoded == []
        later(pair, OTHER, waits=True, headers=headers)
    assert encoded == [[OTHER, ONE]]


def test_an_encoder_that_hangs_costs_a_while_and_no_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact hits and misses go on. What was recorded meanwhile is found once it answers again."""
    semantic = pair.semantic
    timed = semantic._timed
    headers = a_tenant()
    pair.post(ONE, headers=headers)
    recorded(pair)
    faults = semantic.stats().faults
    with pytest.MonkeyPatch.context() as patch, Held(semantic._plain_encoder, "encode") as held:
        patch.setattr(timed, "_limit_s", 0.01)
        for text in (OTHER, NOT):
            answer = pair.post(text, headers=headers)
            assert (said(answer), answer.headers["x-semkv"]) == (f"You said: {text}", "miss")
        assert held.waiting.is_set()
        assert pair.post(ONE, headers=headers).headers["x-semkv"].startswith("hit tier=exact")
        recorded(pair)
    late = semantic.stats().faults.get("semantic_text", 0) - faults.get("semantic_text", 0)
    assert late >= 1
    monkeypatch.setattr(timed, "_closed_until", 0.0)
    wait_until(lambda: timed._began is None)
    reworded_again = OTHER.replace("?", ", please?")
    answer = pair.post(reworded_again, headers=headers)
    assert answer.headers["x-semkv"].startswith("hit tier=text:semantic")
    monkeypatch.setattr(semantic._tally, "_counts", semantic._tally._counts.__class__())


# -- last turns -------------------------------------------------------------------------------------------------------

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "bench/data/last_turns.jsonl").open()
]
SAME = [(row["a"], row["b"]) for row in ROWS if row["same"]][-12:]  # the last are the longest
DOCUMENT = (
    "The lease of the flat in Elm Street begins in May. "
    + "The tenant pays the rent on the first day. " * 40
)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, city: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"city": city})
    return [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]


def looked_up(city: str = "Oslo", result: str = "4 degrees, rain") -> Messages:
    tool = {"role": "tool", "tool_call_id": "1", "content": result}
    return [
        user("How is it there?"),
        assistant(None, tool_calls=call("weather", city)),
        tool,
        assistant("Cold."),
    ]


CHAT = [
    user("Tell me about Lisbon."),
    assistant("It is a city by the sea. Do you want to know more?"),
]
LONG = [
    message
    for n in range(20)
    for message in (user(f"Tell me about town {n}."), assistant(f"Town {n} is old."))
]
FORMS: dict[str, Callable[[str], Messages]] = {
    "second turn": lambda text: [*CHAT, user(text)],
    "turn 21": lambda text: [*LONG, user(text)],
    "after a tool's result": lambda text: [*looked_up(), user(text)],
    "document and question": lambda text: [user([words(DOCUMENT), words(text)])],
    "system prompt, document, question": lambda text: [
        system("Be brief."),
        user([words(DOCUMENT), words(text)]),
    ],
    "an image in an earlier turn": lambda text: [
        user([picture("red"), words("Look.")]),
        *CHAT[1:],
        user(text),
    ],
    "image after the document": lambda text: [user([words(DOCUMENT), picture("red"), words(text)])],
}


def send(pair: Pair, messages: Messages, headers: dict[str, str], **more: Any) -> tuple[str, str]:
    """``miss``, or the tier of the hit; and the answer."""
    pair.app.gateway.cache.found_share = 1.0  # no lookup is left out
    answer = pair.post("", messages=messages, headers=headers, **more)
    assert answer.status_code == 200
    return answer.headers["x-semkv"].removeprefix("hit tier=").split(" ")[0], said(answer)


def recorded(pair: Pair) -> None:
    """Wait until what was answered can be found."""
    wait_until(lambda: not pair.app.gateway.background)


def reworded(
    pair: Pair, form: Callable[[str], Messages], pairs: list[tuple[str, str]]
) -> list[str]:
    """What became of the second text of each pair after the first, each pair in a tenant of its own."""
    tenants = [a_tenant() for _ in pairs]
    first = [send(pair, form(a), tenant) for (a, _), tenant in zip(pairs, tenants, strict=True)]
    assert {tier for tier, _ in first} == {"miss"}
    recorded(pair)
    second = [send(pair, form(b), tenant) for (_, b), tenant in zip(pairs, tenants, strict=True)]
    for (tier, answer), (_, before) in zip(second, first, strict=True):
        assert (answer == before) == (tier != "miss")
    return [tier for tier, _ in second]


@pytest.mark.usefixtures("all_named")
def test_after_an_equal_beginning_a_rewording_hits_as_a_single_turn_does(pair: Pair) -> None:
    alone = reworded(pair, lambda text: [user(text)], SAME)
    assert alone.count("text:semantic") >= 8
    for form in FORMS.values():
        assert reworded(pair, form, SAME) == alone


@pytest.mark.usefixtures("all_named")
def test_300_conversations_with_equal_last_turns_share_nothing(pair: Pair) -> None:
    tenant = a_tenant()
    things = [
        f"{a} {b}"
        for a, b in itertools.product(("red", "old", "big"), (f"house {n}" for n in range(100)))
    ]
    histories = [
        [user(f"Compare the {thing} with another."), assistant("Done.")] for thing in things
    ]
    last = ("What about the second one?", "How about the second one?")
    first = [send(pair, [*history, user(last[0])], tenant) for history in histories]
    assert [tier for tier, _ in first] == ["miss"] * 300
    assert len({answer for _, answer in first}) == 300
    recorded(pair)
    second = [send(pair, [*history, user(last[1])], tenant) for history in histories[::10]]
    assert [tier for tier, _ in second] == ["text:semantic"] * 30
    assert [answer for _, answer in second] == [answer for _, answer in first[::10]], (
        "each one's own"
    )


def parts(*given: dict[str, Any]) -> Messages:
    """A turn of these, and the question."""
    return [user([*given, words("")])]


RED, BLUE = picture("red"), picture("blue")
BEGINNINGS: dict[str, tuple[Messages, Messages]] = {
    "document": (parts(words(DOCUMENT)), parts(words(DOCUMENT + "It ends."))),
    "a number in it": (parts(words(DOCUMENT)), parts(words(DOCUMENT + "1"))),
    "system prompt": ([system("Be brief."), user("")], [system("Be exact."), user("")]),
    "none": ([system("Be brief."), user("")], [user("")]),
    "role": ([system("Be brief."), user("")], [user("Be brief."), user("")]),
    "image": (parts(RED), parts(BLUE)),
    "earlier image": (
        [user([RED, words("Look.")]), *CHAT[1:], user("")],
        [user([BLUE, words("Look.")]), *CHAT[1:], user("")],
    ),
    "order of images": (parts(RED, BLUE), parts(BLUE, RED)),
    "answer": ([*CHAT, user("")], [CHAT[0], assistant("No."), user("")]),
    "turns": ([*CHAT, user("")], [*CHAT, *CHAT, user("")]),
    "result": ([*looked_up(), user("")], [*looked_up(result="5 degrees, rain"), user("")]),
    "arguments": ([*looked_up(), user("")], [*looked_up("Bonn"), user("")]),
    "parts": (parts(words("one "), words("two")), parts(words("one two"))),
    "place of the image": (parts(RED, words("a")), parts(words("a"), RED)),
    "name": ([*CHAT, user("")], [*CHAT, {**user(""), "name": "Ann"}]),
}


@pytest.mark.usefixtures("all_named")
@pytest.mark.parametrize("which", BEGINNINGS)
def test_after_another_beginning_neither_the_same_words_nor_similar_ones_hit(
    pair: Pair, which: str
) -> None:
    def ending(messages: Messages, text: str) -> Messages:
        content = messages[-1]["content"]
        content = text if content == "" else [*content[:-1], words(text)]
        return [*messages[:-1], {**messages[-1], "content": content}]

    own, other = BEGINNINGS[which]
    for text in (ONE, OTHER):
        tenant = a_tenant()
        first = send(pair, ending(own, ONE), tenant)
        recorded(pair)
        second = send(pair, ending(other, text), tenant)
        assert (first[0], second[0]) == ("miss", "miss")
        assert first[1] != second[1]
    assert send(pair, ending(own, OTHER), tenant) == ("text:semantic", first[1])
    assert send(pair, ending(own, OTHER), a_tenant())[0] == "miss", "another tenant"


def test_a_rewording_joins_the_turn_that_is_on_its_way(pair: Pair) -> None:
    tenant = a_tenant()
    send(pair, FORMS["second turn"]("Where is it?"), tenant)
    recorded(pair)
    messages = [FORMS["second turn"](text) for text in (ONE, OTHER)]
    pair.upstream.calls.clear()
    with beside(pair, messages=messages[0], headers=tenant) as first:
        answer = later(pair, "", waits=True, messages=messages[1], headers=tenant)
    assert said(answer) == said(first.result())
    assert answer.headers["x-semkv"].endswith("joined")
    assert len(pair.upstream.calls) == 1


def test_turns_are_found_after_a_restart_and_not_after_a_purge(tmp_path: Path) -> None:
    histories = [[user(f"Describe garden {n}."), assistant("Done.")] for n in range(5)]
    tenant = a_tenant()

    def tiers(pair: Pair, text: str) -> list[str]:
        found = [send(pair, [*history, user(text)], tenant)[0] for history in histories]
        recorded(pair)
        return found

    with Pair(tmp_path, **NEAR) as pair:
        assert tiers(pair, ONE) == ["miss"] * 5
    with Pair(tmp_path, **NEAR) as pair:
        assert tiers(pair, OTHER) == ["text:semantic"] * 5
        assert invoke(["purge", "--cache-dir", str(tmp_path)]).exit_code == 0
        index = pair.semantic._similar.layers["semantic_text"].index
        wait_until(lambda: len(index) == 0)
        assert not index._partitions
        assert tiers(pair, OTHER) == ["miss"] * 5
