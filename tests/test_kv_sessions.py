"""What tenants hold in host memory and on disk: conversations that are kept, bounds, hints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kv_engines import (
    BLOCK,
    NOTHING,
    Answer,
    Engine,
    connector,
    differs,
    in_child,
    prompt,
    token_ids,
)
from semkv.errors import ConfigError
from semkv_stores import block_index
from semkv_stores.block_file import tenant_tag
from semkv_vllm import KVSettings, private
from semkv_vllm.hints import NO_HINTS, Hints, read_hints
from tiny_models import Checkpoint

ROW = 65_536  # bytes of a block of the tiny Llama
ROWS = 40  # blocks that host memory holds


class Small(Engine):
    """An engine whose host memory holds few blocks."""

    def __init__(self, model: str, folder: str, **settings: Any) -> None:
        kv = connector(folder, **{"host_bytes": ROWS * ROW, **settings})
        super().__init__(model, kv, max_num_batched_tokens=256)
        self.shared = self.connectors()[0].shared
        self.manager = self.connectors()[0].manager
        assert self.shared.row_bytes == ROW

    def say(self, ids: list[int], salt: str, **hints: Any) -> Answer:
        """What a tenant is answered where vLLM's own cache has nothing; afterwards all is stored."""
        assert self.llm.reset_prefix_cache()
        extra = {"kv_transfer_params": {"semkv": {"hints": hints}}} if hints else None
        asked = {**prompt(ids), "cache_salt": salt}
        (answer,) = self.ask([asked], tokens=2, extra_args=extra)
        self.settle()
        return answer

    def press(self, rng: random.Random, salt: str = "pressure") -> None:
        """Ask for more than host memory holds."""
        for _ in range(7):
            self.say(blocks(rng, 6), salt)

    def held(self, salt: str) -> int:
        """How many blocks of a tenant are in host memory."""
        mine = [key for key, (owner, _) in self.shared.records.items() if owner == tenant_tag(salt)]
        return sum(self.manager.primary_tier._policy.get(key) is not None for key in mine)

    def on_disk(self, salt: str) -> int:
        """How many bytes of a tenant are on disk."""
        which = {"owner": tenant_tag(salt)}
        return int(self.shared.store.ask(lambda db: block_index.held(db, which), 0))

    @property
    def kept(self) -> int:
        """How many blocks are kept for conversations."""
        return int(self.manager._holdings.kept())


def blocks(rng: random.Random, count: int) -> list[int]:
    """A prompt of so many blocks, and a little."""
    return token_ids(rng, count * BLOCK + 5)


def from_host(count: int) -> tuple[int, dict[str, int]]:
    return count * BLOCK, {"host": count * BLOCK}


def loaded(answer: Answer) -> tuple[int, dict[str, int]]:
    return answer["loaded"], answer["sources"]


def conversations(model: str, folder: str) -> None:
    rng = random.Random(3)
    plain, first, second = blocks(rng, 6), blocks(rng, 6), blocks(rng, 9)
    with Small(model, folder, keep_bytes=16 * ROW) as engine:
        references = {
            "plain": engine.say(plain, "a"),
            "first": engine.say(first, "a", session="one", keep_s=600),
        }
        engine.press(rng)
        assert engine.kept == 6
        again = engine.say(first, "a", session="one", keep_s=600)
        assert loaded(again) == from_host(6)
        assert not differs(again, references["first"])
        again = engine.say(plain, "a")
        assert again["sources"] == {"disk": 6 * BLOCK}, "what nobody keeps was pressed out"
        assert not differs(again, references["plain"])
        # A turn more keeps what it added, and a stranger's conversation of the same name is another one.
        longer = engine.say(first[:-5] + blocks(rng, 2), "a", session="one", keep_s=600)
        assert longer["loaded"] == 6 * BLOCK
        assert engine.kept == 8
        engine.say(first, "stranger", session="one", keep_s=0)
        assert engine.kept == 8
        # Nor does a stranger with more of them than are remembered end it.
        for number in range(20):
            engine.say(blocks(rng, 9), "stranger", session=str(number), keep_s=0)
        assert engine.kept == 8
        # At the tenant's budget the conversation that spoke longest ago is let go.
        references["second"] = engine.say(second, "a", session="two", keep_s=600)
        assert engine.kept == 9
        engine.press(rng)
        assert engine.say(first, "a")["sources"] == {"disk": 6 * BLOCK}
        again = engine.say(second, "a", session="two", keep_s=0)
        assert loaded(again) == from_host(9)
        assert engine.kept == 0, "nothing is kept of one that lets go"
        # What is on disk comes back before it is asked for.
        engine.press(rng)
        assert engine.held("a") < 9
        engine.say(blocks(rng, 1), "a", session="two", keep_s=600, prefetch=True)
        assert engine.kept == 9
        again = engine.say(second, "a", session="two", keep_s=600)
        assert loaded(again) == from_host(9)
        assert not differs(again, references["second"])
        engine.say(blocks(rng, 1), "stranger", session="two", keep_s=600, prefetch=True)
        assert engine.kept == 9
        # All tenants keep half of host memory at most, and nobody ends another's.
        engine.say(blocks(rng, 14), "b", session="one", keep_s=600)
        assert engine.kept == ROWS // 2
        assert loaded(engine.say(second, "a", session="two", keep_s=600)) == from_host(9)
        # A purge is a purge, and so is age.
        engine.shared.store.purge(tenant_tag("a"))
        assert engine.say(second, "a")["loaded"] == 0
        assert engine.kept == ROWS // 2 - 9
        engine.manager._holdings._clock = lambda: 1e12
        engine.say(plain, "c")
        assert engine.kept == 0
        engine.say(second, "a", session="two", keep_s=600)
        assert engine.kept == 9
        engine.forget()
        assert engine.kept == 0
        assert not differs(engine.say(second, "a"), references["second"])
        assert engine.shared.counters["errors"] == 0
        with_faults(engine, second)
        assert not differs(engine.say(second, "a"), references["second"])
        assert engine.left() == NOTHING


