"""The connectors inside a real vLLM (CPU backend), and their halves by themselves."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny_models
from semkv.connectors import namespace, register, weights
from semkv.connectors.adapter import KVAdapter
from semkv.connectors.break_even import RanksGate
from semkv.connectors.host import SharedPool
from semkv.connectors.kv_keys import rank_namespace
from semkv.connectors.kv_plan import LoadPlan
from semkv.connectors.kv_scheduler import KVScheduler
from semkv.connectors.kv_worker import KVWorker
from semkv.connectors.outcome import ConnectorOutcome, read_outcome
from semkv.connectors.settings import ECSettings, KVSettings, read_settings
from semkv.connectors.writer import BackgroundWriter
from semkv.errors import ConfigError
from semkv.keys import digest
from semkv.purging import purge_salts
from semkv.stores.block_index import BlockIndex
from semkv.stores.blocks import KVChunk, KVLayout, KVStore, LayerLayout
from semkv.stores.cachedir import purge_directory
from semkv.stores.extents import Bounds, ExtentStore

BLOCK = 32
ADAPTER = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/nowhere")  # weights that are not known
SKIP = {"kv_transfer_params": {"semkv": {"skip": True}}}


def same_but_for_a_tie(output: Any, cold: Any) -> bool:
    """Equal tokens, up to one where the cold run's two best are within what bfloat16 tells apart: beside others that
    load, fewer tokens are computed at once, which rounds in another way."""
    for own, other, best in zip(answer(output), answer(cold), cold.outputs[0].logprobs, strict=True):
        if own != other:
            first, second = sorted(best.values(), key=lambda found: -found.logprob)[:2]
            return own in best and first.logprob - second.logprob < 0.03
    return True


class Engine:
    """A tiny in-process vLLM with or without the connectors."""

    def __init__(
        self, model: Path, cache_dir: Path | None = None, kv: dict[str, Any] | None = None, **args: Any
    ) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
        pytest.importorskip("vllm")
        from vllm import LLM
        from vllm.config import ECTransferConfig, KVTransferConfig

        self.family = model.name
        self.cache_dir = cache_dir
        media = {} if self.family == "opt" else {"limit_mm_per_prompt": {"image": 1, "video": 0}}
        if cache_dir is not None:
            extra = {"cache_dir": str(cache_dir)}
            args["kv_transfer_config"] = KVTransferConfig(
                kv_connector="SemKVConnector", kv_role="kv_both", kv_connector_extra_config=extra | (kv or {})
            )
            if media:
                args["ec_transfer_config"] = ECTransferConfig(
                    ec_connector="SemECConnector", ec_role="ec_both", ec_connector_extra_config=extra
                )
        args = {"max_model_len": 1024, "dtype": "bfloat16"} | args
        self.llm = LLM(
            str(model), enforce_eager=True, block_size=BLOCK,
            kv_cache_memory_bytes=1 << 28, disable_log_stats=True, **media, **args,
        )  # fmt: skip

    def prompt(self, text: str = "", picture: int = 0, salt: str | None = None) -> dict[str, Any]:
        # Some 100 tokens after the picture, whatever the tokenizer's luck.
        prompt: dict[str, Any] = {"prompt": tiny_models.PROMPTS[self.family] + text + " is there a dog 0123456789" * 7}
        if self.family != "opt":
            prompt["multi_modal_data"] = {"image": tiny_models.picture(picture)}
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt

    def run(
        self, *prompts: dict[str, Any], extra: dict[str, Any] | None = None, tokens: int = 8, top: int | None = None
    ) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args=extra, logprobs=top)
        return list(self.llm.generate(list(prompts), params, use_tqdm=False))

    def one(self, prompt: dict[str, Any], extra: dict[str, Any] | None = None) -> tuple[list[int], ConnectorOutcome]:
        (output,) = self.run(prompt, extra=extra)
        return answer(output), read_outcome(output)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def kv(self) -> KVScheduler:
        half = self.core.scheduler.connector.scheduler_half
        assert isinstance(half, KVScheduler)
        return half

    def store(self) -> KVStore:
        return self.kv.stores()[0]

    def flush(self) -> None:
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

        assert self.worker.flush(60)
        if has_ec_transfer():
            assert get_ec_transfer().worker_half.flush(60)

    @property
    def worker(self) -> KVWorker:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        half = get_kv_transfer_group().worker_half
        assert isinstance(half, KVWorker)
        return half

    def forget(self, *, host: bool = True) -> None:
        """Empty vLLM's own caches and, unless told otherwise, host memory, so that only the disk remains."""
        self.flush()
        if host:
            self.worker.pool.clear()
            assert not len(self.worker.pool)
        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def extents(self) -> set[Path]:
        assert self.cache_dir is not None
        return set((self.cache_dir / "kv" / "extents").glob("*/*"))

    def close(self) -> None:
        from vllm.distributed.ec_transfer import ensure_ec_transfer_shutdown
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        ensure_ec_transfer_shutdown()
        del self.llm
        gc.collect()


