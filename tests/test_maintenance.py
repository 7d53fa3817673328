"""stats, verify, gc and purge over a cache that was really used."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import numpy as np
import pytest

from block_helpers import open_store, restamp, save
from command_line import invoke
from maintenance_helpers import (
    SECRET,
    block_files,
    call,
    digest_of,
    files_of,
    left,
    make_used,
    refused,
    store_kv,
)
from semkv.cache import SemanticCache
from semkv.cli import EXIT_ERROR
from semkv.cli.store import EXIT_DAMAGED
from semkv.config import CacheConfig
from semkv.engines import EnginePrompt
from semkv.errors import StoreError
from semkv.stores.catalog import CATALOG, Catalog
from semkv.stores.maintenance import (
    StoreUse,
    collect,
    inspect,
    prepare,
    purge,
    purge_directory,
    verify,
)
from semkv.tenants import tenant_salt
from semkv.types import MediaSegment, Namespace, Request, TextSegment
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import StoredResponse
from semkv_stores.block_file import tenant_tag
from semkv_stores.fusion import FusionState, FusionStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_used(tmp_path_factory.mktemp("made"))


@pytest.fixture
def used(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / made.name


def test_stats_count_what_is_there(used: Path) -> None:
    found = json.loads(call("stats", "--cache-dir", str(used), "--json"))
    assert [(e["tenant"], e["entries"]) for e in found["entries"]] == [("alice", 3), ("bob", 3)]
    stores = {s["store"]: s for s in found["stores"]}
    assert {name: (s["items"], s["blocks"]) for name, s in stores.items()} == {
        "kv": (2, 2),
        "fusion": (1, 1),
        "media": (2, 0),
    }
    assert stores["kv"]["nbytes"] == sum(p.stat().st_size for p in block_files(used, "kv"))
    table = call("stats", "--cache-dir", str(used))
    assert all(
        word in table
        for word in ("alice", "bob", "kv", "fusion", "media", " ago", "a-model (model)", " kB")
    )
    assert [e["name"] for e in found["entries"]] == ["", "a-model"]
    result = invoke(["stats", "--cache-dir", str(used), "--tenant", "carol"])
    assert result.exit_code == 0
    assert "no data of tenant carol" in result.stderr


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_finds_every_kind_of_damage_and_repairs_it(used: Path) -> None:
    words = ("verify", "--cache-dir", str(used))
    assert "5 files, 6 entries and 0 answers checked, 0 damaged" in call(*words)
    for path in (
        *block_files(used, "kv")[:1],
        *block_files(used, "fusion"),
        next((used / "media").glob("??/*")),
    ):
        damage(path)
    with closing(sqlite3.connect(used / CATALOG)) as db, db:
        rows = db.execute("SELECT id FROM entries LIMIT 2").fetchall()
        db.execute("UPDATE entries SET segments='[' WHERE id=?", rows[0])
        db.execute("UPDATE entries SET response=CAST(x'ff' AS TEXT) WHERE id=?", rows[1])
    (used / "media" / "ab").mkdir(exist_ok=True)
    (used / "media" / "ab" / ("g" * 64)).touch()  # no digest: somebody else's
    found = verify(used)
    assert (found.counts["checked"], found.counts["entries"]) == (5, 6)
    assert [line.split(":")[0] for line in found.damaged] == [
        "kv",
        "fusion",
        "media",
        *["catalog"] * 2,
    ]
    assert "5 files, 6 entries and 0 answers checked, 5 damaged" in call(*words, exit_code=1)
    assert "5 damaged, 5 of them deleted" in call(*words, "--repair")
    assert "2 files, 4 entries and 0 answers checked, 0 damaged" in call(*words)


@pytest.mark.parametrize(
    "command", ["verify --repair", "gc --max-age-days 0.0000001", "purge --tenant alice", "purge"]
)
def test_what_cannot_be_deleted_is_told_and_the_rest_goes(
    used: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an immutable file, or in a folder of another user."""
    store_kv(used, 9, tenant_tag("alice"))
    name = digest_of(used.parent / "alice.jpg")
    stuck = [*block_files(used, "kv"), used / "media" / name[:2] / name]
    if command.startswith("verify"):
        for path in stuck:
            damage(path)
    unlink, catalog = Path.unlink, used / CATALOG

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path in stuck or path == catalog:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    result = invoke([*command.split(), "--cache-dir", str(used)])
    assert result.exit_code == EXIT_ERROR
    assert f"{stuck[-1]} cannot be deleted" in result.stderr
    block = re.escape(str(used / "kv"))
    assert re.search(
        f"{block}/.* cannot be deleted|not all in {block} could be read or deleted", result.stderr
    )
    if command == "purge":
        assert "0 entries" in result.stdout
        assert f"{catalog} cannot be begun anew" in result.stderr
        assert left(used) == sorted(str(path.relative_to(used)) for path in stuck)
    monkeypatch.undo()
    call("purge", "--cache-dir", str(used))
    assert left(used) == []


