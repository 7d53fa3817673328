"""Keys: how requests, segments and models are named in the stores.

A key is always a digest. Nothing a user sent becomes part of a path. A prompt's keys (`Keyed`) are digests over the
namespace too, so that tenants and models share nothing:

    prefix         a leading run: the whole prompt, or what ends in or after a context
    question slot  everything but the last question: requests that differ in their question alone share it
    media prefix   the leading run up to the last media item, with all media items alike: where an image may stand in
    media          the same run with its own media items
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path

from semkv.types import Entry, Exactness, MediaSegment, Namespace, Request, Role, Segment, TextSegment

_NOT_WEIGHTS = frozenset({".md", ".jsonl", ".log"})


def digest(*parts: str | bytes) -> str:
    """SHA-256 over length-prefixed parts, as lowercase hex; unambiguous whatever the parts contain."""
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "big"))
        h.update(raw)
    return h.hexdigest()


def media_id(data: bytes) -> str:
    """The exact identity of a media item: SHA-256 of its encoded bytes, lowercase hex."""
    return hashlib.sha256(data).hexdigest()


# One sign, and what must stand around it: a search steps over all other characters, which is three times as fast.
_SIGNS = r"`\\{}<>=_|~^\"“”„«»"
_CODE = (
    rf"(?<=[{_SIGNS}])|(?<=\w[(\[])|(?<=:)(?=:|//)|(?<=[a-z][A-Z])|(?<=\w\w\.)(?=\w\w)|"
    r"(?<![^\s].)(?:(?<=-)-?[A-Za-z]|(?<=/)\w|(?<=\.)\.?/\w)|(?<=\d)[kKmMgGbBtT]\b"
)
_SIGNS += r"(\[:A-Z./\d'‘\-"
LITERAL = re.compile(rf"[{_SIGNS}](?:{_CODE}|(?<=['‘])(?<!\w.)[^\n]{{1,200}}['’](?!\w))")
"""What keeps its case throughout: code, paths, flags, addresses, quotations. Takes up to 1 us a character."""
_BLANK = "[ \xa0\u2000-\u200a\u202f\u205f\u3000]"
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_KEPT = re.compile(  # an apostrophe stands between two letters, a quotation mark does not
    rf"[{_SIGNS}’‚「『《‹＂＇](?:{_CODE}|(?<=['‘’‚])(?:(?<![A-Za-zÀ-ɏ].)|(?![A-Za-zÀ-ɏ]))|(?<=[「『《‹＂＇]))"
)
_TABLE = re.compile(rf"{_BLANK}{_BLANK}{_BLANK}(?<=\S...)")
_WINDOW, _AHEAD = 1 << 14, 4  # characters in one search, which holds Python's lock; most that a match looks ahead
_CRLF = re.compile(r"(?<!\r)\r\n")
_GAP = re.compile(rf"{_BLANK}(?<=\S.)(?:{_BLANK}*(?=[{_LINE_ENDS}])|({_BLANK}|(?<! )))")  # but for one space in a line
_STARTS = re.compile(r"[A-Z](?:(?<=^.)|(?<=[.?!] .))(?=[a-z'’]*(?:[ ,.:;?!]|\Z))")  # sentences that begin with a word
_ENDS = (". ", "? ", "! ", *_LINE_ENDS)
_STYLED = 2  # words from which a text in capitals, or in Title Case, is taken for a way of typing
_LETTERS = "０-９Ａ-Ｚａ-ｚﬀ-ﬆ"  # full-width letters and digits, ligatures
_WIDE = re.compile(rf"(?<=[\w\u0300-\u036f])[{_LETTERS}]|[{_LETTERS}](?=\w)")  # one alone may be what is asked about
_WORD = re.compile(rf"[0-9A-Za-z{_LETTERS}]+")


def normalise(text: str) -> str:
    """Fold what does not change a question's meaning: double blanks, the case of typing, Unicode form, width.

    Case is folded at the start of a sentence, and throughout where a text of several words is in one style: all
    small, ALL CAPITALS, Each Word Capitalised. Within a sentence it stays, since ``HELLO`` has other letters than
    ``hello``, and so does that of a word that is a name with a capital and another word without (``Polish``). Of
    signs and lone letters the width stays, and lines stay lines, with their indents and tabs; CRLF is a line end
    like another. From its first sentence with code, a path, an address, a quotation or a table on a text stays as
    written, and up to there all but the case of typing. Linear in the text, and idempotent.
    """
    text = text.strip()
    if "\r\n" in text:
        text = _CRLF.sub("\n", text)
    if (kept := _first_kept(text)) is not None:
        before = max(text.rfind(end, 0, kept) for end in _ENDS) + 1
        return _STARTS.sub(_small, text[:before]) + text[before:]
    if not text.isascii():
        text = _nfc(_one_width(_nfc(text)))
    text = _GAP.sub(_folded_gap, text)
    if not one_style(text) or (not text.islower() and not _twofold().isdisjoint(text.lower().split())):
        return _STARTS.sub(_small, text)
    return text.lower() if text.isascii() else _nfc(text.lower())


def _first_kept(text: str) -> int | None:
    """Where the first code, quotation or table starts."""
    for start in range(0, len(text), _WINDOW):
        end = start + _WINDOW
        found = [kind.search(text, start, end + _AHEAD) for kind in (_KEPT, _TABLE)]
        if places := [match.start() for match in found if match and match.start() < end]:
            return min(places)
    return None


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _small(start: re.Match[str]) -> str:
    word = _WORD.match(start.string, start.start())
    return start[0] if word and word[0].lower() in _twofold() else start[0].lower()


@cache
def _twofold() -> frozenset[str]:
    """Words that are a name with a capital and another word without, of the languages that the guards know."""
    files = (Path(__file__).parent / "guards" / "words").glob("*.toml")
    tables = [tomllib.loads(file.read_text(encoding="utf-8")).get("content", {}) for file in files]
    return frozenset(" ".join(table.get(name, "") for table in tables for name in ("twofold", "homographs")).split())


def _folded_gap(gap: re.Match[str]) -> str:
    return " " if gap.lastindex else ""


def one_style(text: str) -> bool:
    """Whether the case of a text is a way of typing: all small, ALL CAPITALS, Each Word Capitalised."""
    if text.islower() or text.isupper():
        return len(text.split(None, _STYLED)) >= _STYLED
    words = text.split()
    return len(words) >= _STYLED and text.istitle()


def _one_width(text: str) -> str:
    """Full-width words and ligatures in plain letters, unless a word stands there in both."""
    words = set(_WORD.findall(_nfc(text.lower())))
    if any(unicodedata.normalize("NFKC", word) in words for word in words if not word.isascii()):
        return text
    return _WIDE.sub(lambda letter: unicodedata.normalize("NFKC", letter[0]), text)


@lru_cache(maxsize=1024)
def namespace_key(namespace: Namespace) -> str:
    """One digest for tenant and model, used to partition every store."""
    return digest("namespace", namespace.tenant, namespace.model)


def segment_key(segment: Segment, *, normalised: bool, with_media: bool = True) -> str:
    """The key of one segment.

    Args:
        segment: the segment.
        normalised: fold the text (`normalise`) instead of taking its exact characters.
        with_media: False gives every media item the same key (``--scope any``).
    """
    if isinstance(segment, MediaSegment):
        return digest("media", segment.media_id if with_media else "*")
    return digest("text", segment.role, normalise(segment.text) if normalised else segment.text)


def chain_keys(segments: Iterable[Segment], *, normalised: bool, with_media: bool = True) -> list[str]:
    """One key per leading run of segments: ``keys[i]`` covers ``segments[: i + 1]``.

    The same idea as vLLM's chained block hashes, one level up: the longest stored key is the longest shared prefix.
    """
    keys: list[str] = []
    parent = "root"
    for segment in segments:
        parent = digest("chain", parent, segment_key(segment, normalised=normalised, with_media=with_media))
        keys.append(parent)
    return keys


def media_uuid(tenant: str, media: str) -> str:
    """The id a media item goes by inside vLLM: content plus tenant, so that no encoder output crosses tenants."""
    return digest("uuid", tenant, media)[:32]


def weights_digest(model: str | Path) -> str:
    """Digest of a local checkpoint's files, or of the id of a model that lives in a hub.

    A directory is read in full (names and bytes of every file but model cards and logs), so two checkpoints with one
    name and other weights never share state. Anything else is taken as a hub id, whose revision must be pinned by the
    caller.
    """
    root = Path(model)
    if not root.is_dir():
        return digest("hub", str(model))
    parts = []
    for file in weight_files(root):
        with file.open("rb") as f:
            parts.append((file.relative_to(root).as_posix(), hashlib.file_digest(f, "sha256").hexdigest()))
    return digest("weights", *(part for pair in sorted(parts) for part in pair))


def weight_files(root: Path) -> list[Path]:
    """The files of a local checkpoint that `weights_digest` reads, in one order; links are followed."""
    found, seen = [], set()
    for folder, below, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            below.clear()  # a link back up
        seen.add(real)
        files = (Path(folder, name) for name in names if name[0] != ".")
        found += [file for file in files if file.is_file() and file.suffix not in _NOT_WEIGHTS]
    return sorted(found)


def model_fingerprint(settings: Mapping[str, object]) -> str:
    """Digest of everything that shapes a model's state and answers.

    Args:
        settings: id, revision, weights digest, dtype, LoRA, chat template, processor settings; any JSON value.
    """
    return digest("model", json.dumps(settings, sort_keys=True, default=str))


# -- a prompt ---------------------------------------------------------------------------------------------------------


class Keyed:
    """A prompt with the chain keys of its leading runs; those that an exact hit does not need are made when asked for.

    Attributes:
        space: `namespace_key` of the namespace.
        segments: the prompt, at least one.
        exact: `chain_keys` over exact characters.
        question, last_media, first_context: positions in ``segments``, or None.
    """

    def __init__(self, namespace: Namespace, segments: tuple[Segment, ...]) -> None:
        self.space, self.segments, self.exact = (
            namespace_key(namespace),
            segments,
            chain_keys(segments, normalised=False),
        )
        self.question: int | None = None
        self.last_media: int | None = None
        self.first_context: int | None = None
        for position, segment in enumerate(segments):
            if isinstance(segment, MediaSegment):
                self.last_media = position
            elif segment.role is Role.QUESTION:
                self.question = position
            elif is_context(segment) and self.first_context is None:
                self.first_context = position

    @cached_property
    def folded(self) -> Sequence[str]:
        """`chain_keys` over normalised text."""
        return chain_keys(self.segments, normalised=True)

    @cached_property
    def any_media(self) -> Sequence[str]:
        """The same over normalised text, with all media items alike."""
        if self.last_media is None:
            return self.folded
        return chain_keys(self.segments, normalised=True, with_media=False)

    def question_slot(self, *, with_media: bool = True) -> str:
        """Digest of all segments but the last question; empty where there is no question."""
        if self.question is None:
            return ""
        chain = self.folded if with_media else self.any_media
        before = chain[self.question - 1] if self.question else ""
        after = [segment_key(s, normalised=True, with_media=with_media) for s in self.segments[self.question + 1 :]]
        return digest("frame", self.space, before, *after)

    def media_prefix(self) -> str:
        """Digest of the leading run up to the last media item, media alike; empty where there is none."""
        return "" if self.last_media is None else digest("run", self.space, self.any_media[self.last_media])

    def media_key(self) -> str:
        """Digest of the same run with its own media items; empty where there is none."""
        return "" if self.last_media is None else digest("media", self.space, self.folded[self.last_media])

    def context_depths(self) -> range:
        """Lengths of the leading runs that hold a context and leave something over, shortest first."""
        if self.first_context is None:
            return range(0)
        return range(self.first_context + 1, len(self.segments))

    def exact_key(self, depth: int) -> str:
        """The key of the first ``depth`` segments, byte for byte."""
        return self._prefix_key(self.exact, "exact", depth)

    def folded_key(self, depth: int, *, with_media: bool = True) -> str:
        """The same after normalisation."""
        return self._prefix_key(self.folded if with_media else self.any_media, "folded", depth)

    def _prefix_key(self, chain: Sequence[str], kind: str, depth: int) -> str:
        name = "lead" if depth < len(self.segments) else "whole"
        return digest(name, self.space, kind, chain[depth - 1])

    def entry_keys(self) -> tuple[str, ...]:
        """All keys under which an entry with this prompt is registered."""
        keys = {self.media_key()}
        for depth in (*self.context_depths(), len(self.segments)):
            keys |= {self.exact_key(depth), self.folded_key(depth), self.folded_key(depth, with_media=False)}
        return tuple(sorted(keys - {""}))


def is_context(segment: Segment) -> bool:
    """Whether a segment is a text with the role ``context`` that says anything."""
    return isinstance(segment, TextSegment) and segment.role is Role.CONTEXT and bool(segment.text.strip())


def exactness_of(own: Sequence[Segment], donor: Sequence[Segment]) -> Exactness:
    """How close a donor's segments are to the request's own, by the weakest pair: another media item is approximate,
    whatever the texts are."""
    alike = len(own) == len(donor) and all(
        mine == theirs or segment_key(mine, normalised=True) == segment_key(theirs, normalised=True)
        for mine, theirs in zip(own, donor, strict=True)
    )
    if not alike:
        return Exactness.APPROXIMATE
    return Exactness.EXACT if same_characters(own, donor) else Exactness.NORMALISED


def same_characters(own: Sequence[Segment], donor: Sequence[Segment], but: int | None = None) -> bool:
    """Whether two runs have the same characters, whatever the media items; ``but`` is a text that is left out."""
    pairs = enumerate(zip(own, donor, strict=False))
    return all(i == but or getattr(mine, "text", "") == getattr(theirs, "text", "") for i, (mine, theirs) in pairs)


def with_media(segments: Sequence[Segment], media: Sequence[str]) -> tuple[Segment, ...]:
    """The same segments with other media items, in order."""
    left = iter(media)
    return tuple(MediaSegment(next(left)) if isinstance(s, MediaSegment) else s for s in segments)


def has_chunk_text(request: Request, segments: Sequence[Segment]) -> bool:
    """Whether a request's chunk text is that of a prompt that was computed for it: it may speak of a context in whose
    place a donor's stands."""
    own = [segment for segment in request.segments if isinstance(segment, TextSegment)]
    computed = [segment for segment in segments if isinstance(segment, TextSegment)]
    return own == computed or request.chunk_text == request.question


def entry_of(request: Request, keyed: Keyed) -> Entry:
    """The entry of a prompt that was computed for a request, without what its answer brings.

    Args:
        request: the request.
        keyed: the prompt. Where the request's chunk text is not its own, the entry has the question's.
    """
    chunk_text = request.chunk_text if has_chunk_text(request, keyed.segments) else request.question
    entry_id = digest("entry", keyed.space, keyed.exact[-1], chunk_text)[:32]
    return Entry(entry_id, request.namespace, keyed.segments, chunk_text, response="")