def answer(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def full_blocks(output: Any) -> int:
    """Tokens that can be loaded: whole blocks, one token left to compute."""
    return int((len(output.prompt_token_ids) - 1) // BLOCK * BLOCK)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.make(family, root / family)
        return made[family]

    return get


@pytest.fixture(scope="class")
def engine(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One LLaVA for most tests; prompts are longer than a step, so every prefill is chunked."""
    e = Engine(models("llava"), tmp_path_factory.mktemp("cache"), max_num_batched_tokens=128, max_num_seqs=8)
    yield e
    e.close()


# ---------------------------------------------------------------------- one module engine


@pytest.mark.engine
class TestEngine:
    def test_loaded_answers_equal_computed_ones(self, engine: Engine) -> None:
        prompt = engine.prompt("first", picture=1)
        (cold,) = engine.run(prompt)
        assert len(cold.prompt_token_ids) > 128
        assert read_outcome(cold) == ConnectorOutcome(0, False, 0, 1, 0)
        engine.forget()
        (warm,) = engine.run(prompt)
        loaded = full_blocks(cold)
        assert read_outcome(warm) == ConnectorOutcome(loaded, False, 0, 0, loaded)
        assert answer(warm) == answer(cold)
        # A control that can fail: the model does look at its prompt and its picture.
        assert answer(engine.run(engine.prompt("first", picture=2))[0]) != answer(cold)
        assert answer(engine.run(engine.prompt("other", picture=1))[0]) != answer(cold)

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_levels_give_the_same_answer(
        self, engine: Engine, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Host memory, then the disk; asynchronously as on a GPU, while another request goes on."""
        monkeypatch.setattr(engine.worker.transfer, "asynchronous", asynchronous)
        monkeypatch.setattr(engine.core.scheduler.connector, "_asynchronous", asynchronous)
        prompt = engine.prompt(f"level {asynchronous}", picture=40)
        cold = answer(engine.run(prompt, extra=SKIP)[0])
        engine.one(prompt)  # captures what vLLM's own cache has
        for host, counter in ((False, "host_tokens"), (True, "disk_tokens")):
            other = engine.prompt(f"other {asynchronous} {host}", picture=41 + 2 * asynchronous + host)
            alone = answer(engine.run(other, extra=SKIP)[0])
            engine.forget(host=host)
            before = engine.worker.counters.totals().get(counter, 0)
            loaded, computed = engine.run(prompt, other)
            assert (answer(loaded), answer(computed)) == (cold, alone)
            n = full_blocks(loaded)
            assert read_outcome(loaded) == ConnectorOutcome(n, False, 0, 0, n)
            assert read_outcome(computed).loaded_tokens == 0
            assert engine.worker.counters.totals()[counter] == before + n

    def test_asynchronous_load_that_fails_is_computed(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine.worker.transfer, "asynchronous", True)
        monkeypatch.setattr(engine.core.scheduler.connector, "_asynchronous", True)
        monkeypatch.setattr(engine.kv._stores, "worker", lambda: None)  # promised by the index alone
        before, prompt = engine.extents(), engine.prompt("late", picture=46)
        cold, _ = engine.one(prompt)
        engine.forget()
        file = max(engine.extents() - before, key=lambda p: p.stat().st_mtime_ns)
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        again, outcome = engine.one(prompt)
        assert (again, outcome.load_failed) == (cold, True)
        engine.forget()
        again, outcome = engine.one(prompt)
        assert (again, outcome.load_failed) == (cold, False)
        assert outcome.loaded_tokens

    def test_blocks_of_an_aborted_load_are_nobody_elses_before_it_has_ended(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm import SamplingParams

        monkeypatch.setattr(engine.worker.transfer, "asynchronous", True)
        monkeypatch.setattr(engine.core.scheduler.connector, "_asynchronous", True)
        gone, other = engine.prompt("gone", picture=47), engine.prompt("other", picture=48)
        cold = [answer(engine.run(p, extra=SKIP)[0]) for p in (gone, other)]
        engine.one(gone)
        engine.forget()
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        free, gate, real = pool.get_num_free_blocks(), threading.Event(), engine.worker._read
        with monkeypatch.context() as m:
            m.setattr(engine.kv._stores, "worker", lambda: None)  # promised by the index alone, so it is read late
            m.setattr(engine.worker, "_read", lambda *args: (gate.wait(), real(*args))[1])
            llm_engine = engine.llm.llm_engine
            llm_engine.add_request("gone", gone, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
            while not engine.worker._coming:
                llm_engine.step()
            llm_engine.abort_request(["gone"])
            assert answer(engine.run(other, extra=SKIP)[0]) == cold[1]
            assert pool.get_num_free_blocks() < free  # the load still writes there
            gate.set()
            while engine.worker._coming or engine.worker._loads:
                engine.run(engine.prompt("goes on", picture=48), extra=SKIP, tokens=2)
            assert pool.get_num_free_blocks() == free
        for prompt, expected in ((gone, cold[0]), (other, cold[1])):
            assert engine.one(prompt)[0] == expected
            engine.forget()
            assert engine.one(prompt)[0] == expected

    def test_requests_of_other_kinds(self, engine: Engine) -> None:
        """Several samples, prompt logprobs (which take no prefix from a cache), beams: loaded as computed."""
        from vllm import SamplingParams
        from vllm.sampling_params import BeamSearchParams

        def run(number: int) -> tuple[Any, int]:
            if number == 2:
                prompt = engine.prompt("beams", picture=51)
                (found,) = engine.llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=6))
                return [list(s.tokens) for s in found.sequences], -1
            kinds: list[dict[str, Any]] = [{"n": 3, "temperature": 0.8, "top_k": 1}, {"prompt_logprobs": 1}]
            params = SamplingParams(max_tokens=6, ignore_eos=True, **({"temperature": 0.0} | kinds[number]))
            prompt = engine.prompt(f"kind {number}", picture=49 + number)
            (output,) = engine.llm.generate([prompt], params, use_tqdm=False)
            logprobs = [sorted(position or {}) for position in output.prompt_logprobs or ()]
            return [[list(o.token_ids) for o in output.outputs], logprobs], output.num_cached_tokens

        for number, loads in enumerate((True, False, None)):
            before = engine.worker.counters.totals().get("disk_tokens", 0)
            cold, _ = run(number)
            engine.forget()
            warm, cached = run(number)
            assert warm == cold, number
            loaded = engine.worker.counters.totals().get("disk_tokens", 0) - before
            assert (loaded > 0) == (loads is not False)
            assert loads is None or (cached > 0) == loads

    def test_encoder_output_is_loaded_when_the_kv_is_not(self, engine: Engine) -> None:
        prompt = engine.prompt("encoder", picture=3)
        cold, _ = engine.one(prompt)
        engine.forget()
        again, outcome = engine.one(prompt, extra=SKIP)
        assert outcome == ConnectorOutcome(0, False, 1, 0, 0)
        assert again == cold
        engine.forget()
        both = SKIP | {"ec_transfer_params": {"semkv": {"skip": True}}}
        again, outcome = engine.one(prompt, extra=both)
        assert outcome == ConnectorOutcome(0, False, 0, 1, 0)
        assert again == cold

    def test_skip_neither_loads_nor_captures(self, engine: Engine) -> None:
        prompt = engine.prompt("skip", picture=4)
        engine.one(prompt, extra=SKIP)
        engine.forget()
        assert engine.one(prompt)[1].loaded_tokens == 0
        engine.forget()
        assert engine.one(prompt, extra=SKIP)[1].loaded_tokens == 0

    def test_salts_share_nothing(self, engine: Engine) -> None:
        a, b = (engine.prompt("salted", picture=5, salt=s) for s in "ab")
        cold, _ = engine.one(a)
        engine.forget()
        other, outcome = engine.one(b)
        assert (outcome.loaded_tokens, outcome.fusion_loaded, outcome.fusion_encoded) == (0, 0, 1)
        assert other == cold
        engine.forget()
        assert engine.one(engine.prompt("salted", picture=5))[1].loaded_tokens == 0
        engine.forget()
        again, outcome = engine.one(a)
        assert outcome.loaded_tokens
        assert again == cold
        engine.forget()
        assert engine.one(a, extra=SKIP)[1].fusion_loaded == 1

    def test_a_purge_of_a_tenant_takes_its_blocks_and_encoder_outputs(self, engine: Engine) -> None:
        assert engine.cache_dir is not None
        mine, yours = (engine.prompt("of a tenant", picture=8, salt=s) for s in ("me", "you"))
        cold, _ = engine.one(mine)
        engine.forget()
        engine.one(yours)
        engine.forget()
        assert purge_salts(engine.cache_dir, None, ["me"], dry_run=True).files >= 2
        purge_salts(engine.cache_dir, None, ["me"], dry_run=False)
        assert purge_salts(engine.cache_dir, None, ["me"], dry_run=True).files == 0
        assert engine.one(mine) == (cold, ConnectorOutcome(0, False, 0, 1, 0))
        engine.forget()
        assert engine.one(yours)[1].loaded_tokens
        engine.forget()
        assert engine.one(yours, extra=SKIP)[1].fusion_loaded == 1

    def test_prefix_of_another_question_and_only_new_blocks(self, engine: Engine) -> None:
        first, second = engine.prompt("one", picture=6), engine.prompt("two", picture=6)
        (cold,) = engine.run(first)
        engine.flush()
        before = engine.store().stats()
        n = len(cold.prompt_token_ids) // BLOCK
        expected = answer(engine.run(second, extra=SKIP)[0])
        engine.forget()
        tokens, outcome = engine.one(second)
        assert outcome.loaded_tokens == 64  # the picture: 1 + 64 tokens, of which two whole blocks
        assert outcome.fusion_loaded == 1  # its last token lies beyond them
        assert tokens == expected
        engine.flush()
        assert engine.store().stats().blocks == before.blocks + n - 2
        engine.one(second)
        engine.flush()
        assert engine.store().stats().blocks == before.blocks + n - 2

    def test_blocks_of_the_engines_own_prefix_cache_are_stored_too(self, engine: Engine) -> None:
        first, second = engine.prompt("hot", picture=7), engine.prompt("tub", picture=7)
        engine.one(first, extra=SKIP)  # computed, not captured
        _, outcome = engine.one(second)
        assert outcome.cached_tokens == 64
        engine.forget()
        (output,) = engine.run(second)
        assert read_outcome(output).loaded_tokens == full_blocks(output)

    def test_batch_in_chunks(self, engine: Engine) -> None:
        prompts = [engine.prompt(f"batch {'x' * 30 * i}", picture=10 + i % 3) for i in range(6)]
        cold = engine.run(*prompts, extra=SKIP, top=2)
        engine.forget()
        captured = engine.run(*prompts)
        assert [answer(o) for o in captured] == [answer(o) for o in cold]
        engine.forget()
        loaded = engine.run(*prompts)
        assert all(same_but_for_a_tie(*pair) for pair in zip(loaded, cold, strict=True))
        for output in loaded:
            outcome = read_outcome(output)
            assert outcome.load_failed is False
            assert outcome.cached_tokens == full_blocks(output)
        assert sum(read_outcome(o).loaded_tokens or 0 for o in loaded) >= full_blocks(loaded[0]) * 3

    @pytest.mark.parametrize("damage", ["flip", "truncate", "layout", "swap", "gone"])
    def test_damage_is_a_miss_with_the_same_answer(self, engine: Engine, damage: str) -> None:
        before, prompt = engine.extents(), engine.prompt(f"damage {damage}", picture=20)
        (cold,) = engine.run(prompt)
        engine.forget()
        new = sorted(engine.extents() - before, key=lambda p: p.stat().st_mtime_ns)
        file, raw = new[-1], new[-1].read_bytes()
        if damage == "flip":
            file.write_bytes(raw[:-5000] + bytes([raw[-5000] ^ 4]) + raw[-4999:])
        elif damage == "truncate":
            file.write_bytes(raw[:-1])
        elif damage == "layout":
            file.write_bytes(raw.replace(b'\\"block_size\\": 32', b'\\"block_size\\": 16'))
            assert file.read_bytes() != raw
        elif damage == "swap":
            other = next(p for p in sorted(before) if p != file)
            file.write_bytes(other.read_bytes())
        else:
            file.unlink()
        counters = dict(engine.worker._extents.counters)
        tokens, outcome = engine.one(prompt)
        assert tokens == answer(cold)
        assert outcome.load_failed is False
        assert outcome.loaded_tokens is not None
        assert outcome.loaded_tokens < full_blocks(cold)
        name = "missing" if damage == "gone" else "corrupt"
        assert engine.worker._extents.counters[name] > counters.get(name, 0)  # read in parts, so perhaps more than one
        assert not file.exists()
        engine.forget()
        tokens, outcome = engine.one(prompt)  # stored again meanwhile
        assert (tokens, outcome.loaded_tokens) == (answer(cold), full_blocks(cold))

    def test_damaged_fusion_state_is_encoded_again(self, engine: Engine) -> None:
        assert engine.cache_dir is not None
        prompt, root = engine.prompt("fusion", picture=21), engine.cache_dir / "fusion" / "extents"
        before = set(root.glob("*/*"))
        cold, _ = engine.one(prompt)
        engine.forget()
        (file,) = set(root.glob("*/*")) - before
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        tokens, outcome = engine.one(prompt, extra=SKIP)
        assert (tokens, outcome.fusion_loaded, outcome.fusion_encoded) == (cold, 0, 1)

    def test_encoder_outputs_share_host_memory_with_the_kv(self, engine: Engine) -> None:
        assert engine.cache_dir is not None
        prompt, root = engine.prompt("shared", picture=24), engine.cache_dir / "fusion" / "extents"
        before = set(root.glob("*/*"))
        cold, _ = engine.one(prompt, extra=SKIP)
        engine.forget(host=False)
        rows = len(engine.worker.pool)
        (file,) = set(root.glob("*/*")) - before
        file.unlink()  # what was encoded is in host memory at once; the disk is not asked
        assert engine.one(prompt, extra=SKIP) == (cold, ConnectorOutcome(0, False, 1, 0, 0))
        engine.forget()
        assert len(engine.worker.pool) == 0 < rows  # one memory, and nothing of it lent out any more
        tokens, outcome = engine.one(prompt, extra=SKIP)
        assert (tokens, outcome.fusion_loaded, outcome.fusion_encoded) == (cold, 0, 1)

    def test_capture_and_inject_by_hand(self, engine: Engine) -> None:
        from vllm import SamplingParams

        adapter, prompt = KVAdapter(engine.llm), engine.prompt("by hand", picture=22)
        (cold,) = engine.run(prompt, extra=SKIP)
        chunk = adapter.capture(cold.request_id)
        assert chunk is not None
        assert chunk.num_tokens == len(cold.prompt_token_ids) // BLOCK * BLOCK
        assert len(chunk.block_ids or ()) == len(chunk.block_hashes)
        assert chunk.typed(chunk.layout.layers[0].name).shape[1:] == chunk.layout.layers[0].shape
        assert adapter.capture("nobody") is None

        engine.forget()
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        llm_engine = engine.llm.llm_engine
        for name, text in (("mine", "by hand"), ("other", "by foot")):
            llm_engine.add_request(name, engine.prompt(text, picture=22), params)
        assert adapter.inject("mine", chunk)
        assert not adapter.inject("other", chunk)
        assert "differ" in adapter.can_inject("other", chunk).reason
        assert not adapter.inject("unknown", chunk)
        done = {}
        while llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm_engine.step() if o.finished}
        assert answer(done["mine"]) == answer(cold)
        assert read_outcome(done["mine"]).loaded_tokens == full_blocks(cold)

    def test_a_purge_reaches_a_running_engine(self, engine: Engine) -> None:
        """An operator's, in another process: neither host memory nor the disk serves what was there; all goes on."""
        prompt = engine.prompt("purged", picture=25)
        cold, _ = engine.one(prompt)
        for _ in range(2):
            engine.forget(host=False)
            assert engine.one(prompt, extra=SKIP)[1].fusion_loaded == 1
            engine.forget(host=False)
            assert engine.one(prompt)[1].loaded_tokens
            engine.forget(host=False)
            command = [sys.executable, "-m", "semkv", "purge", "--cache-dir", str(engine.cache_dir)]
            subprocess.run(command, check=True, capture_output=True, timeout=100)
            assert not engine.extents()
            again, outcome = engine.one(prompt)
            assert (again, outcome) == (cold, ConnectorOutcome(0, False, 0, 1, 0))
        engine.forget()
        again, outcome = engine.one(prompt)  # stored again meanwhile
        assert again == cold
        assert outcome.loaded_tokens

    def test_what_was_computed_on_a_failed_load_is_not_captured(self, engine: Engine) -> None:
        """A prefix is promised by the index and cannot be read: the step computes on what happens to be there."""
        before, picture = engine.extents(), 26
        engine.one(engine.prompt("sound", picture))
        engine.flush()
        (prefix,) = {p for p in engine.extents() - before if _position(p) == 0}
        long = engine.prompt("spoilt " + "left of the tree " * 12, picture)
        (cold,) = engine.run(long, extra=SKIP)
        chunk = KVAdapter(engine.llm).capture(cold.request_id)
        assert chunk is not None
        engine.forget()
        raw = bytearray(prefix.read_bytes())
        raw[8 + int.from_bytes(raw[:8], "little")] ^= 1  # in the first block
        prefix.write_bytes(raw)
        local, engine.kv._stores.worker = engine.kv._stores.worker, lambda: None
        try:
            failed, outcome = engine.one(long)
        finally:
            engine.kv._stores.worker = local
        assert (failed, outcome.load_failed) == (answer(cold), True)
        engine.forget()
        rows = engine.store().read_rows(chunk.block_hashes)
        assert len(rows) == len(chunk.block_hashes)
        near = [np.abs(_floats(a) - _floats(b)).max() for a, b in zip(rows, chunk.rows(), strict=True)]
        assert max(near) < 0.1, near  # in other chunks it rounds otherwise; on another prefix it is another value
        (warm,) = engine.run(long)
        assert answer(warm) == answer(cold)
        assert read_outcome(warm).loaded_tokens == full_blocks(cold)

    def test_a_nap_of_fixed_weights_keeps_what_is_stored(self, engine: Engine) -> None:
        prompt, kv = engine.prompt("nap", picture=27), engine.kv
        connector, settings = engine.core.scheduler.connector, kv.settings
        cold, _ = engine.one(prompt)
        connector._settings = kv.settings = dataclasses.replace(settings, fixed_weights=True)
        try:
            for extra, loads, fusion in ((None, True, (0, 0)), (SKIP, False, (1, 0))):
                engine.forget()
                engine.llm.sleep(level=1)
                engine.llm.wake_up()
                again, outcome = engine.one(prompt, extra=extra)
                assert (again, bool(outcome.loaded_tokens)) == (cold, loads)
                assert (outcome.fusion_loaded, outcome.fusion_encoded) == fusion
        finally:
            connector._settings = kv.settings = settings

    @pytest.mark.parametrize(("how", "pictures"), [("reset", (23, 28)), ("sleep", (29, 30))])
    def test_nothing_of_the_old_weights_is_served_after_a_reset(
        self, engine: Engine, how: str, pictures: tuple[int, int]
    ) -> None:
        """Other weights follow: neither KV nor encoder outputs are served; what another engine stored stays its own."""
        from vllm import SamplingParams

        mine, yours = (engine.prompt("weights", picture=picture) for picture in pictures)
        engine.one(mine)
        (output,) = engine.run(yours, extra=SKIP)
        chunk = KVAdapter(engine.llm).capture(output.request_id)
        assert chunk is not None
        assert engine.cache_dir is not None
        old = KVStore(ExtentStore(engine.cache_dir / "kv", "kv", Bounds(), "another"), "", chunk.layout)
        old.namespace = engine.store().namespace
        assert old.save(chunk)
        engine.forget()
        (output,) = engine.run(yours)
        assert read_outcome(output).loaded_tokens == full_blocks(output)
        engine.one(mine)
        assert old.stats().extents > 1

        if how == "reset":
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            engine.llm.llm_engine.reset_encoder_cache()
        else:
            engine.llm.sleep(level=2)
        engine.llm.apply_model(_other_weights)
        if how == "sleep":
            engine.llm.wake_up()
        assert old.stats().extents == 1
        assert old.lookup(chunk.block_hashes) == len(chunk.block_hashes)
        old.close()
        for prompt in (mine, yours):
            fresh, outcome = engine.one(prompt)
            assert outcome == ConnectorOutcome(0, False, 0, 1, 0)
            engine.forget()
            again, outcome = engine.one(prompt, extra=SKIP)
            assert (again, outcome.fusion_loaded) == (fresh, 1)
            engine.forget()
            again, outcome = engine.one(prompt)
            assert (again, bool(outcome.loaded_tokens)) == (fresh, True)
        engine.llm.llm_engine.add_request("late", yours, SamplingParams(max_tokens=1))
        assert "reset" in KVAdapter(engine.llm).can_inject("late", chunk).reason
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.llm.llm_engine.step()


def _other_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(1.125)


# ---------------------------------------------------------------------- other engines


@pytest.mark.engine
@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "qwen2.5-vl", "internvl"])
def test_identity_by_family(models: Any, family: str, tmp_path: Path) -> None:
    plain = Engine(models(family))
    prompts = [plain.prompt(text, picture=i) for i, text in enumerate(["car", "tree", "dog"])]
    cold = [answer(plain.run(p)[0]) for p in prompts]
    assert len({tuple(c) for c in cold}) == 3
    plain.close()

    first = Engine(models(family), tmp_path)
    for prompt, expected in zip(prompts, cold, strict=True):
        tokens, outcome = first.one(prompt)
        assert tokens == expected
        assert (outcome.loaded_tokens, outcome.fusion_encoded) == (0, 1)
    first.forget()
    for prompt, expected in zip(prompts, cold, strict=True):
        (output,) = first.run(prompt)
        assert answer(output) == expected
        assert read_outcome(output).loaded_tokens == full_blocks(output) >= 64
    first.forget()
    for prompt, expected in zip(prompts, cold, strict=True):
        tokens, outcome = first.one(prompt, extra=SKIP)
        assert tokens == expected
        assert (outcome.loaded_tokens, outcome.fusion_loaded, outcome.fusion_encoded) == (0, 1, 0)
    first.close()

    restarted = Engine(models(family), tmp_path)
    for prompt, expected in zip(prompts, cold, strict=True):
        (output,) = restarted.run(prompt)
        assert answer(output) == expected
        assert read_outcome(output).loaded_tokens == full_blocks(output)
    restarted.close()


