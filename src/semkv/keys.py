"""Keys: how requests, segments and models are named in the stores.

A key is always a digest. Nothing a user sent becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from semkv.types import MediaSegment, Namespace, Segment

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


LITERAL = re.compile(
    r"[`\\{}<>=_|~^\"“”„«»]|(?<!\w)['‘][^\n]+['’](?!\w)|\w[(\[]|::|://|->|[a-z][A-Z]|\w{2}\.\w{2}|"
    r"(?<!\S)(?:--?[A-Za-z]|\.{0,2}/\w)|\d[kKmMgGbBtT]\b"
)
"""What keeps its case throughout: code, paths, flags, addresses, quotations."""
_STARTS = re.compile(r"(?:^|(?<=[.?!] ))[A-Z](?=[a-z'’]*(?:[ ,.:;?!]|$))[^.?!\n]*")  # one that begins with a word
_GAP = re.compile(r"(?<=\S)(?:[^\S\n]+(?=\n)|[^\S\n]{2,}|[^\S\n ])")  # in a line or at its end, but for one space
# Spacing is folded in one line of prose that speaks of nothing written, where the mark can be no word of its own.
_MARKED = re.compile(r" [,?]|[A-Za-z][.,?!][A-Za-z]")  # only then is there anything to fold
_PROSE = re.compile(r"[^\W_](?:[^\W_]|[ .,?!'’-])*")
_OF_WRITING = re.compile(
    r"\b(?:spac|blank|gap|punctuat|comma|colon|dot|full stop|period|mark|sign|symbol|charact|letter|word|text|"
    r"string|question|token|typ|spel|gramma|correct|proof|sentence|phrase|format|print|show|display|writ|wrote|pars|"
    r"split|regex|pattern|quot|verbatim|exact|command|shell|terminal|console|prompt|keyboard|press|key|enter|input|"
    r"output|cod|program|script|query|file|folder|path|password|emoji|smil|column|csv|field|delimit|separat|"
    r"operator|syntax|variab|tag|count|length|edit|translat|repeat|"
    r"cop(?:y|ie)|past(?:e|ing)|echo|repl(?:y|ie)|messag|sen[dt]|sa(?:y|id))",
    re.IGNORECASE,
)
_ASKING = "who|what|why|how|which"
_OPENING = f"{_ASKING}|whose|when|where|is|are|was|were|do|does|did|can|could|should|would|will|has|have"
_LEADING = "the|an?|my|your|our|their|of|in|at|on|from|with|about|against"  # words after which a noun is due
_NOUN = rf"(?:{_LEADING}) (?!(?:{_LEADING}|and|or|not|is|are|to|as|than|like|called) )[^\W\d_]{{2,}}(?<!ing)"
_JOINED = re.compile(
    rf"(?<=[\w,'’] )(?:[a-z]{{2,}}[.?!](?=(?:{_ASKING.title()}) )|"
    rf"(?i:(?!(?:{_ASKING}),)[a-z]{{2,}},(?=(?:{_ASKING}) )))"
)
_COMMA = re.compile(rf"((?<!\S){_NOUN}) (?=, [^\W\d_]{{2}})", re.IGNORECASE)
_ASKED = re.compile(rf"((?:^|[.?!] )(?:{_OPENING}) [^.?!]*?(?<!\S){_NOUN}) (?=\?$)", re.IGNORECASE)
_STYLED = 2  # words from which a text in capitals, or in Title Case, is taken for a way of typing


def normalise(text: str) -> str:
    """Fold what does not change a question's meaning: Unicode form, width, white space, spacing and case of typing.

    Case is folded at the start of a sentence, and throughout where a text of several words is in one style: all
    small, ALL CAPITALS, Each Word Capitalised. Within a sentence it stays: ``Polish`` is not ``polish``, ``HELLO`` has
    other letters than ``hello``. Sentences with code, a path, an address or a quotation keep their case. Lines stay
    lines, with their indents, and a tab stays one. In a single line of prose a blank before a mark (``of the US ?``)
    and a missing one after it (``of death.What do I``) are mended where no other reading is left.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", "".join(_same_meaning(c) for c in text))
    text = _respaced(_GAP.sub(_folded_space, text.strip()))
    if not LITERAL.search(text):
        return text.lower() if one_style(text) else _STARTS.sub(_small_start, text)
    return _STARTS.sub(lambda found: found[0] if LITERAL.search(found[0]) else _small_start(found), text)


def _small_start(sentence: re.Match[str]) -> str:
    return sentence[0][0].lower() + sentence[0][1:]


def _respaced(line: str) -> str:
    """A line of prose with the blanks that belong around its marks; any other text as it is."""
    if not _MARKED.search(line) or not _PROSE.fullmatch(line):
        return line
    found = _ASKED.sub(r"\1", _COMMA.sub(r"\1", _JOINED.sub(r"\g<0> ", line)))
    return line if found == line or LITERAL.search(found) or _OF_WRITING.search(found) else found


def _folded_space(run: re.Match[str]) -> str:
    if run.string.startswith("\n", run.end()):
        return ""
    return "\t" if "\t" in run[0] else " "


def one_style(text: str) -> bool:
    """Whether the case of a text is a way of typing: all small, ALL CAPITALS, Each Word Capitalised."""
    if text.islower() or text.isupper():
        return len(text.split(None, _STYLED)) >= _STYLED
    words = text.split()
    return len(words) >= _STYLED and text.istitle()


def _same_meaning(character: str) -> str:
    """A full-width letter or a ligature as plain letters. Not NFKC as a whole, which makes ``22`` of ``2²``."""
    kind = unicodedata.decomposition(character).partition(" ")[0]
    return unicodedata.normalize("NFKC", character) if kind in ("<wide>", "<narrow>", "<compat>") else character


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
    parts, seen = [], set()
    for folder, below, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            below.clear()  # a link back up
        seen.add(real)
        for file in (Path(folder, name) for name in names if name[0] != "."):
            if file.is_file() and file.suffix not in _NOT_WEIGHTS:
                with file.open("rb") as f:
                    parts.append((file.relative_to(root).as_posix(), hashlib.file_digest(f, "sha256").hexdigest()))
    return digest("weights", *(part for pair in sorted(parts) for part in pair))


def model_fingerprint(settings: Mapping[str, object]) -> str:
    """Digest of everything that shapes a model's state and answers.

    Args:
        settings: id, revision, weights digest, dtype, LoRA, chat template, processor settings; any JSON value.
    """
    return digest("model", json.dumps(settings, sort_keys=True, default=str))
