"""What goes into the catalog and comes out of it, what goes with it, and the forms in which it is stored."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from semkv.errors import CorruptValue
from semkv.types import Entry, MediaSegment, Namespace, Role, Segment, TextSegment

if TYPE_CHECKING:
    from semkv.types import Vector


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """What one tenant and model has in the catalog; times are seconds since the epoch.

    Attributes:
        tenant, model: the namespace.
        entries: how many.
        hits: how often one of them stood in for a request. An exact repeat that a gateway answers from its store of
            answers is none: the catalog is not asked.
        oldest: when the first was recorded.
        used: when one was last recorded or hit.
        name: of the model, where an entry tells it.
    """

    tenant: str
    model: str
    entries: int
    hits: int
    oldest: float
    used: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """An entry with everything by which it is found.

    Attributes:
        entry: what is kept.
        keys: digests under which `Catalog.find` returns it.
        frame: digest of all its segments but the question, or an empty string.
        loose_frame: the same with every media item alike.
        run: digest of its leading run up to the last media item with every media item alike, or an empty string.
        contexts: key of a leading run that ends in a context -> hashes of that context's sentences (signed 64 bits).
        vectors: layer key -> vector of this entry.
        media_vectors: (layer key, media id) -> vector of one media item.
    """

    entry: Entry
    keys: tuple[str, ...]
    frame: str = ""
    loose_frame: str = ""
    run: str = ""
    contexts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    media_vectors: Mapping[tuple[str, str], Vector] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VectorRow:
    """One entry's vector as an index wants it; ``number`` grows with every row ever written."""

    number: int
    entry_id: str
    space: str
    frame: str
    loose_frame: str
    layer: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MediaRow:
    """One entry's media items; ``number`` grows with every entry ever written."""

    number: int
    entry_id: str
    space: str
    run: str
    media: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """What a deletion took away: entries, and media items that no entry refers to any more."""

    entry_ids: tuple[str, ...] = ()
    media: tuple[str, ...] = ()


def removal(db: sqlite3.Connection, rows: Sequence[int]) -> Removed:
    """What `delete` would take away."""
    ids = (json.dumps(rows),)
    gone = db.execute("SELECT entry_id FROM entries WHERE id IN (SELECT value FROM json_each(?))", ids).fetchall()
    media = db.execute(
        "WITH gone AS (SELECT value FROM json_each(?)),"
        " shown AS (SELECT DISTINCT media FROM entry_media WHERE entry IN gone)"
        " SELECT media FROM shown WHERE NOT EXISTS"
        " (SELECT 1 FROM entry_media WHERE entry_media.media=shown.media AND entry NOT IN gone) ORDER BY media",
        ids,
    ).fetchall()
    return Removed(tuple(e for (e,) in gone), tuple(m for (m,) in media))


def delete(db: sqlite3.Connection, rows: Sequence[int]) -> Removed:
    """Delete entries by the numbers of their rows, with the contexts and vectors of media that only they had.

    What refers to an entry goes by itself (``ON DELETE CASCADE``).
    """
    removed = removal(db, rows)
    ids = (json.dumps(rows),)
    media = db.execute(
        "SELECT DISTINCT media, space FROM entry_media WHERE entry IN (SELECT value FROM json_each(?))", ids
    ).fetchall()
    keys = db.execute(
        "SELECT DISTINCT key FROM entry_keys JOIN contexts USING (key) WHERE entry IN (SELECT value FROM json_each(?))",
        ids,
    ).fetchall()
    db.execute("DELETE FROM entries WHERE id IN (SELECT value FROM json_each(?))", ids)
    db.executemany("DELETE FROM contexts WHERE key=?1 AND NOT EXISTS (SELECT 1 FROM entry_keys WHERE key=?1)", keys)
    db.executemany(
        "DELETE FROM media_vectors WHERE media=?1 AND space=?2"
        " AND NOT EXISTS (SELECT 1 FROM entry_media WHERE media=?1 AND space=?2)",
        media,
    )
    return removed


def pack(vector: Vector) -> bytes:
    """Little-endian float32, the form of every vector in the catalog."""
    return vector.astype("<f4", copy=False).tobytes()


def unpack(data: bytes, dim: int) -> Vector:
    """The vector behind `pack`, read-only.

    Raises:
        CorruptValue: another length than ``dim``, or not finite.
    """
    if len(data) != 4 * dim:
        raise CorruptValue(f"a vector of {len(data)} bytes where {dim} numbers belong")
    vector = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    if not math.isfinite(np.dot(vector, vector)):  # one pass; a catalog is opened by reading all of them
        raise CorruptValue("a vector that is not finite")
    return vector


def dump_segments(segments: Iterable[Segment]) -> str:
    """Segments as JSON; a media item keeps its id and name, never a path."""
    rows = [
        {"media": s.media_id, "name": s.name} if isinstance(s, MediaSegment) else {"role": s.role, "text": s.text}
        for s in segments
    ]
    return json.dumps(rows, ensure_ascii=False)


def load_segments(text: str) -> tuple[Segment, ...]:
    """The segments behind `dump_segments`; raises what JSON and a missing field raise."""
    return tuple(
        MediaSegment(row["media"], None, row["name"]) if "media" in row else TextSegment(row["text"], Role(row["role"]))
        for row in json.loads(text)
    )


# What to select from ``entries`` for `load_entry`, after the number of the row.
WHOLE_ENTRY = (
    "id, entry_id, tenant, model, segments, chunk_text, response, created, last_hit, hits, metadata,"
    " (SELECT json_group_array(tag) FROM tags WHERE entry=entries.id)"
)


def load_entry(
    entry_id: str,
    tenant: str,
    model: str,
    segments: str,
    chunk_text: str,
    response: str,
    created: float,
    last_hit: float,
    hits: int,
    metadata: str,
    tags: str,
) -> Entry:
    """The entry behind the columns of `WHOLE_ENTRY`; raises what JSON and a missing field raise."""
    return Entry(
        entry_id=entry_id,
        namespace=Namespace(tenant, model),
        segments=load_segments(segments),
        chunk_text=chunk_text,
        response=response,
        tags=tuple(sorted(json.loads(tags))),
        created=created,
        last_hit=last_hit,
        hits=hits,
        metadata=json.loads(metadata),
    )
