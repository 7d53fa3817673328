"""From an answered request to what the catalog keeps: the canonical prompt with every key by which it is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.keys import digest
from semkv.stores.catalog_rows import Record
from semkv.tiers.embedding import VISION
from semkv.tiers.keying import Keyed
from semkv.tiers.similar_context import context_rows
from semkv.types import Entry, MediaSegment, Request, ReuseReport, Segment, TextSegment

if TYPE_CHECKING:
    from semkv.types import Vector


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
    return Entry(
        entry_id=digest("entry", keyed.space, keyed.exact[-1], chunk_text)[:32],
        namespace=request.namespace,
        segments=keyed.segments,
        chunk_text=chunk_text,
        response="",
    )


def make_record(
    report: ReuseReport,
    response: str,
    vectors: Mapping[str, Vector],
    layers: Mapping[str, str],
    tags: tuple[str, ...],
    metadata: Mapping[str, Any],
    now: float,
) -> Record:
    """The record of ``report.plan.segments`` and their answer.

    Args:
        report: the lookup.
        response: the engine's answer to the canonical prompt.
        vectors: unit vectors by layer that belong to the canonical prompt; ``vision`` by the request's own media.
        layers: the catalog's name of each layer; vectors of other layers are left out.
        tags, metadata: as the entry keeps them.
        now: seconds since the epoch.
    """
    request, segments = report.request, report.plan.segments
    keyed = Keyed.of(request.namespace, segments)
    entry = replace(entry_of(request, keyed), response=response, tags=tags, created=now, metadata=metadata)
    sent = [s.media_id for s in segments if isinstance(s, MediaSegment)]
    rows = np.atleast_2d(vectors[VISION]) if VISION in vectors and VISION in layers else ()
    media = {
        (layers[VISION], mine.media_id): row
        for mine, computed, row in zip(request.media, sent, rows, strict=False)
        if mine.media_id == computed  # a donor's image has its own vector already
    }
    return Record(
        entry=entry,
        keys=keyed.entry_keys(),
        frame=keyed.frame(),
        loose_frame=keyed.frame(with_media=False),
        run=keyed.run(),
        contexts=context_rows(keyed),
        vectors={layers[n]: v for n, v in vectors.items() if n in layers and n != VISION},
        media_vectors=media,
    )
