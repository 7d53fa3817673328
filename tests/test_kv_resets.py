"""A reset beside running requests: new weights follow, nothing of the old ones is stored, and storing goes on."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_engines import (
    SKIP,
    Answer,
    Engine,
    answered,
    connector,
    differs,
    in_child,
    prompt,
    token_ids,
)
from semkv_vllm.old_weights import OldWeights
from tiny_models import Checkpoint


def _other_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(1.125)


class Busy(Engine):
    """An engine in which one request at least runs at any time."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.done: dict[str, Answer] = {}
        self.tokens: dict[str, list[int]] = {}

    @property
    def shared(self) -> Any:
        return self.connectors()[0].shared

    def start(self, name: str, ids: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2)
        self.llm.llm_engine.add_request(name, prompt(ids), params)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            for output in self.llm.llm_engine.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.done[output.request_id] = answered(output)

    def until(self, *names: str) -> None:
        while not set(names) <= self.done.keys():
            self.step()


def busy(model: str, cache: str) -> dict[str, Any]:
    rng = random.Random(7)
    first, other, unrelated = (token_ids(rng, size) for size in (200, 230, 170))
    engine = Busy(model, connector(cache, capture_decode=True), max_num_seqs=8)
    engine.start("old", first, 300)
    engine.start("old and short", other, 200)
    engine.step(90)
    found: dict[str, Any] = {"reset": engine.llm.reset_prefix_cache(reset_connector=True)}
    engine.llm.apply_model(_other_weights)
    stored = engine.shared.counters["stored_blocks"]
    # Both old requests go on writing blocks, which the prompts of the next ones begin with.
    engine.step(40)
    follows = first + engine.tokens["old"][:120]
    asked = {
        "same": first,
        "follows": follows,
        "unrelated": unrelated,
        "unrelated too": unrelated + follows[:70],
    }
    for name, ids in asked.items():
        engine.start(name, ids, 16)
    engine.until(*asked)
    while engine.shared.counters["stored_blocks"] == stored and "old and short" not in engine.done:
        time.sleep(0.1)  # the disk is a process of its own, and tells in a step
        engine.step()
    found["old beside"] = sorted(name.rpartition("-")[0] for name in engine.shared.old.requests)
    found["stored beside"] = engine.shared.counters["stored_blocks"] - stored
    engine.until("old and short")
    afterwards = other + engine.tokens["old and short"]
    engine.start("long", token_ids(rng, 100), 400)
    engine.step()
    engine.start("afterwards", afterwards, 16)
    engine.until("old", "afterwards")
    engine.start("last", afterwards + follows, 16)
    engine.until("last")
    engine.step()
    found["over"] = engine.shared.old is None
    found["running"] = "long" not in engine.done
    engine.until("long")
    engine.settle()
    asked |= {"afterwards": afterwards, "last": afterwards + follows}
    prompts = [prompt(ids) for ids in asked.values()]
    found["wrong"] = []
    found["loaded"] = {}
    engine.forget()
    for name, one in zip(
        asked, prompts, strict=True
    ):  # alone, so that nothing is stored on the way
        engine.forget()
        (reference,) = engine.ask([one], extra_args=SKIP)
        engine.forget()
        (answer,) = engine.ask([one])
        found["loaded"][name] = answer["loaded"]
        found["wrong"] += [name] * bool(differs(answer, reference))
    found["left"] = engine.left()
    engine.close()
    return found