@pytest.mark.parametrize("command", ["stats", "verify", "gc", "purge --tenant alice", "purge"])
def test_a_folder_that_cannot_be_read_is_told(
    used: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = Path.lstat

    def closed(path: Path) -> os.stat_result:
        if path.parent.parent == used / "media":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", closed)
    monkeypatch.setattr(os, "access", lambda path, mode: path != used / "media")
    result = invoke([*command.split(), "--cache-dir", str(used)])
    assert result.exit_code == EXIT_ERROR
    assert f"{used / 'media'} cannot be read" in result.stderr


def test_a_store_that_others_can_write_to_is_told_and_the_rest_is_collected(used: Path) -> None:
    (used / "kv").chmod(0o777)
    result = invoke(["gc", "--cache-dir", str(used), "--max-age-days", "0.0000001"])
    assert result.exit_code == EXIT_ERROR
    assert f"kv: {used / 'kv' / 'index.sqlite'} cannot be used" in result.stderr
    assert block_files(used, "kv")
    assert block_files(used, "fusion") == []


def test_a_purge_says_which_folders_it_does_not_follow(used: Path) -> None:
    (used / "kv").rename(used.parent / "elsewhere")
    (used / "kv").symlink_to(used.parent / "elsewhere")
    result = invoke(["purge", "--cache-dir", str(used)])
    assert result.exit_code == EXIT_ERROR
    assert f"{used / 'kv'} is a link" in result.stderr
    assert len(block_files(used, "kv")) == 2
    assert left(used) == []
    call("purge", "--cache-dir", str(used.parent / "elsewhere"))
    assert block_files(used, "kv") == []


def test_gc_deletes_what_is_too_old_and_nothing_else(used: Path) -> None:
    with closing(sqlite3.connect(used / CATALOG)) as db, db:
        db.execute(
            "UPDATE entries SET created=created-40*86400 WHERE tenant='alice' OR segments LIKE '%question 0%'"
        )
    with closing(SqliteStore(used / CATALOG)) as store:
        for days, key in ((40, "old"), (20, "young")):
            store.put(
                StoredResponse(key * 16, "t", "m", b"{}", created=time.time() - days * 86_400)
            )
    running = SemanticCache(CacheConfig(used, semantic=False))
    picture = used.parent / "alice.jpg"
    media = MediaSegment(digest_of(picture), picture, "alice")
    asked = Request("1", Namespace("alice", "model"), (media, TextSegment("question 1")))
    assert running.try_reuse(asked).hit
    assert "0 entries, 0 answers" in call("gc", "--cache-dir", str(used), "--max-age-days", "0")
    said = call("gc", "--cache-dir", str(used), "--max-age-days", "30")
    assert "0 of KV, 0 of fusion states, 1 images, 4 entries, 1 answers" in said
    assert not running.try_reuse(asked).hit
    running.close()
    found = inspect(used)
    assert [(e.tenant, e.entries) for e in found.entries] == [("bob", 2)]
    assert {store.store: store.items for store in found.stores} == {
        "kv": 2,
        "fusion": 1,
        "media": 1,
        "answers": 1,
    }
    stray = block_files(used, "kv")[0].with_name("0" * 16 + ".safetensors.1.tmp")
    stray.write_bytes(b"half a file")
    loose, young = (used / "media" / name[:2] / name for name in ("ab" * 32, "cd" * 32))
    for image in (loose, young):
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(b"of no entry, or of one that is about to be written")
    os.utime(loose, (1, 1))
    found = collect(used)
    assert [found.counts[name] for name in ("kv", "fusion", "media")] == [1, 0, 1]
    assert young.exists()
    assert "deleted: 2 of KV, 1 of fusion" in call(
        "gc", "--cache-dir", str(used), "--max-age-days", "0.0000001"
    )


@pytest.mark.parametrize("empty_file", [False, True])
@pytest.mark.parametrize("command", ["stats", "verify", "gc", "purge", "purge --tenant alice"])
def test_a_folder_that_is_no_cache_is_refused_and_left_alone(
    tmp_path: Path, command: str, empty_file: bool
) -> None:
    song = tmp_path / "media" / "ab" / "song.tmp"
    song.parent.mkdir(parents=True)
    song.write_bytes(b"of a user")
    os.utime(song, (1, 1))
    if empty_file:
        (tmp_path / CATALOG).touch()
    before = files_of(tmp_path)
    assert "holds no semkv cache" in refused(*command.split(), "--cache-dir", str(tmp_path))
    assert files_of(tmp_path) == before


# -- a database that cannot be read ------------------------------------------------------------------------------------


def break_whole(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)


def break_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)


