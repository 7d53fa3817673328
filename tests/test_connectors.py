"""The connectors inside a real vLLM (CPU backend), and what they are made of."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import uuid
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import semkv_vllm as connectors
import tiny_models
from kv_engines import BLOCK, SKIP, CachedEngine, answer, full_blocks, in_child
from maintenance_helpers import purge
from semkv.errors import ConfigError
from semkv.stores.maintenance import purge as purge_from_here
from semkv_stores.block_file import tenant_tag
from semkv_stores.blocks import BlockStore
from semkv_stores.digests import digest
from semkv_stores.fusion import FusionState, FusionStore
from semkv_vllm import (
    ConnectorOutcome,
    ECSettings,
    KVSettings,
    identity,
    read_outcome,
    read_settings,
)
from semkv_vllm.media import Media
from semkv_vllm.shared import BreakEven, KVShared

pytestmark = pytest.mark.engine


def kv_params(**params: Any) -> dict[str, Any]:
    return {"kv_transfer_params": params}


def disk(
    tokens: int, *, fusion: tuple[int, int] = (0, 0), cached: int | None = None
) -> ConnectorOutcome:
    """What is reported of a request that loaded so many tokens, all of them from disk."""
    return ConnectorOutcome(
        tokens, {"disk": tokens} if tokens else {}, *fusion, tokens if cached is None else cached
    )


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 4
    file.write_bytes(raw)


@pytest.fixture(scope="class")
def engine(
    checkpoint: tiny_models.Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CachedEngine]:
    """One LLaVA for most tests; prompts are longer than a step, so every prefill is chunked."""
    folder = tmp_path_factory.mktemp("cache")
    with CachedEngine(
        checkpoint("llava"), folder, max_num_batched_tokens=128, max_num_seqs=8
    ) as made:
        yield made


class TestEngine:
    def test_encoder_output_is_loaded_when_the_kv_is_not(self, engine: CachedEngine) -> None:
        before, prompt = engine.files("fusion"), engine.prompt("encoder", picture=3)
        cold = engine.store(prompt)
        assert engine.one(prompt, extra=SKIP) == (cold, disk(0, fusion=(1, 0)))
        engine.forget()
        both = SKIP | {"ec_transfer_params": {"semkv": {"skip": True}}}
        assert engine.one(prompt, extra=both) == (cold, disk(0, fusion=(0, 1)))
        engine.forget()
        (file,) = engine.files("fusion") - before
        flip(file, -1)
        assert engine.one(prompt, extra=SKIP) == (cold, disk(0, fusion=(0, 1)))

    def test_what_a_request_may_say(self, engine: CachedEngine) -> None:
        """Skip neither loads nor stores, vLLM's own limits hold, and nobody is believed whose blocks these are."""
        prompt = engine.prompt("words", picture=4, salt="mine")
        cold, _ = engine.one(prompt, extra=SKIP)
        engine.forget(keep_host=True)
        claims = kv_params(semkv={"owner": tenant_tag("yours"), "adapter": "x"})
        assert engine.one(prompt, extra=claims)[1].loaded_tokens == 0
        engine.settle()
        assert purge_from_here(engine.cache_dir, salts=["yours"], dry_run=True).counts["files"] == 0
        assert purge_from_here(engine.cache_dir, salts=["mine"], dry_run=True).counts["files"]
        limits = ({"max_load_tokens": 70}, 64), ({"kv_load_tiers": [{"medium": "CPU"}]}, 0)
        for extra, expected in (
            (SKIP, 0),
            *((kv_params(**limit), loaded) for limit, loaded in limits),
        ):
            tokens, outcome = engine.from_disk(prompt, extra=extra)
            assert (tokens, outcome.loaded_tokens) == (cold, expected)
        assert engine.from_disk(prompt)[1].loaded_tokens > 64

    def test_a_purge_reaches_a_running_engine(self, engine: CachedEngine) -> None:
        """Of a tenant, and an operator's of everything: neither the disk nor host memory serves what was there; the
        other tenant's stays, and all goes on."""
        mine, yours = (engine.prompt("of a tenant", picture=8, salt=s) for s in ("me", "you"))
        cold, _ = engine.one(mine)
        engine.one(yours)
        engine.forget(keep_host=True)
        assert purge_from_here(engine.cache_dir, salts=["me"], dry_run=True).counts["files"] >= 2
        purge_from_here(engine.cache_dir, salts=["me"])
        assert purge_from_here(engine.cache_dir, salts=["me"], dry_run=True).counts["files"] == 0
        before = engine.counts()["purged_blocks"]
        assert engine.one(mine) == (cold, disk(0, fusion=(0, 1)))
        assert engine.counts()["purged_blocks"] > before
        for prompt in (yours, mine):  # one was left alone, the other is stored anew
            assert engine.from_host(prompt)[1].sources.get("host")
        engine.forget(keep_host=True)
        purge(engine.cache_dir)
        assert not engine.files()
        assert engine.one(mine) == (cold, disk(0, fusion=(0, 1)))
        again, outcome = engine.from_disk(mine)
        assert (again, set(outcome.sources)) == (cold, {"disk"})

    def test_what_is_on_its_way_during_a_purge_is_not_kept(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from semkv_vllm.spec import CPUWorker

        prompt = engine.prompt("on its way", picture=9, salt="leaves")
        with monkeypatch.context() as patch:
            patch.setattr(CPUWorker, "get_finished", lambda _: [])
            cold, _ = engine.one(prompt)
            purge_from_here(engine.cache_dir, salts=["leaves"])
            engine.one(engine.prompt("hears of it", picture=9), extra=SKIP)
        assert engine.from_host(prompt) == (cold, disk(0, fusion=(0, 1)))

    @pytest.mark.parametrize(
        ("damage", "counted"), [("flip", "corrupt"), ("swap", "corrupt"), ("gone", "missing")]
    )
    def test_damage_is_a_miss_with_the_same_answer(
        self, engine: CachedEngine, damage: str, counted: str
    ) -> None:
        engine.store(engine.prompt("another file", picture=19))
        before, prompt = engine.files(), engine.prompt(f"damage {damage}", picture=20)
        (cold,) = engine.run(prompt)
        engine.forget()
        file = max(engine.files() - before, key=lambda p: p.stat().st_mtime_ns)
        if damage == "flip":
            flip(file, -5000)
        elif damage == "swap":
            file.write_bytes(min(before).read_bytes())
        else:
            file.unlink()
        counts = engine.counts()
        tokens, outcome = engine.one(prompt)
        assert tokens == answer(cold)
        assert (outcome.loaded_tokens or 0) < full_blocks(cold)
        assert engine.counts()[counted] > counts[counted]
        assert not file.exists()
        engine.from_disk(prompt)  # which stores what lay undamaged in the file, too
        tokens, outcome = engine.from_disk(prompt)
        assert (tokens, outcome.loaded_tokens) == (answer(cold), full_blocks(cold))

    def test_a_store_that_fails_costs_the_hit_and_nothing_else(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the disk tier's store raises, in vLLM's thread or in ours, the engine answers."""
        prompt, shared = engine.prompt("faults", picture=22), engine.connector.shared
        cold = engine.store(prompt)

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("broken")

        for name in ("find", "last_purge", "purges_after"):
            with monkeypatch.context() as patch:
                patch.setattr(shared.store, name, broken)
                engine.forget()
                errors = engine.counts()["errors"]
                assert engine.one(prompt)[0] == cold
                engine.one(engine.prompt(f"new for {name}", picture=22))
                engine.settle()
                assert engine.counts()["errors"] > errors or name == "purges_after"
        assert engine.from_disk(prompt)[1].loaded_tokens
        engine.settle()
        monkeypatch.setattr(shared.store, "ask", lambda what, otherwise, **_: otherwise)
        assert engine.from_host(prompt)[1].sources.get("host"), "a fault of the index is no purge"
        engine.settle()
        engine.llm.sleep(level=1)  # though nothing can be deleted
        engine.llm.wake_up()
        monkeypatch.undo()
        assert engine.one(prompt)[1].loaded_tokens == 0

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    def test_the_disks_process_may_die_or_fall_silent(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
    ) -> None:
        """Requests go on without the disk, and with it once it was started again."""
        prompt = engine.prompt(f"dies of {how.name}", picture=22)
        cold = engine.store(prompt)
        (tier,) = engine.connector.manager.secondary_tiers
        with monkeypatch.context() as patch:
            patch.setattr("semkv_vllm.disk_process._SILENT_S", 0.5)
            patch.setattr("semkv_vllm.tier._HUNG_S", 0.0)
            errors = engine.counts()["errors"]
            os.kill(tier._disk._process.pid, how)
            assert engine.one(prompt) == (cold, disk(0, fusion=(1, 0)))
            assert engine.counts()["errors"] > errors
        assert engine.from_host(prompt)[1].sources.get("host")
        engine.forget()
        tier._disk._started -= 3600.0
        engine.one(engine.prompt("starts it", picture=22))
        again, outcome = engine.from_disk(prompt)
        assert (again, set(outcome.sources)) == (cold, {"disk"})

    def test_vllm_counts_host_hits_as_in_its_own_lookups(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        prompt, counted, seen = engine.prompt("counted", picture=22), Counter[str](), []

        def counting(self: Any, name: Any, value: Any = 1, labelvalues: Any = ()) -> None:
            if "chunk_" in str(name) and any("primary" in label for label in labelvalues):
                counted[str(name)] += value

        engine.one(prompt)
        monkeypatch.setattr(OffloadingConnectorStats, "increase_counter", counting)
        for _ in range(2):
            counted.clear()
            assert engine.from_host(prompt)[1].sources.get("host")
            engine.settle()
            seen.append(dict(counted))
            monkeypatch.setattr(
                type(engine.connector.manager), "held", lambda *_: (0, False)
            )  # now by vLLM's way
        assert seen[0] == seen[1]
        assert min(seen[0].values()) >= 3, seen

    def test_what_the_disk_cannot_take_stays_in_host_memory(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = engine.prompt("full queue", picture=22)
        (tier,) = engine.connector.manager.secondary_tiers
        monkeypatch.setattr(tier, "_queue_bytes", 0)
        monkeypatch.setattr(tier, "_waiting_bytes", 1)
        before = engine.counts()["dropped"]
        cold = engine.store(prompt, keep_host=True)
        assert engine.counts()["dropped"] > before
        again, outcome = engine.one(prompt)
        assert (again, set(outcome.sources)) == (cold, {"host"})
        monkeypatch.undo()

    def test_blocks_that_are_too_old_are_served_from_nowhere(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt, shared = engine.prompt("old", picture=22), engine.connector.shared
        cold = engine.store(prompt, keep_host=True)
        old = {key: (owner, 1.0) for key, (owner, _) in shared.records.items()}
        shared.records.update(old)
        settings = KVSettings(shared.settings.cache_dir, max_age_s=3600.0)
        monkeypatch.setattr(shared, "settings", settings)
        again, outcome = engine.one(prompt, extra=kv_params(kv_load_tiers=[{"medium": "CPU"}]))
        assert (again, outcome.loaded_tokens) == (cold, 0)
        assert engine.from_host(prompt)[1].sources.get("host")  # computed and stored anew

    @pytest.mark.parametrize(
        "why", ["/dev/shm cannot be used", "one step computes up to 128 tokens"]
    )
    def test_a_connector_that_has_too_little_memory_stays_idle(
        self,
        engine: CachedEngine,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        why: str,
    ) -> None:
        from semkv_vllm import kv

        def agreed(*args: Any) -> tuple[int, bool]:
            if "step" in why:
                return 1 << 12, True
            raise PermissionError("not yours")

        monkeypatch.setattr(kv, "agreed_host_bytes", agreed)
        scheduler, role = engine.scheduler, kv.KVConnectorRole.SCHEDULER
        made = kv.SemKVConnector(scheduler.vllm_config, role, scheduler.kv_cache_config)
        assert type(made) is kv.IdleConnector
        assert why in caplog.text

    def test_all_hooks_of_a_request_name_its_blocks_alike(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the content of its picture: a tail of a block is looked up in one hook and loaded in another."""
        prompt, half = engine.prompt("alike", picture=22), engine.connector.connector_scheduler
        cold = engine.store(prompt)
        hooks = (
            "on_new_request",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "request_finished",
        )
        named: dict[str, list[bytes]] = {}
        for hook in hooks:
            own = getattr(half, hook)

            def spy(
                request: Any, *args: Any, own: Any = own, hook: str = hook, **fields: Any
            ) -> Any:
                named[hook] = list(request.block_hashes)
                return own(request, *args, **fields)

            monkeypatch.setattr(half, hook, spy)
        tokens, outcome = engine.one(prompt)
        assert (tokens, bool(outcome.loaded_tokens)) == (cold, True)
        beginnings = {hook: hashes[:2] for hook, hashes in named.items()}
        assert beginnings == dict.fromkeys(hooks, beginnings["on_new_request"])
        engine.one(engine.prompt("later", picture=22))
        assert len(engine.connector._live) <= 1  # what ended is forgotten in a later step

    def test_capture_and_inject_by_hand(self, engine: CachedEngine) -> None:
        from vllm import SamplingParams

        from semkv_vllm.adapter import KVAdapter

        adapter, prompt = KVAdapter(engine.llm), engine.prompt("by hand", picture=22)
        (cold,) = engine.run(prompt)
        chunk = adapter.capture(cold.request_id)
        assert chunk is not None
        assert chunk.num_tokens == len(cold.prompt_token_ids) // BLOCK * BLOCK
        assert {len(t) for t in chunk.tensors.values()} == {len(chunk.block_hashes)}
        assert sum(t.shape[1] for t in chunk.tensors.values()) <= chunk.rows.shape[1]
        assert adapter.capture("nobody") is None
        purge(engine.cache_dir)
        engine.forget()
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        llm_engine = engine.llm.llm_engine
        for name, text in (("mine", "by hand"), ("other", "by foot")):
            llm_engine.add_request(name, engine.prompt(text, picture=22), params)
        assert adapter.inject("mine", chunk)
        assert not adapter.inject("other", chunk)
        assert "differ" in adapter.refusal("other", chunk)
        assert not adapter.inject("unknown", chunk)
        done = step(engine)
        assert answer(done["mine"]) == answer(cold)
        assert read_outcome(done["mine"]).loaded_tokens == full_blocks(cold)

    def test_a_nap_of_fixed_weights_keeps_what_is_stored(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt, connector = engine.prompt("nap", picture=27), engine.connector
        cold, _ = engine.one(prompt)
        settings = KVSettings(
            connector.shared.settings.cache_dir, fixed_weights=True, report_loads=True
        )
        monkeypatch.setattr(connector, "_settings", settings)
        for extra, loads, fusion in ((None, True, (0, 0)), (SKIP, False, (1, 0))):
            engine.forget(keep_host=True)
            engine.llm.sleep(level=1)
            engine.llm.wake_up()
            again, outcome = engine.one(prompt, extra=extra)
            assert (again, bool(outcome.loaded_tokens)) == (cold, loads)
            assert (outcome.fusion_loaded, outcome.fusion_encoded) == fusion

    @pytest.mark.parametrize(("how", "pictures"), [("reset", (23, 28)), ("sleep", (29, 30))])
    def test_nothing_of_the_old_weights_is_served_after_a_reset(
        self, engine: CachedEngine, how: str, pictures: tuple[int, int]
    ) -> None:
        """Other weights follow: neither KV nor encoder outputs are served; what another engine stored stays its own."""
        from vllm import SamplingParams

        from semkv_vllm.adapter import KVAdapter

        mine, yours = (engine.prompt("weights", picture=picture) for picture in pictures)
        adapter = KVAdapter(engine.llm)
        engine.one(mine)
        (output,) = engine.run(yours)
        chunk = adapter.capture(output.request_id)
        assert chunk is not None
        other = BlockStore(engine.cache_dir / "kv", "kv", writer="another")
        key = b"another engine's block".ljust(36)
        assert other.write(chunk.namespace, {}, [key], [chunk.rows[0]])
        if how == "reset":
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            engine.llm.llm_engine.reset_encoder_cache()
        else:
            engine.settle()
            engine.llm.sleep(level=2)
        engine.llm.apply_model(_other_weights)
        if how == "sleep":
            engine.llm.wake_up()
        found = other.find(chunk.namespace, [key, *chunk.block_hashes])
        assert [ref is not None for ref in found] == [True] + [False] * len(chunk.block_hashes)
        other.close()
        for prompt in (mine, yours):
            fresh, outcome = engine.one(prompt)
            assert outcome == disk(0, fusion=(0, 1))
            again, outcome = engine.from_disk(prompt, extra=SKIP)
            assert (again, outcome.fusion_loaded) == (fresh, 1)
            again, outcome = engine.from_disk(prompt)
            assert (again, bool(outcome.loaded_tokens)) == (fresh, True)
        engine.llm.llm_engine.add_request("late", yours, SamplingParams(max_tokens=1))
        assert "reset" in adapter.refusal("late", chunk)
        step(engine)

    def test_after_a_reset_that_fails_nothing_is_stored_or_loaded_until_one_succeeds(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise AssertionError("broken")

        prompt = engine.prompt("mixed", picture=31)
        engine.store(prompt, keep_host=True)
        before = engine.counts()["stored_blocks"]
        monkeypatch.setattr(engine.connector.manager, "reset_cache", broken)
        assert not engine.llm.reset_prefix_cache(reset_connector=True)
        monkeypatch.undo()
        assert engine.one(prompt)[1].loaded_tokens == 0
        engine.one(engine.prompt("of which weights?", picture=31))
        engine.settle()
        assert engine.counts()["stored_blocks"] == before
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        cold = engine.store(prompt)
        again, outcome = engine.one(prompt)
        assert (again, bool(outcome.loaded_tokens)) == (cold, True)

    def test_replies_say_nothing_of_the_cache_unless_told_to(
        self, engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was loaded for a request tells its client what others have asked."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        prompt = engine.prompt("quiet", picture=31)
        engine.store(prompt)
        monkeypatch.setattr(engine.connector, "_settings", KVSettings(engine.cache_dir))
        monkeypatch.setattr(get_ec_transfer(), "_reports", False)
        monkeypatch.setattr(engine.scheduler.ec_connector, "_reports", False)
        (output,) = engine.run(prompt)
        assert (output.kv_transfer_params, output.ec_transfer_params) == (None, None)
        assert not ECSettings(engine.cache_dir).report_loads


def step(engine: CachedEngine) -> dict[str, Any]:
    """The outputs of the requests under way, by name, when all have ended."""
    core, done = engine.llm.llm_engine, dict[str, Any]()
    while core.has_unfinished_requests():
        done |= {output.request_id: output for output in core.step() if output.finished}
    return done


def _other_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(1.125)


# ---------------------------------------------------------------------- other engines


def test_a_prompt_larger_than_host_memory_is_answered(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    """Its blocks on disk would push each other out of host memory for ever."""
    row = (
        32 * 128 * 3 * 2 * 4
    )  # a block of 32 tokens of three layers of width 128, keys and values, in float32
    kv = {"host_bytes": 14 * (row + 4096)}
    with CachedEngine(checkpoint("opt"), tmp_path) as large:
        (cold,) = large.run(large.prompt("long " * 120))
        large.settle()
    assert full_blocks(cold) > 16 * BLOCK
    with CachedEngine(checkpoint("opt"), tmp_path, kv, max_num_batched_tokens=128) as small:
        tokens, outcome = small.one(small.prompt("long " * 120))
    assert tokens == answer(cold)
    assert 0 < (outcome.loaded_tokens or 0) < full_blocks(cold)


def test_kv_events_tell_what_is_on_the_disk(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored, evicted and purged by another process."""
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved

    monkeypatch.setattr("semkv_vllm.tier._LOOK_S", 0.0)
    monkeypatch.setattr("semkv_vllm.tier._LOOKS", 1)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with CachedEngine(
        checkpoint("opt"), tmp_path, {"max_blocks": 4}, kv_events_config=events
    ) as engine:
        told, take = set[Any](), engine.connector.take_events

        def listen() -> list[Any]:
            taken = list(take())
            for event in taken:
                if event.medium == MEDIUM_STORAGE and isinstance(event, BlockRemoved):
                    told.difference_update(event.block_hashes)
                elif event.medium == MEDIUM_STORAGE:
                    assert event.token_ids
                    told.update(event.block_hashes)
            return taken

        def after(text: str) -> set[Any]:
            engine.store(engine.prompt(text))
            listen()
            count = "SELECT count(*) FROM blocks"
            assert len(told) == engine.connector.shared.store.ask(
                lambda db: db.execute(count).fetchone()[0], None
            )
            return set(told)

        monkeypatch.setattr(engine.connector, "take_events", listen)
        first, second = after("first"), after("second")
        assert first - second, "evicted"
        purge(tmp_path)
        third = after("third")
        assert third
        assert not second & third


def test_another_tier_tells_weights_apart(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    """It goes by the model's name, which is the same for other weights in the same folder."""
    model, folders = shutil.copytree(checkpoint("opt"), tmp_path / "opt"), []
    kv = {
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "fs")}],
        "fixed_weights": True,
    }
    for _ in range(2):
        with CachedEngine(model, tmp_path / "cache", kv) as engine:
            prompt = engine.prompt("elsewhere")
            assert not engine.one(prompt)[1].loaded_tokens
            purge(tmp_path / "cache")
            assert engine.from_disk(prompt)[1].loaded_tokens, "the other tier has it"
        flip(model / "model.safetensors", -1)
        folders.append(set((tmp_path / "fs").iterdir()))
    assert folders[0] < folders[1]


def test_an_engine_that_cannot_be_served_answers(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CachedEngine(checkpoint("opt"), tmp_path, enable_prefix_caching=False) as engine:
        assert caplog.text.count("prefix caching is off") == 1
        cold, outcome = engine.one(engine.prompt("idle"))
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.one(engine.prompt("idle")) == (cold, outcome)
    assert outcome.loaded_tokens is None


def test_an_engine_whose_directories_are_files_answers(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("kv", "fusion"):
        (tmp_path / name).write_text("in the way")
    with CachedEngine(checkpoint("llava"), tmp_path) as engine:
        assert "no KV is kept on disk" in caplog.text
        assert "no encoder outputs are kept" in caplog.text
        prompt = engine.prompt("no disk", picture=22)
        cold, _ = engine.one(prompt)
        again, outcome = engine.from_host(prompt)
    assert (again, set(outcome.sources)) == (cold, {"host"})


def by_name(model: str, cache: str, name: str) -> dict[str, Any]:
    """As a server runs it: the engine core is another process, and vLLM finds the connectors by their entry point."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", SEMKV_CACHE_DIR=cache)
    from vllm import LLM, SamplingParams

    from semkv_vllm.host_memory import OURS, region_of

    llm = LLM(
        model, max_model_len=512, enforce_eager=True, dtype="float32", block_size=BLOCK, kv_cache_memory_bytes=1 << 26,
        limit_mm_per_prompt={"image": 1, "video": 0},
        kv_transfer_config={"kv_connector": "SemKVConnector", "kv_role": "kv_both", "engine_id": name,
                            "kv_connector_extra_config": {"report_loads": True}},
        ec_transfer_config={"ec_connector": "SemECConnector", "ec_role": "ec_both",
                            "ec_connector_extra_config": {"report_loads": True}},
    )  # fmt: skip
    prompt = {
        "prompt": "<s><image>" + " is there a dog" * 20,
        "multi_modal_data": {"image": tiny_models.picture()},
    }

    def ask(extra: dict[str, Any] | None, enough: Callable[[Any], object]) -> list[Any]:
        """Blocks and encoder outputs are stored in the background: ask until what is wanted is found."""
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args=extra)
        while True:
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            while not llm.reset_prefix_cache():
                time.sleep(0.01)
            llm.llm_engine.reset_encoder_cache()
            if enough(output):
                return [answer(output), output.kv_transfer_params, output.ec_transfer_params]

    found = {
        "cold": ask(None, lambda _: True),
        "warm": ask(None, lambda output: output.kv_transfer_params["semkv"]["loaded_tokens"]),
        "fused": ask(SKIP, lambda output: output.ec_transfer_params["semkv"]["loaded"]),
        "in process": hasattr(llm.llm_engine.engine_core, "engine_core"),
        "shared": region_of(
            OURS + digest("engine", name, llm.llm_engine.vllm_config.instance_id, "1")[:24]
        ).exists(),
    }
    llm.llm_engine.engine_core.shutdown()
    return found


def test_by_name_alone_in_an_engine_process(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    found = in_child(by_name, checkpoint("llava"), tmp_path / "cache", name)
    assert not found["in process"]
    cold, warm, fused = (found[level] for level in ("cold", "warm", "fused"))
    assert warm[0] == fused[0] == cold[0]
    nothing = {"semkv": {"loaded_tokens": 0, "sources": {}}}
    assert cold[1:] == [nothing, {"semkv": {"loaded": 0, "encoded": 1}}]
    assert warm[1]["semkv"]["loaded_tokens"] >= 96
    assert fused[1:] == [nothing, {"semkv": {"loaded": 1, "encoded": 0}}]
    assert not found["shared"], "a name that is there while the engine runs stays when it is killed"


# ---------------------------------------------------------------------- the parts


def test_an_older_vllm_is_named_with_the_floor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    connectors.register()
    assert not caplog.text
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    connectors.register()
    assert "vLLM 0.32 or newer is needed, and 0.31.2 is installed" in caplog.text


def test_all_processes_of_an_engine_agree_on_its_host_memory(tmp_path: Path) -> None:
    from semkv_vllm.host_memory import agreed_host_bytes

    assert agreed_host_bytes("engine", 1 << 20, tmp_path) == (1 << 20, True)
    assert agreed_host_bytes("engine", 1 << 30, tmp_path) == (1 << 20, False)
    second, third = (agreed_host_bytes(name, 1 << 60, tmp_path)[0] for name in ("other", "third"))
    assert third < second / 2, "which the other has not filled yet"


def test_every_job_is_answered_when_the_disks_process_dies(tmp_path: Path) -> None:
    """Also one that could not be sent, and is followed by another at once."""
    from semkv_vllm.disk_process import DiskProcess, HostShape

    store, memory = BlockStore(tmp_path, "kv"), os.memfd_create("rows")
    os.ftruncate(memory, 4 * 64)
    disk = DiskProcess(memory, HostShape(rows=4, stride=64, row_bytes=64), store)
    about = {"namespace": "ns", "layout": {}, "owner": "", "since": store.last_purge()}

    def stored(*rows: int) -> list[bytes]:
        numbers = [disk.submit(keys=[b"%d" % row], chunks=[row], **about) for row in rows]
        answers = {done.number: done.good for done in disk.drain()}
        return [answers[number] for number in numbers]

    assert stored(0) == [b"\1"]
    assert disk._process
    disk._process.kill()
    disk._process.wait()
    disk._started -= 3600.0
    assert stored(1, 2) == [b"", b""]
    assert stored(1, 2) == [b"\1", b"\1"]
    disk.close()
    os.close(memory)


def test_the_gate_reads_only_what_is_faster() -> None:
    gate = BreakEven()
    assert gate.worth(1000, 1 << 30)  # nothing is known
    for _ in range(4):
        gate.prefill.measured(10_000, 1.0)
        gate.disk.measured(1 << 30, 1.0)
    assert gate.worth(10_000, 1 << 29)
    assert not gate.worth(1_000, 1 << 30)
    assert any(gate.worth(1_000, 1 << 30) for _ in range(40))  # once in a while, to measure again


def test_settings_name_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMKV_CACHE_DIR", str(tmp_path))
    assert read_settings(KVSettings, None).cache_dir == tmp_path
    assert read_settings(KVSettings, {"max_age_s": 3}).bounds().max_age_s == 3
    for extra, word in (
        ({"hots_bytes": 1}, "hots_bytes"),
        ({"host_bytes": "4GiB"}, "host_bytes"),
        ({"host_bytes": -1}, "host_bytes"),
        ({"secondary_tiers": "p2p"}, "secondary_tiers"),
        ({"secondary_tiers": [{"type": "semkv"}, {"type": "semkv"}]}, "secondary_tiers"),
        ({"secondary_tiers": [{"type": "semkv", "max_bytes": 1}]}, "stand beside secondary_tiers"),
        ({"secondary_tiers": [{"type": ["fs"]}]}, "each with a type"),
        ({"secondary_tiers": [{"type": "example"}]}, "loads none"),
        ({"secondary_tiers": [{"type": "p2p"}]}, "fixed_weights"),
    ):
        with pytest.raises(ConfigError, match=word):
            read_settings(KVSettings, extra)
    with pytest.raises(ConfigError, match="max_bytes"):
        read_settings(ECSettings, {"max_bytes": -1})
    ours, theirs = {"type": "semkv"}, {"type": "p2p", "port": 1}
    for given, made in (
        ((theirs,), [ours, theirs]),
        ((theirs, ours), [theirs, ours]),
    ):  # ours stands where it is put
        assert KVSettings(Path(), secondary_tiers=given, fixed_weights=True).tiers() == made


def test_encoder_outputs_that_wait_are_bounded_and_one_that_fails_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from semkv_vllm import ec

    blocks, gate, done = BlockStore(tmp_path, "fusion"), threading.Event(), []

    def save(store: FusionStore, state: FusionState, *_: Any) -> None:
        done.append(state.key)
        assert gate.wait(60)
        assert state.key != "b", "scripted"

    monkeypatch.setattr(FusionStore, "save", save)
    monkeypatch.setattr(ec, "_MOST_WAITING", 2)
    worker = ec.ECWorker(blocks, "cpu", saves=True)
    step = ec.SemECMetadata("ns", blocks.last_purge(), saves={name: (name, "") for name in "abcd"})
    for name in "abcd":  # the third is too much, and the last comes when there is room again
        if name == "d":
            gate.set()
            assert worker.flush(60)
        worker.save(step, {name: torch.ones(1, 10)}, name)
    worker.close()
    assert done == ["a", "b", "d"]
    assert (blocks.counters["dropped"], blocks.counters["errors"]) == (1, 1)
    assert "scripted" in caplog.text


def test_weights_are_read_once_and_changes_are_seen_behind_a_link_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, elsewhere, notes, seen = (
        tmp_path / "model",
        tmp_path / "elsewhere",
        tmp_path / "notes",
        set(),
    )
    model.mkdir()
    elsewhere.mkdir()
    (model / "weights").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(model)
    for number, folder in enumerate((model, elsewhere, model), 1):
        (folder / "w.safetensors").write_bytes(b"%d" % number)
        seen.add(first := identity.cached_weights_digest(model, notes))
        with monkeypatch.context() as patch:
            patch.setattr(identity, "weights_digest", lambda path: pytest.fail("read again"))
            assert identity.cached_weights_digest(model, notes) == first
        assert len(seen) == number
    (note,) = notes.iterdir()
    note.unlink()
    os.mkfifo(note)  # a reader would wait for a writer
    assert identity.cached_weights_digest(model, notes) == first
    assert {path.stat().st_mode & 0o777 for path in notes.iterdir()} == {0o600}


def test_outcome_of_other_engines() -> None:
    assert read_outcome(SimpleNamespace(num_cached_tokens=3)) == ConnectorOutcome(cached_tokens=3)
    odd = SimpleNamespace(kv_transfer_params={"semkv": [1]}, ec_transfer_params="x")
    assert read_outcome(odd) == ConnectorOutcome()
    two = {
        "semkv": {"loaded_tokens": 0, "sources": {}},
        "semkv-2": {"loaded_tokens": 64, "sources": {"disk": 64}},
    }
    assert read_outcome(SimpleNamespace(kv_transfer_params=two)) == ConnectorOutcome(
        64, {"disk": 64}
    )


def media(
    name: str, salt: str | None, identifier: str = "cat.jpg", shown: str = ""
) -> SimpleNamespace:
    """A request with one media item of two positions, as vLLM's scheduler has it."""
    import torch

    position = SimpleNamespace(get_num_embeds=lambda: 2)
    pixels = torch.tensor(list((shown or identifier).encode()))
    data = {"pixels": SimpleNamespace(data=pixels)}
    feature = SimpleNamespace(
        identifier=identifier, modality="image", mm_position=position, data=UserDict(data)
    )
    fields = {"cache_salt": salt, "lora_request": None, "ec_transfer_params": None}
    return SimpleNamespace(request_id=name, mm_features=[feature], **fields)


def test_one_name_in_two_tenants_is_never_shared(tmp_path: Path) -> None:
    from semkv_vllm.ec import ECScheduler

    store = FusionStore.open(tmp_path, "ns")
    ec = ECScheduler(store.blocks, "ns", tmp_path, Media(trusted=False))
    mine, yours = media("1", "me"), media("2", "you")

    def has(request: Any) -> bool:
        ec.observe(request)
        return ec.has("cat.jpg")

    assert not has(mine)
    ec.allocated(mine, 0)
    ((key, _),) = ec.build_step().saves.values()
    store.save(FusionState.from_array(key, np.ones((2, 4), np.float32)))
    assert has(mine)
    assert not has(yours), "while both run, the name says nothing about whose item it is"
    assert ec.finished(mine) == {"semkv": {"loaded": 0, "encoded": 1}}
    assert not has(yours)
    ec.finished(yours)
    again = media("5", "me")
    assert has(again)
    ec.allocated(again, 0)
    assert list(ec.build_step().loads) == ["cat.jpg"]
    assert ec.finished(again) == {"semkv": {"loaded": 1, "encoded": 0}}
    other = media("6", "me", shown="another")
    assert not has(other), "another item of the same name"
    ec.finished(other)
    renamed = media("7", "me", "dog.jpg", shown="cat.jpg")
    ec.observe(renamed)
    assert ec.has("dog.jpg"), "the same item under another name"
    ec.finished(renamed)
    odd = media("8", "odd")
    assert not has(odd)
    ec.allocated(odd, 0)
    ((key, _),) = ec.build_step().saves.values()
    store.save(FusionState.from_array(key, np.ones((3, 4), np.float32)))
    assert not has(odd), "three rows for two positions"


def test_encoder_outputs_of_other_weights_are_nobodys_at_once(tmp_path: Path) -> None:
    """Without another picture: neither what is on disk, nor what is on its way there."""
    import torch

    from semkv_vllm.ec import ECScheduler, ECWorker

    planned: dict[str, ECScheduler] = {}
    workers: dict[str, ECWorker] = {}
    for name in ("one", "two"):
        blocks = BlockStore(tmp_path / "fusion", "fusion", writer=name)
        identity.FOLLOWERS[name] = planned[name] = ECScheduler(
            blocks, "ns", tmp_path, Media(trusted=False)
        )
        workers[name] = ECWorker(blocks, "cpu", saves=True)

    def has(engine: str, item: str) -> bool:
        planned[engine].observe(media(item, None, item))
        return planned[engine].has(item)

    def step(engine: str, item: str) -> Any:
        assert not has(engine, item)
        planned[engine].allocated(media(item, None, item), 0)
        return planned[engine].build_step()

    def save(engine: str, planned_step: Any, item: str) -> None:
        workers[engine].save(planned_step, {item: torch.ones(2, 4)}, item)
        assert workers[engine].flush(60)

    for engine, item in (("one", "cat"), ("two", "dog")):
        save(engine, step(engine, item), item)
    under_way = step("one", "cow")
    assert identity.may_have_changed("one")
    save("one", under_way, "cow")
    assert [has("two", item) for item in ("cat", "cow", "dog")] == [False, False, True]
    save("one", step("one", "dog"), "dog")
    assert has("one", "dog")
    planned["one"].close()
    content = Media(trusted=False).content(media("dog", None, "dog").mm_features[0])
    assert digest("ec", content, "") in planned["two"].store
    assert digest("ec", content, "") not in planned["one"].store


def test_a_fault_in_every_step_is_counted_each_time_and_logged_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = KVShared(KVSettings(tmp_path), None, None, dict)
    for where in ("a store", "a lookup", "a store", "a store"):
        try:
            raise OSError(where)
        except OSError:
            shared.fault(where)
    assert shared.counters["errors"] == 4
    assert [record.getMessage().count("a store") for record in caplog.records] == [1, 0]
