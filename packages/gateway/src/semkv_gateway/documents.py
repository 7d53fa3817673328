"""Documents of a request, put into the order whose beginning was sent lately (`semkv.documents`), by choice.

A document is what the operator says is one: an item of vLLM's ``documents`` field (``field``), a long text part of a
user's message in front of its last text (``parts``), or what stands between tags (``<document>``). Documents that stand
together change places among themselves. All else stays: what the system, the assistant and tools say, the last text of
every turn, and a request of which anything may tell a document by its place, or is not understood.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from semkv.documents import (
    MOST_DOCUMENTS,
    TOLD,
    Document,
    DocumentOrder,
    has_place,
    may_tell_by_place,
    objection,
)
from semkv_gateway.request_key import CanonicalRequest

log = logging.getLogger(__name__)

FIELD: Final = "field"
PARTS: Final = "parts"
REORDERED: Final = "reordered"
AS_IT_CAME: Final = "as it came"
UNKNOWN: Final = "unknown form"
NUMBERED: Final = "numbered"

_ROUTES = ("/v1/chat/completions", "/v1/messages")
_TAG = 500  # characters of a document in which its tag is looked at
_SHORTEST = 200  # characters of a part that is a document
# What a template may show in front of the messages. The words of the first ones are for the model.
_FORMS = tuple(
    "tools functions response_format structured_outputs guided_json guided_choice guided_regex guided_grammar"
    " output_config output_format text".split()
)
_IN_FRONT = ("system", "chat_template_kwargs", "reasoning_effort", *_FORMS)
# A tag that begins a document, with a number or a letter as an attribute; a field that is a number.
_NUMBERED_TAG = re.compile(r"<[^>]*=\s*[\"']?\s*(?:\d+|[a-z]|[ivx]+)\s*[\"']?[\s/>]", re.IGNORECASE)
_NUMBERED_FIELD = re.compile(r'": "\W{0,4}\d+\W{0,4}"[,}]')
_TOOLS = ("tool", "function")
_TEXTS = ("text", "input_text", "output_text")
# Parts that say nothing of documents: pictures and sounds, and what tools have said.
_SILENT = ("image_url", "image", "input_audio", "audio_url", "video_url", "tool_result")
_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode

Visit = Callable[[bytes, Sequence[str]], Sequence[int]]
"""Gets a digest of all in front of some documents, and them; says in which order they shall stand."""

Piece = tuple[str, Any]
"""Of a message: what it is, and its text. A part of another form is one piece, as it came."""

_DOCUMENT: Final = "document"
_SAID: Final = "text"
_OTHER: Final = "other"


class Documents:
    """Puts the documents of requests into order. May be used by several threads.

    Args:
        kinds: what is a document: ``field``, ``parts``, tags such as ``<document>``; none where nothing is moved.
        count: called with what became of a request that has several documents.
        on_fault: called after a fault, which costs no request anything.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        count: Callable[[str], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._layout = Layout(kinds) if kinds else None
        self._count = count
        self._on_fault = on_fault
        self._order = DocumentOrder()

    def settled(self, asked: CanonicalRequest) -> CanonicalRequest:
        """The request with its documents as they shall be sent."""
        if self._layout is None or not _has_known_form(asked):
            return asked
        try:
            outcome, settled = self._settled(self._layout, asked)
        except Exception:
            self._failed()
            return asked
        if outcome:
            self._count(outcome)
        return settled

    def sent(self, canonical: CanonicalRequest) -> None:
        """Note that a request goes upstream."""
        if self._layout is None or not _has_known_form(canonical):
            return

        def note(before: bytes, documents: Sequence[str]) -> Sequence[int]:
            self._order.sent(_scope_of(canonical), before, _known(documents))
            return range(len(documents))

        try:
            self._layout.visited(canonical.given, note)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        log.exception("documents could not be put into order")
        self._on_fault("documents")

    def _settled(self, layout: Layout, asked: CanonicalRequest) -> tuple[str, CanonicalRequest]:
        """What became of a request, and the request; nothing became of one without several documents."""
        if not layout.has_several(asked.given):
            return "", asked
        if not asked.is_plain or _is_templated(asked.given):
            return UNKNOWN, asked
        said = layout.said(asked.given)
        why = objection(said.in_front, said.behind, said.documents)
        if not why and may_tell_by_place(_words_of(asked.given)):
            why = TOLD
        if why:
            return why, asked
        # The assistant may refer to documents by the places in which they were sent to it.
        answered = bool(objection((), said.answered, said.documents))
        visit = _Choice(self._order, _scope_of(asked), only_known=answered)
        body = layout.visited(asked.given, visit)
        if not visit.moved:
            return visit.objection or AS_IT_CAME, asked
        return REORDERED, asked.reordered_as(body)


class _Choice:
    """Chooses the order of the documents of one request, where they may change places.

    Attributes:
        moved: some have.
        objection: why others have not, in a word or two.
    """

    def __init__(self, order: DocumentOrder, scope: bytes, *, only_known: bool) -> None:
        self._order = order
        self._scope = scope
        self._only_known = only_known
        self.moved = False
        self.objection = ""

    def __call__(self, before: bytes, documents: Sequence[str]) -> Sequence[int]:
        as_it_came = range(len(documents))
        if len(documents) < 2:
            return as_it_came
        known = _known(documents)
        objection = self._object(before, documents, known)
        if objection:
            self.objection = objection
            return as_it_came
        chosen = self._order.choose(self._scope, before, known)
        if [known[place] for place in chosen] != known:
            self.moved = True
        return chosen

    def _object(
        self,
        before: bytes,
        documents: Sequence[str],
        known: Sequence[Document],
    ) -> str:
        """Why they may not change places."""
        if any(map(_is_numbered, documents)):
            return NUMBERED
        if len(documents) > MOST_DOCUMENTS:
            return UNKNOWN
        if self._only_known and not self._order.is_known(self._scope, before, known):
            return TOLD
        return ""


class Said:
    """What a request says outside of its documents, and in them.

    Attributes:
        documents: their texts.
        in_front: of all documents.
        behind: any of them.
        answered: by the assistant, wherever it stands.
    """

    def __init__(self) -> None:
        self.documents: list[str] = []
        self.in_front: list[str] = []
        self.behind: list[str] = []
        self.answered: list[str] = []
        self._now = self.in_front

    def meet_documents(self, texts: Iterable[str]) -> None:
        """What follows is behind documents."""
        self.documents.extend(texts)
        self._now = self.behind

    def hear(self, texts: Iterable[str]) -> None:
        """Note texts where they stand."""
        self._now.extend(texts)


class Layout:
    """Where documents stand in a body.

    Args:
        kinds: see `Documents`.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._field = FIELD in kinds
        self._parts = PARTS in kinds
        names = [kind[1:-1] for kind in kinds if kind.startswith("<")]
        self._tags = [
            re.compile(rf"<(?:(/){re.escape(name)}\s*|{re.escape(name)}(?:\s[^<>]*)?)>")
            for name in names
        ]

    def has_several(self, body: Mapping[str, Any]) -> bool:
        """Whether any documents stand together."""
        found = list[int]()

        def note(_: bytes, documents: Sequence[str]) -> Sequence[int]:
            found.append(len(documents))
            return range(len(documents))

        self.visited(body, note)
        return max(found, default=0) > 1

    def visited(self, body: Mapping[str, Any], visit: Visit) -> dict[str, Any]:
        """The body with documents that stand together in the order that ``visit`` says."""
        new = dict(body)
        front = _Front()
        front.add([body.get(name) for name in _IN_FRONT])
        listed = body.get("documents")
        if self._field and isinstance(listed, list) and _are_documents(listed):
            before = front.hasher()
            texts = [_encode(item) for item in listed]
            order = visit(before.digest(), texts)
            new["documents"] = [listed[i] for i in order]
        front.add(new.get("documents"))
        messages = list[Any]()
        for message in body["messages"]:
            if _is_users(message):
                message = self._visited_message(message, front, visit)
            front.add(message)
            messages.append(message)
        new["messages"] = messages
        return new

    def said(self, body: Mapping[str, Any]) -> Said:
        """What a body says outside of its documents."""
        said = Said()
        said.in_front.extend(_texts_of(body.get("system")))
        listed = body.get("documents")
        if self._field and listed:
            is_plain = isinstance(listed, list) and _are_documents(listed)
            said.meet_documents(_texts_in(listed) if is_plain else ())
        for message in body["messages"]:
            content = message.get("content")
            role = message.get("role")
            if role == "assistant":
                said.answered.extend(_texts_of(content))
                said.answered.extend(_texts_of([message.get("tool_calls")]))
            elif _is_users(message):
                self._hear(message, said)
            elif role not in _TOOLS:
                said.hear(_texts_of(content))
        return said

    def _hear(self, message: Mapping[str, Any], said: Said) -> None:
        for kind, text in _flat(self._pieces(message)):
            if kind == _DOCUMENT:
                said.meet_documents([text])
            else:
                said.hear(_texts_of([text]) if kind == _OTHER else [text])

    # -- one message ------------------------------------------------------------------------------------------------

    def _visited_message(
        self,
        message: Mapping[str, Any],
        front: _Front,
        visit: Visit,
    ) -> dict[str, Any]:
        parts = self._pieces(message)
        pieces = list(_flat(parts))
        seen = 0
        hasher = None  # of all in front of a run; each piece is encoded once, however many runs there are
        for run in _runs(pieces):
            texts = [pieces[at][1] for at in run]
            hasher = hasher or front.hasher()
            _update(hasher, pieces[seen : run[0]])
            seen = run[0]
            order = visit(hasher.digest(), texts)
            for at, place in zip(run, order, strict=True):
                pieces[at] = (_DOCUMENT, texts[place])
        content = message["content"]
        left = iter(pieces)
        filled = [[next(left)[1] for _ in part] for part in parts]
        if isinstance(content, str):
            return {**message, "content": "".join(filled[0])}
        new = list[Any]()
        for part, texts in zip(content, filled, strict=True):
            if _is_text(part):
                part = {**part, "text": "".join(texts)}
            new.append(part)
        return {**message, "content": new}

    def _pieces(self, message: Mapping[str, Any]) -> list[list[Piece]]:
        """What a user's message is made of, by part."""
        content = message["content"]
        if isinstance(content, str):
            return [self._split(content)]
        texts = [at for at, part in enumerate(content) if "text" in part]
        last = max(texts, default=-1)
        return [self._pieces_of(part, is_last=at == last) for at, part in enumerate(content)]

    def _pieces_of(self, part: Any, *, is_last: bool) -> list[Piece]:
        if not _is_text(part):
            return [(_OTHER, part)]
        text = part["text"]
        pieces = self._split(text)
        if len(pieces) > 1 or is_last or not self._parts or len(text) < _SHORTEST:
            return pieces
        return [(_DOCUMENT, text)]

    def _split(self, text: str) -> list[Piece]:
        """A text in its documents between tags, and what is between them."""
        for tag in self._tags:
            spans = _spans(tag, text)
            if spans:
                return list(_cut(text, spans))
        return [(_SAID, text)]


def _spans(tag: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    """Where documents between tags begin and end; none where an end is missing, or one stands in another."""
    spans = list[tuple[int, int]]()
    start = -1
    for found in tag.finditer(text):
        is_end = found[1] is not None
        if is_end != (start >= 0):
            return []
        if is_end:
            spans.append((start, found.end()))
        start = -1 if is_end else found.start()
    return spans if start < 0 else []


def _cut(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    at = 0
    for start, end in spans:
        yield _SAID, text[at:start]
        yield _DOCUMENT, text[start:end]
        at = end
    yield _SAID, text[at:]


def _runs(pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """Where documents stand together in front of a message's last text, with nothing but blanks between them."""
    said = [at for at, (kind, text) in enumerate(pieces) if kind == _SAID and text.strip()]
    last = max(said, default=-1)
    run = list[int]()
    for at in range(last + 1):
        kind, text = pieces[at]
        if kind == _DOCUMENT:
            run.append(at)
        elif run and (kind == _OTHER or text.strip()):
            yield run
            run = []


def _flat(parts: Iterable[Iterable[Piece]]) -> Iterator[Piece]:
    for part in parts:
        yield from part


# -- bodies ------------------------------------------------------------------------------------------------------------


def _has_known_form(asked: CanonicalRequest) -> bool:
    """Whether a request has messages whose contents are texts or parts. The upstream refuses what has not."""
    messages = asked.given.get("messages")
    if asked.endpoint not in _ROUTES or not isinstance(messages, list):
        return False
    if not all(isinstance(message, dict) for message in messages):
        return False
    contents = (message.get("content") for message in messages)
    parts = (content for content in contents if isinstance(content, list))
    return all(isinstance(part, dict) for content in parts for part in content)


def _is_users(message: Any) -> bool:
    """Whether a message is one of the user's, with nothing in it that a tool has said."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    content = message.get("content")
    if isinstance(content, list):
        return not any(isinstance(p, dict) and p.get("type") == "tool_result" for p in content)
    return isinstance(content, str)


def _is_text(part: Any) -> bool:
    """Whether a part is a text and nothing else: a mark for a cache, for instance, belongs to a place."""
    return isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"


def _are_documents(listed: Iterable[Any]) -> bool:
    """Whether each of them is a text, or texts by name."""
    return all(isinstance(value, str) for value in _texts_in(listed))


def _texts_in(listed: Iterable[Any]) -> Iterator[Any]:
    """What documents say, where they are texts, or texts by name."""
    for item in listed:
        yield from item.values() if isinstance(item, dict) else [item]


def _is_templated(body: Mapping[str, Any]) -> bool:
    """Whether the client says how a template shows documents."""
    options = body.get("chat_template_kwargs") or {}
    plain = isinstance(options, dict) and all(type(value) is bool for value in options.values())
    words = " ".join(options).replace("_", " ") if plain else ""
    has_own = body.get("chat_template") is not None
    return has_own or not plain or may_tell_by_place(words)


def _texts_of(content: Any) -> Iterator[str]:
    """The texts of a content in any form; a part of an unknown form as it is encoded."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else ""
        if kind in _TEXTS and isinstance(part.get("text"), str):
            yield part["text"]
        elif part is not None and kind not in _SILENT:
            yield _encode(part)


def _words_of(body: Mapping[str, Any]) -> str:
    """What the tools and the form of an answer say to the model."""
    forms = [body[name] for name in _FORMS if body.get(name)]
    return re.sub(r"[\W_]+", " ", _encode(forms))


def _is_numbered(document: str) -> bool:
    """Whether a document has a number, or tells others by their places."""
    return (
        _NUMBERED_TAG.match(document[:_TAG]) is not None
        or _NUMBERED_FIELD.search(document) is not None
        or has_place(document)
    )


def _known(documents: Sequence[str]) -> list[Document]:
    return [Document.of(text) for text in documents]


def _scope_of(canonical: CanonicalRequest) -> bytes:
    """Those who share a beginning in the upstream's cache."""
    salt = canonical.given.get("cache_salt")
    return _encode([canonical.partition, canonical.endpoint, canonical.model, salt]).encode()


class _Front:
    """All in front of some documents. Encoded when it is first asked for: pictures behind them never are."""

    def __init__(self) -> None:
        self._hasher = blake2b()
        self._waiting: list[Any] = []

    def add(self, value: Any) -> None:
        self._waiting.append(value)

    def hasher(self) -> blake2b:
        """Of what was added. The caller may update it with what belongs to the middle of a message."""
        _update(self._hasher, self._waiting)
        self._waiting.clear()
        return self._hasher.copy()


def _update(hasher: blake2b, values: Iterable[Any]) -> None:
    for value in values:
        hasher.update(_encode(value).encode("utf-8", "surrogatepass") + b"\n")
