"""The objects of a bucket's log: their names, and what is in them. `semkv_vllm.bucket_log` has the whole picture."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash
from msgspec import MsgspecError, msgpack

from semkv_stores.bucket_index import Record
from semkv_vllm.bucket import Listed

_RECORD = re.compile(r"\d{16}")
_PART = re.compile(r"(\d{16})-\d{5}-(\d{5})")
_MAGIC = b"semkv\x01"
_SUM = 16


def encode(record: Record) -> bytes:
    payload = msgpack.encode(record)
    return _MAGIC + xxhash.xxh3_128_digest(payload) + payload


def decode(content: bytes) -> Record | None:
    """A record; None where it is damaged or of another format."""
    begin = len(_MAGIC) + _SUM
    payload = content[begin:]
    if content[:begin] != _MAGIC + xxhash.xxh3_128_digest(payload):
        return None
    try:
        return msgpack.decode(payload, type=Record)
    except MsgspecError:
        return None


def record_name(place: int) -> str:
    return f"{place:016d}"


def object_name(bucket: str, file: str) -> str:
    return f"{bucket}/blocks/{file[:2]}/{file}"


def places(listed: Iterable[Listed]) -> list[int]:
    """Of the records among some objects."""
    names = [each.name.rpartition("/")[2] for each in listed]
    return [int(name) for name in names if _RECORD.fullmatch(name)]


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose parts are all there; place 0 where there is none."""

    place: int = 0
    parts: tuple[str, ...] = ()


def part_name(place: int, number: int, count: int) -> str:
    return f"{record_name(place)}-{number:05d}-{count:05d}"


def latest_snapshot(listed: Iterable[Listed]) -> Snapshot:
    """The latest one of which all parts are there."""
    parts: dict[tuple[int, int], list[str]] = {}
    for each in listed:
        if found := _PART.fullmatch(each.name.rpartition("/")[2]):
            parts.setdefault((int(found[1]), int(found[2])), []).append(each.name)
    whole = [
        Snapshot(place, tuple(sorted(names)))
        for (place, count), names in parts.items()
        if len(names) == count
    ]
    return max(whole, key=lambda each: each.place, default=Snapshot())
