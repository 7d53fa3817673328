"""export and import: what a gateway has goes to another directory, and serves there."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gateway_helpers import ADMIN, Pair, wait_until
from maintenance_helpers import call, make_used, refused
from semkv.stores.maintenance import inspect


def test_an_imported_cache_answers_at_another_gateway(tmp_path: Path) -> None:
    file = tmp_path / "cache.tar"
    own_secret = {"SEMKV_ADMIN_KEY": ADMIN}
    with Pair(tmp_path / "old", semantic=True, environment=own_secret) as old:
        assert old.post("How tall is the Eiffel tower in Paris?").headers["x-semkv"] == "miss"
        wait_until(lambda: old.metric("semkv_semantic_entries") == 1)
        call("export", str(file), "--cache-dir", str(tmp_path / "old"))  # it runs meanwhile
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    call("import", str(file), "--cache-dir", str(tmp_path / "new"))
    with Pair(tmp_path / "new", semantic=True, environment=own_secret) as new:
        assert (
            new.post("How tall is the Eiffel tower in Paris?")
            .headers["x-semkv"]
            .startswith("hit tier=exact")
        )
        near = new.post("how tall is the  Eiffel tower in Paris?")
        assert near.headers["x-semkv"].startswith("hit tier=text:normalised")


def test_entries_and_pictures_go_along_and_what_cannot_go_is_said(tmp_path: Path) -> None:
    used, new, file = make_used(tmp_path), tmp_path / "new", tmp_path / "cache.tar"
    empty = tmp_path / "empty"
    assert "nothing to export" in refused("export", str(file), "--cache-dir", str(empty))
    assert "No such file or directory" in refused(
        "export", str(tmp_path / "no" / "x.tar"), "--cache-dir", str(used)
    )
    call("export", str(file), "--cache-dir", str(used))
    assert "is there already" in refused("export", str(file), "--cache-dir", str(used))
    assert "is not empty" in refused("import", str(file), "--cache-dir", str(used))
    for length in (100, 5000, file.stat().st_size // 2):
        (tmp_path / "cut.tar").write_bytes(file.read_bytes()[:length])
        assert refused("import", str(tmp_path / "cut.tar"), "--cache-dir", str(empty))
        assert not list(empty.iterdir())
    assert refused("import", str(tmp_path / "none.tar"), "--cache-dir", str(empty))
    new.mkdir()  # an empty one will do
    call("import", str(file), "--cache-dir", str(new))
    after = inspect(new)
    assert after.entries == inspect(used).entries
    assert [s.items for s in after.stores if s.store == "media"] == [2]
    assert {path.stat().st_mode & 0o777 for path in new.iterdir()} == {0o700, 0o600}
    assert not list(tmp_path.rglob(".semkv-*"))
    (used / "secret").symlink_to(file)
    assert "is a link" in refused("export", str(tmp_path / "linked.tar"), "--cache-dir", str(used))
    assert not (tmp_path / "linked.tar").exists()


NAMES = ("../evil", "/etc/evil", "media/../../evil", "media/ab/c/d", "x", "kv/files/aa/b")
SPARSE = {"major": "1", "minor": "0", "name": "media/ab/x", "realsize": str(1 << 40)}


@pytest.mark.parametrize(
    ("said", "mode", "about"),
    [
        *(("is nothing that export writes", "w", {"name": name}) for name in NAMES),
        (
            "is nothing that export writes",
            "w",
            {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        ),
        (
            "is nothing",
            "w",
            {"pax_headers": {f"GNU.sparse.{name}": value for name, value in SPARSE.items()}},
        ),
        ("null byte", "w", {"pax_headers": {"path": "media/ab/x\0y"}}),
        ("compressed", "w:gz", {}),  # a small one may fill a disk
    ],
)
def test_an_archive_of_somebody_else_writes_nothing(
    tmp_path: Path, said: str, mode: str, about: dict[str, Any]
) -> None:
    archive, member = tmp_path / "evil.tar", tarfile.TarInfo("media/ab/x")
    for name, value in about.items():
        setattr(member, name, value)
    content = b"1\n0\n1\n".ljust(1024, b"\0") if member.isreg() else b""
    member.size = len(content)
    with tarfile.open(archive, mode, format=tarfile.PAX_FORMAT) as out:  # type: ignore[call-overload]
        out.addfile(member, io.BytesIO(content))
    told = refused("import", str(archive), "--cache-dir", str(tmp_path / "d"))
    assert said in told
    assert "no export of semkv" not in told, "it was not even begun"
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [archive]
