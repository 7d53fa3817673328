"""The order of documents: found by what was sent lately, and never changed where it may say something."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_helpers import OTHER, Pair, a_tenant, kind, picture, words
from semkv.documents import MOST_DOCUMENTS, UNKNOWN_WORD, Document, DocumentOrder, objection
from semkv.errors import ConfigError
from semkv.types import Plan
from semkv_gateway.documents import Documents, Layout
from semkv_gateway.request_key import CanonicalRequest, Deployment, canonicalise
from semkv_gateway.settings import ServerSettings
from semkv_guards.places import has_place, may_tell_by_place

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
QUESTION = "Who wrote the novel, and why did they do it?"
HERE = b"tenant"


def documents(*names: str) -> list[Document]:
    return [Document(name.encode(), 1000) for name in names]


def chosen(order: DocumentOrder, names: str, *, scope: bytes = HERE, before: bytes = b"") -> str:
    places = order.choose(scope, before, documents(*names))
    return "".join(names[place] for place in places)


def send(order: DocumentOrder, names: str, *, scope: bytes = HERE, before: bytes = b"") -> str:
    """What is sent for some documents."""
    found = chosen(order, names, scope=scope, before=before)
    order.sent(scope, before, documents(*found))
    return found


class TestOrder:
    def test_the_longest_beginning_that_was_sent(self) -> None:
        order = DocumentOrder()
        order.sent(HERE, b"", documents(*"cabde"))
        order.sent(HERE, b"", documents(*"xy"))
        assert chosen(order, "bacx") == "cabx"
        assert chosen(order, "zyxw")[:2] == "xy"
        assert chosen(order, "eda") in ("".join(p) for p in itertools.permutations("eda"))

    def test_of_equal_ones_the_latest(self) -> None:
        order = DocumentOrder()
        for sent in ("ab", "ba", "cd", "dc"):
            order.sent(HERE, b"", documents(*sent))
        assert chosen(order, "ab") == "ba"
        order.sent(HERE, b"", documents(*"cd"))
        assert chosen(order, "dc") == "cd"

    def test_one_that_was_sent_long_ago_is_likely_gone(self) -> None:
        order = DocumentOrder()
        order.sent(HERE, b"", documents(*"abc"))
        for _ in range(100):
            order.sent(HERE, b"other", [Document(b"large", 1_000_000)])
        order.sent(HERE, b"", documents(*"de"))
        assert chosen(order, "abcde")[:2] == "de"

    def test_popular_documents_come_first_where_nothing_was_sent(self) -> None:
        order = DocumentOrder()
        for names in ("pq", "pr", "ps", "pqs", "tq"):
            chosen(order, names)
        assert chosen(order, "tsqp", before=b"elsewhere") == "pqst"

    def test_equal_sets_get_one_order_while_others_are_sent(self) -> None:
        order = DocumentOrder()
        first = send(order, "abcde")
        for names in ("edcba", "cbxyz", "abcdz", "edx", "eab", "caedb"):
            send(order, names)
        orders = {chosen(order, "".join(names)) for names in itertools.permutations("abcde")}
        assert orders == {first}

    def test_scopes_and_what_stands_before_are_apart(self) -> None:
        order = DocumentOrder()
        order.sent(b"one", b"", documents(*"cba"))
        for scope, before in ((b"two", b""), (b"one", b"x"), (b"on", b"e"), (b"", b"one")):
            assert chosen(order, "abc", scope=scope, before=before) == "abc"
        assert chosen(order, "abc", scope=b"one") == "cba"

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_what_another_does_changes_nothing(self, data: st.DataObject) -> None:
        sets = st.lists(st.text("abcdefgh", min_size=1, max_size=6), max_size=12)
        mine, others = data.draw(sets), data.draw(sets)
        alone, beside = DocumentOrder(), DocumentOrder()
        expected = [send(alone, names) for names in mine]
        found = []
        for own, other in itertools.zip_longest(mine, others):
            if other is not None:
                send(beside, other, scope=b"another")
            if own is not None:
                found.append(send(beside, own))
        assert found == expected

    @given(st.lists(st.text("abcdefg", max_size=9), max_size=30), st.integers(1, 12))
    @settings(max_examples=60, deadline=None)
    def test_it_is_a_permutation_the_same_for_an_equal_past_and_bounded(
        self, requests: list[str], most: int
    ) -> None:
        one, other = DocumentOrder(most), DocumentOrder(most)
        for names in requests:
            found = send(one, names)
            assert Counter(found) == Counter(names)
            assert send(other, names) == found
            assert len(one) <= most

    def test_many_documents_take_bounded_time_and_more_stay(self) -> None:
        order = DocumentOrder()
        names = [b"%03d" % number for number in range(MOST_DOCUMENTS)]
        many = [Document(name, 10) for name in names]
        for start in range(0, 200, 3):  # many ways down the tree
            order.sent(HERE, b"", many[start:] + many[:start])
        assert sorted(order.choose(HERE, b"", many)) == list(range(MOST_DOCUMENTS))
        more = [*many, Document(b"more", 10)]
        order.sent(HERE, b"", more)
        assert order.choose(HERE, b"", more) == tuple(range(len(more)))

    def test_threads(self) -> None:
        order = DocumentOrder(most=50)
        faults = list[BaseException]()

        def work(letters: str) -> None:
            try:
                for names in itertools.permutations(letters, 4):
                    assert Counter(send(order, "".join(names))) == Counter(names)
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work, args=(letters,)) for letters in ("abcdef",) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert len(order) <= 50

    def test_a_text_of_any_form_is_a_document(self) -> None:
        assert Document.of("\ud800") != Document.of("")
        assert Document.of("one").size == 3


# -- what is said about documents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "What does the second document say?",
        "Summarize the document above.",
        "Explain [2].",
        "Is (3) right?",
        "What does document #2 say?",
        "What does Document B say?",
        "What do you read in source two?",
        "What does the last one say?",
        "Which of the former is right?",
        "Answer in the order of the texts.",
        "What is said, in order?",
        "Do this for each document.",
        "Compare the reports.",
        "Cite what you use.",
        "What does the 3rd say?",
        "What does the text at the top say?",
        "What does doc_2 say?",
        "Are both passages right?",
        "Tell me about passage iv.",
        "Use the following document.",
    ],
)
def test_a_text_may_tell_a_document_by_its_place(text: str) -> None:
    assert may_tell_by_place(text)
    assert objection((), [text], [text])


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        "Which report mentions Rome?",
        "What was the revenue last year?",
        "What do the document(s) say about Rome?",
        "How do I get f(x) from g[i]?",
        "What must I do in order to win?",
    ],
)
def test_a_text_that_tells_none(text: str) -> None:
    assert not may_tell_by_place(text)
    assert not objection((), [text], [text])


@pytest.mark.parametrize(
    ("text", "documents", "found"),
    [
        ("What does it say about crumpets?", ["Emma had crumpets."], ""),
        ("What does it say about crumpets?", ["Emma had tea."], UNKNOWN_WORD),
        ("What does the ninety-fivest say?", ["The ninety say so."], UNKNOWN_WORD),
        ("What is said in 1815?", ["It was 1816."], UNKNOWN_WORD),
        ("What is said in 1815?", ["It was 1816.", "It was 1815."], ""),
    ],
)
def test_a_word_of_which_nothing_is_known_may_mean_a_place(
    text: str, documents: list[str], found: str
) -> None:
    assert objection((), [text], documents) == found


def test_all_documents_together_may_be_told_in_front_of_them() -> None:
    for text in (
        "Use the following pieces of retrieved context to answer the question.",
        "Answer the question from the documents below.",
    ):
        assert not objection([text], (), ())
        assert objection((), [text], [text])


@pytest.mark.parametrize(
    "text", ["Was sagt der zweite Bericht?", "第二份文件说了什么？", "Emma Wodehúsová?"]
)
def test_what_is_not_understood_may_say_anything(text: str) -> None:
    assert objection((), [text], [text])


@pytest.mark.parametrize(
    "head",
    [
        "[1] ", "1. ", "Document 3: ", "(b) ", "II. ", "Second document. ", "#4 ", "<index>5</index> ",
        '{"id": 6, "text": "', "Source no. 7\n", "Two: ", "Seite 8 ",
    ],
)  # fmt: skip
def test_numbered_documents(head: str) -> None:
    text = "The novel was written by them, and that is what they did with it"
    assert not has_place(text)
    assert has_place(head + text)


def test_documents_that_tell_others_or_end_with_a_number_or_are_not_understood() -> None:
    text = "The novel was written by them, and that is what they did with it"
    assert has_place(f"{text}, as the previous document says.")
    assert has_place(f"{text} [3]")
    assert has_place("Der Roman wurde von ihnen geschrieben, wie schon gesagt.")


# -- the gateway -------------------------------------------------------------------------------------------------------


LAYOUT = Layout(["field", "parts", "<document>"])


def text_of(name: str) -> str:
    """A document that is long enough to be one."""
    sentence = f"This is what {name} has written about the novel and why they did it, with all that was known. "
    return (sentence * 4).strip()


A, B, C, D = map(text_of, ("Anna", "Bertha", "Clara", "Dora"))


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("ordered")
    with Pair(folder, reorder_documents=("field", "parts", "<document>")) as pair:
        yield pair


def in_parts(*texts: str, question: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [words(text) for text in (*texts, question)]}]


def in_tags(*texts: str, question: str = QUESTION) -> list[dict[str, Any]]:
    tagged = "\n".join(f"<document>{text}</document>" for text in texts)
    return [{"role": "user", "content": f"{tagged}\n{question}"}]


def post(pair: Pair, messages: Any, path: str = CHAT, **more: Any) -> httpx.Response:
    headers = more.pop("headers", None)
    body = {"model": "scripted", "temperature": 0, "messages": messages, **more}
    return httpx.post(pair.url + path, json=body, headers=headers, timeout=120)


def sent(pair: Pair) -> Any:
    """The messages that the upstream got last."""
    return pair.upstream.calls[-1]["messages"]


@pytest.mark.parametrize("form", [in_parts, in_tags])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
class TestForms:
    def test_a_repeat_in_another_order_is_one_prompt(
        self, form: Any, path: str, ordered: Pair
    ) -> None:
        headers = a_tenant()
        more = {"max_tokens": 9, "headers": headers}
        first = post(ordered, form(A, B, C), path, **more)
        calls = len(ordered.upstream.calls)
        answers = [
            post(ordered, form(*texts), path, **more) for texts in itertools.permutations((A, B, C))
        ]
        assert kind(first) == "miss"
        assert [kind(answer) for answer in answers] == ["hit"] * 6
        assert {answer.content for answer in answers} == {first.content}
        assert len(ordered.upstream.calls) == calls
        marked = ["reordered" in answer.headers["x-semkv"].split() for answer in answers]
        assert marked.count(False) == 1, "one of them came as it was sent"
        assert sent(ordered) in [form(*texts) for texts in itertools.permutations((A, B, C))]

    def test_the_beginning_is_one_that_was_sent(self, form: Any, path: str, ordered: Pair) -> None:
        more = {"max_tokens": 9, "headers": a_tenant()}
        post(ordered, form(A, B, C), path, **more)
        before = sent(ordered)
        answer = post(ordered, form(D, C, B, A, question="What else is there?"), path, **more)
        assert "reordered" in answer.headers["x-semkv"].split()
        order = sorted((A, B, C), key=str(before).index)
        assert sent(ordered) == form(*order, D, question="What else is there?")


class TestField:
    def test_documents_of_vllm(self, ordered: Pair) -> None:
        headers = a_tenant()
        items = [{"title": "About it", "text": text} for text in (A, B, C)]
        question = [{"role": "user", "content": QUESTION}]
        answers = [
            post(ordered, question, documents=given, headers=headers)
            for given in (items, items[::-1])
        ]
        assert [kind(answer) for answer in answers] == ["miss", "hit"]
        calls = ordered.upstream.calls[-1]
        assert sorted(map(str, calls["documents"])) == sorted(map(str, items))

    @pytest.mark.parametrize("number", ["1", 1])
    def test_numbered_ones_stay(self, number: Any, ordered: Pair) -> None:
        headers = a_tenant()
        items = [{"doc_id": str(at), "text": text} for at, text in enumerate((C, B, A), 1)]
        items[0]["doc_id"] = number
        answer = post(
            ordered, [{"role": "user", "content": QUESTION}], documents=items, headers=headers
        )
        assert "reordered" not in answer.headers["x-semkv"]
        assert ordered.upstream.calls[-1]["documents"] == items

    def test_a_template_of_the_clients_may_number_them(self, ordered: Pair) -> None:
        items = [{"text": text} for text in (C, B, A)]
        for more in (
            {"chat_template": "{{ documents }}"},
            {"chat_template_kwargs": {"citation_mode": "accurate"}},
            {"chat_template_kwargs": {"citations": True}},
        ):
            headers = a_tenant()
            given = {"documents": items, "headers": headers, **more}
            post(ordered, [{"role": "user", "content": QUESTION}], **given)
            assert ordered.upstream.calls[-1]["documents"] == items


def orders(pair: Pair, messages: Any, **more: Any) -> list[Any]:
    """What is sent after others were sent in each order of three documents."""
    found = []
    for texts in itertools.permutations((A, B, C)):
        headers = a_tenant()
        post(pair, in_parts(*texts), headers=headers)
        post(pair, messages, headers=headers, **more)
        found.append(without_uuids(sent(pair)))
    return found


def without_uuids(messages: Any) -> Any:
    """Messages without the names that the gateway gives to pictures."""
    if isinstance(messages, list):
        return [without_uuids(item) for item in messages]
    if isinstance(messages, dict):
        return {key: without_uuids(value) for key, value in messages.items() if key != "uuid"}
    return messages


TOOL = [{"role": "tool", "tool_call_id": "1", "content": [words(A), words(B), words(C)]}]
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
ASKED = [{"role": "user", "content": QUESTION}]
STAY = {
    "system text": [{"role": "system", "content": [words(A), words(B), words(C)]}, *ASKED],
    "the assistant": [*ASKED, {"role": "assistant", "content": [words(A), words(B)]}, *ASKED],
    "tool results": [*ASKED, *CALLED, *TOOL, *ASKED],
    "the last text": in_parts(C, question=B),
    "the question in front": [
        {"role": "user", "content": f"{QUESTION}\n<document>{B}</document>\n<document>{A}</document>"}
    ],
    "short parts": in_parts("one thing", "another thing"),
    "labels between": in_parts("Document 1:", C, "Document 2:", A),
    "numbered": in_parts(f"[1] {C}", f"[2] {A}"),
    "numbered tags": [
        {"role": "user", "content": f'<document index="1">{C}</document> <document index="2">{A}</document> {QUESTION}'}
    ],
    "told by place": in_parts(C, A, question="What does the second document say?"),
    "told before": [{"role": "system", "content": "Use the document above all."}, *in_parts(C, A)],
    "another language": in_parts(C, A, question="Was sagt der zweite Bericht dazu?"),
    "a mark for a cache": [
        {"role": "user", "content": [{**words(C), "cache_control": {"type": "ephemeral"}}, words(A), words(QUESTION)]}
    ],
    "a picture between": [{"role": "user", "content": [words(C), picture("red"), words(A), words(QUESTION)]}],
    "text between": [
        {"role": "user", "content": f"<document>{C}</document> but <document>{A}</document> {QUESTION}"}
    ],
    "an open tag": [
        {"role": "user", "content": f"<document>{C}</document> <document>{A} <document> {QUESTION}"}
    ],
    "one in another": in_tags(f"{C}<document>{B}</document>", A),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str, ordered: Pair) -> None:
    assert orders(ordered, STAY[name]) == [STAY[name]] * 6


@pytest.mark.parametrize(
    "more",
    [
        {"an_unknown_field": [2]},
        {"echo": True},
        {"return_token_ids": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "document_index"}}},
        {"tools": [{"type": "function", "function": {"name": "cite", "parameters": {}}}]},
    ],
    ids=str,
)
def test_what_stays_for_the_sake_of_another_field(more: dict[str, Any], ordered: Pair) -> None:
    messages = in_parts(C, B, A)
    assert orders(ordered, messages, **more) == [messages] * 6


class TestConversations:
    def test_a_later_turn_begins_as_the_turn_before(self, ordered: Pair) -> None:
        headers = a_tenant()
        post(ordered, in_parts(C, D, question="What else?"), headers=headers)
        post(ordered, in_parts(A, B, C), headers=headers)
        before = sent(ordered)
        told = {"role": "assistant", "content": "The first document says so."}
        later = [*in_parts(A, B, C), told, {"role": "user", "content": "Why is that?"}]
        post(ordered, later, headers=headers)
        assert sent(ordered)[0] == before[0] != in_parts(A, B, C)[0]

    def test_what_an_assistant_told_of_another_order_stays(self, ordered: Pair) -> None:
        told = {"role": "assistant", "content": "The second document says so."}
        later = [*in_parts(C, B, A), told, {"role": "user", "content": "Why is that?"}]
        headers = a_tenant()
        post(ordered, in_parts(A, B), headers=headers)
        post(ordered, later, headers=headers)
        assert sent(ordered) == later

    def test_two_groups_keep_to_themselves(self, ordered: Pair) -> None:
        headers = a_tenant()
        messages = [
            {"role": "user", "content": [words(B), words(A), picture("red"), words(D), words(C), words(QUESTION)]}
        ]  # fmt: skip
        post(ordered, messages, headers=headers)
        content = sent(ordered)[0]["content"]
        texts = [part.get("text") for part in content]
        assert sorted(texts[:2]) == [A, B]
        assert sorted(texts[3:5]) == [C, D]
        assert [texts[2], texts[5]] == [None, QUESTION]


class TestTenants:
    def test_none_learns_the_order_of_another(self, ordered: Pair) -> None:
        mine = a_tenant()
        expected = post(ordered, in_parts(A, B, C), headers=a_tenant()).headers["x-semkv"]
        alone = sent(ordered)
        for texts in itertools.permutations((A, B, C)):
            other = a_tenant()
            post(ordered, in_parts(*texts, question="What does the first say?"), headers=other)
        found = post(ordered, in_parts(A, B, C), headers=mine)
        assert sent(ordered) == alone
        assert found.headers["x-semkv"] == expected

    def test_nor_a_salt_of_another(self, ordered: Pair) -> None:
        headers = a_tenant()
        post(ordered, in_parts(C, B, A), headers=headers, cache_salt="one")
        one = sent(ordered)
        told = in_parts(*(B, A, C), question="What does the first say?")
        post(ordered, told, headers=headers, cache_salt="two")
        post(ordered, in_parts(C, B, A), headers=headers, cache_salt="one")
        assert sent(ordered)[0] in (one[0], told[0])
        post(ordered, in_parts(C, B, A, D), headers=headers, cache_salt="two")
        assert [part["text"] for part in sent(ordered)[0]["content"]][:3] == [B, A, C]


class TestOperators:
    def test_it_is_off_unless_asked_for(self, tmp_path: Path) -> None:
        with Pair(tmp_path) as pair:
            for texts in itertools.permutations((A, B, C)):
                answer = post(pair, in_parts(*texts))
                assert answer.headers["x-semkv"] == "miss"
                assert sent(pair) == in_parts(*texts)
            assert pair.metric("semkv_documents_total") == 0

    @pytest.mark.parametrize("wrong", ["", "document", "<a b>", "<>", "</a>", "Parts"])
    def test_what_may_be_named(self, wrong: str) -> None:
        with pytest.raises(ConfigError, match="--reorder-documents"):
            ServerSettings(reorder_documents=(wrong,))

    def test_only_what_is_named_is_moved(self, tmp_path: Path) -> None:
        with Pair(tmp_path, reorder_documents=("<doc>",)) as pair:
            for texts in itertools.permutations((A, B, C)):
                post(pair, in_parts(*texts))
                post(pair, in_tags(*texts))
            assert pair.metric("semkv_documents_total") == 0

    def test_it_is_counted_by_outcome(self, ordered: Pair) -> None:
        def count(outcome: str) -> float:
            return ordered.metric(f'semkv_documents_total{{outcome="{outcome}"}}')

        before = [count(outcome) for outcome in ("reordered", "numbered", "told by place")]
        headers = a_tenant()
        for texts in itertools.permutations((A, B)):
            post(ordered, in_parts(*texts), headers=headers)
        post(ordered, STAY["numbered"], headers=headers)
        post(ordered, STAY["told by place"], headers=headers)
        after = [count(outcome) for outcome in ("reordered", "numbered", "told by place")]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]

    def test_a_fault_costs_no_request(self, tmp_path: Path, monkeypatch: Any) -> None:
        with Pair(tmp_path, reorder_documents=("parts",)) as pair:
            monkeypatch.setattr(Layout, "visited", lambda *_: 1 / 0)
            answer = post(pair, in_parts(A, B))
            assert (answer.status_code, kind(answer)) == (200, "miss")
            assert pair.metric('semkv_faults_total{part="documents"}') == 2
            assert sent(pair) == in_parts(A, B)

    def test_beside_a_temperature(self, tmp_path: Path) -> None:
        settings = {"default_temperature": 0.0, "reorder_documents": ("parts",)}
        with Pair(tmp_path, **settings) as pair:
            given = [in_parts(*texts) for texts in ((A, B), (B, A))]
            marks = [post(pair, one, temperature=None).headers["x-semkv"] for one in given]
        assert [mark.split()[0] for mark in marks] == ["miss", "hit"]
        assert all(mark.endswith("temperature=0") for mark in marks)
        assert ["reordered" in mark for mark in marks].count(True) == 1

    def test_beside_a_near_repeat(self) -> None:
        deployment = Deployment(CHAT, "tenant", b"secret")
        body = {"messages": in_parts(A, B)}
        asked = canonicalise(body, deployment).reordered_as({"messages": in_parts(B, A)})
        donor = canonicalise({"messages": in_parts(B, A, question=OTHER)}, deployment).request
        assert donor is not None
        found = asked.with_plan(Plan(segments=donor.segments))
        assert found is not None
        assert found.reordered


def test_many_runs_of_documents_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred kilobytes of short runs took the gateway half a minute."""
    encoded = list[int]()

    def counted(value: Any) -> str:
        text = json.dumps(value)
        encoded.append(len(text))
        return text

    monkeypatch.setattr("semkv_gateway.documents._encode", counted)
    content = "<document>a</document><document>b</document>x" * 200 + QUESTION
    body = {"messages": [{"role": "user", "content": content}]}
    places = set[bytes]()

    def visit(before: bytes, documents: Sequence[str]) -> Sequence[int]:
        places.add(before)
        return (1, 0)

    LAYOUT.visited(body, visit)
    assert len(places) == 200
    assert sum(encoded) < 5 * len(content)


