"""Keys: how requests, segments and models are named in the stores.

A key is always a digest. Nothing a user sent becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
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


_CODE = (
    r"[`\\{}<>=_|~^\"“”„«»]|\w[(\[]|::|://|->|[a-z][A-Z]|\w{2}\.\w{2}|"
    r"(?<!\S)(?:--?[A-Za-z]|\.{0,2}/\w)|\d[kKmMgGbBtT]\b"
)
LITERAL = re.compile(_CODE + r"|(?<!\w)['‘][^\n]{1,200}['’](?!\w)")
"""What keeps its case throughout: code, paths, flags, addresses, quotations. Takes up to 1 us a character."""
_BLANK = "[ \xa0\u2000-\u200a\u202f\u205f\u3000]"
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_KEPT = re.compile(  # an apostrophe stands between two letters, a quotation mark does not; three blanks are a table's
    rf"{_CODE}|['‘’‚](?:(?<![A-Za-zÀ-ɏ].)|(?![A-Za-zÀ-ɏ]))|[「『《‹＂＇]|{_BLANK}{{3}}(?<=\S...)"
)
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
    if kept := _KEPT.search(text):
        before = max(text.rfind(end, 0, kept.start()) for end in _ENDS) + 1
        return _STARTS.sub(_small, text[:before]) + text[before:]
    if not text.isascii():
        text = _nfc(_one_width(_nfc(text)))
    text = _GAP.sub(_folded_gap, text)
    if not one_style(text) or (not text.islower() and not _twofold().isdisjoint(text.lower().split())):
        return _STARTS.sub(_small, text)
    return text.lower() if text.isascii() else _nfc(text.lower())


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
