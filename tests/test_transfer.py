"""Copies between paged caches and host rows, and when a load is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from semkv.connectors.break_even import BreakEven


def test_blocks_go_out_and_come_back_bit_by_bit() -> None:
    torch = pytest.importorskip("torch")
    from semkv.connectors.kv_transfer import PagedTransfer

    def caches() -> dict[str, object]:
        permuted = torch.randn(12, 4, 2, 8, dtype=torch.bfloat16).permute(0, 2, 1, 3)
        halves = torch.randn(24, 3, dtype=torch.float32)  # two of the kernel's blocks in one of the scheduler's
        return {"a": permuted, "b": halves}

    here, there = caches(), caches()
    source, target = (PagedTransfer(c, 12, 16) for c in (here, there))
    assert not source.asynchronous
    rows = source.host_memory(5 * source.layout.row_bytes).reshape(5, -1)
    landing = source.copy_out([3, 1, 7, 0, 11], [rows[:2], rows[2:]])
    assert landing.done()
    assert np.array_equal(rows, source.gather([3, 1, 7, 0, 11]))
    assert target.copy_in([rows[:4], rows[4:]], [2, 4, 6, 8, 10]).done()
    for name, ratio in (("a", 1), ("b", 2)):
        for old, new in zip([3, 1, 7, 0, 11], [2, 4, 6, 8, 10], strict=True):
            assert torch.equal(
                here[name][old * ratio : old * ratio + ratio], there[name][new * ratio : new * ratio + ratio]
            )  # type: ignore[index]


def test_rows_are_grouped_by_the_staging_size() -> None:
    pytest.importorskip("torch")
    from semkv.connectors.kv_transfer import _pieces

    rows = [np.zeros((n, 1), np.uint8) for n in (3, 4, 1)]
    assert [[(at, len(part)) for at, part in group] for group in _pieces(rows, 5)] == [
        [(0, 3), (3, 2)],
        [(5, 2), (7, 1)],
    ]


def test_a_load_slower_than_computing_is_not_done() -> None:
    gate = BreakEven()
    assert gate.worth(1000, 1 << 20, 1 << 20)  # nothing is known
    for _ in range(4):
        gate.prefill.measured(1000, 0.01)
        gate.host.measured(1 << 20, 0.001)
        gate.disk.measured(1 << 20, 0.02)
    assert gate.worth(1000, 1 << 20, 0)
    assert not gate.worth(1000, 1 << 20, 1 << 20)
    assert gate.worth(100_000, 1 << 27, 1 << 27)  # of another size nothing is known
    assert sum(gate.worth(1000, 1 << 20, 1 << 20) for _ in range(64)) == 2  # to measure again
    for _ in range(20):
        gate.disk.measured(1 << 20, 0.002)
    assert gate.worth(1000, 1 << 20, 1 << 20)