@pytest.mark.parametrize("messages", [5, [5], [None], [{"role": "user", "content": [5, "a"]}]])
def test_what_has_no_form_is_no_fault(messages: Any) -> None:
    faults = list[str]()
    order = Documents(["parts"], faults.append, faults.append)
    asked = cast("CanonicalRequest", SimpleNamespace(endpoint=CHAT, given={"messages": messages}))
    assert order.settled(asked) is asked
    order.sent(asked)
    assert not faults


# -- any body ----------------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    [A, B, C, "short", QUESTION, f"<document>{A}</document>\n<document>{B}</document> {QUESTION}", "<document>", ""]
)  # fmt: skip
PART = st.one_of(
    TEXTS.map(words),
    st.just(picture("red")),
    st.just({**words(D), "cache_control": {"type": "ephemeral"}}),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.one_of(TEXTS, st.lists(PART, max_size=6), st.none()),
    }
)


@given(st.lists(MESSAGE, max_size=5), st.lists(TEXTS, max_size=3), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_order_leaves_all_else(messages: list[Any], given: list[str], random: Any) -> None:
    body = {"model": "m", "messages": messages, "documents": given}
    runs = list[Sequence[str]]()

    def shuffled(_: bytes, texts: Sequence[str]) -> Sequence[int]:
        runs.append(texts)
        order = list(range(len(texts)))
        random.shuffle(order)
        return order

    new = LAYOUT.visited(body, shuffled)
    assert LAYOUT.visited(body, lambda _, texts: range(len(texts))) == body
    assert Counter(new["documents"]) == Counter(given)
    for before, after in zip(messages, new["messages"], strict=True):
        if before["role"] != "user":
            assert after == before
        assert Counter(characters(before)) == Counter(characters(after))
        assert kinds(before) == kinds(after)
    if not any(len(run) > 1 for run in runs):
        assert new == body


def characters(message: Any) -> str:
    return str(message["content"])


def kinds(message: Any) -> list[str]:
    content = message["content"]
    return [sorted(part) for part in content] if isinstance(content, list) else [type(content)]