def with_faults(engine: Small, ids: list[int]) -> None:
    """A fault leaves nothing pinned that nobody keeps, and no request that has not ended."""
    manager = engine.manager
    holdings = manager._holdings
    held = list(holdings._owner)
    holdings._owner.clear()
    engine.say(ids, "a", session="three", keep_s=600)
    assert engine.shared.counters["errors"] == 1
    assert engine.kept == 0
    chunks = [private.chunk_of(manager.primary_tier, key) for key in held]
    assert any(chunks)
    assert not any(chunk.ref_cnt for chunk in chunks if chunk is not None)
    engine.forget()
    engine.say(ids, "a", session="three", keep_s=600)
    look_up = manager.lookup

    def faulty(key: bytes, context: Any, **fields: Any) -> Any:
        if context.req_id.endswith(" prefetch"):
            raise OSError("on purpose")
        return look_up(key, context, **fields)

    manager.lookup = faulty
    engine.say(ids[:BLOCK], "a", session="three", keep_s=600, prefetch=True)
    manager.lookup = look_up
    assert engine.shared.counters["errors"] == 2
    assert not manager._req_state


@pytest.mark.engine
def test_a_conversation_is_kept_within_its_tenants_budget(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    in_child(conversations, checkpoint("llama"), tmp_path)


def bounds(model: str, folder: str) -> None:
    rng = random.Random(4)
    other, long = blocks(rng, 6), blocks(rng, 16)
    settings = {"tenant_host_bytes": 12 * ROW, "tenant_bytes": 30 * ROW, "keep_bytes": 100 * ROW}
    with Small(model, folder, **settings) as engine:
        engine.say(other, "b")
        for number in range(8):
            last = blocks(rng, 5)
            reference = engine.say(last, "a", session=str(number % 3), keep_s=600)
            assert engine.held("a") <= 12
            assert engine.on_disk("a") <= 30 * ROW
        assert engine.shared.counters["tenant_evicted_blocks"] > 0
        assert loaded(engine.say(other, "b")) == from_host(6), "nobody else paid for it"
        again = engine.say(last, "a")
        assert loaded(again) == from_host(5)
        assert not differs(again, reference)
        # Of a prompt beyond the bound the beginning stays.
        reference = engine.say(long, "c")
        assert engine.held("c") == 12
        again = engine.say(long, "c")
        assert loaded(again) == from_host(12)
        assert not differs(again, reference)
        engine.forget()
        again = engine.say(long, "c")
        assert 0 < again["loaded"] <= 12 * BLOCK
        assert engine.held("c") <= 12
        assert not differs(again, reference)
        assert engine.shared.counters["errors"] == 0
        assert engine.left() == NOTHING


@pytest.mark.engine
def test_a_tenants_bound_holds_in_host_memory_and_on_disk(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    in_child(bounds, checkpoint("llama"), tmp_path)


def least(model: str, folder: str) -> None:
    rng = random.Random(5)
    kept, long = blocks(rng, 9), blocks(rng, 8)
    with Small(model, folder, keep_bytes=100 * ROW, host_bytes=12 * ROW) as engine:
        engine.say(kept, "a", session="one", keep_s=600)
        assert engine.kept == 4
        engine.say(long, "b")
        assert engine.on_disk("b") > 8 * ROW, "a step's blocks have room beside what is kept"
        assert engine.shared.counters["errors"] == 0


@pytest.mark.engine
def test_what_is_kept_leaves_room_for_a_step(checkpoint: Checkpoint, tmp_path: Path) -> None:
    in_child(least, checkpoint("llama"), tmp_path)


PEER = "10.0.0.1:5710"


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        [],
        {"session": 5},
        {"session": "x" * 1000},
        {"session": ["x"]},
        {"keep_s": "5"},
        {"keep_s": True},
        {"keep_s": -1},
        {"keep_s": float("nan")},
        {"keep_s": float("inf")},
        {"keep_s": 10**400},
        {"prefetch": 1},
        {"peer": "10.0.0.2:5710"},
        {"peer": 5},
        {"peer": ["10.0.0.1:5710"]},
        {"peer": {"remote_host": "10.0.0.1"}},
        {"session": "right", "other": 1},
    ],
)
def test_a_hint_that_is_wrong_says_nothing(given: object) -> None:
    for params in (given, {"semkv": given}, {"semkv": {"hints": given}}):
        assert read_hints(params, [PEER]) is NO_HINTS


def test_a_hint_names_a_peer_that_the_operator_has_named() -> None:
    said = {"session": "s", "keep_s": 5, "prefetch": True, "peer": PEER}
    params = {"semkv": {"hints": said}}
    assert read_hints(params, [PEER]) == Hints("s", keep_s=5, prefetch=True, peer=PEER)
    assert read_hints(params) is NO_HINTS
    p2p = {"type": "p2p", "host": "10.0.0.1", "port": 5710}
    both = (PEER, "10.0.0.2:5710")
    settings = KVSettings(fixed_weights=True, secondary_tiers=(p2p,), peers=both)
    assert settings.others == {"10.0.0.2:5710"}
    with pytest.raises(ConfigError, match="peers"):
        KVSettings(peers=both)
    with pytest.raises(ConfigError, match="host:port"):
        KVSettings(fixed_weights=True, secondary_tiers=(p2p,), peers=("10.0.0.1",))
