"""Graphs on disk: a start that need not build them, and no item on a row of another vector, whatever happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cache_helpers import WrittenEncoder
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.index import IndexSizes, Row, VectorIndex
from semkv.keys import namespace_key
from semkv.stores.cachedir import prepare, purge_directory
from semkv.stores.catalog import Catalog
from semkv.stores.database import Database
from semkv.stores.kept_graphs import (
    KeptGraphs,
    damage_of,
    folder_of,
    kept_beside,
    kept_files,
    write_graph,
)
from semkv.stores.maintenance import collect, inspect, purge_entries, verify
from semkv.types import Namespace, Plan, Request, ReuseReport, TextSegment
from test_index import HALF, AgainstBruteForce, clustered

COUNT, DIM = 3000, 64


class Disk:
    """A folder of graphs and what was told of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.purge: str | None = ""  # the catalog's last one
        self.faults: list[Exception] = []

    def files(self, layer: str = "layer") -> KeptGraphs:
        return KeptGraphs(self.folder, layer, lambda: self.purge, self.faults.append)

    def index(self, layer: str = "layer", dim: int = DIM) -> VectorIndex:
        return VectorIndex(dim, flat=512, kept=self.files(layer))

    def opened(self, vectors: np.ndarray, items: Sequence[str] = (), layer: str = "layer") -> VectorIndex:
        """An index that was given vectors in pages, as a cache does when it starts."""
        index = self.index(layer, vectors.shape[1])
        items = items or [str(i) for i in range(len(vectors))]
        for start in range(0, len(items), 700):
            page = zip(items[start : start + 700], vectors[start : start + 700], strict=False)
            index.extend(Row(item, "p", vector, "ns") for item, vector in page)
        index.loaded()
        return index

    def filled(self, vectors: np.ndarray) -> None:
        """Graphs of vectors, kept."""
        index = self.opened(vectors)
        assert index.settle()
        index.close()
        assert kept_files(self.folder)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "graphs")


def test_the_next_start_builds_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clustered(COUNT)
    disk.filled(vectors)
    monkeypatch.setattr(VectorIndex, "_build", lambda *_: pytest.fail("a graph was built"))
    index = disk.opened(vectors)
    sizes = index.sizes()
    assert (sizes.flat < 512, sizes.flat + sizes.graph, sizes.dead) == (True, COUNT, 0)
    assert np.mean([index.search("p", v)[0].item == str(i) for i, v in enumerate(vectors)]) >= 0.98
    assert all(index.score(str(i), v) == pytest.approx(1.0, abs=HALF) for i, v in enumerate(vectors))
    index.close()
    assert disk.faults == []


