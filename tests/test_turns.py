"""The last turn of a conversation, and a question after a document: matched by its words where all before it is equal.

Without that beginning a last turn may mean anything ("And in winter?"), so nothing of another beginning may answer it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from gateway_helpers import (
    NEAR,
    ONE,
    OTHER,
    Pair,
    a_tenant,
    beside,
    later,
    near_pair,
    picture,
    said,
    wait_until,
    words,
)

Messages = list[dict[str, Any]]
ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "bench/data/last_turns.jsonl").open()]
SAME = [(row["a"], row["b"]) for row in ROWS if row["same"]][-32:]  # the last are the longest
DOCUMENT = "The lease of the flat in Elm Street begins in May. " + "The tenant pays the rent on the first day. " * 40


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
    return [user("How is it there?"), assistant(None, tool_calls=call("weather", city)), tool, assistant("Cold.")]


CHAT = [user("Tell me about Lisbon."), assistant("It is a city by the sea. Do you want to know more?")]
LONG = [message for n in range(20) for message in (user(f"Tell me about town {n}."), assistant(f"Town {n} is old."))]
FORMS: dict[str, Callable[[str], Messages]] = {
    "second turn": lambda text: [*CHAT, user(text)],
    "turn 21": lambda text: [*LONG, user(text)],
    "after a tool's result": lambda text: [*looked_up(), user(text)],
    "document and question": lambda text: [user([words(DOCUMENT), words(text)])],
    "system prompt, document, question": lambda text: [system("Be brief."), user([words(DOCUMENT), words(text)])],
    "an image in an earlier turn": lambda text: [user([picture("red"), words("Look.")]), *CHAT[1:], user(text)],
    "image after the document": lambda text: [user([words(DOCUMENT), picture("red"), words(text)])],
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A gateway before an upstream whose answer names everything that it was sent."""

    def everything(body: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()

    with pytest.MonkeyPatch.context() as patch, near_pair(tmp_path_factory.mktemp("turns")) as pair:
        patch.setattr("scripted_upstream.prompt_of", everything)
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    yield running
    running.settle()


def send(pair: Pair, messages: Messages, headers: dict[str, str], **more: Any) -> tuple[str, str]:
    """``miss``, or the tier of the hit; and the answer."""
    pair.app.gateway.cache.found_share = 1.0  # so that the lookup ends before the upstream is asked
    answer = pair.post("", messages=messages, headers=headers, **more)
    assert answer.status_code == 200
    return answer.headers["x-semkv"].removeprefix("hit tier=").split(" ")[0], said(answer)


def recorded(pair: Pair) -> None:
    """Wait until what was answered can be found."""
    wait_until(lambda: not pair.app.gateway.background)


def reworded(pair: Pair, form: Callable[[str], Messages], pairs: list[tuple[str, str]]) -> list[str]:
    """What became of the second text of each pair after the first, each pair in a tenant of its own."""
    tenants = [a_tenant() for _ in pairs]
    first = [send(pair, form(a), tenant) for (a, _), tenant in zip(pairs, tenants, strict=True)]
    assert {tier for tier, _ in first} == {"miss"}
    recorded(pair)
    second = [send(pair, form(b), tenant) for (_, b), tenant in zip(pairs, tenants, strict=True)]
    for (tier, answer), (_, before) in zip(second, first, strict=True):
        assert (answer == before) == (tier != "miss")
    return [tier for tier, _ in second]


@pytest.fixture(scope="module")
def alone(running: Pair) -> list[str]:
    """What becomes of the rewordings as single turns."""
    return reworded(running, lambda text: [user(text)], SAME)


@pytest.mark.parametrize("form", FORMS)
def test_after_an_equal_beginning_a_rewording_hits_as_a_single_turn_does(
    pair: Pair, alone: list[str], form: str
) -> None:
    assert (len(alone), alone.count("text:semantic")) >= (32, 25)
    assert reworded(pair, FORMS[form], SAME) == alone


def test_300_conversations_with_equal_last_turns_share_nothing(pair: Pair) -> None:
    tenant = a_tenant()
    things = [f"{a} {b}" for a, b in itertools.product(("red", "old", "big"), (f"house {n}" for n in range(100)))]
    histories = [[user(f"Compare the {thing} with another."), assistant("Done.")] for thing in things]
    last = ("What about the second one?", "How about the second one?")
    first = [send(pair, [*history, user(last[0])], tenant) for history in histories]
    assert [tier for tier, _ in first] == ["miss"] * 300
    assert len({answer for _, answer in first}) == 300
    recorded(pair)
    second = [send(pair, [*history, user(last[1])], tenant) for history in histories[::10]]
    assert [tier for tier, _ in second] == ["text:semantic"] * 30
    assert [answer for _, answer in second] == [answer for _, answer in first[::10]], "each one's own"


BEGINNINGS: dict[str, tuple[Messages, Messages]] = {
    "document": ([user([words(DOCUMENT), words("")])], [user([words(DOCUMENT + "It ends."), words("")])]),
    "a number in it": ([user([words(DOCUMENT), words("")])], [user([words(DOCUMENT + "1"), words("")])]),
    "system prompt": ([system("Be brief."), user("")], [system("Be exact."), user("")]),
    "none": ([system("Be brief."), user("")], [user("")]),
    "role": ([system("Be brief."), user("")], [user("Be brief."), user("")]),
    "image": ([user([picture("red"), words("")])], [user([picture("blue"), words("")])]),
    "earlier image": (
        [user([picture("red"), words("Look.")]), *CHAT[1:], user("")],
        [user([picture("blue"), words("Look.")]), *CHAT[1:], user("")],
    ),
    "order of images": (
        [user([picture("red"), picture("blue"), words("")])],
        [user([picture("blue"), picture("red"), words("")])],
    ),
    "answer": ([*CHAT, user("")], [CHAT[0], assistant("No."), user("")]),
    "turns": ([*CHAT, user("")], [*CHAT, *CHAT, user("")]),
    "result": ([*looked_up(), user("")], [*looked_up(result="5 degrees, rain"), user("")]),
    "arguments": ([*looked_up(), user("")], [*looked_up("Bonn"), user("")]),
    "parts": ([user([words("one "), words("two"), words("")])], [user([words("one two"), words("")])]),
    "place of the image": (
        [user([picture("red"), words("a"), words("")])],
        [user([words("a"), picture("red"), words("")])],
    ),
    "name": ([*CHAT, user("")], [*CHAT, {**user(""), "name": "Ann"}]),
}


@pytest.mark.parametrize("which", BEGINNINGS)
def test_after_another_beginning_neither_the_same_words_nor_similar_ones_hit(pair: Pair, which: str) -> None:
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