def break_table(path: Path) -> None:
    """The text that declares a table."""
    path.write_bytes(path.read_bytes().replace(b"created REAL", b"\xffreated REAL"))


def make_foreign(path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mine (x)")


def make_newer(path: Path) -> None:
    restamp(path, version=99)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm", [break_whole, break_page, make_foreign, make_newer, make_folder, make_pipe]
)
def test_a_database_that_cannot_be_read_is_named_and_not_touched(
    used: Path, harm: Callable[[Path], None]
) -> None:
    store_kv(used, 9, tenant_tag("alice"))
    with closing(SqliteStore(used / CATALOG)) as store:
        for i in range(50):
            store.put(StoredResponse(str(i), "alice", "model", b"x" * 1000, time.time()))
    inspect(used)  # the other stores' own files are there now
    harm(used / CATALOG)
    before = {name: data for name, data in files_of(used).items() if CATALOG in name}
    for command, said in {
        "stats": "fusion",
        "verify": "",
        "verify --repair": "",
        "gc --max-age-days 1": "0 images, 0 entries, 0 answers",
        "purge --tenant alice": "0 entries, 0 answers and 1 files deleted",  # the rest is done all the same
    }.items():
        result = invoke([*command.split(), "--cache-dir", str(used)])
        assert said in result.stdout, command
        assert {name: data for name, data in files_of(used).items() if CATALOG in name} == before, (
            command
        )
        if harm is make_pipe:  # which is as no database
            assert result.exit_code == 0
        elif command.startswith("verify") and harm in (break_whole, break_page):
            assert "catalog: " in result.stdout
            assert "1 damaged" in result.stdout
            assert result.exit_code == EXIT_DAMAGED or harm is break_page
        else:
            assert result.exit_code == EXIT_ERROR
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("semkv: ")]
            assert str(used / CATALOG) in line
    if harm is make_folder:
        (used / CATALOG / "mine").touch()
    stays = harm in (make_foreign, make_folder)
    told = invoke(["purge", "--cache-dir", str(used)])
    assert (told.exit_code, CATALOG in told.stderr.splitlines()[-1]) == (
        EXIT_ERROR if stays else 0,
        True,
    )
    assert left(used) == [f"{CATALOG}/mine"] * (harm is make_folder), (
        "the rest is deleted all the same"
    )
    if harm is make_foreign:
        assert {name: data for name, data in files_of(used).items() if CATALOG in name} == before