def flipped(where: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[where if isinstance(where, int) else int(where * len(data))] ^= 4
        file.write_bytes(data)

    return damage


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def foldered(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [*map(flipped, (0, 20, 0.001, 0.5, 0.9, -1)), piped, linked, foldered])
def test_a_damaged_file_is_counted_and_built_anew(disk: Disk, damage: Callable[[Path], None]) -> None:
    vectors = clustered(COUNT)
    disk.filled(vectors)
    victim = kept_files(disk.folder)[0]
    damage(victim)
    assert damage_of(victim)
    index = disk.opened(vectors)
    assert len(disk.faults) == 1
    assert index.settle()
    assert np.mean([index.search("p", v)[0].item == str(i) for i, v in enumerate(vectors)]) >= 0.98
    index.close()
    if victim.is_file():
        assert [damage_of(file) for file in kept_files(disk.folder)] == [""]


def test_a_graph_of_another_layer_or_dimension_is_refused(disk: Disk) -> None:
    disk.filled(clustered(COUNT))
    (file,) = kept_files(disk.folder)
    disk.opened(clustered(COUNT, 32)).close()
    disk.filled(clustered(COUNT))
    disk.files("another").save("ns", "p", lambda write: write(b"something"))
    (theirs,) = (other for other in kept_files(disk.folder) if other != file)
    theirs.replace(file)
    disk.opened(clustered(COUNT)).close()
    assert [str(fault).split(": ")[-1] for fault in disk.faults] == [
        "a graph of another kind, dimension or size",
        "of another format, layer or partition",
    ]


@pytest.mark.parametrize("where", ["entry_point", "neighbors"])
def test_a_forged_graph_with_a_right_checksum_is_refused(disk: Disk, where: str) -> None:
    """Whoever may write the folder can make any file; a link that leads out of the graph must not be followed."""
    vectors = clustered(COUNT)
    disk.filled(vectors)
    index = disk.opened(vectors)
    graph = index._partitions["p"].graph
    assert graph is not None
    links = graph.index.hnsw
    if where == "entry_point":
        links.entry_point = 10**8
    else:
        ends = faiss.vector_to_array(links.neighbors)
        faiss.copy_array_to_vector(np.where(ends >= 0, 10**9, ends).astype(ends.dtype), links.neighbors)
    disk.files().save("ns", "p", lambda write: write_graph(graph.index, graph.items, write))
    again = disk.opened(vectors)
    assert len(disk.faults) == 1
    assert again.settle()
    assert again.search("p", vectors[9])[0].item == "9"
    again.close()


def test_what_a_purge_took_out_of_a_graph_costs_no_build_at_the_next_start(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clustered(COUNT)
    disk.filled(vectors)
    index = disk.opened(vectors)
    index.remove(["5"])
    index.apply_purges("")
    assert index.settle()
    assert kept_files(disk.folder), "before anybody closes"
    monkeypatch.setattr(VectorIndex, "_build", lambda *_: pytest.fail("a graph was built"))
    again = disk.opened(np.delete(vectors, 5, axis=0), [str(i) for i in range(COUNT) if i != 5])
    assert again.sizes().flat < 512
    again.close()
    index.close()
    assert disk.faults == []


def test_files_of_partitions_that_are_gone_are_deleted_at_the_start(disk: Disk) -> None:
    disk.filled(clustered(COUNT))
    other = disk.opened(clustered(COUNT), layer="another")
    other.close()
    both = len(kept_files(disk.folder))
    index = disk.index()
    index.loaded()
    index.close()
    assert len(kept_files(disk.folder)) == both - 1, "another layer's stay"
    late = disk.index()
    late.loaded()
    late.extend(Row(str(i), "p", v, "ns") for i, v in enumerate(clustered(COUNT)))
    assert late.settle()
    late.close()
    assert len(kept_files(disk.folder)) == both


def test_a_disk_that_takes_nothing_costs_no_answer(disk: Disk) -> None:
    disk.folder.write_text("no folder")
    vectors = clustered(COUNT)
    index = disk.opened(vectors)
    assert index.settle()
    assert index.search("p", vectors[3])[0].item == "3"
    index.close()
    assert disk.faults
    assert disk.folder.read_text() == "no folder"


KILLED = """
import sys, threading
from pathlib import Path
sys.path[:0] = {path!r}
from test_kept_graphs import Disk, clustered
from semkv.index import Row
vectors = clustered(9000)
disk = Disk(Path({folder!r}))
index = disk.opened(vectors[:2000])
index.settle()
print("ready", flush=True)
for start in range(2000, 9000, 250):
    index.remove(str(i) for i in range(start - 2000, start - 1800))
    index.extend(Row(str(i), "p", vectors[i], "ns") for i in range(start, start + 250))
    index.settle()
    for partition in index._partitions.values():
        index._keep(partition)
"""


def test_killed_at_any_moment_the_next_start_is_right(disk: Disk) -> None:
    vectors = clustered(9000)
    random = Random(3)
    sizes = []
    for _ in range(6):
        program = KILLED.format(path=[str(Path(__file__).parent)], folder=str(disk.folder))
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(random.uniform(0.05, 1.2))
            child.send_signal(signal.SIGKILL)
        assert [damage_of(file) for file in kept_files(disk.folder)] == [""] * len(kept_files(disk.folder))
        first = random.randrange(0, 1000)  # the catalog is not where the graphs are: some rows are gone, some new
        there = list(range(first, first + 6000))
        index = disk.opened(vectors[there], [str(i) for i in there])
        sizes.append(index.sizes().graph)
        assert len(index) == len(there)
        for i in range(0, 9000, 17):
            for near in index.search("p", vectors[i], 3):
                assert first <= int(near.item) < first + 6000
                assert near.score == pytest.approx(float(vectors[int(near.item)] @ vectors[i]), abs=HALF)
    assert disk.faults == []
    assert max(sizes) > 500, "graphs were taken up"


class WithRestarts(AgainstBruteForce):
    """Any order of writes and restarts; what a restart finds may have changed since."""

    def __init__(self) -> None:
        super().__init__()
        from tempfile import TemporaryDirectory

        self.folder = TemporaryDirectory()
        self.faults: list[Exception] = []
        self.open()

    def open(self) -> None:
        folder = Path(self.folder.name) / "graphs"
        kept = KeptGraphs(folder, "layer", lambda: "", self.faults.append)
        self.index = VectorIndex(4, flat=16, kept=kept)
        items = list(self.table)
        for start in range(0, len(items), 50):
            self.index.extend(Row(item, *self.table[item], "ns") for item in items[start : start + 50])
        self.index.loaded()

    @rule(orderly=st.booleans(), lost=st.sampled_from([0, 0.1, 0.5]), turned=st.sampled_from([0, 0.1, 1.0]))
    def restart(self, orderly: bool, lost: float, turned: float) -> None:
        old = self.index
        if orderly:
            old.close()
        random = np.random.default_rng(len(self.table))
        self.table = {item: row for item, row in self.table.items() if random.random() >= lost}
        for item, (partition, vector) in self.table.items():
            if random.random() < turned / 2:
                self.table[item] = (partition, np.roll(vector, 1))
        self.open()
        if not orderly:
            old.close()  # another process, which keeps its graphs later
        assert self.faults == []

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestWithRestarts = WithRestarts.TestCase
TestWithRestarts.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def ask(number: int, tenant: str) -> Request:
    text = f"What color is {tenant}'s car with number {number}?"
    return Request(str(number), Namespace(tenant, "m"), (TextSegment(text),))


def record(cache: SemanticCache, tenant: str, numbers: Iterable[int], tags: Sequence[str] = ()) -> None:
    for number in numbers:
        request = ask(number, tenant)
        cache.add_observation(ReuseReport(request, Plan(request.segments), {}), "red", tags=tags)


def opened(folder: Path, fingerprint: str = "one") -> SemanticCache:
    encoder = WrittenEncoder()
    encoder.fingerprint = fingerprint
    return SemanticCache(CacheConfig(folder), text_encoder=encoder)


def index_of(cache: SemanticCache) -> VectorIndex:
    """Its index of texts, once nothing is left to do there."""
    (index,) = cache._matching._similar.indexes()
    assert index.settle()
    return index


def test_a_cache_keeps_the_graphs_of_each_tenant_and_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as cache:
        record(cache, "alice", range(1100))
        record(cache, "bob", range(1100))
        index_of(cache)
    graphs = kept_files(folder / "graphs")
    assert len({file.parent for file in graphs}) == len(graphs) == 2
    (use,) = [use for use in inspect(folder).stores if use.store == "graphs"]
    assert (use.items, use.nbytes) == (2, sum(file.stat().st_size for file in graphs))
    assert verify(folder).checked == 2

    with monkeypatch.context() as still:
        still.setattr(VectorIndex, "_build", lambda *_: pytest.fail("a graph was built"))
        with opened(folder) as cache:
            (index,) = cache._matching._similar.indexes()
            assert index.sizes() == IndexSizes(2200 - index.sizes().graph, index.sizes().graph, 0)
            assert index.sizes().graph > 2000
            assert cache.stats().faults == {}
    graphs[0].write_bytes(graphs[0].read_bytes()[:-1])
    assert len(verify(folder).damaged) == 1
    with opened(folder) as cache:
        assert cache.stats().faults == {"graph": 1}
        index_of(cache)
    assert verify(folder, repair=True).damaged == ()

    with opened(folder, "another"):
        pass
    assert len(kept_files(folder / "graphs")) == 2, "the other encoder may come back"
    assert purge_entries(folder, ["alice"], None, dry_run=True).entries == 1100
    assert len(kept_files(folder / "graphs")) == 2
    purge_entries(folder, ["alice"], None, dry_run=False)
    assert len(kept_files(folder / "graphs")) == 1
    assert collect(folder).graphs == 0
    with opened(folder) as cache:
        cache.invalidate(namespace=Namespace("bob", "m"))
        assert kept_files(folder / "graphs") == []


@pytest.mark.parametrize("moment", ["before", "while it is written", "before it has its name", "after"])
def test_what_was_purged_is_not_written_back(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is open, with rows that no file has yet, is purged from outside and then closed."""
    folder = tmp_path / "cache"
    config = CacheConfig(folder)
    prepare(config)
    real, catalog = Path.replace, folder / "catalog.sqlite"
    with opened(folder) as cache:
        record(cache, "alice", range(1100))
        index = index_of(cache)
        (graph,) = kept_files(folder / "graphs")
        if moment == "before":
            purge_directory(folder)
        for partition in index._partitions.values():
            partition.kept = 0

        def late(part: Path, file: Path) -> Path:
            if moment == "while it is written":
                purge_directory(folder)
            elif moment == "before it has its name":  # the purge has looked, and did not see it
                catalog.unlink()
                graph.unlink()
            return real(part, file)

        monkeypatch.setattr(Path, "replace", late)
    monkeypatch.undo()
    if moment == "after":
        purge_directory(folder)
    assert kept_files(folder / "graphs") == []


def test_another_catalog_gets_no_graphs_of_the_one_before(disk: Disk, tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        first = kept_beside(catalog, "layer", disk.faults.append)
        catalog.path.rename(tmp_path / "held")  # as one that is open
        with closing(Catalog(tmp_path / "catalog.sqlite")) as another:
            second = kept_beside(another, "layer", disk.faults.append)
            second.save("ns", "p", lambda write: write(b"new"))
            first.save("ns", "p", lambda write: write(b"purged"))
    assert bytes(disk.files().read("p") or b"") == b"new"
    assert disk.faults == []


def test_a_graph_written_when_a_purge_has_looked_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    prepare(CacheConfig(folder))
    with closing(Catalog(folder / "catalog.sqlite")) as catalog:
        files = kept_beside(catalog, "layer", lambda error: pytest.fail(str(error)))
        real = Database.empty

        def empty(database: Database) -> bool:
            files.save("ns", "p", lambda write: write(b"x"))
            return real(database)

        monkeypatch.setattr(Database, "empty", empty)
        purge_directory(folder)
    assert kept_files(folder / "graphs") == []


def test_a_purge_by_tag_takes_the_graphs_in_which_its_vectors_are(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as cache:
        record(cache, "alice", range(1100))
        record(cache, "bob", range(1100))
        record(cache, "bob", [5000], tags=("secret",))
        index_of(cache)
    graphs = kept_files(folder / "graphs")
    purge_entries(folder, None, "secret", dry_run=True)
    assert kept_files(folder / "graphs") == graphs
    assert purge_entries(folder, None, "secret", dry_run=False).entries == 1
    (left,) = kept_files(folder / "graphs")
    assert left.parent.name == folder_of(namespace_key(Namespace("alice", "m")))
    with opened(folder) as cache:
        index_of(cache)
    assert kept_files(folder / "graphs") == graphs


def test_gc_deletes_graphs_of_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as cache:
        record(cache, "alice", range(3))
    files = KeptGraphs(folder / "graphs", "layer", lambda: "", lambda error: pytest.fail(str(error)))
    files.save(namespace_key(Namespace("alice", "m")), "p", lambda write: write(b"x"))
    files.save(namespace_key(Namespace("bob", "m")), "p", lambda write: write(b"x"))
    place = folder / "graphs" / folder_of(namespace_key(Namespace("alice", "m")))
    for part in ("old.tmp", "young.tmp"):
        (place / part).write_bytes(b"half")
    os.utime(place / "old.tmp", (1, 1))
    collected = collect(folder)
    assert (collected.graphs, collected.strays) == (1, 1)
    assert sorted(path.suffix for path in place.iterdir()) == [".graph", ".tmp"]
    assert len(kept_files(folder / "graphs")) == 1
