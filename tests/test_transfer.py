"""Copies between paged caches and host rows, and when a load is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from semkv.connectors.break_even import BreakEven


def test_blocks_go_out_and_come_back_bit_by_bit() -> None:
    torch = pytest.importorskip("torch")
    from semkv.connectors.kv_transfer import Job, PagedTransfer

    def caches() -> dict[str, object]:
        permuted = torch.randn(12, 4, 2, 8, dtype=torch.bfloat16).permute(0, 2, 1, 3)
        halves = torch.randn(24, 3, dtype=torch.float32)  # two of the kernel's blocks in one of the scheduler's
        return {"a": permuted, "b": halves}

    here, there = caches(), caches()
    source, target = (PagedTransfer(c, 12, 16) for c in (here, there))
    assert not source.asynchronous
    rows = np.empty((5, source.layout.row_bytes), np.uint8)
    (landing,) = source.copy_out([Job([rows[:2], rows[2:]], [3, 1, 7, 0, 11])])
    assert landing.done()
    assert np.array_equal(rows, source.gather([3, 1, 7, 0, 11]))
    assert target.copy_in([Job([rows[:4], rows[4:]], [2, 4, 6, 8, 10])])[0].done()
    for name, ratio in (("a", 1), ("b", 2)):
        for old, new in zip([3, 1, 7, 0, 11], [2, 4, 6, 8, 10], strict=True):
            assert torch.equal(
                here[name][old * ratio : old * ratio + ratio], there[name][new * ratio : new * ratio + ratio]
            )  # type: ignore[index]


def test_threads_of_either_mode_use_one_staging_tensor() -> None:
    """vLLM's threads are in PyTorch's inference mode; those that bring what was read late are not."""
    torch = pytest.importorskip("torch")
    from semkv.connectors.kv_transfer import Job, PagedTransfer

    cache = {"a": torch.zeros(4, 16, dtype=torch.uint8)}
    transfer, row = PagedTransfer(cache, 4, 16), np.arange(16, dtype=np.uint8)[None]
    with torch.inference_mode():
        transfer.copy_in([Job([row], [1])])
        transfer.gather([1])
    transfer.copy_in([Job([row], [2])])
    assert np.array_equal(transfer.gather([2, 1]), np.concatenate([row, row]))


def test_rows_are_grouped_by_the_staging_size() -> None:
    pytest.importorskip("torch")
    from semkv.connectors.kv_transfer import Job, _pieces

    jobs = [
        Job([np.zeros((n, 1), np.uint8) for n in sizes], range(10 * sum(sizes), 11 * sum(sizes)))
        for sizes in ((3, 4), (1,))
    ]
    assert [([len(part) for part in piece.rows], list(piece.block_ids)) for piece in _pieces(jobs, 5)] == [
        ([3, 2], [70, 71, 72, 73, 74]),
        ([2, 1], [75, 76, 10]),
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