def make_empty(path: Path) -> None:  # as a full disk or a crash leaves it
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [break_whole, break_page, make_empty, Path.unlink])
def test_only_what_may_delete_begins_a_store_with_a_damaged_index_anew(
    used: Path, harm: Callable[[Path], object]
) -> None:
    index, damaged = used / "kv" / "index.sqlite", harm in (break_whole, break_page)
    harm(index)
    for command in ("stats", "verify", "stats --tenant alice", "purge --tenant alice --dry-run"):
        checks = command == "verify" and damaged
        result = invoke([*command.split(), "--cache-dir", str(used)])
        if checks or harm is not break_page:  # of which only a part is damaged
            assert result.exit_code == (EXIT_DAMAGED if checks else EXIT_ERROR), command
            assert f"kv: {index}" in (result.stdout if checks else result.stderr)
            assert "'semkv verify --repair' begins an empty store" in result.output
        assert len(block_files(used, "kv")) == 2
        assert index.exists() == (harm is not Path.unlink)
    call("verify", "--repair", "--cache-dir", str(used))
    assert block_files(used, "kv") == []
    assert "0 damaged" in call("verify", "--cache-dir", str(used))


@pytest.mark.parametrize("harm", [break_whole, break_page, break_table])
def test_a_damaged_catalog_goes_with_a_purge_of_everything_and_is_put_aside_by_a_cache(
    used: Path, harm: Callable[[Path], None]
) -> None:
    harm(used / CATALOG)
    call("purge", "--cache-dir", str(used), "--dry-run")
    assert (used / CATALOG).exists()
    call("purge", "--cache-dir", str(used))
    assert left(used) == []
    assert inspect(used).unread == ()
    SemanticCache(CacheConfig(used, semantic=False)).close()
    harm(used / CATALOG)
    SemanticCache(CacheConfig(used, semantic=False)).close()
    assert left(used) == [f"{CATALOG}.damaged"]


# -- what one tenant has: stats and purge by its name -----------------------------------------------------------------


def store_for_tenants(root: Path) -> None:
    """For each tenant a KV block and a fusion state with each of its salts: its name, that of `semkv run`, and the
    gateway's."""
    fusion = FusionStore.open(root / "fusion", "ns")
    salts = [
        salt
        for tenant in ("alice", "bob")
        for salt in (tenant, EnginePrompt((), tenant).cache_salt, tenant_salt(SECRET, tenant, None))
    ]
    for i, salt in enumerate(salts):
        store_kv(root, i + 9, tenant_tag(salt))
        fusion.save(
            FusionState.from_array(str(salt), np.zeros((2, 3), np.float32)), owner=tenant_tag(salt)
        )
    fusion.close()


