"""Documents that are reused at another position: exact where all is computed again, and never found by exact requests.

Every engine runs in a process of its own. In a model of one layer keys and values depend on token and position alone,
so there what is reused must be what would be computed, too.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import vllm_defaults
from document_engines import (
    ALL_AGAIN,
    BLOCKS,
    BROKEN_RANK,
    CLOSE,
    HOOKS,
    LAYERS,
    SIGN,
    SIZES,
    Reuse,
    approximate,
    off,
    sampling,
)
from kv_engines import BLOCK, NOTHING, SKIP, in_child, prompt, report
from maintenance_helpers import purge
from semkv_lab.local_engine import all_computed_again
from semkv_vllm import spans
from semkv_vllm.spans import Load, Piece, Span
from tiny_models import Checkpoint

# ---------------------------------------------------------------------- plans


def load(pieces: list[Piece], begin: int, end: int) -> Load:
    return Load(
        "name", tokens=[], blocks=np.empty(0, int), pieces=tuple(pieces), begin=begin, end=end
    )


def test_what_is_computed_again() -> None:
    """The first tokens, the watched ones, what lies between; never a token twice."""
    first = Piece(begin=40, skip=32, size=96)
    second = Piece(begin=150, skip=0, size=64)
    plan = load([first, second], begin=32, end=214)
    watched = spans.WATCHED
    assert list(plan.gaps()) == [(32, 72), (136 - watched, 150), (214 - watched, 214)]
    assert list(plan.watched()) == [(136 - watched, 136), (214 - watched, 214)]
    assert plan.reused + plan.rows == 214 - 32
    assert list(replace(plan, pieces=()).gaps()) == [(32, 214)]


def test_documents_never_share_a_block() -> None:
    """Nor do they get one that has an exact name: whatever stands where, with every number of first tokens."""
    rng = random.Random(3)
    for _ in range(300):
        taken = set[int]()
        at = rng.randrange(100)
        exact_end = rng.randrange(0, 5) * 16
        for _ in range(5):
            end = at + rng.randrange(1, 120)
            skip = rng.choice([0, 1, 16, 17, 40])
            piece = spans.piece_of(Span(at, end), block=16, skip=skip, exact_end=exact_end)
            if piece is not None:
                place = spans.staged(piece, 16)
                blocks = set(range(place.begin // 16, place.end // 16))
                assert min(blocks) >= exact_end // 16
                assert taken.isdisjoint(blocks)
                taken |= blocks
                assert exact_end <= piece.first < piece.last <= end
                assert piece.skip >= skip
            at = end + rng.randrange(3)


def test_renamed_blocks_keep_the_beginning_only() -> None:
    hashes = [bytes([number]) * 32 for number in range(6)]
    one, other = (spans.renamed(hashes, 2) for _ in range(2))
    assert one[:2] == other[:2] == hashes[:2]
    assert len({*hashes, *one, *other}) == 2 + 4 * 3
    assert {len(name) for name in one} == {32}


HOSTILE: list[Any] = [
    None, True, 5, "x", {}, [], [[]], [[1]], [[1, 2, 3]], [["1", "9"]], [[1.0, 9.0]], [[True, 9]], [[-1, 9]],
    [[9, 9]], [[9, 1]], [[0, 10**9]], [[0, 10**30]], [[0, 60], [50, 90]], [[50, 90], [0, 40]], [[0, None]],
    [(0, 9)] and {"0": 9}, [[0, 9]] * 2, [[at, at + 1] for at in range(5000)], "separated", [[0, [9]]],
]  # fmt: skip


@pytest.mark.parametrize("given", HOSTILE, ids=lambda value: str(value)[:30])
def test_hostile_spans_ask_for_nothing(given: Any) -> None:
    assert spans.asked({"spans": given}, range(100), repair=16) is None


@pytest.mark.parametrize("repair", [-1, 1.0, True, "8", None, 101, 10**30])
def test_hostile_repairs_ask_for_nothing(repair: Any) -> None:
    given = {"spans": [[0, 50]], "repair": repair}
    assert spans.asked(given, range(100), repair=16) is None
    assert spans.asked({"spans": [[0, 50]]}, range(100), repair=16) is not None


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([7, 8, 1, 2, 7, 8, 3, 7, 8, 4], [(2, 4), (6, 7)]),
        ([1, 7, 8, 2, 3], []),
        ([7, 8, 7, 8, 7, 8], []),
        ([7, 7, 8, 5, 7, 8], [(3, 4)]),
        ([], []),
    ],
)
def test_documents_between_separators(tokens: list[int], found: list[tuple[int, int]]) -> None:
    assert list(spans.separated(tokens, (7, 8))) == found
    asked = spans.asked({"spans": "separated"}, tokens, repair=0, separator=(7, 8))
    assert (asked.spans if asked else ()) == tuple(found)


def planner(**shared: Any) -> Any:
    """The scheduler's half without an engine, for what no engine can be made to do."""
    from semkv_vllm.documents import Documents

    half = Documents.__new__(Documents)
    half.refused = ""
    half._block = 16
    half._arriving = {}
    half._seen = lambda request: request
    half._shared = SimpleNamespace(**shared)
    return half