@pytest.mark.engine
def test_preemption_decode_capture_failed_loads_and_bounds(models: Any, tmp_path: Path) -> None:
    """A cache too small for its requests, a store too small for its blocks, and loads that fail in the worker."""
    # Single requests are compared with four at once: on some processors these round otherwise in bfloat16.
    exact = {"dtype": "float32"}
    plain = Engine(models("llava"), **exact)
    prompts = [plain.prompt(f"small {i}", picture=30 + i) for i in range(4)]
    expected = [answer(plain.run(p, tokens=40)[0]) for p in prompts]
    plain.close()

    settings = {"capture_decode": True, "max_blocks": 40}
    tight = {"num_gpu_blocks_override": 20, "max_num_seqs": 4, "max_model_len": 512}
    small = Engine(models("llava"), tmp_path, settings, **tight, **exact)
    preempted, real = [], small.core.scheduler._preempt_request
    small.core.scheduler._preempt_request = lambda *a, **k: (preempted.append(a), real(*a, **k))[1]
    try:
        outputs = small.run(*prompts, tokens=40)
        assert [answer(o) for o in outputs] == expected
        assert preempted
        small.forget()
        (output,) = small.run(prompts[0], tokens=40)
        assert answer(output) == expected[0]
        assert read_outcome(output).loaded_tokens == full_blocks(output)

        adapter = KVAdapter(small.llm)
        chunk = adapter.capture(output.request_id)
        assert chunk is not None
        assert chunk.num_tokens > len(output.prompt_token_ids) // BLOCK * BLOCK  # generated tokens too
        small.flush()
        assert small.store().lookup(chunk.block_hashes) == len(chunk.block_hashes)

        small.forget()
        for file in small.extents():
            raw = file.read_bytes()
            file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        small.kv._stores.worker = lambda: None  # as with several ranks: promised by the index alone
        (output,) = small.run(prompts[0], tokens=40)
        assert read_outcome(output).load_failed is True
        assert answer(output) == expected[0]
        small.forget()
        (output,) = small.run(prompts[0], tokens=40)  # what failed was computed and stored again
        assert answer(output) == expected[0]
        assert read_outcome(output).loaded_tokens

        for i in range(8):
            small.run(small.prompt(f"fill {i}", picture=50 + i), tokens=2)
        small.flush()
        assert small.store()._extents.totals()[1] <= 40
        assert small.kv._extents.totals()[1] == sum(
            len(json.loads(_metadata(f)["semkv"])["hashes"]) for f in small.extents()
        )
    finally:
        small.close()


