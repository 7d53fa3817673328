"""Keys: how requests, segments and models are named in the stores.

A key is always a digest. Nothing a user sent becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from semkv.types import MediaSegment, Namespace, Segment

_CHUNK = 1 << 20
_SPACES = re.compile(r"(\s+)")
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


# Words whose case carries meaning: code, paths, flags, addresses, camelCase, quantities such as 5m and 5M.
_LITERAL = re.compile(
    r"[`\\{}<>=_|~^]|\w[(\[]|::|://|->|[a-z][A-Z]|\w{2}\.\w{2}|(?<!\S)(?:--?[A-Za-z]|\.{0,2}/\w)|\d[kKmMgGbBtT]\b"
)
# Text whose line ends and indents carry meaning.
_BLOCK = re.compile(r"```|[{};:][ \t]*\n[ \t]+\S")


def normalise(text: str) -> str:
    """Fold what does not change a question's meaning: Unicode form, width, case, runs of white space.

    Words that look like code, a path or an address keep their case, and a text that holds a block of code keeps its
    lines: ``ls -l`` is not ``ls -L``.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", "".join(_same_meaning(c) for c in text))
    if not _LITERAL.search(text):
        folded = text.casefold()
    else:
        folded = "".join(part if _LITERAL.search(part) else part.casefold() for part in _SPACES.split(text))
    return folded.strip() if _BLOCK.search(text) else " ".join(folded.split())


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
    h = hashlib.sha256()
    for file in sorted(p for p in root.rglob("*") if p.is_file() and p.suffix not in _NOT_WEIGHTS and p.name[0] != "."):
        h.update(file.relative_to(root).as_posix().encode() + b"\0")
        with file.open("rb") as f:
            while block := f.read(_CHUNK):
                h.update(block)
    return h.hexdigest()


def model_fingerprint(settings: Mapping[str, object]) -> str:
    """Digest of everything that shapes a model's state and answers.

    Args:
        settings: id, revision, weights digest, dtype, LoRA, chat template, processor settings; any JSON value.
    """
    return digest("model", json.dumps(settings, sort_keys=True, default=str))
