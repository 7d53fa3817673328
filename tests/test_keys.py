"""Keys: two different things never share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv.keys import digest, weights_digest


def test_a_digest_tells_where_a_part_ends() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]
    assert len({digest(*p) for p in parts}) == len(parts)
    assert digest("é") == digest("é".encode())


def folder(root: Path, **files: str) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def test_a_checkpoint_is_its_files_names_and_bytes(tmp_path: Path) -> None:
    first = weights_digest(folder(tmp_path / "1", a="1", b="2"))
    assert weights_digest(folder(tmp_path / "2", a="1", b="2")) == first
    others = [
        folder(tmp_path / "3", a="1b\0002"),
        folder(tmp_path / "4", a="2", b="1"),
        folder(tmp_path / "5", a="1", c="2"),
        folder(tmp_path / "6", a="12", b=""),
    ]
    assert len({first, *map(weights_digest, others)}) == 5


@pytest.mark.parametrize("name", ["README.md", "training.jsonl", ".hidden"])
def test_cards_and_logs_are_no_weights(tmp_path: Path, name: str) -> None:
    model = folder(tmp_path / "m", a="1")
    before = weights_digest(model)
    (model / name).write_text("x")
    assert weights_digest(model) == before


def test_what_a_link_leads_to_is_read_once(tmp_path: Path) -> None:
    model, shared = folder(tmp_path / "m", a="1"), folder(tmp_path / "shared", w="1")
    (model / "part").symlink_to(shared)
    (shared / "up").symlink_to(model)
    before = weights_digest(model)
    (shared / "w").write_text("2")
    assert weights_digest(model) != before