@pytest.mark.engine
def test_speculation_prompt_embeddings_and_an_fp8_cache(models: Any, tmp_path: Path) -> None:
    """In a process of its own: drafts from n-grams import numba, after which vLLM 0.32 starts no engine beside it."""
    script = Path(__file__).with_name("odd_engine.py")
    done = subprocess.run([sys.executable, str(script), models("opt"), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


BY_NAME = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
import tiny_models

def main():
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], max_model_len=512, enforce_eager=True, dtype="bfloat16", block_size=32,
              kv_cache_memory_bytes=1 << 28, limit_mm_per_prompt={"image": 1, "video": 0},
              kv_transfer_config={"kv_connector": "SemKVConnector", "kv_role": "kv_both"},
              ec_transfer_config={"ec_connector": "SemECConnector", "ec_role": "ec_both"})
    prompt = {"prompt": "<s><image>" + " is there a dog" * 20, "multi_modal_data": {"image": tiny_models.picture()}}
    seen = []
    for skip in (False, False, True):
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                                extra_args={"kv_transfer_params": {"semkv": {"skip": skip}}})
        out = llm.generate([prompt], params, use_tqdm=False)[0]
        seen.append([list(out.outputs[0].token_ids), out.kv_transfer_params, out.ec_transfer_params])
        time.sleep(2)  # the files are written in the background
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()
    print("RESULT" + json.dumps([hasattr(llm.llm_engine.engine_core, "engine_core"), seen]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.engine
def test_by_name_alone_in_an_engine_process(models: Any, tmp_path: Path) -> None:
    """As a server runs it: the engine core is another process, and vLLM finds the connectors by their entry point."""
    script = tmp_path / "script.py"
    script.write_text(BY_NAME)
    environment = os.environ | {
        "SEMKV_CACHE_DIR": str(tmp_path / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(script), str(models("llava")), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    in_process, (cold, warm, fused) = json.loads(done.stdout.rpartition("RESULT")[2].splitlines()[0])
    assert not in_process
    assert warm[0] == fused[0] == cold[0]
    assert cold[1:] == [{"semkv": {"loaded_tokens": 0, "load_failed": False}}, {"semkv": {"loaded": 0, "encoded": 1}}]
    assert warm[1]["semkv"]["loaded_tokens"] >= 96
    assert fused[1:] == [{"semkv": {"loaded_tokens": 0, "load_failed": False}}, {"semkv": {"loaded": 1, "encoded": 0}}]


def _floats(row: Any) -> Any:
    return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # bfloat16


def _position(path: Path) -> int:
    return int(json.loads(_metadata(path)["semkv"])["position"])


def _metadata(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return file.metadata()


# ---------------------------------------------------------------------- the halves alone

LAYOUT = KVLayout((LayerLayout("a", "bfloat16", (1, 2), (2, 1), 4),), BLOCK)


def request(name: str, n_tokens: int, **fields: Any) -> SimpleNamespace:
    base = {
        "request_id": name,
        "num_tokens": n_tokens,
        "num_prompt_tokens": n_tokens,
        "block_hashes": [f"{name[0]}{i}".encode() for i in range(n_tokens // BLOCK)],
        "kv_transfer_params": None,
        "lora_request": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**(base | fields))


def scheduled(new: list[tuple[str, list[int], int, int]] = (), cached: list[tuple[str, Any, int, int]] = (), resumed: tuple[str, ...] = ()) -> Any:  # fmt: skip # noqa: E501
    """Requests as (name, block ids, computed tokens, scheduled tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=c) for r, b, c, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, *_ in cached],
            new_block_ids=[None if b is None else (b,) for _, b, *_ in cached],
            num_computed_tokens=[c for _, _, c, _ in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={r: s for r, _, _, s in [*new, *cached]},
    )


def half(path: Path, ranks: int = 1, gate: RanksGate | None = None, **settings: Any) -> KVScheduler:
    ext = ExtentStore(path / "kv", "kv", Bounds())
    for rank in range(ranks):
        ext.put_layout("engine", rank, json.dumps(LAYOUT.document()))
    return KVScheduler(
        KVSettings(path, **settings), ext, lambda: "ns", engine="engine", world_size=ranks, block_size=BLOCK, gate=gate
    )


def put(path: Path, rank: int, hashes: list[bytes]) -> None:
    store = KVStore.open(path / "kv", rank_namespace("ns", rank), LAYOUT)
    store.save_rows(hashes, np.full((len(hashes), 4), rank + 1, np.uint8))
    store.close()


def test_one_token_is_left_and_asking_twice_changes_nothing(tmp_path: Path) -> None:
    kv, r = half(tmp_path), request("a", 96)
    put(tmp_path, 0, r.block_hashes)
    assert [kv.matched_tokens(r, 0) for _ in range(3)] == [64, 64, 64]
    assert kv.matched_tokens(r, 32) == 32
    assert kv.matched_tokens(r, 64) == 0
    assert kv.matched_tokens(request("a", 97), 0) == 96
    assert kv.matched_tokens(request("b", 97), 0) == 0
    for fields in (
        {"lora_request": ADAPTER},
        {"skip_reading_prefix_cache": True},
        {"kv_transfer_params": {"semkv": {"skip": True}}},
    ):
        assert kv.matched_tokens(request("a", 97, **fields), 0) == 0


def test_what_was_promised_is_not_evicted_before_the_request_has_ended(tmp_path: Path) -> None:
    kv, r = half(tmp_path), request("a", 96)
    put(tmp_path, 0, r.block_hashes)
    small = KVStore.open(tmp_path / "kv", rank_namespace("ns", 0), LAYOUT, Bounds(max_blocks=3))
    others = [bytes([i]) * 32 for i in range(100, 103)]
    assert kv.matched_tokens(r, 0) == 64
    assert small.save_rows(others, np.zeros((3, 4), np.uint8)) is None
    small.release("another engine/a")
    assert small.save_rows(others, np.zeros((3, 4), np.uint8)) is None
    kv.finished(r)
    assert small.save_rows(others, np.zeros((3, 4), np.uint8)) is not None


def test_blocks_missing_in_one_rank_are_not_promised(tmp_path: Path) -> None:
    kv, r = half(tmp_path, ranks=2), request("a", 200)
    put(tmp_path, 0, r.block_hashes)
    assert kv.matched_tokens(r, 0) == 0
    put(tmp_path, 1, r.block_hashes[:2])
    assert kv.matched_tokens(r, 0) == 64


def test_several_ranks_read_ahead_what_waits_for_room(tmp_path: Path) -> None:
    kv, one, two = half(tmp_path, ranks=2), request("a", 96), request("b", 96)
    for rank in (0, 1):
        put(tmp_path, rank, one.block_hashes)
        put(tmp_path, rank, two.block_hashes)
    assert kv.matched_tokens(one, 0) == kv.matched_tokens(two, 0) == 64
    kv.admitted(one, [1, 2, 3], 64)  # no room for the other
    step = kv.build_step(scheduled())
    assert [(p.request_id, p.block_hashes) for p in step.prefetches] == [("b", two.block_hashes[:2])]
    assert kv.matched_tokens(two, 0) == 64
    assert not kv.build_step(scheduled()).prefetches  # once
    kv.admitted(two, [4, 5, 6], 64)
    step = kv.build_step(scheduled())
    assert ([p.block_ids for p in step.loads], step.prefetches) == ([[4, 5]], [])


def test_several_ranks_capture_only_when_every_load_is_confirmed(tmp_path: Path) -> None:
    kv, r = half(tmp_path, ranks=2), request("a", 160)
    for rank in (0, 1):
        put(tmp_path, rank, r.block_hashes[:2])
    assert kv.matched_tokens(r, 0) == 64
    kv.admitted(r, [1, 2, 3, 4, 5], 64)
    step = kv.build_step(scheduled(new=[("a", [1, 2, 3, 4, 5], 64, 32)]))
    assert [p.block_ids for p in step.loads] == [[1, 2]]
    assert step.loads[0].rows is None
    assert not step.captures
    again = kv.build_step(scheduled(cached=[("a", None, 96, 32)]))
    assert not again.captures
    kv.confirm(step.step)
    last = kv.build_step(scheduled(cached=[("a", None, 128, 32)]))
    assert [c.block_ids for c in last.captures] == [[1, 2, 3, 4, 5]]


def test_several_ranks_load_only_what_is_faster(tmp_path: Path) -> None:
    """By what the ranks report; a block that all of them captured or loaded lately is taken to be in host memory."""
    from semkv.connectors.kv import SemKVReport

    kv = half(tmp_path, ranks=2, gate=RanksGate(host_bytes=5 * 4))  # five rows in each rank
    names = [f"a{i}".encode() for i in range(6)]
    for rank in (0, 1):
        put(tmp_path, rank, names)

    def ask(name: str) -> int | None:
        return kv.matched_tokens(request(name, 200, block_hashes=names), 0)

    assert ask("before anything was measured") == 192
    measured = {"prefill": [(192, 0.01)] * 4, "host": [(24, 0.001)] * 4}
    reports = [SemKVReport(0, measured | {"disk": [(24, seconds), (4, seconds)] * 4}) for seconds in (0.004, 0.4)]
    assert kv.gate is not None
    kv.gate.rates.learn(reports[0].measured)
    assert ask("disk fast enough") == 192
    kv = half(tmp_path, ranks=2, gate=RanksGate(host_bytes=5 * 4))
    both = reports[0].aggregate(reports[1])
    assert isinstance(both, SemKVReport)
    assert kv.gate is not None
    kv.gate.rates.learn(both.measured)
    assert ask("too slow in one") == 0
    assert kv.counters.totals()["refused_loads"] == 1
    r = request("c", 160, block_hashes=names[:5])
    kv.admitted(r, [1, 2, 3, 4, 5], 0)
    assert kv.build_step(scheduled(new=[("c", [1, 2, 3, 4, 5], 0, 160)])).captures
    assert ask("what was captured") == 160
    kv.gate.told([b"other"], 4)  # and pushes the oldest out
    assert ask("pushed out") == 0
    kv.gate.told(names[:5], 4)
    assert ask("loaded") == 160
    kv.load_failed({1})
    assert ask("after a failed load") == 0
    assert half(tmp_path, ranks=2, gate=RanksGate(1), break_even=False).gate is None


def test_what_several_ranks_were_told_is_bounded_where_nothing_ever_hits(tmp_path: Path) -> None:
    kv = half(tmp_path, ranks=2, gate=RanksGate(host_bytes=5 * 4))
    for rank in (0, 1):
        put(tmp_path, rank, [b"theirs"])
    assert kv.gate is not None
    for number in range(20):
        name = f"r{number}"
        r = request(name, 96, block_hashes=[f"{name} {i}".encode() for i in range(3)])
        assert kv.matched_tokens(r, 0) == 0
        kv.admitted(r, [1, 2, 3], 0)
        assert kv.build_step(scheduled(new=[(name, [1, 2, 3], 0, 96)])).captures
        kv.finished(r)
        assert len(kv.gate._told) <= 5


def test_what_goes_on_during_a_reset_is_not_captured(tmp_path: Path) -> None:
    """Its blocks before the reset and those after it may be of different weights."""
    kv, old, new = half(tmp_path), request("a", 200), request("b", 96)
    kv.admitted(old, [1, 2, 3, 4, 5, 6, 7], 0)
    assert kv.build_step(scheduled(new=[("a", [1, 2, 3, 4, 5, 6, 7], 0, 64)])).captures
    kv.reset()
    assert not kv.build_step(scheduled(cached=[("a", None, 64, 136)])).captures
    kv.admitted(old, [1, 2, 3], 0)  # preempted, and admitted again
    assert not kv.build_step(scheduled(cached=[("a", [1, 2, 3], 0, 96)], resumed=("a",))).captures
    kv.admitted(new, [8, 9, 10], 0)
    step = kv.build_step(scheduled(new=[("b", [8, 9, 10], 0, 96)]))
    assert [c.block_ids for c in step.captures] == [[8, 9, 10]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_rests_on_blocks_from_before_a_reset_is_not_captured(tmp_path: Path, ranks: int) -> None:
    """vLLM's own prefix cache stays where requests run on: its blocks have the same hashes, and are of both weights."""
    kv, old = half(tmp_path, ranks=ranks), request("a", 200)

    def captured(name: str, block_ids: list[int], computed: int) -> list[list[int]]:
        r = request(name, 32 * len(block_ids), block_hashes=old.block_hashes[: len(block_ids)])
        kv._stores.offered.clear()
        kv.admitted(r, block_ids, 0)
        return [
            c.block_ids
            for c in kv.build_step(scheduled(new=[(name, block_ids, computed, r.num_tokens - computed)])).captures
        ]

    kv.admitted(old, [1, 2, 3], 0)
    assert kv.build_step(scheduled(new=[("a", [1, 2, 3], 0, 64)])).captures
    kv.reset()
    assert not kv.build_step(scheduled(cached=[("a", [4, 5, 6, 7], 64, 136)])).captures
    assert captured("before", [1, 8], 32) == captured("both", [1, 2, 3, 4, 9], 128) == []
    assert captured("on those", [1, 8, 10], 64) == []
    assert captured("new", [11, 12, 13], 0) == [[11, 12, 13]]
    assert captured("on new", [11, 12, 13, 14], 96) == [[11, 12, 13, 14]]
    assert captured("again", [11, 12, 13, 1], 96) == [[11, 12, 13, 1]]  # the engine let go of what was there
    assert captured("on that", [11, 12, 13, 1, 2], 128) == [[11, 12, 13, 1, 2]]
    put_to = [KVStore(kv._extents, rank_namespace(kv.namespace, rank), LAYOUT) for rank in range(ranks)]
    for store in put_to:
        store.save_rows(old.block_hashes[:3], np.zeros((3, 4), np.uint8))
    loads = request("loads", 160, block_hashes=old.block_hashes[:5])
    kv._stores.offered.clear()
    assert kv.matched_tokens(loads, 0) == 96
    kv.admitted(loads, [20, 21, 22, 23, 24], 96)
    kv.build_step(scheduled())  # asynchronous: it is scheduled when they have come
    kv.confirm(kv._step)
    kv.admitted(loads, [20, 21, 22, 23, 24], 0)
    step = kv.build_step(scheduled(new=[("loads", [20, 21, 22, 23, 24], 96, 64)]))
    assert [c.block_ids[-2:] for c in step.captures] == [[23, 24]]  # the writer leaves out what is there


def test_what_was_injected_before_a_reset_is_not_loaded_after_it(tmp_path: Path) -> None:
    kv, r = half(tmp_path), request("a", 97)
    chunk = KVChunk.from_rows(np.ones((3, LAYOUT.row_bytes), np.uint8), r.block_hashes, LAYOUT)
    kv.inject("a", chunk)
    assert kv.matched_tokens(r, 0) == 96
    kv.inject("a", chunk)
    kv.reset()
    assert kv.matched_tokens(r, 0) == 0


def occupied(tmp_path: Path, kv: KVScheduler) -> tuple[BlockIndex, sqlite3.Connection]:
    """The index, and who else is writing to it; a first try, which would wait for that, need not wait here."""
    index = kv._extents._index.get()
    assert index is not None
    index._db.execute("PRAGMA busy_timeout=0")
    other = sqlite3.connect(tmp_path / "kv" / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return index, other


def test_a_reset_that_cannot_take_back_says_so_and_goes_on_trying(tmp_path: Path) -> None:
    kv, name = half(tmp_path), b"name"
    put(tmp_path, 0, [name])
    (store,) = kv.stores()
    _, other = occupied(tmp_path, kv)
    assert not kv.reset()
    kv.build_step(scheduled())
    other.execute("COMMIT")
    assert store.stored([name]) == [True]
    kv.build_step(scheduled())
    assert store.stored([name]) == [False]
    assert kv.reset()


def test_only_the_first_try_to_take_back_waits(tmp_path: Path) -> None:
    """Steps try again, and must not be held up by it; what is new is tried first."""
    kv = half(tmp_path)
    (old,) = kv.stores()
    index, other = occupied(tmp_path, kv)
    assert not kv.reset()
    said: list[str] = []
    index._db.set_trace_callback(said.append)
    kv.build_step(scheduled())
    assert next(s for s in said if "busy" in s or "BEGIN" in s) == "PRAGMA busy_timeout=0"
    assert index._db.execute("PRAGMA busy_timeout").fetchone() == (10_000,)
    other.execute("COMMIT")
    (new,) = kv.stores()
    said.clear()
    assert kv.reset()
    told = [s for s in said if "INTO disowned" in s]
    assert [new.namespace in told[0], old.namespace in told[1], len(told)] == [True, True, 2]


def test_a_step_tries_to_take_back_once_however_much_is_left(tmp_path: Path) -> None:
    for rank in range(2):
        put(tmp_path, rank, [b"name"])
    kv = half(tmp_path, ranks=2)
    stores, said = kv.stores(), list[str]()
    index, other = occupied(tmp_path, kv)
    assert not kv.reset()
    assert kv.stores()  # the next step need not ask for them
    index._db.set_trace_callback(said.append)
    kv.build_step(scheduled())
    assert said.count("BEGIN IMMEDIATE") == 1
    other.execute("COMMIT")
    with ThreadPoolExecutor(1) as steps, index._lock:  # as a thread of this process that waits for another process
        steps.submit(kv.build_step, scheduled()).result(20)
    assert [store.stored([b"name"]) for store in stores] == [[True], [True]]
    assert kv._extents.writable
    kv.build_step(scheduled())
    assert [store.stored([b"name"]) for store in stores] == [[False], [False]]


@pytest.mark.parametrize("resets", [0, 1, 2])
def test_what_an_engine_stored_after_a_reset_ends_with_it(tmp_path: Path, resets: int) -> None:
    kv, extents = half(tmp_path), ExtentStore(tmp_path / "kv", "kv", Bounds())
    for _ in range(resets):
        assert kv.reset()
    (store,) = kv.stores()
    assert store.save_rows([b"name"], np.zeros((1, 4), np.uint8))
    kv.close()
    assert len(extents.extents()) == (0 if resets else 1)


def test_an_engine_is_one_run_of_it_in_all_processes() -> None:
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig

    one, two = VllmConfig(), VllmConfig()
    name = namespace.engine_name(one, "given")
    assert name != namespace.engine_name(two, "given")
    assert name != namespace.engine_name(one, "another")
    assert name == namespace.engine_name(pickle.loads(pickle.dumps(one)), "given")


def test_a_reset_takes_back_what_this_engine_wrote(tmp_path: Path) -> None:
    """And nothing else; with weights that are never exchanged, nothing at all."""
    for fixed in (True, False):
        kv, name = half(tmp_path, fixed_weights=fixed), f"of {fixed}".encode()
        for writer in ("another", ""):  # `half` has no name
            store = KVStore(ExtentStore(tmp_path / "kv", "kv", Bounds(), writer), rank_namespace("ns", 0), LAYOUT)
            assert store.save_rows([writer.encode() + name], np.zeros((1, 4), np.uint8))
        asked = request("a", 64, block_hashes=[name, b"missing"])
        assert kv.matched_tokens(asked, 0) == BLOCK
        kv.reset()
        assert kv.matched_tokens(asked, 0) == (BLOCK if fixed else 0)
        assert store.stored([name, b"another" + name]) == [fixed, True]


def test_what_was_captured_before_a_purge_is_captured_again(tmp_path: Path) -> None:
    kv, names = half(tmp_path), [f"a{i}".encode() for i in range(3)]
    for number, again in enumerate((True, False, True)):
        name = f"request {number}"
        r = request(name, 96, block_hashes=names)
        assert kv.matched_tokens(r, 0) == 0
        kv.admitted(r, [1, 2, 3], 0)
        captures = kv.build_step(scheduled(new=[(name, [1, 2, 3], 0, 96)])).captures
        assert [c.block_ids for c in captures] == ([[1, 2, 3]] if again else [])
        if number == 1:
            purge_directory(tmp_path)


def test_chunks_preemption_and_failed_loads(tmp_path: Path) -> None:
    kv, r = half(tmp_path, max_extent_blocks=2), request("a", 200)
    kv.admitted(r, [1, 2], 0)
    assert not kv.build_step(scheduled(new=[("a", [1, 2], 0, 20)])).captures
    step = kv.build_step(scheduled(cached=[("a", [3], 20, 76)]))
    assert [(c.block_ids, c.position) for c in step.captures] == [([1, 2], 0), ([3], 2)]
    assert not kv.build_step(scheduled(cached=[("a", None, 96, 3)])).captures
    # Preempted and resumed on other blocks: what is on its way to the disk is not captured again.
    step = kv.build_step(scheduled(cached=[("a", [7, 8, 9, 10], 0, 128)], resumed=("a",)))
    assert [(c.block_ids, c.position) for c in step.captures] == [([10], 3)]
    # A failed load spoils what was captured meanwhile; the epoch tells the worker.
    kv.load_failed({9})
    step = kv.build_step(scheduled(cached=[("a", [11, 12], 128, 72)]))
    assert step.epoch == 1
    assert [b for c in step.captures for b in c.block_ids] == [7, 8, 9, 10, 11, 12]
    assert kv.finished(r) == {"semkv": {"loaded_tokens": 0, "load_failed": True}}


def test_generated_tokens_only_when_asked(tmp_path: Path) -> None:
    for decode in (False, True):
        kv, r = half(tmp_path, capture_decode=decode), request("a", 64)
        kv.admitted(r, [1, 2], 0)
        kv.build_step(scheduled(new=[("a", [1, 2], 0, 64)]))
        r.block_hashes.append(b"generated")
        step = kv.build_step(scheduled(cached=[("a", [3], 95, 1)]))
        assert [c.block_ids for c in step.captures] == ([[3]] if decode else [])


def test_rows_stay_in_their_process() -> None:
    plan = LoadPlan("r", [1], [b"h"], np.zeros((1, 4), np.uint8))
    assert pickle.loads(pickle.dumps(plan)) == LoadPlan("r", [1], [b"h"], None)


def test_settings_name_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMKV_CACHE_DIR", str(tmp_path))
    assert read_settings(KVSettings, None).cache_dir == tmp_path
    assert read_settings(KVSettings, {"cache_dir": "/x", "max_blocks": 5}).bounds().max_blocks == 5
    assert read_settings(ECSettings, {}).root == tmp_path / "fusion"
    with pytest.raises(ConfigError, match=r"max_block'.*max_blocks"):
        read_settings(KVSettings, {"max_block": 5})
    for wrong in (
        {"max_blocks": "5"},
        {"capture_decode": 1},
        {"host_bytes": 0},
        {"queue_bytes": 0},
        {"max_bytes": -1},
        {"max_age_s": math.nan},
        {"max_age_s": 10**400},
        {"cache_dir": 3},
        {"cache_dir": " "},
        {"cache_dir": "a\0b"},
        {"cache_dir": "~nobody-of-this-name/x"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            read_settings(KVSettings, wrong)
    for other in (
        {"max_items": -1},
        {"host_bytes": -1},
        {"fusion_dir": "a\0b"},
        {"fusion_dir": "~nobody-of-this-name"},
    ):
        with pytest.raises(ConfigError, match=next(iter(other))):
            read_settings(ECSettings, other)
    monkeypatch.setenv("SEMKV_CACHE_DIR", "~nobody-of-this-name/x")
    with pytest.raises(ConfigError, match="SEMKV_CACHE_DIR"):
        read_settings(KVSettings, {})
    assert read_settings(KVSettings, {"cache_dir": "/x"}).cache_dir == Path("/x")


def test_writer_bounds_what_waits() -> None:
    import threading

    writer, gate, done = BackgroundWriter("test", 100, Counter()), threading.Event(), []
    assert writer.submit(gate.wait, 60)
    assert writer.submit(lambda: done.append(1), 40)
    assert not writer.submit(lambda: done.append(2), 1)
    assert not writer.flush(0.05)
    gate.set()
    assert writer.flush(10)
    assert writer.submit(lambda: done.append(3), 1000)  # alone, anything may wait
    writer.close()
    assert done == [1, 3]


def test_a_job_that_raises_is_counted_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    counters: Counter[str] = Counter()
    writer, done = BackgroundWriter("test", 100, counters), []
    assert writer.submit(lambda: [][0], 60)
    assert writer.submit(lambda: done.append(1), 40)
    assert writer.flush(10)
    assert writer.submit(lambda: done.append(2), 100), "nothing waits any more"
    writer.close()
    assert (done, counters["errors"]) == ([1, 2], 1)
    assert "IndexError" in caplog.text


def test_weights_behind_a_link_are_looked_at(tmp_path: Path) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    model.mkdir()
    elsewhere.mkdir()
    (elsewhere / "w.safetensors").write_bytes(b"one")
    (model / "weights").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(model)
    first = namespace.cached_weights_digest(model, tmp_path / "notes")
    assert namespace.cached_weights_digest(model, tmp_path / "notes") == first
    (elsewhere / "w.safetensors").write_bytes(b"two")
    assert namespace.cached_weights_digest(model, tmp_path / "notes") != first


def test_weights_are_read_once_and_changes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tmp_path / "model", []
    model.mkdir()
    (model / "w.safetensors").write_bytes(b"1")
    real = namespace.weights_digest
    monkeypatch.setattr(namespace, "weights_digest", lambda p: calls.append(p) or real(p))
    first = namespace.cached_weights_digest(model, tmp_path / "notes")
    assert namespace.cached_weights_digest(model, tmp_path / "notes") == first
    assert len(calls) == 1
    (model / "w.safetensors").write_bytes(b"2")
    os.utime(model / "w.safetensors", ns=(1, 1))
    assert namespace.cached_weights_digest(model, tmp_path / "notes") != first


def test_outcome_of_an_engine_without_connectors() -> None:
    assert read_outcome(SimpleNamespace(num_cached_tokens=3)) == ConnectorOutcome(cached_tokens=3)
    odd = SimpleNamespace(kv_transfer_params={"semkv": [1]}, ec_transfer_params="x")
    assert read_outcome(odd) == ConnectorOutcome()


def test_registration_is_idempotent_and_lazy(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with caplog.at_level(logging.WARNING):
        register()
        register()
    from semkv.connectors.ec import SemECConnector
    from semkv.connectors.kv import SemKVConnector

    assert KVConnectorFactory._registry["SemKVConnector"]() is SemKVConnector
    assert ECConnectorFactory._registry["SemECConnector"]() is SemECConnector


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("cache_config", "calculate_kv_scales", True),
        ("cache_config", "block_size", 2 * BLOCK),
    ],
)
def test_what_cannot_be_served_is_left_idle(where: str, key: str, value: object) -> None:
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from semkv.connectors.kv import unsupported

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), cache_config=SimpleNamespace(block_size=BLOCK), speculative_config=None
    )
    assert unsupported(config, groups) is None
    setattr(getattr(config, where), key, value)
    assert unsupported(config, groups)


def test_one_name_in_two_tenants_is_never_shared(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from semkv.connectors.ec import ECScheduler
    from semkv.stores.fusion import FusionState, FusionStore

    def media(name: str, salt: str | None, **fields: Any) -> SimpleNamespace:
        position = SimpleNamespace(get_num_embeds=lambda: 2)
        feature = SimpleNamespace(identifier="cat.jpg", modality="image", mm_position=position)
        base = {"request_id": name, "cache_salt": salt, "mm_features": [feature], "lora_request": None}
        return SimpleNamespace(**(base | {"ec_transfer_params": None} | fields))

    store = FusionStore.open(tmp_path, "ns")
    ec = ECScheduler(ECSettings(tmp_path), store, "ns", SharedPool(tmp_path, 0))
    mine, yours = media("1", "me"), media("2", "you")
    ec.observe(mine)
    assert not ec.has("cat.jpg")
    ec.allocated(mine, 0)
    (key,) = ec.build_step().saves.values()
    store.save(FusionState.from_array(key, np.ones((2, 4), np.float32)))
    assert ec.has("cat.jpg")
    ec.observe(yours)  # while both run, the name says nothing about whose item it is
    assert not ec.has("cat.jpg")
    assert ec.finished(mine) == {"semkv": {"loaded": 0, "encoded": 1}}
    assert not ec.has("cat.jpg")
    ec.finished(yours)
    for ignored in (
        media("3", "me", lora_request=ADAPTER),
        media("4", "me", ec_transfer_params={"semkv": {"skip": True}}),
    ):
        ec.observe(ignored)
        assert not ec.has("cat.jpg")
        ec.finished(ignored)
    again = media("5", "me")
    ec.observe(again)
    assert ec.has("cat.jpg")
    ec.allocated(again, 0)
    assert list(ec.build_step().loads) == ["cat.jpg"]
    assert ec.finished(again) == {"semkv": {"loaded": 1, "encoded": 0}}
    store.save(FusionState.from_array(digest("ec", "cat.jpg", "odd"), np.ones((3, 4), np.float32)))
    odd = media("6", "odd")
    ec.observe(odd)
    assert not ec.has("cat.jpg")  # three rows for two positions


def test_encoder_outputs_of_other_weights_are_nobodys_at_once(tmp_path: Path) -> None:
    """Without another picture: neither what is on disk and in host memory, nor what is on its way there."""
    pytest.importorskip("vllm")
    import torch

    from semkv.connectors.ec import ECScheduler, ECWorker
    from semkv.stores.fusion import FusionStore
    from semkv.stores.host_memory import HostMemories

    settings, memories, followers = ECSettings(tmp_path), HostMemories(), len(weights._FOLLOWERS)

    def engine(name: str) -> tuple[ECScheduler, ECWorker]:
        extents = ExtentStore(tmp_path / "fusion", "fusion", Bounds(), name)
        host = SharedPool(tmp_path, 1 << 22, memories)
        scheduler = ECScheduler(settings, FusionStore(extents, "ns"), "ns", host)
        weights.follow(name, scheduler)
        return scheduler, ECWorker(settings, extents, "cpu", saves=True, host=host)

    def asked(ec: ECScheduler, name: str) -> Any:
        feature = SimpleNamespace(
            identifier=name, modality="image", mm_position=SimpleNamespace(get_num_embeds=lambda: 2)
        )
        fields = {"cache_salt": None, "lora_request": None, "ec_transfer_params": None}
        return SimpleNamespace(request_id=name, mm_features=[feature], **fields)

    def has(ec: ECScheduler, name: str) -> bool:
        ec.observe(asked(ec, name))
        return ec.has(name)

    def step(ec: ECScheduler, name: str) -> Any:
        assert not has(ec, name)
        ec.allocated(asked(ec, name), 0)
        return ec.build_step()

    (one, mine), (two, yours) = engine("one"), engine("two")
    mine.save(step(one, "cat"), {"cat": torch.ones(2, 4)}, "cat")
    yours.save(step(two, "dog"), {"dog": torch.ones(2, 4)}, "dog")
    assert mine._writer.flush(60)
    assert yours._writer.flush(60)
    assert two.store.stats().extents == 2
    under_way = step(one, "cow")
    assert weights.may_have_changed("one")
    assert not has(two, "cat")
    mine.save(under_way, {"cow": torch.ones(2, 4)}, "cow")
    assert mine._writer.flush(60)
    assert not has(two, "cow")
    assert has(two, "dog")
    mine.save(step(one, "dog"), {"dog": torch.ones(2, 4)}, "dog")
    assert mine._writer.flush(60)
    assert has(one, "dog")
    assert one.store.stats().extents == 1
    one.close()
    assert one.store.stats().extents == 0

    weights.leave(one)
    del two
    gc.collect()
    assert len(weights._FOLLOWERS) == followers
