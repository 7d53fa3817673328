"""The catalog: what is written comes back, bounds hold, faults are told apart."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from block_helpers import restamp
from semkv.errors import CorruptValue, StoreError
from semkv.keys import Keyed, entry_of, namespace_key
from semkv.stores import catalog as catalog_module
from semkv.stores.catalog import FORMAT, Catalog, Record, pack, unpack
from semkv.types import Entry, MediaSegment, Namespace, Request, Role, TextSegment

HERE, THERE = Namespace("here", "m"), Namespace("there", "m")


def record(
    name: str, *, namespace: Namespace = HERE, media: str = "m" * 64, created: float = 1.0
) -> Record:
    entry = Entry(
        entry_id="",
        namespace=namespace,
        segments=(
            TextSegment("sys", Role.SYSTEM),
            MediaSegment(media, None, "n1"),
            TextSegment(f"q {name} é"),
        ),
        chunk_text=f"q {name}",
        response="yes",
        tags=(f"tag-{name}", "all"),
        created=created,
        metadata={"row": 1},
    )
    prompt = Request("", namespace, entry.segments, entry.chunk_text)
    return Record(
        entry=replace(entry, entry_id=entry_of(prompt, Keyed(namespace, entry.segments)).entry_id),
        keys=(f"key-{name}", "shared"),
        question_slot="slot",
        any_media_slot="any media",
        media_prefix="prefix",
        vectors={"text@1": np.full(4, 0.5, dtype=np.float32)},
        media_vectors={("vision@1", media): np.full(2, 0.5**0.5, dtype=np.float32)},
    )


def id_of(name: str, **of: Any) -> str:
    return record(name, **of).entry.entry_id


def ids(names: str, **of: Any) -> tuple[str, ...]:
    return tuple(id_of(name, **of) for name in names)


def test_an_entry_comes_back_as_it_went_in(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c.sqlite")
    new, removed = catalog.add(record("a"))
    assert new
    assert not removed.entry_ids
    catalog.close()
    catalog = Catalog(tmp_path / "c.sqlite")
    entry = record("a").entry
    assert catalog.get(id_of("a")) == replace(entry, tags=tuple(sorted(entry.tags)))
    assert catalog.get("b") is None
    assert [e.entry_id for e in catalog.find("shared")] == [id_of("a")]
    assert catalog.has("key-a")
    assert not catalog.has("key-b")
    (row,) = catalog.vectors(["text@1"], 0, 10)
    assert row.entry_id == id_of("a")
    assert (row.question_slot, row.any_media_slot) == ("slot", "any media")
    assert unpack(row.data, 4).tolist() == [0.5] * 4
    assert catalog.vectors(["text@2"], 0, 10) == []
    assert catalog.vectors(["text@1"], row.number, 10) == []
    (media,) = catalog.media_rows(0, 10)
    assert media.media == ("m" * 64,)
    packed = catalog.media_vector(namespace_key(HERE), "vision@1", "m" * 64)
    assert packed is not None
    assert unpack(packed, 2).tolist() == pytest.approx([0.5**0.5] * 2)


def hits_on_disk(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT entry_id, hits FROM entries"))


def test_a_repeat_is_no_second_entry_and_hits_are_written_with_the_next_write(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.sqlite"
    catalog = Catalog(path)
    catalog.add(record("a", created=1.0))
    again = replace(
        record("a", created=5.0), vectors={"text@2": np.full(2, 0.5**0.5, dtype=np.float32)}
    )
    assert not catalog.add(again)[0]
    assert len(catalog.vectors(["text@1", "text@2"], 0, 10)) == 2
    for i in range(3):
        catalog.hit(id_of("a"), 2.0 + i)
    assert catalog.tag(id_of("a"), ()), "which only looks"
    assert not catalog.tag("b", ["late"])
    assert hits_on_disk(path) == {id_of("a"): 3}
    catalog.hit(id_of("a"), 7.0)
    assert hits_on_disk(path) == {id_of("a"): 3}
    assert catalog.tag(id_of("a"), ["late"])
    entry = catalog.get(id_of("a"))
    assert entry is not None
    assert (entry.created, entry.last_hit, entry.hits) == (1.0, 7.0, 4)
    assert "late" in entry.tags
    assert catalog.by_namespace()[0].used == 7.0
    catalog.hit(id_of("a"), 9.0)
    catalog.close()
    catalog.close()
    assert hits_on_disk(path) == {id_of("a"): 5}, "each once, the last one at the end"


def test_the_least_recently_used_go_and_a_deletion_leaves_nothing_behind(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c.sqlite", max_entries=3)
    for i, name in enumerate("abc"):
        catalog.add(record(name, created=float(i), media=("b" if name == "b" else "m") * 64))
    catalog.hit(id_of("a"), 10.0)
    new, removed = catalog.add(record("d", created=11.0))
    assert (new, removed.entry_ids, removed.media) == (True, ids("b", media="b" * 64), ("b" * 64,))
    assert catalog.find("key-b") == []
    assert catalog.media_vector(namespace_key(HERE), "vision@1", "b" * 64) is None
    assert catalog.invalidate(entry_id=id_of("a")).media == ()  # others still have the image
    assert catalog.invalidate(tag="all").media == ("m" * 64,)
    with closing(sqlite3.connect(tmp_path / "c.sqlite")) as db:
        for table in "entries entry_keys vectors media_vectors entry_media tags".split():
            assert db.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,), table


def test_invalidation_by_tag_entry_and_namespace(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c.sqlite")
    for name in "abc":
        catalog.add(record(name))
    catalog.add(record("d", namespace=THERE))
    assert len(catalog.invalidate(tag="all", dry_run=True).entry_ids) == 4
    assert len(catalog) == 4
    assert catalog.invalidate(tag="all", namespace=THERE).entry_ids == ids("d", namespace=THERE)
    assert catalog.invalidate(tag="tag-b").entry_ids == ids("b")
    assert catalog.invalidate(tag="no such tag").entry_ids == ()
    assert set(catalog.invalidate(namespace=HERE).entry_ids) == set(ids("ac"))
    with pytest.raises(ValueError, match="tag"):
        catalog.invalidate()


def test_removals_that_nobody_fetches_become_one_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_REMOVALS", 3)
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        catalog.invalidate(tag="nobody hears of it")
        assert catalog.read_from() == ""  # from here on they wait for others
        for n in range(5):
            catalog.invalidate(tag=f"t{n}")
        waiting = catalog.removals()
    assert [text for _, text in waiting] == ["{}", '{"tag": "t3"}', '{"tag": "t4"}']


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    Catalog(tmp_path / "c.sqlite").close()
    restamp(tmp_path / "c.sqlite", version=7)
    with pytest.raises(StoreError, match=rf"format version 7.*version {FORMAT}.*semkv purge"):
        Catalog(tmp_path / "c.sqlite")


@pytest.mark.parametrize(
    "harm",
    [
        "segments='{', created='text', hits='text', model=x'fe', frame=CAST(x'ff' AS TEXT), media=7",
        "segments='[]'",
        "segments=replace(segments, 'q a', 'q b')",
        "chunk_text='q b'",
        "tenant='there'",
        "response=CAST(x'ff' AS TEXT)",
    ],
)
def test_a_damaged_entry_is_deleted_and_hides_no_other(tmp_path: Path, harm: str) -> None:
    """Also an entry with another text, which its keys do not show."""
    catalog = Catalog(tmp_path / "c.sqlite")
    catalog.add(record("a"))
    catalog.add(record("b"))
    with sqlite3.connect(tmp_path / "c.sqlite") as db:
        db.execute(f"UPDATE entries SET {harm} WHERE entry_id=?", ids("a"))
    uses = catalog.by_namespace()
    assert sum(use.entries for use in uses) == 2
    assert {(type(use.tenant), type(use.hits), type(use.oldest)) for use in uses} == {
        (str, int, float)
    }
    assert [row.entry_id for row in catalog.vectors(["text@1"], 0, 10)] == [*ids("ab")]
    assert [row.entry_id for row in catalog.media_rows(0, 10)] == [*ids("ab")]
    with pytest.raises(CorruptValue, match=f"entry {id_of('a')}"):
        catalog.find("key-a")
    assert len(catalog) == 1
    assert catalog.find("key-b")


def test_a_damaged_vector_is_none() -> None:
    good = np.full(4, 0.5, dtype=np.float32)
    for data in (
        pack(good)[:12],
        *(pack(good * np.array([1, 1, 1, n], np.float32)) for n in (np.nan, np.inf, 2, 0.5)),
    ):
        with pytest.raises(CorruptValue):
            unpack(data, 4)
