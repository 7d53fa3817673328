"""Directories that share a bucket: a folder, and a real S3 server."""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import LocalStore, from_url

from block_helpers import LAYOUT, ROW, keys, open_store, right, served, value
from bucket_helpers import Replica
from kv_engines import NOTHING, SKIP, CachedEngine, in_child
from s3_server import UV, S3Server
from semkv.cli import run
from semkv.stores import maintenance
from semkv_stores.block_file import tenant_tag
from semkv_stores.blocks import BlockStore, Bounds
from semkv_stores.errors import ConfigError, StoreError
from semkv_vllm import BUCKET_MAX_BYTES, ECSettings, KVSettings, bucket, bucket_log
from semkv_vllm.bucket_log import Follower
from semkv_vllm.disk_process import DiskProcess, FileDone, HostShape
from semkv_vllm.shared import BreakEven
from tiny_models import Checkpoint


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    if UV is None:
        pytest.skip("uv is not installed")
    with S3Server() as server:
        yield server


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


@pytest.fixture(params=["file", "s3"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(request.getfixturevalue("url"))
    request.getfixturevalue("s3")
    return f"s3://blocks/{tmp_path.name}"


def objects(url: str, kind: str = "blocks") -> list[str]:
    """Names of objects of a kind."""
    store: Any = LocalStore(url[7:]) if url.startswith("file:") else None
    store = store or from_url(url, client_options={"allow_http": True})
    names = [each["path"] for batch in obstore.list(store) for each in batch]
    return sorted(name for name in names if f"/{kind}/" in name)


def until(ready: Callable[[], object]) -> None:
    last = time.monotonic() + 300.0
    while not ready():
        assert time.monotonic() < last, "it did not happen"
        time.sleep(0.05)


def path(url: str, name: str) -> Path:
    return Path(url[7:], name)


# ---------------------------------------------------------------------- sharing


def test_what_one_directory_stores_another_serves(tmp_path: Path, any_url: str) -> None:
    one = Replica(tmp_path / "one", any_url)
    one.save(0, 8, owner="a")
    one.save(8, 4)
    assert one.share()
    other = Replica(tmp_path / "other", any_url)
    assert other.serves(0, 12) == 0
    assert other.share()
    assert other.serves(0, 12) == 12
    assert not other.store.find("another", keys(0, 1))[0]
    refs = other.store.find("ns", keys(0, 8))
    assert [ref is not None and ref.here for ref in refs] == [False] * 8
    assert other.store.bring("ns", keys(0, 8), refs, other.store.last_purge()) == [True] * 8
    assert all(ref is not None and ref.here for ref in other.store.find("ns", keys(0, 8)))
    assert other.share()
    assert len(objects(any_url)) == 2, "what came from the bucket does not go there again"
    # One process of a directory follows; a new one goes on where the one before was.
    one.follower.close()
    again = Replica(tmp_path / "one", any_url)
    again.save(12)
    assert again.share()
    assert again.follower.place == 2
    assert other.share()
    assert other.serves(0, 13) == 13
    # Without the bucket its blocks are not found.
    alone = open_store(tmp_path / "other")
    assert right(alone, 0, 13) == 8


def test_what_the_disk_has_no_room_for_is_served_from_the_bucket(tmp_path: Path, url: str) -> None:
    one = Replica(tmp_path / "one", url, disk=Bounds(max_bytes=6 * 1024))
    for first in range(0, 40, 4):
        one.save(first, 4)
        assert one.share()
    assert len(list((tmp_path / "one").rglob("*.safetensors"))) < 10
    assert one.serves(0, 40) == 40


@pytest.mark.parametrize("whose", ["a tenant's", "all"])
def test_a_purge_reaches_the_bucket_and_all_directories(
    tmp_path: Path, any_url: str, whose: str
) -> None:
    replicas = [Replica(tmp_path / name / "kv", any_url) for name in ("one", "other", "third")]
    one, other, third = replicas
    one.save(0, 2, owner="a")
    one.save(2, 2, owner="b")
    third.save(4, 2, owner="a")  # not in the bucket when the purge comes
    assert one.share()
    assert other.share()
    assert other.serves(0, 4) == 4
    refs = other.store.find("ns", keys(0, 2))
    other.store.bring("ns", keys(0, 2), refs, other.store.last_purge())
    heard = [replica.store.last_purge() for replica in replicas]
    if whose == "all":
        maintenance.purge(tmp_path / "one")
    else:
        one.store.purge("a")
    assert one.serves(0, 2) == 0
    kept = 0 if whose == "all" else 2
    for replica in (one, other, third):
        assert replica.share()
        assert (replica.serves(0, 2), replica.serves(2, 2), replica.serves(4, 2)) == (0, kept, 0)
    one.settle()
    assert len(objects(any_url)) == bool(kept)
    # The engines of the other directories hear of it, as of one of their own.
    for replica, last in zip(replicas, heard, strict=True):
        assert replica.store.purges_after(last) != []
    # What is computed later is kept.
    one.save(6, 2, owner="a")
    assert one.share()
    assert other.share()
    assert other.serves(6, 2) == 2


@pytest.mark.parametrize("whose", ["a tenant's", "all"])
def test_a_bucket_is_purged_without_an_engine(
    tmp_path: Path, any_url: str, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = Replica(tmp_path / "one" / "kv", any_url), Replica(tmp_path / "other", any_url)
    one.save(0, 2, owner=tenant_tag("alice"))
    one.save(2, 2, owner=tenant_tag("bob"))
    assert one.share()
    assert other.share()
    command = ["purge", "--bucket", any_url, f"--cache-dir={tmp_path}/none"]
    command += ["--tenant=alice"] * (whose != "all")
    count = 2 if whose == "all" else 1
    run([*command, "--dry-run"])
    assert f"{count} files" in capsys.readouterr().out
    assert other.serves(0, 4) == 4
    run(command)
    assert f"{count} files" in capsys.readouterr().out
    # Nobody who looks at the log now finds anything of it, and the objects are gone.
    assert len(objects(any_url)) == 2 - count
    cold = Replica(tmp_path / "cold", any_url)
    for replica in (cold, one, other):
        assert replica.share()
        assert replica.serves(0, 2) == 0
        assert replica.serves(2, 2) == (0 if whose == "all" else 2)
    run(command)
    assert "0 files" in capsys.readouterr().out
    assert one.share()
    one.save(4, 2, owner=tenant_tag("alice"))  # computed since
    assert one.share()
    assert other.share()
    assert other.serves(4, 2) == 2


def test_a_purge_of_what_is_no_bucket(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreError, match="holds no blocks"):
        run(["purge", "--bucket", url])
    assert list(Path(url[7:]).iterdir()) == [], "none is begun"
    with pytest.raises(ConfigError, match="--bucket"):
        run(["purge", "--bucket", "nonsense"])
    with pytest.raises(ConfigError, match="--tag"):
        run(["purge", "--bucket", url, "--tag", "a"])
    with pytest.raises(StoreError, match="cannot be read"):
        run(["purge", "--bucket", f"{url}/{'long' * 100}"])
    one = Replica(tmp_path / "one", url)
    one.save(0)
    assert one.share()
    path(url, objects(url, "log")[0]).write_bytes(b"damaged")
    run(["purge", "--bucket", url])
    path(url, "kv/semkv.json").write_text("damaged")
    with pytest.raises(StoreError, match="cannot be followed"):
        run(["purge", "--bucket", url])


def test_a_slow_bucket_changes_nothing_but_the_time(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get", "put", "list", "delete"):
        monkeypatch.setattr(obstore, name, slowly(getattr(obstore, name), 0.05))
    one, other = Replica(tmp_path / "one", url), Replica(tmp_path / "other", url)
    one.save(0, 4, owner="a")
    assert one.share()
    assert other.share()
    assert other.serves(0, 4) == 4
    other.store.purge("a")
    assert other.share()
    assert one.share()
    assert one.serves(0, 4) == 0


def slowly(what: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same, but late."""

    def late(*args: Any, **fields: Any) -> Any:
        time.sleep(seconds)
        return what(*args, **fields)

    return late


def test_a_purge_waits_for_a_bucket_that_is_away(tmp_path: Path, url: str) -> None:
    """And nothing that it covers is served here meanwhile, whatever the log says."""
    one, other = Replica(tmp_path / "one", url), Replica(tmp_path / "other", url)
    one.save(0, 2, owner="a")
    assert one.share()
    assert other.follower.turn()
    other.store.purge("a")
    path(url, "").rename(f"{tmp_path}/gone")
    path(url, "").write_text("no folder")
    assert not other.follower.turn()
    path(url, "").unlink()
    Path(f"{tmp_path}/gone").rename(path(url, ""))
    one.save(2, 2, owner="a")  # computed by somebody who has not heard of it
    assert one.share()
    other.follower.close()
    again = Replica(tmp_path / "other", url)
    assert again.share()
    assert again.serves(0, 4) == 0
    assert one.share()
    assert one.serves(0, 4) == 0


# ---------------------------------------------------------------------- damage


def flip(file: Path, place: float) -> None:
    raw = bytearray(file.read_bytes())
    raw[min(len(raw) - 1, int(len(raw) * place))] ^= 0x10
    file.write_bytes(raw)


@pytest.mark.parametrize(
    "place", [0.0, 0.01, 0.2, 0.5, 0.9, 1.0, "cut", "empty", "lost", "exchanged"]
)
def test_a_damaged_object_is_a_miss(tmp_path: Path, url: str, place: float | str) -> None:
    one, other = Replica(tmp_path / "one", url), Replica(tmp_path / "other", url)
    one.save(0, 4)
    one.save(4, 4)
    assert one.share()
    assert other.share()
    first, second = (path(url, name) for name in objects(url))
    if isinstance(place, float):
        flip(first, place)
    elif place == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif place == "empty":
        first.write_bytes(b"")
    elif place == "lost":
        first.unlink()
    else:
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    assert other.serves(0, 8) < 8  # each that is served is checked to be right
    assert other.serves(0, 8) in (0, 4)
    assert other.store.counters["corrupt"] + other.store.counters["missing"] > 0
    assert one.serves(0, 8) == 8, "the first one has its own"
    other.save(0, 4)
    assert other.serves(0, 4) == 4


@pytest.mark.parametrize("how", ["flipped", "lost", "of another format"])
def test_a_record_that_cannot_be_read_may_have_been_a_purge(
    tmp_path: Path, url: str, how: str
) -> None:
    one, other = Replica(tmp_path / "one", url), Replica(tmp_path / "other", url)
    for first in range(3):
        one.save(first)
        assert one.share()
    assert other.share()
    one.store.purge("a")
    one.save(9)
    assert one.share()
    record = path(url, objects(url, "log")[3])
    if how == "flipped":
        flip(record, 0.9)
    elif how == "lost":
        record.unlink()
    else:
        record.write_bytes(b"semkv\x02" + record.read_bytes()[6:])
    other.store.bring("ns", keys(0, 1), other.store.find("ns", keys(0, 1)), 1)
    assert other.share()
    assert other.serves(0, 3) == 0
    assert other.serves(9) == 1
    other.save(10)
    assert other.share()
    cold = Replica(tmp_path / "cold", url)
    assert cold.share()
    assert cold.serves(0, 11) == 2


# ---------------------------------------------------------------------- clocks, bounds, snapshots


def test_a_wrong_clock_changes_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    years = 10 * 365 * 86400.0
    wrong = [0.0]
    moment = time.time
    monkeypatch.setattr(time, "time", lambda: moment() + wrong[0])
    replicas = []
    for number, ahead in enumerate((years, -years, 0.0)):
        wrong[0] = ahead
        bounds = Bounds(max_age_s=3600.0)
        replica = Replica(tmp_path / str(number), url, max_age_s=3600.0, disk=bounds)
        replica.save(number)
        assert replica.share()
        replicas.append((replica, ahead))
    for replica, ahead in replicas:
        wrong[0] = ahead
        assert replica.share()
        assert replica.follower.sweep() == 0
        assert replica.serves(0, 3) == 3
    wrong[0] = years
    replicas[0][0].store.purge("")
    replicas[0][0].share()
    for replica, ahead in replicas[1:]:
        wrong[0] = ahead
        assert replica.share()
        assert replica.serves(0, 3) == 0


def test_what_is_too_old_or_too_much_goes(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_log, "ROOM_S", 0.0)
    one = Replica(tmp_path / "one", url, max_bytes=8 * 1024)
    other = Replica(tmp_path / "other", url, max_bytes=8 * 1024)
    for first in range(0, 40, 4):
        (one if first % 8 else other).save(first, 4)
        assert one.share()
        assert other.share()
    assert one.share()
    one.settle()
    other.settle()
    there = objects(url)
    assert {name.rpartition("/")[2] for name in there} == one.holds() == other.holds()
    assert 0 < sum(path(url, name).stat().st_size for name in there) <= 8 * 1024
    assert other.serves(36, 4) == 4, "the latest stay"
    strict = Replica(tmp_path / "strict", url, max_age_s=100.0)
    assert strict.share()
    assert strict.holds() == other.holds()
    strict.follower.clock.ahead += 200.0  # as if so much time had passed in the bucket
    assert strict.follower.turn()
    strict.settle()
    assert objects(url) == []


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_log, "_SNAPSHOT_RECORDS", 4)
    monkeypatch.setattr(bucket_log, "_KEPT", 1)
    monkeypatch.setattr(bucket_log, "_PART_BLOCKS", 30)


@pytest.mark.usefixtures("short_log")
def test_a_snapshot_takes_the_place_of_the_log(tmp_path: Path, any_url: str) -> None:
    one = Replica(tmp_path / "one", any_url)
    late = Replica(tmp_path / "late", any_url)
    late.save(100, 2, owner="a")
    late.save(102, 2, owner="b")
    assert late.share()
    assert one.share()
    one.store.purge("a")
    for first in range(0, 48, 4):
        one.save(first, 4)
        assert one.share()
        one.settle()
    assert len(objects(any_url, "log")) <= 10
    cold = Replica(tmp_path / "cold", any_url)
    assert cold.share()
    assert cold.serves(0, 48) == 48
    assert cold.holds() == one.holds()
    # Of the purge, which is not in the log any more, the snapshot knows.
    assert late.serves(100, 4) == 4
    assert late.share()
    assert late.serves(100, 4) == 2
    assert late.serves(0, 48) == 48
    assert late.holds() == one.holds()


@pytest.mark.usefixtures("short_log")
def test_nothing_is_appended_where_nobody_looks(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process stands still between its look at the log and its put, while others make a snapshot and delete the
    records."""
    one, slow = Replica(tmp_path / "one", url), Replica(tmp_path / "slow", url)
    one.save(0, 2, owner="a")
    assert one.share()
    assert slow.share()
    slow.store.purge("a")
    follow = slow.follower._follow

    def stand_still(**fields: Any) -> None:
        follow(**fields)
        monkeypatch.setattr(slow.follower, "_follow", follow)
        for first in range(10, 50):
            one.save(first, owner="a")
            assert one.share()
            one.settle()

    monkeypatch.setattr(slow.follower, "_follow", stand_still)
    assert slow.share()
    assert one.share()
    assert one.serves(0, 50) == slow.serves(0, 50) == 0
    cold = Replica(tmp_path / "cold", url)
    assert cold.share()
    assert cold.serves(0, 50) == 0


def test_what_is_purged_between_its_put_and_its_record_leaves_no_object(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_log, "_PART_BLOCKS", 2)
    one = Replica(tmp_path / "one", url)
    assert one.share()
    for first in range(6):
        one.save(first, owner="ab"[first % 2])
    assert one.follower.uploads.step()
    assert len(objects(url)) == 6
    one.store.purge("a")
    assert one.share()
    one.settle()
    assert len(objects(url)) == 3
    other = Replica(tmp_path / "other", url)
    assert other.share()
    assert other.serves(0, 6) == 3


def test_directories_append_at_once(tmp_path: Path, any_url: str) -> None:
    replicas = [Replica(tmp_path / str(number), any_url) for number in range(4)]

    def work(number: int) -> bool:
        done = True
        for first in range(3):
            replicas[number].save(100 * number + first)
            done &= replicas[number].share()
        return done

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    for replica in replicas:
        assert replica.share()
        assert sum(replica.serves(100 * number, 3) for number in range(4)) == 12
    assert len({frozenset(replica.holds()) for replica in replicas}) == 1


@pytest.mark.usefixtures("short_log")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_nothing_wrong_is_served(
    tmp_path: Path, url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories store, follow, purge, lose their index, are purged whole and begin anew, in any order."""
    monkeypatch.setattr(bucket_log, "ROOM_S", 0.0)
    rng = random.Random(seed)
    names = ["one", "other", "third"]
    made: dict[str, Replica] = {}
    blocks: dict[int, str] = {}  # that may be served, with their owners

    def of(name: str) -> Replica:
        if name not in made:
            disk = Bounds(max_bytes=rng.choice([0, 6 * 1024]))
            made[name] = Replica(tmp_path / name / "kv", url, max_bytes=40 * 1024, disk=disk)
        return made[name]

    gone = set[int]()
    number = 0
    for _ in range(120):
        name = rng.choice(names)
        what = rng.random()
        if what < 0.4:
            owner = rng.choice("ab")
            of(name).save(number, 2, owner=owner)
            blocks |= {number: owner, number + 1: owner}
            number += 2
        elif what < 0.8:
            of(name).share()
        elif what < 0.9:
            if name in made:
                made.pop(name).follower.close()
        elif what < 0.95:
            owner = rng.choice("ab")
            of(name).share()
            of(name).store.purge(owner)
            gone |= {block for block, whose in blocks.items() if whose == owner}
        elif what < 0.98:
            of(name)
            maintenance.purge(tmp_path / name)
            gone |= set(blocks)
        elif name in made:
            (tmp_path / name / "kv" / "index.sqlite").unlink()
        if number:
            served(of(name).store, rng.sample(range(number), min(number, 20)))
    lasting = [of(name) for name in names]
    for replica in lasting * 3:
        assert replica.share()
        replica.settle()
    for replica in lasting:
        assert gone.isdisjoint(served(replica.store, range(number)))
    there = {name.rpartition("/")[2] for name in objects(url)}
    assert all(replica.holds() <= there for replica in lasting)


# ---------------------------------------------------------------------- a bucket that is slow, dead or not able


def test_a_dead_bucket_is_left_alone_and_told_of_once(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Replica(tmp_path / "one", url), Replica(tmp_path / "other", url)
    one.save(0, 4)
    assert one.share()
    assert other.share()
    folder = path(url, "")
    folder.rename(tmp_path / "gone")
    folder.write_text("no folder")
    one.save(4, 4)
    for _ in range(20):
        one.share()
        assert one.serves(0, 8) == 8
        assert other.serves(0, 4) == 0
    assert other.follower.reads.away_s() > 0
    told = [line for line in caplog.messages if "cannot be used for" in line]
    assert len(told) == len(set(told))
    assert 2 <= len(told) <= 3, told  # reads, uploads, its log
    folder.unlink()
    (tmp_path / "gone").rename(folder)
    for objects_of in (one.follower.objects, one.follower.uploads.objects, other.follower.reads):
        objects_of._until = 0.0
    assert one.share()
    assert other.share()
    assert other.serves(0, 8) == 8
    assert "can be used for its log" in caplog.text


def test_a_bucket_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_REQUEST_S", 1)
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    taken.append(deaf.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        for name, text in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }.items():
            monkeypatch.setenv(name, text)
        one = Replica(tmp_path / "one", "s3://blocks/deaf")
        one.save(0, 4)
        assert not one.follower.turn()
        asked = len(taken)
        assert 0 < asked <= 4
        one.follower.objects._until = time.monotonic() + 3600.0
        for _ in range(10):
            one.share()
            assert one.serves(0, 4) == 4
        assert len(taken) == asked
        deaf.shutdown(socket.SHUT_RDWR)
    one.follower.objects._until = 0.0
    assert not one.share()  # nobody listens any more
    assert one.serves(0, 4) == 4


def test_a_bucket_without_conditional_puts_is_not_used(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = obstore.put

    def overwrite(*args: Any, **fields: Any) -> Any:
        return put(*args, **{**fields, "mode": "overwrite"})

    monkeypatch.setattr(obstore, "put", overwrite)
    one = Replica(tmp_path / "one", url)
    one.save(0)
    assert not one.share()
    assert "no conditional puts" in caplog.text
    assert objects(url) == []


# ---------------------------------------------------------------------- kill -9

_CHILD = """
import itertools, os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
import obstore
from bucket_helpers import Replica
put, numbers = obstore.put, itertools.count(1)
def dies(*args, **fields):
    last = next(numbers) == int(sys.argv[3])
    if last and sys.argv[4] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    found = put(*args, **fields)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
obstore.put = dies
replica = Replica(Path(sys.argv[1]), sys.argv[2])
replica.save(0, 4)
replica.save(4, 4)
replica.share()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_that_is_killed_leaves_nothing_wrong(
    tmp_path: Path, url: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first block file, and at the record."""
    code = _CHILD.format(tests=str(Path(__file__).parent))
    killed = 0
    for number in (4, 6):
        root = tmp_path / f"{when}{number}"
        here = f"{url}/{when}{number}"
        path(here, "").mkdir()
        command = [sys.executable, "-c", code, str(root / "one"), here, str(number), when]
        done = subprocess.run(command, check=False, capture_output=True)
        killed += done.returncode == -signal.SIGKILL
        other = Replica(root / "other", here)
        assert other.share()
        assert other.serves(0, 8) in (0, 8)
        again = Replica(root / "one", here)
        assert again.share()
        assert other.share()
        assert other.serves(0, 8) == again.serves(0, 8) == 8
        monkeypatch.setattr(bucket_log, "ORPHAN_S", -3600.0)
        again.follower.sweep()
        assert len(objects(here)) == 2
    assert killed == 2


# ---------------------------------------------------------------------- the disk process


class Machine:
    """A directory with a disk process, and host memory of eight rows."""

    def __init__(self, root: Path, url: str) -> None:
        self.store = open_store(root, writer=root.name)
        self.store.finds_far = True
        memory = os.memfd_create("rows")
        os.ftruncate(memory, 8 * ROW)
        self.rows = np.frombuffer(mmap.mmap(memory, 8 * ROW), np.uint8).reshape(8, ROW)
        shape = HostShape(rows=8, stride=ROW, row_bytes=ROW)
        bounds = {"max_bytes": 0, "max_age_s": 0.0}
        self.disk = DiskProcess(memory, shape, self.store, {"url": url, **bounds})

    def do(self, blocks: range, chunks: list[int], **job: Any) -> FileDone:
        about = {"namespace": "ns", "layout": LAYOUT, "since": self.store.last_purge()}
        self.disk.submit(keys=keys(blocks[0], len(blocks)), chunks=chunks, **about, **job)
        (done,) = self.disk.drain()
        return done

    def write(self, blocks: range) -> FileDone:
        for chunk, block in enumerate(blocks):
            self.rows[chunk] = value(block)
        return self.do(blocks, list(range(len(blocks))))

    def fetch(self, blocks: range) -> FileDone:
        refs = self.store.find("ns", keys(blocks[0], len(blocks)))
        places = [ref.row for ref in refs if ref is not None]
        file = refs[0].file if refs[0] is not None else ""
        return self.do(blocks, list(range(len(blocks))), file=file, places=places, far=True)

    def here(self, block: int) -> bool | None:
        (ref,) = self.store.find("ns", keys(block, 1))
        return None if ref is None else ref.here


def test_a_disk_process_shares_fetches_and_keeps(tmp_path: Path, url: str) -> None:
    one, other = Machine(tmp_path / "one", url), Machine(tmp_path / "other", url)
    assert one.write(range(4)).good == b"\1" * 4
    until(lambda: other.here(0) is False)
    assert one.write(range(4, 8)).good == b"\1" * 4
    one.disk.close()  # which puts what is left
    until(lambda: other.here(4) is False)
    done = other.fetch(range(1, 4))
    assert (done.good, done.away_s) == (b"\1" * 3, 0.0)
    assert all(np.array_equal(other.rows[at], value(at + 1)) for at in range(3))
    until(lambda: other.here(1))
    assert other.here(0) is False
    # A process that is killed leaves its work to the next.
    process = other.disk._process
    assert process is not None
    process.kill()
    assert other.fetch(range(4, 8)).good == b""
    other.disk._started -= 3600.0
    until(lambda: other.fetch(range(4, 8)).good == b"\1" * 4)
    Path(url[7:]).rename(tmp_path / "gone")
    done = other.fetch(range(1))
    assert not any(done.good)
    assert done.away_s > 0
    assert other.write(range(8, 12)).good == b"\1" * 4, "the disk goes on"
    other.disk.close()


# ---------------------------------------------------------------------- settings, the gate


@pytest.mark.parametrize("kind", [KVSettings, ECSettings])
def test_a_wrong_bucket_is_an_error_at_load(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for right_url in ("", "s3://name", "s3://name/a/b", "gs://n/x", "az://c/d", "file:///a/b c/"):
        assert kind(bucket=right_url).bucket == right_url
    assert kind().follower() is None
    assert kind(bucket="s3://a", bucket_age_s=5).follower() == {
        "url": "s3://a",
        "max_bytes": BUCKET_MAX_BYTES,
        "max_age_s": 5.0,
    }
    wrong = "name s3:// s3:///a ftp://a/b http://a/b memory:/// file://a/b file:/// file:///../a s3://u:p@a/b s3://a?b=c s3://a#b s3://a:80/b s3://a/.. s3://a//b file:///a/.. file:///a%2f../b"  # noqa: E501
    for text in wrong.split():
        with pytest.raises(ConfigError) as raised:
            kind(bucket=text)
        assert "u:p" not in str(raised.value)
    for field, given in {"bucket_bytes": -1, "bucket_age_s": "x"}.items():
        with pytest.raises(ConfigError):
            kind(**{field: given})
    monkeypatch.setattr("semkv_vllm.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"packages/vllm\[bucket\]"):
        kind(bucket="s3://name")


def test_the_bucket_has_a_pace_of_its_own() -> None:
    gate = BreakEven()
    for _ in range(4):
        gate.prefill.measured(1000, 1.0)
        gate.disk.measured(1000, 0.1)
        gate.bucket.measured(1000, 10.0)
    assert gate.worth(1000, 1000)
    assert gate.worth(1000, 1000, 10)
    assert not gate.worth(1000, 1000, 1000)
    assert not gate.worth(1000, 0, 1000)


# ---------------------------------------------------------------------- two machines


def rows(folder: Path, kind: str, where: str, table: str = "files") -> int:
    """How many rows of an index meet a condition."""
    with closing(sqlite3.connect(folder / kind / "index.sqlite")) as db:
        return int(db.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchone()[0])


def two_machines(model: str, folder: str, url: str, server: int) -> dict[str, Any]:
    """An engine fills the bucket, another one with a directory of its own asks the same. Then the server dies."""
    own = {name: Path(folder, name) for name in ("one", "other")}
    found: dict[str, Any] = {"wrong": 0}
    fields: dict[str, Any] = {"bucket": {"bucket": url}, "max_num_seqs": 8}
    with CachedEngine(Path(model), own["one"], **fields) as engine:
        salts = ("me", "you", "you")
        asked = [engine.prompt(f"no {n}", picture=n, salt=salt) for n, salt in enumerate(salts)]
        last = engine.prompt("the last", picture=9)
        cold = [engine.store(prompt) for prompt in asked]
        reference = engine.store(last)
        again = [engine.from_disk(prompt) for prompt in asked]
        found["wrong"] += [tokens for tokens, _ in again] != cold
        found["one machine"] = [outcome.loaded_tokens for _, outcome in again]
    found["not shared"] = [rows(own["one"], kind, "place=0") for kind in ("kv", "fusion")]
    with CachedEngine(Path(model), own["other"], **fields) as engine:
        for kind in ("kv", "fusion"):
            most = rows(own["one"], kind, "place>0")
            until(lambda kind=kind, most=most: rows(own["other"], kind, "place>0") == most)
        first = engine.one(asked[0], extra=SKIP)
        found["pictures"] = [first[1].fusion_loaded, first[1].fusion_encoded]
        found["wrong"] += first[0] != cold[0]
        engine.forget()
        answers = [engine.one(prompt) for prompt in asked]
        found["wrong"] += [tokens for tokens, _ in answers] != cold
        found["two machines"] = [outcome.loaded_tokens for _, outcome in answers]
        engine.forget()
        found["counted"] = engine.counts()["bucket_read_blocks"]
        until(lambda: rows(own["other"], "kv", "here=1") >= 3)  # what came is kept
        maintenance.purge(own["other"], salts=["me"])
        for kind in ("kv", "fusion"):
            until(lambda kind=kind: not rows(own["other"], kind, "place IS NULL", "purges"))
        found["after the purge"] = [engine.from_disk(prompt)[1].loaded_tokens for prompt in asked]
        found["wrong"] += engine.one(asked[0])[0] != cold[0]
        for kind in ("kv", "fusion"):
            store = BlockStore(own["one"] / kind, kind)
            before = rows(own["one"], kind, "here=1")
            assert Follower(store, url).turn()
            found[f"{kind} gone"] = before - rows(own["one"], kind, "here=1")
        os.killpg(server, signal.SIGKILL)
        found["from a dead bucket"] = []
        for _ in range(2):
            tokens, outcome = engine.one(last)
            found["wrong"] += tokens != reference
            found["from a dead bucket"].append(outcome.loaded_tokens)
            engine.forget()
        found["left"] = engine.left()
    return found


@pytest.mark.engine
def test_a_second_machine_loads_what_the_first_one_computed(
    checkpoint: Checkpoint, tmp_path: Path, s3: S3Server
) -> None:
    url = f"s3://blocks/{tmp_path.name}"
    found = in_child(two_machines, checkpoint("llava"), tmp_path, url, s3.pid)
    assert found["wrong"] == 0
    assert found["not shared"] == [0, 0]
    assert found["two machines"] == found["one machine"]
    assert min(found["one machine"]) > 64
    assert found["pictures"] == [1, 0]
    assert found["counted"] > 0
    assert found["after the purge"][0] == 0
    assert found["after the purge"][1:] == found["one machine"][1:]
    assert min(found["kv gone"], found["fusion gone"]) > 0, "the first machine hears of the purge"
    computed, loaded = found["from a dead bucket"]
    assert computed == 0
    assert loaded > 64, "the disk goes on"
    assert found["left"] == NOTHING
