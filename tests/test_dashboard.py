"""The parts of the operators' side: traffic by time, limits, ids of hits."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_dashboard.history import WINDOWS, History
from semkv_dashboard.hit_ids import HitIds, WrongHit
from semkv_dashboard.limits import Buckets, site_of

HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)


def test_whoever_comes_often_has_a_row_however_many_others_there_are(tmp_path: Path) -> None:
    history = History(tmp_path)
    for start in range(0, 600, 20):
        for number in range(start, start + 20):
            history.add("tenant hit", f"once {number}")
        for _ in range(3 if start >= 300 else 0):
            history.add("tenant hit", "late and often")
        history.write()
    for window in WINDOWS:
        counts = history.view(window)["sums"]["tenant hit"]
        assert len(counts) <= 101
        assert counts["late and often"] == 45
        assert sum(counts.values()) == 645
    history.close()


def test_two_processes_add_up_and_old_bins_go(tmp_path: Path) -> None:
    first, second = History(tmp_path), History(tmp_path)
    for history in (first, second):
        history.add("tier", "exact", 5)
    second.write()
    assert first.view("1 hour")["sums"] == {"tier": {"exact": 10}}
    first.clock = lambda: time.time() + 7200
    first.add("tier", "miss")
    assert first.view("1 hour")["sums"] == {"tier": {"miss": 1}}
    assert first.view("24 hours")["sums"] == {"tier": {"exact": 10, "miss": 1}}
    first.close()
    second.close()


def test_what_the_file_does_not_take_waits(tmp_path: Path) -> None:
    faults = Counter[str]()
    history = History(tmp_path / "folder", lambda: faults.update(["history"]))
    (tmp_path / "folder").write_text("no folder")
    history.add("tier", "exact")
    assert history.view("1 hour")["sums"] == {}
    assert faults["history"] > 0
    (tmp_path / "folder").unlink()
    assert history.view("1 hour")["sums"] == {"tier": {"exact": 1}}
    history.close()


def test_a_bucket_fills_again() -> None:
    now = 0.0
    bucket = Buckets(3, 2.0, lambda: now)
    for _ in range(3):
        assert not bucket.wait("me")
        bucket.take("me")
    assert bucket.wait("me") == 2.0
    assert not bucket.wait("you")
    now = 2.5
    assert not bucket.wait("me")
    bucket.take("me")
    assert bucket.wait("me") == 1.5


def test_a_site_has_many_addresses() -> None:
    assert site_of("2001:db8:1:2:3::4") == site_of("2001:db8:1:2::9") != site_of("2001:db8:1:3::4")
    assert site_of("192.0.2.1") != site_of("192.0.2.2")
    assert site_of("::ffff:192.0.2.1") != site_of("::ffff:192.0.2.2")
    assert site_of("no address") == "no address"


@given(HEX, HEX, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1), st.text())
@settings(max_examples=100, deadline=None)
def test_an_id_says_what_it_was_made_of_to_its_tenant_alone(
    key: str, pair: str, near: bool, similar: bool, created: int, other: str
) -> None:
    ids = HitIds(b"secret")
    hit = WrongHit(created, key, pair[:32] if near else "", pair if near and similar else "")
    number = ids.of("tenant", hit)
    assert ids.read(number, "tenant") == ids.read(number, None) == hit
    assert ids.read(number, "another") is None
    assert HitIds(b"other").read(number, "tenant") is None
    if other != number:
        assert ids.read(other.encode("ascii", "replace").decode(), "tenant") is None