@pytest.mark.parametrize("first", range(4))
def test_a_block_is_loaded_once(first: int) -> None:
    """Also where a document comes twice and its beginning was exact the first time."""
    keys = [bytes([number]) for number in range(4)]
    piece = Piece(begin=100, skip=0, size=64)
    for last in range(first, 5):
        seen = set(keys[first:last])
        found = planner()._unseen(piece, keys, seen)
        blocks = range(found.skip // 16, found.size // 16) if found else range(0)
        assert seen.isdisjoint(keys[number] for number in blocks)
        assert bool(blocks) == (len(seen) < 4)


@pytest.mark.parametrize(("computed", "found"), [(64, (None, False)), (32, None), (0, None)])
def test_after_a_fault_nothing_rests_on_blocks_of_an_earlier_attempt(
    computed: int, found: Any
) -> None:
    """What follows such blocks would be found under exact names."""
    from semkv_vllm.documents import _Wish

    exact = [bytes([number]) * 32 for number in range(6)]
    own = spans.renamed(exact, 2)
    half = planner()
    plan = load([Piece(begin=40, skip=0, size=32)], begin=32, end=72)
    wish = _Wish(asked=mock.Mock(), keys=[], limit=None, exact=exact, load=plan)
    half._wishes = {"name": wish}
    request = mock.Mock(request_id="name", block_hashes=list(own))
    assert half.unmatched(request, computed) == found
    assert request.block_hashes == own, "nobody else finds them"
    assert half.matched(request, 0) is None, "an exact one from then on"


def test_a_load_that_could_not_be_asked_for_has_failed() -> None:
    """vLLM waits for it: the workers say so."""
    from semkv_vllm.documents import Orders, _Wish

    half = planner()
    half.orders = Orders()
    half._used = {}
    plan = load([Piece(begin=40, skip=0, size=32)], begin=32, end=72)
    wish = _Wish(asked=mock.Mock(), keys=[], limit=None, load=plan)
    half._wishes = {"name": wish}
    assert half.not_loaded(mock.Mock(request_id="name"), 72 - 16) == 0
    assert wish.tried
    assert half.used("name") == 0
    assert half.take_orders() == Orders(unloaded=["name"], dropped=[])
    assert half.take_orders() == Orders()


@pytest.mark.parametrize("end", ["failed", "not loaded", "not heard of"])
def test_what_was_approximate_once_is_said_whatever_comes_later(end: str) -> None:
    """Some of the answer may have been computed from it, before the request was preempted."""
    from semkv_vllm.documents import Orders

    half = planner(counters=Counter())
    half.orders = Orders()
    half._used = {}
    half._wishes = {}
    plan = load([Piece(begin=40, skip=0, size=32)], begin=32, end=72)
    less = replace(plan, end=60)
    assert plan.reused == 30 > less.reused > 0
    half._arriving["name"] = plan
    assert half.used("name") == 30, "as long as nobody says that it has failed"
    half.arrived(["name", "of another kind"], failed=[])
    assert half._arriving == {}
    half._arriving["name"] = less
    if end == "failed":
        half.arrived(["name"], failed=["name"])
    elif end == "not loaded":
        half._wishes["name"] = mock.Mock()
        half.not_loaded(mock.Mock(request_id="name"), 40)
    assert half.used("name") == 30
    half.ended("name")
    assert half.used("name") == 0
    assert half._used == half._arriving == {}


def step_of(*jobs: Any, **orders: Any) -> Any:
    from semkv_vllm.orders import DocumentStep

    loads = dict(enumerate(jobs))
    return DocumentStep(load_jobs=loads, store_jobs={}, jobs_to_flush=set(), **orders)


def a_job(name: str, plan: Any = None) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob

    from semkv_vllm.orders import DocumentJob

    job = TransferJob(name, src_spec=mock.Mock(), dst_spec=mock.Mock())
    return job if plan is None else DocumentJob.of(job, plan)


def a_placement(ranks: int) -> Any:
    """A worker's half without a model."""
    import torch

    from semkv_vllm.placement import Placement

    half = Placement.__new__(Placement)
    half.shared = mock.Mock()
    half._ranks = ranks
    half._trusted = True
    half._device = torch.device("cpu")
    half._coming = {}
    half._turn = []
    half._plan = None
    half._here = set()
    half._unloaded = set()
    return half


def heard(half: Any, *came: str) -> list[set[str]]:
    """What vLLM hears of loads when some have come: all that have ended, and those that failed."""
    results = SimpleNamespace(finished_recving=set(came), failed_recving=set())
    half.finish(results)
    return [results.finished_recving, results.failed_recving]


def test_what_a_worker_says_of_loads() -> None:
    """One that has failed is not waited for, and is not taken for an exact one. Nor are others after a fault."""
    half = a_placement(ranks=1)
    plan = load([Piece(begin=40, skip=0, size=32)], begin=32, end=72)
    half.begin(step_of(a_job("plain"), a_job("marked"), unloaded=["marked", "never asked"]))
    assert heard(half, "plain") == [{"plain", "never asked"}, {"never asked"}]
    assert heard(half, "marked") == [{"marked"}, {"marked"}]
    half.begin(step_of(a_job("plain"), a_job("one", plan), a_job("two", plan)))
    with mock.patch.object(type(half), "_reuse", side_effect=ValueError):
        assert heard(half, "one") == [{"one"}, {"one"}]
    with mock.patch.object(type(half), "_on_all_ranks", side_effect=ValueError):
        assert heard(half, "two", "plain") == [{"two", "plain"}, {"two"}]
    assert half.shared.fault.call_count == 2
    step = step_of(a_job("plain"), a_job("one", plan))
    step.unloaded = None  # is not to be gone through
    half.begin(step)
    assert heard(half, "one", "plain") == [{"one", "plain"}] * 2
    kept = (half._coming, half._here, half._turn, half._unloaded)
    assert not [left for left in kept if left]


def test_a_rank_that_others_wait_for_ends_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    half = a_placement(ranks=2)
    half.begin(step_of(a_job("one", load([], begin=32, end=72))))
    with (
        mock.patch.object(type(half), "_all", side_effect=ValueError("planted")),
        pytest.raises(ValueError, match="planted"),
    ):
        heard(half, "one")
    assert "the engine ends" in caplog.text


# ---------------------------------------------------------------------- engines


def identity(model: str, cache: str, ahead: bool) -> dict[str, Any]:
    """What is off when all is computed again; when nothing is; of exact requests after each of these."""
    if ahead:
        vllm_defaults.plan_ahead()
    reuse = Reuse(model, cache)
    found: dict[str, Any] = {"refused": reuse.half.refused, "again": [], "moved": [], "after": []}
    found["reused"] = []
    for ids, places in reuse.layouts():
        wanted = reuse.cold(ids)
        with all_computed_again():
            found["again"].append(off(reuse.reused(ids, places, 0), wanted))
        found["after"].append(off(reuse.exact(ids), wanted))
        reuse.forget()
        moved = reuse.reused(ids, places, 0)
        found["moved"].append(off(moved, wanted))
        found["reused"].append(approximate(moved))
        found["after"].append(off(reuse.exact(ids), wanted))
        reuse.forget()
    found["mismatches"] = reuse.counters["document_mismatches"]
    found |= EXTRA.get(Path(model).name, lambda _: {})(reuse)
    found["ways"] = reuse.engine.ways()
    found["left"] = reuse.engine.left()
    found["plans"] = len(reuse.half._wishes) + len(reuse.half._arriving) + len(reuse.half._used)
    reuse.engine.close()
    return found


def check_identity(found: dict[str, Any], *, layers: int) -> None:
    assert found["refused"] == ""
    assert max(found["again"] + found["after"]) <= CLOSE
    assert min(found["reused"]) > 100
    if layers == 1:
        assert max(found["moved"]) <= CLOSE
    else:  # this can fail, so the other figures mean something
        assert max(found["moved"]) > CLOSE
    assert found["left"] == NOTHING
    assert found["plans"] == 0


# -- what is only asked of one of the models: engines are dear ------------------


def crowd(reuse: Reuse, *, one_layer: bool) -> dict[str, Any]:
    """Many at once in a small KV cache, some of them aborted: how many answers are wrong?"""
    dice = random.Random(5)
    system = reuse.text(64)
    jobs = []
    for number in range(14):
        order = dice.sample(range(len(SIZES)), dice.randint(2, 3))
        beginning = [system] if dice.random() < 0.7 else []
        ids, places = reuse.compose(*beginning, *order, reuse.text(dice.randint(5, 40)))
        jobs.append((ids, places if number % 2 else None))
        if number % 4 == 1:  # the same prompt exactly, beside it
            jobs.append((ids, None))
    reuse.forget()
    wanted = reuse.together([ids for ids, _ in jobs])
    reuse.forget()
    preempted = reuse.engine.count_preemptions()
    core = reuse.engine.llm.llm_engine
    for number, (ids, places) in enumerate(jobs):
        reuse.submit(number, ids, places, dice.choice([0, 32]) if places else 0)
    done = {}
    dropped = set()
    steps = 0
    while core.has_unfinished_requests():
        done |= {int(out.request_id): out for out in core.step() if out.finished}
        steps += 1
        left = [number for number in range(len(jobs)) if number not in done]
        if steps % 12 == 0 and left and len(dropped) < 3:
            dropped.add(dice.choice(left))
            core.abort_request([str(number) for number in dropped])
    checked = [
        number
        for number in done
        if number not in dropped and (one_layer or not approximate(done[number]))
    ]
    after = reuse.together([ids for ids, _ in jobs])
    reuse.forget()
    stored = reuse.together([ids for ids, _ in jobs], load=True)
    return {
        "wrong": [number for number in checked if off(done[number], wanted[number]) > CLOSE],
        "checked": len(checked),
        "approximate": sum(bool(approximate(out)) for out in done.values()),
        "preempted": len(preempted),
        "wrong after": [n for n, out in enumerate(after) if off(out, wanted[n]) > CLOSE],
        "wrong from the store": [n for n, out in enumerate(stored) if off(out, wanted[n]) > CLOSE],
        "loaded": sum(report(out).get("loaded_tokens", 0) for out in stored),
    }


def plain_rules(reuse: Reuse) -> dict[str, Any]:
    """Whom nothing is reused for, and what comes before reuse."""
    found: dict[str, Any] = {"hostile": [], "exact": []}
    ids, places = reuse.compose(reuse.text(45), 2, 0, reuse.text(20))
    wanted = reuse.cold(ids)
    for given in ([[0, 10**9]], [[9, 1]], {"0": 9}, "separated"):
        out = reuse.reused(ids, given, 0)
        found["hostile"].append([off(out, wanted), approximate(out)])
        reuse.forget()
    same = {"places": places, "ids": ids}
    for fields in ({"salt": "another tenant"}, {"prompt_logprobs": 1}):
        found["exact"].append(approximate(reuse.reused(**same, **fields)))
        reuse.forget()
    reuse.half._settings = replace(reuse.half._settings, document_tokens=2048)
    found["exact"].append(approximate(reuse.reused(**same)))
    reuse.half._settings = replace(reuse.half._settings, document_tokens=0)
    reuse.forget()
    with all_computed_again(), small_passes(10) as found["passes"]:
        out = reuse.reused(**same)
    found["in small passes"] = [off(out, wanted), approximate(out)]
    reuse.forget()
    # A document in its own place is an exact beginning.
    first, place = reuse.compose(2, reuse.text(30))
    wanted = reuse.cold(first)
    out = reuse.reused(first, place, 0)
    found["in place"] = [off(out, wanted), approximate(out), report(out)["loaded_tokens"]]
    reuse.forget()
    # Without spans there is nothing to think of.
    with mock.patch.object(type(reuse.half), "_plan", side_effect=AssertionError):
        out = reuse.output(ids, {"kv_transfer_params": {"max_offload_tokens": 0}})
    found["without"] = approximate(out)
    found["errors"] = reuse.counters["errors"]
    # Between separators.
    mark = [11, 12, 11]
    parts = [reuse.text(40), mark, 2, mark, 0, mark, reuse.text(9)]
    ids, _ = reuse.compose(*parts)
    found["separated"] = approximate(reuse.reused(ids, "separated", 0))
    return found


@contextmanager
def small_passes(rows: int) -> Iterator[list[list[int]]]:
    """With so many ``document_rows``; gives the tokens of the passes of each step."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    repair = get_kv_transfer_group()._placement._repair
    run = repair.run
    steps: list[list[int]] = []

    def noted(passes: Any) -> None:
        steps.append([len(each.ids) for each in passes])
        run(passes)

    with mock.patch.multiple(repair, run=noted, _most_tokens=rows):
        yield steps


def faulty_hooks(reuse: Reuse) -> dict[str, Any]:
    """A request while one of our hooks fails: how wrong its answer is, what was reused, whether somebody heard."""
    ids, places = reuse.compose(reuse.text(45), 2, 0, reuse.text(20))
    few = {"tokens": 2}
    reuse.forget()
    wanted = reuse.output(ids, SKIP, **few)
    reuse.forget()
    found = {}
    for hook in HOOKS:
        before = reuse.counters["errors"]
        with mock.patch(f"semkv_vllm.{hook}", side_effect=ValueError(hook)) as broken:
            answer = reuse.reused(ids, places, 0, **few)
        exact = reuse.output(ids, SKIP, **few)  # where it can, from what the other left
        reuse.forget()
        found[hook] = {
            "called": broken.called,
            "off": [off(answer, wanted), off(exact, wanted)],
            "approximate": approximate(answer),
            "heard": reuse.counters["errors"] > before,
            "left": reuse.engine.left(),
        }
    for left in (reuse.half._wishes, reuse.half._used):  # of the one that had no end
        left.clear()
    found["none"] = {"approximate": approximate(reuse.reused(ids, places, 0, **few))}
    reuse.forget()
    return found


def check_hooks(found: dict[str, Any]) -> None:
    assert found.pop("none")["approximate"] > 200, "nothing is reused after faults"
    for hook, seen in found.items():
        assert seen["called"], hook
        assert seen["left"] == NOTHING, hook
        assert seen["heard"] or hook == "placement.Placement.take_news", hook
        assert seen["off"][1] <= CLOSE, hook
        assert seen["off"][0] <= CLOSE or seen["approximate"], hook


def failed_load(reuse: Reuse) -> dict[str, Any]:
    """A load that cannot be repaired, beside a request that runs; then the same prompt exactly."""
    ids, places = reuse.compose(reuse.text(45), 2, 0, reuse.text(20))
    other = reuse.text(90)
    wanted = [reuse.cold(ids), reuse.cold(other)]
    core = reuse.engine.llm.llm_engine
    core.add_request("1", prompt(other), sampling(SKIP, tokens=8))
    done = {}
    with mock.patch("semkv_vllm.gate.Layers.move", side_effect=ValueError("planted")):
        reuse.submit(0, ids, places, 0, tokens=8)
        while core.has_unfinished_requests():
            done |= {int(out.request_id): out for out in core.step() if out.finished}
    return {
        "off": [off(done[number], own) for number, own in enumerate(wanted)]
        + [off(reuse.exact(ids), wanted[0])],
        "approximate": approximate(done[0]),
        "errors": reuse.counters["errors"],
    }


def faults(reuse: Reuse) -> dict[str, Any]:
    """From the disk; after a purge; after a fault of ours."""
    ids, places = reuse.compose(reuse.text(45), 2, 0, reuse.text(20))
    wanted = reuse.cold(ids)
    reuse.engine.forget()
    found: dict[str, Any] = {"disk": approximate(reuse.reused(ids, places, 0))}
    reuse.forget()
    broken = mock.patch.object(type(reuse.half), "_is_worth_it", side_effect=ValueError)
    with broken:
        out = reuse.reused(ids, places, 0)
    found["fault"] = [off(out, wanted), approximate(out)]
    reuse.forget()
    again = reuse.reused(ids, places, 0)
    found["after"] = approximate(again)
    reuse.forget()
    long = reuse.text(BLOCK * BLOCKS * 2 // 3)  # has no room beside what is kept for it
    wanted_of_long = reuse.output(long, None)
    reuse.forget()
    with mock.patch.object(type(reuse.half), "take_orders", side_effect=ValueError) as lost:
        found["long"] = off(reuse.output(long, None), wanted_of_long)
    assert lost.called
    reuse.forget()
    purge(reuse.engine.scheduler.connector._settings.cache_dir)
    out = reuse.reused(ids, places, 0)
    found["purged"] = [off(out, wanted), approximate(out)]
    return found


def other_theta(reuse: Reuse) -> dict[str, Any]:
    """After the start the model gets another rotary embedding."""
    runner = reuse.engine.core.model_executor.driver_worker.worker.model_runner
    rotary = runner.get_model().model.layers[0].self_attn.rotary_emb
    rotary.base *= 2
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())
    ids, places = reuse.compose(reuse.text(64), 2, 4, reuse.text(20))
    wanted = reuse.cold(ids)
    first = reuse.reused(ids, places, 0)
    found = {"first": [off(first, wanted), approximate(first)]}
    reuse.forget()
    second = reuse.reused(ids, places, 0)
    found["second"] = [off(second, wanted), approximate(second)]
    found["noticed"] = reuse.counters["document_mismatches"]
    return found


def gates(reuse: Reuse) -> dict[str, Any]:
    """Why engines would be refused."""
    from semkv_vllm.gate import refusal

    config = reuse.engine.scheduler.connector._config
    cache = reuse.engine.scheduler.kv_cache_config
    found: dict[str, Any] = {"this": refusal(config, cache)}
    for part, name, value in (
        ("", "lora_config", SimpleNamespace()),
        ("", "speculative_config", SimpleNamespace()),
        ("", "kv_events_config", SimpleNamespace(enable_kv_cache_events=True)),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "enable_expert_parallel", True),
        ("cache_config", "cache_dtype", "fp8"),
    ):
        other = copy.copy(config)
        if part:
            setattr(other, part, copy.copy(getattr(config, part)))
        setattr(getattr(other, part) if part else other, name, value)
        found[name] = refusal(other, cache)
    group = cache.kv_cache_groups[0]
    for name, value in (("sliding_window", 64), ("attention_chunk_size", 64), ("block_size", 2)):
        kind = replace(group.kv_cache_spec, **{name: value})
        other_cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind)])
        found[name] = refusal(config, other_cache)
    found["two groups"] = refusal(config, SimpleNamespace(kv_cache_groups=[group, group]))
    runner = reuse.engine.core.model_executor.driver_worker.worker.model_runner
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    attention = runner.get_model().model.layers[1].self_attn

    def reason() -> str:
        return str(worker._placement._looked_at(runner, worker._kv_caches))

    rotary = attention.rotary_emb
    found["as it is"] = reason()
    attention.rotary_emb = copy.copy(rotary)
    attention.rotary_emb._forward_method = lambda positions, query, key: (query, key)
    found["a layer without rotation"] = reason()
    attention.rotary_emb = rotary
    kind = type(rotary)
    rotary.__class__ = type("DynamicNTKScalingRotaryEmbedding", (kind,), {})
    found["another rotary embedding"] = reason()
    rotary.__class__ = kind
    return found


def larger_inputs(runner: Any, rows: int, tokens: int) -> Any:
    """Where CUDA graphs would read a pass, with some tokens more than it has; on a CPU there are no graphs."""
    import torch

    size = tokens + 8 - tokens % 8
    buffers = getattr(runner, "input_buffers", None)
    if buffers is None:
        return torch.full((size,), 7, dtype=torch.int32), torch.arange(size)
    return buffers.input_ids[:size], buffers.positions[:size]


def as_by_graphs(reuse: Reuse) -> dict[str, Any]:
    """The extra pass as CUDA graphs are given it: right, beside another request, wrong, broken, and not to be found."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from semkv_vllm import private, repair

    ours = get_kv_transfer_group()._placement._repair
    runner = reuse.engine.core.model_executor.driver_worker.worker.model_runner
    none_here = private.graph_inputs(runner, 1, 8)
    padded = repair._padded

    def others(one: Any, ids: Any, positions: Any) -> Any:
        made = padded(one, ids, positions)
        return replace(made, ids=made.ids - 1)

    found: dict[str, Any] = {"none": none_here, "off": [], "used": [], "sizes": []}
    ids, places = reuse.compose(reuse.text(45), 2, 0, reuse.text(20))
    wanted = reuse.cold(ids)
    other = reuse.text(90)
    wanted_other = reuse.output(other, SKIP, tokens=8)
    core = reuse.engine.llm.llm_engine
    for plant in (
        mock.patch.object(repair, "_padded", padded),
        mock.patch.object(repair, "_padded", padded),
        mock.patch.object(repair, "_padded", others),
        mock.patch.object(repair, "_padded", side_effect=ValueError("planted")),
        mock.patch.object(private, "graph_inputs", side_effect=ValueError("planted")),
    ):
        ours._may_use_graphs = True
        reuse.forget()
        done = {}
        with mock.patch.object(private, "graph_inputs", larger_inputs), plant, all_computed_again():
            core.add_request("1", prompt(other), sampling(SKIP, tokens=8))
            reuse.submit(0, ids, places, 0, tokens=8)
            while core.has_unfinished_requests():
                done |= {int(out.request_id): out for out in core.step() if out.finished}
        found["off"] += [off(done[0], wanted), off(done[1], wanted_other)]
        found["used"].append(ours._may_use_graphs)
        found["sizes"].append(len(ours._proven))
        if len(found["sizes"]) > 1:
            ours._proven.clear()
    found["errors"] = reuse.counters["errors"]
    reuse.forget()
    return found


def check_graphs(found: dict[str, Any]) -> None:
    assert found["none"] is None
    assert max(found["off"]) <= CLOSE
    assert found["used"] == [True, True, False, False, False]
    first, second, *rest = found["sizes"]
    assert first == second > 0
    assert rest == [0, 0, 0]
    assert found["errors"] == 0


EXTRA: dict[str, Any] = {
    "llama-shallow": lambda reuse: {
        "rules": plain_rules(reuse),
        "crowd": crowd(reuse, one_layer=False),
        "gates": gates(reuse),
    },
    "llama3": lambda reuse: {"crowd": crowd(reuse, one_layer=True)},
    "yarn": lambda reuse: {"graphs": as_by_graphs(reuse), "failed": failed_load(reuse)},
    "qwen2": lambda reuse: {"hooks": faulty_hooks(reuse), "faults": faults(reuse)},
    "qwen3": lambda reuse: {"graphs": as_by_graphs(reuse), "theta": other_theta(reuse)},
}


def run(
    checkpoint: Checkpoint,
    family: str,
    folder: Path,
    *,
    ahead: bool = False,
    second_runner: bool = False,
) -> dict[str, Any]:
    model = checkpoint(family)
    found = in_child(identity, model, folder, ahead, second_runner=second_runner)
    assert found["ways"] == [second_runner, ahead]
    check_identity(found, layers=LAYERS.get(family, 2))
    return dict(found)


def check_crowd(crowd: dict[str, Any]) -> None:
    assert crowd["wrong"] == crowd["wrong after"] == crowd["wrong from the store"] == []
    assert crowd["preempted"] > 0
    assert crowd["approximate"] > 0
    assert crowd["loaded"] > 0


def two_ranks(model: str, cache: str) -> dict[str, Any]:
    """Two layers on two ranks: what the pass exchanges counts, and a fault of one rank must not leave the other."""
    sign = Path(cache) / "broken"
    os.environ[SIGN] = str(sign)
    reuse = Reuse(model, cache, tensor_parallel_size=2, worker_extension_cls=BROKEN_RANK)
    ids, places = reuse.compose(reuse.text(45), 2, 0, reuse.text(20))
    wanted = reuse.output(ids, SKIP, tokens=2)
    found: dict[str, Any] = {"refused": reuse.half.refused, "off": [], "errors": [], "starts": []}
    found["reused"] = []
    reuse.forget()
    for where in ("before the check", "in the rehearsal", "in the pass", ""):
        sign.write_text(where)
        found["starts"].append(reuse.engine.llm.collective_rpc("look_again"))
    for where in (ALL_AGAIN, "moving", "in the pass", ""):
        reuse.forget()
        sign.write_text(where)
        moved = reuse.reused(ids, places, 0, tokens=2)
        sign.unlink()
        exact = reuse.output(ids, SKIP, tokens=2)
        found["off"] += [off(moved, wanted), off(exact, wanted)]
        found["errors"].append(reuse.counters["errors"])
        found["reused"].append(approximate(moved))
    found["mismatches"] = reuse.counters["document_mismatches"]
    found["left"] = reuse.engine.left()
    reuse.engine.close()
    return found


@pytest.mark.engine
def test_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A rank that fails at the start is refused on both; one that fails within a pass takes part in it to its end, and
    then vLLM computes the request."""
    found = in_child(two_ranks, checkpoint("llama-shallow"), tmp_path)
    assert (found["refused"], found["mismatches"], found["left"]) == ("", 0, NOTHING)
    *broken, whole = found["starts"]
    assert all(all(said) for said in broken)
    assert "rehearsal" in broken[1][1]
    assert whole == ["", ""]
    *exact, reused, after = found["off"]
    assert max([*exact, after]) <= CLOSE
    assert reused > CLOSE  # this can fail, so the other figures mean something
    assert found["errors"] == [1, 2, 3, 3]  # the first one is of a start
    assert min(found["reused"][0], found["reused"][-1]) > 200


@pytest.mark.engine
def test_llama(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(checkpoint, "llama-shallow", tmp_path)
    assert found["mismatches"] == 0
    rules = found["rules"]
    assert [out for out in rules["hostile"] if out[0] > CLOSE or out[1]] == []
    assert rules["exact"] == [0, 0, 0]
    assert max(rules["passes"]) == [10]
    assert len(rules["passes"]) > 20
    assert rules["in small passes"][0] <= CLOSE
    assert rules["in small passes"][1] > 200
    assert rules["in place"][0] <= CLOSE
    assert rules["in place"][1:] == [0, 160]
    assert (rules["without"], rules["errors"]) == (0, 0)
    assert rules["separated"] > 200
    check_crowd(found["crowd"])
    gates = found["gates"]
    assert gates.pop("this") == gates.pop("as it is") == ""
    assert "layer 1" in gates["a layer without rotation"]
    assert "not known to be right" in gates["another rotary embedding"]
    assert [name for name, reason in gates.items() if not reason] == []


@pytest.mark.engine
def test_llama3(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(checkpoint, "llama3", tmp_path, ahead=True)
    check_crowd(found["crowd"])


@pytest.mark.engine
def test_yarn_and_what_vllm_does_by_default(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(checkpoint, "yarn", tmp_path, ahead=True, second_runner=True)
    check_graphs(found["graphs"])
    assert max(found["failed"]["off"]) <= CLOSE
    assert found["failed"]["approximate"] == 0
    assert found["failed"]["errors"] == 1


@pytest.mark.engine
def test_qwen2(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(checkpoint, "qwen2", tmp_path, ahead=True)
    check_hooks(found["hooks"])
    faults = found["faults"]
    assert faults["disk"] > 200
    assert faults["fault"][0] <= CLOSE
    assert faults["fault"][1] == 0
    assert faults["after"] == faults["disk"]
    assert faults["long"] <= CLOSE
    assert faults["purged"][0] <= CLOSE
    assert faults["purged"][1] == 0


@pytest.mark.engine
def test_qwen3_and_another_theta(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It is noticed within the first request, which is answered exactly all the same."""
    found = run(checkpoint, "qwen3", tmp_path)
    check_graphs(found["graphs"])
    theta = found["theta"]
    assert theta["first"][0] <= CLOSE
    assert theta["second"][0] <= CLOSE
    assert theta["second"][1] == 0
    assert theta["noticed"] == 1


# ---------------------------------------------------------------------- rotation


def rotations() -> list[float]:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from semkv_vllm.gate import rotation_error

    ropes: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ]
    found = []
    with set_current_vllm_config(VllmConfig()):
        for neox in (True, False):
            for part in (1.0, 0.5):
                for rope in ropes:
                    given = {"rope_theta": 10000.0, "partial_rotary_factor": part, **rope}
                    rotary = get_rope(64, 4096, neox, given, torch.float32)
                    found.append(rotation_error(rotary, "cpu", torch.float32, 4096, axes=1))
        for interleaved in (True, False):
            given = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [12, 10, 10]}
            given["mrope_interleaved"] = interleaved
            rotary = get_rope(64, 4096, True, given, torch.float32)
            found.append(rotation_error(rotary, "cpu", torch.float32, 4096, axes=3))
    return found


