"""A vector index of your own: all vectors of a partition in one numpy matrix.

cache = SemanticCache(config, index=NumpyIndex)
"""

import threading
from collections.abc import Iterable

import numpy as np

from semkv.index import Neighbour, Row


class NumpyIndex:
    """Unit vectors by partition and item. ``dim`` is their length."""

    def __init__(self, dim: int) -> None:
        self._rows: dict[str, dict[str, np.ndarray]] = {}
        self._partition: dict[str, str] = {}
        self._lock = threading.Lock()

    def extend(self, rows: Iterable[Row]) -> None:
        with self._lock:
            for row in rows:
                self._rows.setdefault(row.partition, {})[row.item] = row.vector
                self._partition[row.item] = row.partition

    def remove(self, items: Iterable[str]) -> None:
        with self._lock:
            for item in items:
                del self._rows[self._partition.pop(item)][item]

    def search(self, partition: str, vector: np.ndarray, k: int = 1) -> list[Neighbour]:
        with self._lock:
            rows = dict(self._rows.get(partition, {}))
        scores = np.stack([*rows.values()]) @ vector if rows else np.empty(0)
        return [Neighbour([*rows][i], float(scores[i])) for i in np.argsort(-scores)[:k]]

    def score(self, item: str, vector: np.ndarray) -> float | None:
        with self._lock:
            partition = self._partition.get(item)
            return None if partition is None else float(self._rows[partition][item] @ vector)