def test_stats_of_a_tenant_say_what_it_holds_in_which_stores(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_for_tenants(used)
    answers = SqliteStore(used / CATALOG, clock=lambda: 0.0)  # so that what is stale now can be put
    for tenant in ("alice", "alice", "bob"):
        answers.put(StoredResponse(os.urandom(32).hex(), tenant, "model", b"{}", time.time()))
    answers.put(StoredResponse("stale", "alice", "model", b"{}", 1.0, 2.0, 3.0))
    answers.close()

    def held(tenant: str) -> tuple[list[tuple[str, int]], dict[str, tuple[int, int]]]:
        found = json.loads(call("stats", "--cache-dir", str(used), "--tenant", tenant, "--json"))
        assert found["tenants"][0] == tenant
        entries = [(e["tenant"], e["entries"]) for e in found["entries"]]
        return entries, {s["store"]: (s["items"], s["blocks"]) for s in found["stores"]}

    monkeypatch.delenv("SEMKV_SECRET", raising=False)
    rest = {"media": (1, 0), "answers": (3, 0)}  # what has run out lies there too
    assert held("alice") == ([("alice", 3)], {"kv": (2, 2), "fusion": (2, 2), **rest})
    words = ("stats", "--cache-dir", str(used), "--tenant", "alice")
    assert "set SEMKV_SECRET" in invoke(words).stderr
    monkeypatch.setenv("SEMKV_SECRET", SECRET.decode())
    assert held("alice") == ([("alice", 3)], {"kv": (3, 3), "fusion": (3, 3), **rest})
    assert "set SEMKV_SECRET" not in invoke(words).stderr
    bobs = ([("bob", 3)], {"kv": (3, 3), "fusion": (3, 3), **rest, "answers": (1, 0)})
    assert held("bob") == bobs
    assert held("nobody") == ([], {})
    everything = {s.store: s for s in inspect(used).stores}
    assert {name: s.items for name, s in everything.items()} == {
        "kv": 8,
        "fusion": 7,
        "media": 2,
        "answers": 1,
    }
    alices = {s.store: s.nbytes for s in inspect(used, tenants=["alice"]).stores}
    assert alices["media"] == len(b"the picture of alice")
    assert "kv" not in alices, "nobody said which salts were hers"
    assert "tenant alice" in call(*words)
    counted = call("purge", "--cache-dir", str(used), "--tenant", "alice", "--dry-run")
    assert "3 entries, 3 answers and 7 files" in counted
    assert (
        call("purge", "--cache-dir", str(used), "--tenant", "alice").split()[:7]
        == counted.split()[:7]
    )
    assert held("alice") == ([], {}), "a purge finds what stats find"
    assert held("bob") == bobs


@pytest.mark.parametrize("name", ["[/x] :smile:", "a\x1b[31mb\n", "a' OR 1=1 --"])
def test_a_tenant_may_have_any_name(tmp_path: Path, name: str) -> None:
    with closing(SqliteStore(tmp_path / CATALOG)) as store:
        store.put(StoredResponse("key", name, "model", b"{}", time.time()))
    shown = name.replace("\x1b", "\\x1b").replace("\n", "\\n")
    for words in ((), ("--tenant", name)):
        out = call("stats", "--cache-dir", str(tmp_path), *words)
        assert "\x1b" not in out
        assert f"│ {shown} " in out
    assert f"tenant {shown}:" in out


def test_a_name_that_is_no_text_is_refused(used: Path) -> None:
    assert "UTF-8" in refused("purge", "--cache-dir", str(used), "--tenant", "\udcff")


# -- whose a directory is ---------------------------------------------------------------------------------------------


def test_a_purge_removes_what_semkv_wrote_and_nothing_else(tmp_path: Path) -> None:
    root, fusion, outside = tmp_path / "cache", tmp_path / "fusion", tmp_path / "outside"
    prepare(CacheConfig(root))
    for folder in (root / "kv", root / "fusion", fusion):
        with closing(open_store(folder)) as store:
            assert save(store, 0, 2)
    ours = ["catalog.sqlite.damaged", "media/ab/" + "ab" * 32, "policy.json", "document-reuse.json"]
    ours += [
        "kv/extents/0a/0a11.safetensors",
        f"weights/{'0a' * 32}.json",
        f"weights/{'0a' * 32}.json.0a11.tmp",
    ]
    theirs = ["notes.txt", "secret", "kv/notes.txt", "media/notes.txt", "weights/config.json"]
    theirs += ["thesis/catalog.sqlite.damaged"]
    for name in ours + theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    outside.mkdir()
    (outside / "precious").write_text("x")
    (root / "media" / "cd").symlink_to(outside, target_is_directory=True)
    assert purge(root, dry_run=True).counts["files"] == len(ours) + 2
    assert len(left(root)) == len(ours + theirs) + 2
    with pytest.raises(StoreError, match="media/cd is a link, and nothing behind it is deleted"):
        prepare(CacheConfig(root), purge=True)
    assert left(root) == sorted(theirs)
    (root / "media" / "cd").unlink()
    prepare(CacheConfig(root, fusion_cache_dir=fusion), purge=True)
    assert left(fusion) == []
    assert (outside / "precious").exists()
    purge_directory(root)


def test_a_purge_refuses_a_directory_that_is_not_a_cache(tmp_path: Path) -> None:
    (tmp_path / CATALOG).write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match="holds no semkv cache"):
        prepare(CacheConfig(tmp_path), purge=True)
    with pytest.raises(StoreError, match="holds files that are not semkv's"):
        prepare(CacheConfig(tmp_path))
    assert (tmp_path / CATALOG).read_text(encoding="utf-8") == "mine"
    purge_directory(tmp_path / "none")
    with pytest.raises(StoreError, match="is a file"):
        prepare(CacheConfig(tmp_path / CATALOG))


