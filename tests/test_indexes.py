"""The vector index: exact neighbours, within a partition, also after removals."""

from __future__ import annotations

import numpy as np
import pytest

from semkv.indexes.faiss import FlatIndex, Row


def unit(*numbers: float) -> np.ndarray:
    vector = np.array(numbers, dtype=np.float32)
    return vector / np.linalg.norm(vector)


def filled(count: int, partitions: int = 1, dim: int = 8) -> tuple[FlatIndex, np.ndarray]:
    vectors = np.random.default_rng(0).normal(size=(count, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = FlatIndex(dim)
    index.extend(Row(str(i), f"p{i % partitions}", v) for i, v in enumerate(vectors))
    return index, vectors


def test_the_nearest_come_first_and_equal_brute_force() -> None:
    index, vectors = filled(50)
    query = unit(*range(1, 9))
    expected = np.argsort(-(vectors @ query))[:5]
    found = index.search("p0", query, 5)
    assert [int(n.item) for n in found] == list(expected)
    assert found[0].score == pytest.approx(float(vectors[expected[0]] @ query), abs=1e-5)


def test_a_partition_sees_only_its_own() -> None:
    index, vectors = filled(40, partitions=4)
    for i, vector in enumerate(vectors):
        assert index.search(f"p{i % 4}", vector, 1)[0].item == str(i)
        assert all(int(n.item) % 4 == (i + 1) % 4 for n in index.search(f"p{(i + 1) % 4}", vector, 3))
    assert index.search("nobody", vectors[0]) == []


def test_removed_items_are_gone_and_the_rest_stays_right() -> None:
    index, vectors = filled(60, partitions=3)
    gone = {str(i) for i in range(0, 60, 2)}
    index.remove([*gone, "unknown"])
    assert len(index) == 30
    for i, vector in enumerate(vectors):
        best = index.search(f"p{i % 3}", vector, 1)[0]
        assert (best.item == str(i)) is (str(i) not in gone)
        score = index.score(str(i), vector)
        assert score is None if str(i) in gone else score == pytest.approx(1.0, abs=1e-5)
    index.remove([str(i) for i in range(60)])
    assert len(index) == 0
    assert index.search("p0", vectors[0]) == []


def test_an_item_keeps_its_first_vector() -> None:
    index = FlatIndex(2)
    index.extend([Row("a", "p", unit(1, 0)), Row("a", "p", unit(0, 1))])
    assert len(index) == 1
    assert index.search("p", unit(1, 0))[0].score == pytest.approx(1.0)


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="dimension 8"):
        FlatIndex(8).extend([Row("a", "p", unit(1, 0))])