@pytest.mark.engine
def test_storing_goes_on_beside_old_requests_and_nothing_old_is_stored(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    found = in_child(busy, checkpoint("llama"), tmp_path)
    assert found["reset"] is False
    assert found["wrong"] == []
    assert {"old", "old and short"} <= set(found["old beside"]), found
    assert found["stored beside"] > 0, "new requests are stored while old ones run"
    assert found["over"], "when the last old request has ended nothing is kept apart"
    assert found["running"], "and no moment without a request was needed"
    assert found["loaded"]["unrelated"] > 0
    assert found["loaded"]["last"] > 0


# ---------------------------------------------------------------------- the account of it


class Pool:
    """vLLM's cache, as far as it is asked."""

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(num_gpu_blocks=20)
        self.evicted: set[int] = set()

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def step(
    *,
    new: dict[str, tuple[list[int], int]] | None = None,
    resumed: dict[str, tuple[list[int], int]] | None = None,
    running: dict[str, list[int]] | None = None,
    copies: list[tuple[int, int]] | None = None,
) -> Any:
    """What vLLM's scheduler says of a step: blocks, and the tokens that need not be computed."""
    again = resumed or {}
    goes_on = running or {}
    fresh = [
        SimpleNamespace(req_id=name, block_ids=(ids,), num_computed_tokens=tokens)
        for name, (ids, tokens) in (new or {}).items()
    ]
    cached = SimpleNamespace(
        req_ids=[*again, *goes_on],
        new_block_ids=[
            *((ids,) for ids, _ in again.values()),
            *((ids,) for ids in goes_on.values()),
        ],
        num_computed_tokens=[*(tokens for _, tokens in again.values()), *(999 for _ in goes_on)],
        resumed_req_ids=set(again),
    )
    made = [SimpleNamespace(src_block_id=one, dst_block_id=other) for one, other in copies or []]
    return SimpleNamespace(
        scheduled_new_reqs=fresh, scheduled_cached_reqs=cached, kv_cache_block_copies=made
    )


def begins(old: OldWeights, name: str, ids: list[int], found: int, loaded: int = 0) -> None:
    """A request as vLLM's scheduler takes it up."""
    old.looked_up(name, found)
    old.allocated(name, [ids], loaded)
    old.step(step(new={name: (ids, found + loaded)}))


@pytest.fixture
def old() -> OldWeights:
    return OldWeights(["old"], Pool(), [4])


def test_what_is_computed_anew_is_new_also_for_those_who_find_it(old: OldWeights) -> None:
    begins(old, "new", [1, 2, 3], 0)
    begins(old, "finds it", [1, 2, 4], 8)
    assert old.requests == {"old"}
    assert not {1, 2, 3, 4} & old.blocks


@pytest.mark.parametrize("found", [4, 8, 5])
def test_who_finds_what_is_old_is_old_and_so_is_what_it_writes(old: OldWeights, found: int) -> None:
    begins(old, "finds", [1, 2, 3], found)
    begins(old, "finds what that wrote", [9, 3, 4], 8)
    assert {"finds", "finds what that wrote"} <= old.requests


def test_a_block_that_an_old_request_gets_is_old_again(old: OldWeights) -> None:
    begins(old, "new", [1, 2], 0)
    old.step(step(running={"old": [2]}))
    begins(old, "finds", [2, 5], 4)
    assert "finds" in old.requests
    begins(old, "writes", [2, 6], 0)
    begins(old, "finds what is new", [2, 7], 4)
    assert not {"writes", "finds what is new"} & old.requests


def test_in_one_step_it_counts_who_writes_whatever_the_order(old: OldWeights) -> None:
    begins(old, "new", [1, 2], 0)
    for name in ("finds", "old too"):
        old.looked_up(name, 4)
        old.allocated(name, [[1]], 0)
    old.step(step(new={"finds": ([3, 1, 4], 4), "old too": ([9, 3, 2], 4)}, running={"old": [1]}))
    assert {"finds", "old too"} <= old.requests


def test_what_our_store_gave_is_new_and_what_another_gave_is_not(old: OldWeights) -> None:
    begins(old, "ours", [1, 2, 3], 0, loaded=8)
    assert "ours" not in old.requests
    begins(old, "begins with it", [1, 2, 4], 8)
    assert "begins with it" not in old.requests
    old.looked_up("theirs", 0)
    old.allocated("theirs", [[1, 2, 5]], 0)
    old.step(step(new={"theirs": ([1, 2, 5], 8)}))
    assert "theirs" in old.requests


def test_a_load_is_accounted_for_once(old: OldWeights) -> None:
    """vLLM says twice that blocks were allocated where a load takes several steps."""
    old.looked_up("ours", 0)
    old.allocated("ours", [[1, 2, 3]], 8)
    old.allocated("ours", [[1, 2, 3]], 0)
    old.step(step(new={"ours": ([1, 2, 3], 8)}))
    assert "ours" not in old.requests


def test_a_new_request_that_is_preempted_and_then_finds_what_is_old_is_old(old: OldWeights) -> None:
    begins(old, "new", [1, 2], 0)
    old.looked_up("new", 4)
    old.allocated("new", [[9, 3]], 0)
    old.step(step(resumed={"new": ([9, 3], 4)}))
    assert "new" in old.requests


def test_a_copy_of_what_is_old_is_old_for_all_in_the_step(old: OldWeights) -> None:
    begins(old, "new", [1, 2], 0)
    old.step(step(running={"new": [3]}, copies=[(1, 2)]))
    assert "new" not in old.requests
    old.step(step(running={"new": [3]}, copies=[(9, 2)]))
    assert "new" in old.requests
    assert 2 in old.blocks


def test_it_is_not_over_while_one_that_found_what_is_old_waits_for_a_load(old: OldWeights) -> None:
    old.looked_up("waits", 4)
    old.allocated("waits", [[9, 2, 3]], 4)
    assert not old.is_over(["old"])
    old.step(step(new={"waits": ([9, 2, 3], 8)}))
    assert old.requests == {"waits"}
    old.ended("waits", [[9, 2, 3]])
    assert old.is_over(["waits"])


def test_it_is_over_when_the_last_old_request_has_ended(old: OldWeights) -> None:
    begins(old, "finds", [1, 2], 4)
    manager: Any = old._manager
    manager.evicted.clear()
    old.ended("old", [[7, 8, 0]])
    assert manager.evicted == {7, 8}
    assert not old.is_over(["old"])
    old.ended("finds", [[1, 2]])
    assert old.is_over(["finds"])
    assert manager.evicted >= old.blocks