def test_blocks_below_another_programs_database_are_left_alone(tmp_path: Path) -> None:
    index, photo = (
        tmp_path / "kv" / "index.sqlite",
        tmp_path / "kv" / "extents" / "ab" / "photo.jpg",
    )
    photo.parent.mkdir(parents=True)
    photo.write_text("mine")
    make_foreign(index)
    before = index.read_bytes()
    for command in ("purge", "purge --tenant x", "gc", "verify", "verify --repair"):
        assert invoke([*command.split(), "--cache-dir", str(tmp_path)]).exit_code == EXIT_ERROR, (
            command
        )
    assert (photo.read_text(), index.read_bytes()) == ("mine", before)


@pytest.mark.parametrize("names", [[CATALOG, f"{CATALOG}.lock"], [f"weights/{'0a' * 32}.json"]])
def test_a_directory_that_a_killed_or_an_earlier_semkv_left_is_taken_over(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    prepare(CacheConfig(tmp_path))
    prepare(CacheConfig(tmp_path), purge=True)
    SemanticCache(CacheConfig(tmp_path, semantic=False)).close()
    purge_directory(tmp_path)
    assert left(tmp_path) == []


class OwnStore:
    """A store of a user's own, as an entry point of `semkv.stores` makes it."""

    name = "notes"

    def __init__(self, cache_dir: Path) -> None:
        self.files = cache_dir.with_name("notes")

    def usage(self, tenants: Sequence[str] | None = None) -> Iterator[StoreUse]:
        found = list(self.files.glob("*"))
        if tenants is None and found:
            yield StoreUse(
                store=self.name,
                namespace="",
                items=len(found),
                blocks=0,
                nbytes=sum(file.stat().st_size for file in found),
                oldest=0.0,
                used=0.0,
            )

    def verify(self, *, repair: bool = False) -> Iterator[str]:
        for file in self.files.glob("*"):
            yield "" if file.read_text() == "whole" else f"{file.name} is cut off"
            if repair and file.read_text() != "whole":
                file.unlink()

    def collect(self, before: float) -> int:
        old = [file for file in self.files.glob("*") if file.stat().st_mtime < before]
        for file in old:
            file.unlink()
        return len(old)

    def purge(
        self, *, tenants: Sequence[str] | None = None, tag: str | None = None, dry_run: bool = False
    ) -> int:
        gone = [file for file in self.files.glob("*") if tag in (None, file.name)]
        for file in () if dry_run else gone:
            file.unlink()
        return len(gone)

    def close(self) -> None:
        pass


def test_a_store_of_the_users_own_is_looked_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = tmp_path / "cache"
    notes = tmp_path / "notes"
    notes.mkdir()
    for name, text in {"a": "whole", "b": "who", "c": "whole"}.items():
        (notes / name).write_text(text)
    Catalog(cache_dir / CATALOG).close()
    own = EntryPoint("notes", f"{__name__}:OwnStore", "semkv.stores")
    installed = [own, *entry_points(group="semkv.stores")]
    monkeypatch.setattr(
        "semkv.stores.maintenance.entry_points", lambda group: EntryPoints(installed)
    )
    (use,) = inspect(cache_dir).stores
    assert (use.store, use.items) == ("notes", 3)
    checked = verify(cache_dir, repair=True)
    assert checked.damaged == ["notes: b is cut off"]
    assert checked.counts["notes"] == 3
    assert purge(cache_dir, tag="c", dry_run=True).counts["notes"] == 1
    assert purge(cache_dir, tag="c").counts["notes"] == 1
    assert [file.name for file in notes.iterdir()] == ["a"]
    assert purge(cache_dir).counts["notes"] == 1
    assert not any(notes.iterdir())


def test_answers_without_the_gateway_are_named_and_not_left_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalog(tmp_path / CATALOG).close()
    monkeypatch.setattr("semkv.stores.maintenance.entry_points", lambda group: EntryPoints(()))
    assert inspect(tmp_path).unread == ()
    SqliteStore(tmp_path / CATALOG).close()
    (line,) = inspect(tmp_path).unread
    assert "semkv-gateway is not installed" in line