@pytest.mark.engine
def test_keys_are_rotated_as_models_do() -> None:
    """NeoX and GPT-J style, whole and half heads, three kinds of tables, two kinds of M-RoPE."""
    found = in_child(rotations)
    assert len(found) == 14
    assert max(found) < 1e-6


class PlainBackend:
    """Writes keys and values as vLLM's GPU kernels do."""

    num_kv_heads = 2
    head_size = 64

    @property
    def impl(self) -> PlainBackend:
        return self

    def do_kv_cache_update(
        self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any
    ) -> None:
        import torch

        block = cache.shape[2]
        rows = cache.transpose(1, 2)
        rows[slots // block, slots % block] = torch.cat((keys, values), -1)


def fused() -> list[float]:
    """How far the kernel is from torch's operations, run by Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from semkv_vllm.fused import Fused
    from semkv_vllm.gate import Layers, fused_error
    from semkv_vllm.moving import Cells

    found = []
    backend = PlainBackend()
    with set_current_vllm_config(VllmConfig()):
        for neox, part in ((True, 1.0), (False, 0.5)):
            given = {"rope_theta": 10000.0, "partial_rotary_factor": part, "rope_type": "default"}
            rotary = get_rope(64, 512, neox, given, torch.float32)
            layers = Layers.__new__(Layers)
            caches = [torch.zeros(12, 2, 16, 128) for _ in range(2)]
            layers.cells = [Cells(backend, cache) for cache in caches]
            layers.rotaries = [rotary, rotary]
            kernel = Fused(layers.cells, layers.rotaries)
            found.append(fused_error(layers, kernel, 10, 512))
            found.append(fused_error(layers, lambda moves: None, 10, 512))
    return found


@pytest.mark.engine
def test_one_kernel_moves_as_many_operations() -> None:
    """Tokens in several groups, of two requests, half of them onto others; what does nothing is off."""
    pytest.importorskip("triton")
    found = in_child(fused)
    assert max(found[::2]) < 1e-6
    assert min(found[1::2]) > 0.1
