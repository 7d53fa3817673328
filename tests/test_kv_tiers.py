"""Other tiers of vLLM below ours, and what clients may say to them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_engines import NOTHING, Answer, Engine, connector, differs, in_child, prompt, token_ids
from semkv_stores.block_file import PAGE
from semkv_vllm import KVSettings, seals
from semkv_vllm.params import client_params
from semkv_vllm.seals import Seals, check_tier
from semkv_vllm.shared import KVShared
from tiny_models import Checkpoint

PEER = {"kv_request_id": "a", "remote_host": "10.0.0.1", "remote_port": 5000}


def asked() -> list[Any]:
    rng = random.Random(5)
    return [prompt(token_ids(rng, size)) for size in (110, 300)]


def wrong(answers: list[Answer], references: list[Answer]) -> list[str]:
    return [
        why
        for answer, other in zip(answers, references, strict=True)
        if (why := differs(answer, other))
    ]


class Replica(Engine):
    """An engine with a directory of its own; the files of vLLM's ``fs`` tier are everybody's."""

    def __init__(self, model: str, folder: str, name: str, **settings: Any) -> None:
        tiers = [{"type": "semkv"}, {"type": "fs", "root_dir": f"{folder}/fs"}]
        kv = connector(f"{folder}/{name}", fixed_weights=True, secondary_tiers=tiers, **settings)
        super().__init__(model, kv)

    @property
    def fs(self) -> Any:
        return self.connectors()[0].manager.secondary_tiers[1]


def files(folder: str) -> list[Path]:
    return sorted(Path(folder, "fs").rglob("*.bin"))


def damaged(model: str, folder: str) -> dict[str, Any]:
    """Files that are right, exchanged, cut, or have one bit turned; then a tier that raises."""
    found: dict[str, Any] = {}
    with Replica(model, folder, "first") as engine:
        references = engine.ask(asked())
        engine.settle()
    with Replica(model, folder, "cold") as engine:
        answers = engine.ask(asked())
        found["shared"] = [answer["loaded"] for answer in answers]
        found["wrong"] = wrong(answers, references)
        engine.settle()
        engine.fs.file_mapper = None  # all that it does now fails
        answers = engine.ask([prompt(token_ids(random.Random(9), 200))])
        engine.forget()
        answers = engine.ask(asked())
        found["wrong"] += wrong(answers, references)
        found["left"] = engine.left()
    for file in files(folder)[:4]:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 12 * 4 + 3] ^= 0x40
        file.write_bytes(raw)
    one, other = files(folder)[4:6]
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    for file in files(folder)[6:8]:
        file.write_bytes(file.read_bytes()[: PAGE + 7])
    with Replica(model, folder, "damaged") as engine:
        answers = engine.ask(asked())
        found["wrong"] += wrong(answers, references)
        found["refused"] = engine.connectors()[0].shared.counters["unsealed_blocks"]
        found["damaged"] = sum(answer["loaded"] for answer in answers)
        engine.forget()
        found["wrong"] += wrong(engine.ask(asked()), references)
    with Replica(model, folder, "unchecked", unchecked_tiers=True) as engine:
        found["unchecked"] = [answer["loaded"] for answer in engine.ask(asked())]
    return found


@pytest.mark.engine
def test_a_block_of_another_tier_is_used_only_with_its_seal(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    found = in_child(damaged, checkpoint("llama"), tmp_path)
    assert found["wrong"] == []
    assert found["shared"] == [96, 288]
    assert found["left"] == NOTHING
    assert found["refused"] >= 1
    assert found["damaged"] < 96 + 288
    # Rows without seals are other files: what is sealed is not taken for them, nor they for it.
    assert found["unchecked"] == [0, 0]


def test_a_seal_covers_the_block_its_key_and_its_model() -> None:
    rows = np.zeros((4, 3 * PAGE), np.uint8)
    rows[:, : 2 * PAGE] = np.random.default_rng(1).integers(0, 255, (4, 2 * PAGE), np.uint8)
    seals = Seals(rows, lambda: "model")
    seals.write([b"a", b"b"], [0, 1])
    assert seals.right([b"a", b"b", b"c"], [0, 1, 2]) == [True, True, False]
    assert seals.right([b"b", b"a"], [0, 1]) == [False, False]
    assert Seals(rows, lambda: "another").right([b"a"], [0]) == [False]
    for place in (0, PAGE, 2 * PAGE - 1, 3 * PAGE - 1):
        rows[0, place] ^= 1
        assert seals.right([b"a"], [0]) == [False]
        rows[0, place] ^= 1
    assert seals.right([b"a"], [0]) == [True]


def test_a_tier_that_fails_is_a_miss(tmp_path: Path) -> None:
    """Also one that has something to say of a job that was given up, or of one that it made by itself."""
    from vllm.v1.kv_offload.base import LookupResult
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    class Broken(SecondaryTierManager):
        def __init__(self) -> None:
            self.tier_type = "broken"
            self.drained = 0

        def _fail(self, *_: Any) -> Any:
            raise ValueError("broken")

        on_new_request = lookup = submit_store = submit_load = _fail

        def drain_jobs(self) -> None:
            self.drained += 1

        def get_finished_jobs(self) -> Any:
            return [JobResult(1, True), JobResult(77, True)]

    shared = KVShared(KVSettings(tmp_path), None, None, dict)
    tier: Any = Broken()
    check_tier(tier, shared, Seals(np.zeros((1, 2 * PAGE), np.uint8), str))
    tier.on_new_request(None)
    assert tier.lookup(b"a", None) is LookupResult.MISS
    tier.submit_load(
        SimpleNamespace(job_id=1, keys=[b"a"], chunk_ids=np.array([0]), is_promotion=True)
    )
    assert tier.drained == 1, "nothing may still write into the rows of a load that failed"
    assert [(result.job_id, result.success) for result in tier.get_finished_jobs()] == [
        (1, False),
        (77, True),
    ]
    assert shared.counters["errors"] == 3


def test_a_tier_that_does_not_say_is_waited_for_a_short_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    class Silent(SecondaryTierManager):
        def __init__(self) -> None:
            self.tier_type = "silent"

        def lookup(self, key: Any, req_context: Any) -> LookupResult:
            return LookupResult.RETRY

        def submit_store(self, *_: Any) -> Any:
            raise NotImplementedError

        on_new_request = get_finished_jobs = submit_load = drain_jobs = submit_store

    moment = [100.0]
    monkeypatch.setattr(seals.time, "monotonic", lambda: moment[0])
    shared = KVShared(KVSettings(tmp_path), None, None, dict)
    tier: Any = Silent()
    check_tier(tier, shared, Seals(np.zeros((1, 2 * PAGE), np.uint8), str))
    context = ReqContext("a", {"remote_kv_source": PEER})
    found = []
    for _ in range(6):
        found.append(tier.lookup(b"a", context))
        moment[0] += 0.5
    assert found == [LookupResult.RETRY] * 4 + [LookupResult.MISS] * 2
    assert shared.is_away("10.0.0.1:5000")
    # Another request, and the same one looked up again later, wait anew.
    moment[0] += 100.0
    assert not shared.is_away("10.0.0.1:5000")
    for each in (context, ReqContext("b")):
        assert tier.lookup(b"a", each) is LookupResult.RETRY


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        "x",
        [["max_load_tokens", 3]],
        {"remote_kv_source": PEER},
        {"remote_prefiller": PEER},
        {"remote_decoder": {"kv_request_id": "a"}},
        {"do_remote_prefill": True, "do_remote_decode": 1, "unknown": {}},
        {"max_load_tokens": True},
        {"max_load_tokens": -1},
        {"max_load_tokens": 10**30},
        {"max_load_tokens": 3.0},
        {"max_offload_tokens": "3"},
        {"max_offload_tokens": float("nan")},
        {"kv_load_tiers": "CPU"},
        {"kv_load_tiers": {"medium": "CPU"}},
        {"kv_load_tiers": [5]},
        {"kv_load_tiers": [{}]},
        {"kv_load_tiers": [{"medium": 5}]},
        {"kv_load_tiers": [{"medium": "GPU"}]},
        {"kv_load_tiers": [{"locality": ["LOCAL"]}]},
        {"kv_load_tiers": [{"medium": "CPU", "other": 1}]},
        {"kv_load_tiers": [{"medium": "CPU"}] * 1000},
        {"semkv": {"owner": "somebody", "adapter": "x"}},
    ],
)
def test_what_is_not_known_to_be_harmless_is_dropped(given: object) -> None:
    assert client_params(given) == {}


def test_what_is_harmless_or_allowed_is_handed_on() -> None:
    harmless = {
        "max_load_tokens": 0,
        "max_offload_tokens": 70,
        "kv_load_tiers": [{"medium": "cpu", "locality": "LOCAL"}],
    }
    assert client_params(harmless | {"remote_kv_source": PEER}) == harmless
    assert client_params({"kv_load_tiers": []}) == {"kv_load_tiers": []}
    allowed = ["remote_kv_source", "house", "max_load_tokens"]
    assert client_params({"remote_kv_source": PEER, "house": 5}, allowed) == {
        "remote_kv_source": PEER,
        "house": 5,
    }
    bad: list[Any] = [
        5,
        "x",
        None,
        [PEER],
        PEER | {"remote_port": "x"},
        PEER | {"remote_host": [1]},
        PEER | {"more": 1},
    ]
    bad += [
        PEER | {"kv_request_id": 5},
        PEER | {"remote_port": True},
        PEER | {"remote_port": 70000},
    ]
    for one in bad:
        assert client_params({"remote_kv_source": one}, allowed) == {}
    assert client_params({"max_load_tokens": -1}, allowed) == {}
