"""The vector index: the nearest neighbours within a partition, whatever was added, removed and rebuilt on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from semkv.index import Row, VectorIndex, codes_of

HALF = 1e-3  # what float16 may cost a score


def sizes(index: VectorIndex) -> tuple[int, int, int]:
    """Plain rows, rows in graphs, and those of them that are removed but still take room."""
    homes = index._partitions.values()
    dead = sum(home.gone for home in homes)
    return sum(len(home.rows) for home in homes), sum(home.covered for home in homes) - dead, dead


def settle(index: VectorIndex) -> None:
    """Wait until nothing is being built: the one worker has done what was asked of it before."""
    while index._worker.submit(int).result() or any(
        home.building for home in list(index._partitions.values())
    ):
        pass


def drawn(count: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(count: int, dim: int = 64, seed: int = 0) -> np.ndarray:
    """Groups of near neighbours, as paraphrases are, about directions that are not spread evenly."""
    random = np.random.default_rng(seed)
    centres = drawn(count // 20, dim, seed) * (1 / np.sqrt(np.arange(1, dim + 1)))
    points = centres[random.integers(len(centres), size=count)]
    points += 0.5 * np.linalg.norm(points, axis=1, keepdims=True) * drawn(count, dim, seed + 1)
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def grown() -> Iterator[tuple[VectorIndex, np.ndarray]]:
    """6,000 clustered vectors in one partition, all but the last few in a graph."""
    vectors = clustered(6000)
    index = VectorIndex(64, flat=512)
    index.extend(Row(str(i), "p", v) for i, v in enumerate(vectors))
    settle(index)
    yield index, vectors
    index.close()


def test_graphs_find_what_brute_force_finds(grown: tuple[VectorIndex, np.ndarray]) -> None:
    index, vectors = grown
    flat, graph, _ = sizes(index)
    assert graph > 5000
    assert flat + graph == 6000
    queries = vectors[::20] + 0.05 * drawn(300, 64, seed=5)
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)
    cosines = queries @ vectors.T
    found = [index.search("p", query, 10) for query in queries]
    assert (
        np.mean([n[0].item == str(best) for n, best in zip(found, cosines.argmax(1), strict=True)])
        >= 0.98
    )
    tens = [{str(i) for i in np.argpartition(-row, 10)[:10]} for row in cosines]
    assert (
        np.mean([len({n.item for n in ns} & ten) / 10 for ns, ten in zip(found, tens, strict=True)])
        >= 0.95
    )
    for neighbours, row in zip(found, cosines, strict=True):
        scores = [n.score for n in neighbours]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx([row[int(n.item)] for n in neighbours], abs=HALF)


def test_searches_and_writes_at_once(grown: tuple[VectorIndex, np.ndarray]) -> None:
    """No search finds an item under another's vector; those that stay are found as often as at rest, or nearly."""
    index, vectors = grown
    wrong: list[str] = []
    found: list[bool] = []
    done = threading.Event()

    def search(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not done.is_set() or len(found) < 1000:  # however late a busy machine starts it
            i = int(random.integers(0, 1000))  # these are never removed
            near = index.search("p", vectors[i], 3)
            found.append(bool(near) and near[0].item == str(i))
            if any(
                abs(n.score - float(vectors[int(n.item.lstrip("x"))] @ vectors[i])) > HALF
                for n in near
            ):
                wrong.append(f"{i}: {near}")

    readers = [threading.Thread(target=search, args=(n,)) for n in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(3):
        index.extend(Row("x" * (turn + 1) + str(i), "p", vectors[i]) for i in range(3000, 6000))
        index.remove([str(i) for i in range(1000, 6000) if i % 3 == turn])
        index.remove(["x" * turn + str(i) for i in range(3000, 6000)])
    settle(index)
    done.set()
    for reader in readers:
        reader.join()
    index.close()
    assert wrong == []
    assert np.mean(found) >= 0.98
    assert len(index) == 1000 + 3000


def test_what_is_removed_while_a_graph_is_built_stays_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = clustered(4000)
    index = VectorIndex(64, flat=512)
    removed = {*range(1, 1400), *range(2000, 2400), *range(3000, 3900)}
    grow = VectorIndex._grow

    def slow(*arguments: Any) -> bool:
        index.remove(str(i) for i in removed)  # between the copy of the rows and its publication
        return grow(*arguments)

    monkeypatch.setattr(VectorIndex, "_grow", slow)
    index.extend(Row(str(i), "p", v) for i, v in enumerate(vectors))
    settle(index)
    assert sum(sizes(index)[:2]) == len(index) == 4000 - len(removed)
    for i in range(0, 4000, 7):
        found = index.search("p", vectors[i], 5)
        assert not {int(n.item) for n in found} & removed
        assert len({n.item for n in found}) == len(found) == 5
    index.close()


def test_a_fault_of_the_upkeep_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(VectorIndex, "_grow", short_of_memory)
    vectors = clustered(1000)
    index = VectorIndex(64, flat=512)
    index.extend(Row(str(i), "p", v) for i, v in enumerate(vectors))
    settle(index)
    assert index.search("p", vectors[7])[0].item == "7"
    monkeypatch.undo()
    index.extend([Row("more", "p", vectors[8])])
    settle(index)
    assert sizes(index)[1] > 0


def test_a_purge_of_whole_clusters_hides_nothing_of_those_that_stay() -> None:
    """Most links of a dense cluster's rows lead to each other: what goes with it has no living row beside it."""
    random = np.random.default_rng(1)
    centres = random.normal(size=(20, 64))
    label = random.integers(20, size=8000)
    label[0] = stays = 15

    def about(labels: np.ndarray) -> np.ndarray:
        points = (centres[labels] + 0.25 * random.normal(size=(len(labels), 64))).astype(np.float32)
        return points / np.linalg.norm(points, axis=1, keepdims=True)

    def found(items: list[str], rows: np.ndarray) -> float:
        return float(
            np.mean(
                [
                    [n.item for n in index.search("p", v)] == [i]
                    for i, v in zip(items, rows, strict=True)
                ]
            )
        )

    vectors = about(label)
    index = VectorIndex(64)
    index.extend(Row(str(i), "p", v) for i, v in enumerate(vectors))
    settle(index)
    index.remove([str(i) for i in np.flatnonzero(label < 4)[:1500]])
    settle(index)
    assert sizes(index)[2] > 1000, "removed, and not yet built anew"
    first = np.flatnonzero(label == stays)  # of the first living row
    assert found([str(i) for i in first], vectors[first]) >= 0.97
    new = about(np.full(1100, stays))
    index.extend(Row(f"new {i}", "p", v) for i, v in enumerate(new))
    settle(index)
    assert sizes(index)[0] < 1024
    assert found([f"new {i}" for i in range(1100)], new) >= 0.97
    index.close()


class AgainstBruteForce(RuleBasedStateMachine):
    """Any order of writes across the border between plain rows and graphs, compared with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.index = VectorIndex(4, flat=16)
        self.table: dict[str, tuple[str, np.ndarray]] = {}
        self.made = 0

    @rule(count=st.integers(1, 60), partition=st.sampled_from("ab"))
    def add(self, count: int, partition: str) -> None:
        rows = []
        for vector in drawn(count, 4, seed=self.made):
            self.made += 1
            rows.append(Row(str(self.made), partition, vector))
            self.table[str(self.made)] = (partition, vector)
        self.index.extend(rows)

    @rule(share=st.sampled_from([0.1, 0.5, 1.0]), seed=st.integers(0, 9))
    def remove(self, share: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        gone = [item for item in self.table if random.random() < share]
        self.index.remove(gone)
        for item in gone:
            del self.table[item]

    @rule()
    def settle(self) -> None:
        settle(self.index)

    @rule()
    def nothing_removed_is_left_in_memory(self) -> None:
        settle(self.index)
        for name, part in self.index._partitions.items():
            there = np.stack([vector for home, vector in self.table.values() if home == name])
            stored = {row.tobytes() for row in there.astype(np.float16)} | {bytes(8)}
            assert {row.astype(np.float16).tobytes() for row in part.rows} <= stored
            if part.graph is not None:
                # FAISS's own encoding: it rounds one number in some 20,000 differently than numpy.
                encoded = part.graph.index.storage.sa_encode(there)
                known = {row.tobytes() for row in encoded} | {bytes(8)}
                assert {row.tobytes() for row in codes_of(part.graph.index)} <= known

    @invariant()
    def the_same_as_the_table(self) -> None:
        assert len(self.index) == len(self.table)
        query = drawn(1, 4, seed=self.made + 1)[0]
        for partition in "ab":
            rows = {
                item: float(vector @ query)
                for item, (name, vector) in self.table.items()
                if name == partition
            }
            found = self.index.search(partition, query, 40)
            assert len({n.item for n in found}) == len(found)
            assert len(found) >= 0.9 * min(40, len(rows))
            for neighbour in found:
                assert neighbour.score == pytest.approx(rows[neighbour.item], abs=HALF)
            if rows:
                assert found[0].score >= max(rows.values()) - 0.05
        for item, (_, vector) in list(self.table.items())[:3]:
            assert self.index.score(item, vector) == pytest.approx(1.0, abs=HALF)

    def teardown(self) -> None:
        self.index.close()


TestAgainstBruteForce = AgainstBruteForce.TestCase
TestAgainstBruteForce.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
