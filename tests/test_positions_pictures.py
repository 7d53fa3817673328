"""Documents at another position in models that take pictures: beside pictures, and pictures that are documents.

Most models here have one layer. There keys and values depend on token and position alone, so what is reused must be
what would be computed, too: that is how it is seen that all axes of positions move alike.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import vllm_defaults
from document_engines import CLOSE, PictureReuse, Text, approximate, off, sampling
from kv_engines import NOTHING, SKIP, in_child
from semkv_lab.local_engine import all_computed_again
from tiny_models import Checkpoint


def crowd(reuse: PictureReuse) -> dict[str, Any]:
    """Many at once in a small KV cache, so that steps have pictures of others: how many answers are wrong?"""
    dice = random.Random(2)
    jobs = []
    for number in range(10):
        order = dice.sample(range(5), 2)
        beginning = [reuse.picture(2, 3)] if dice.random() < 0.4 else []
        ids, places = reuse.compose(
            *beginning, reuse.text(9), *order, reuse.text(dice.randint(5, 40))
        )
        jobs.append((ids, places if number % 2 else None))
    reuse.forget()
    wanted = [reuse.output(ids, SKIP, tokens=24, logprobs=1) for ids, _ in jobs]
    reuse.forget()
    preempted = reuse.engine.count_preemptions()
    core = reuse.engine.llm.llm_engine
    for number, (ids, places) in enumerate(jobs):
        reuse.submit(number, ids, places, dice.choice([0, 32]) if places else 0, tokens=24)
    done = {}
    while core.has_unfinished_requests():
        done |= {int(out.request_id): out for out in core.step() if out.finished}
    after = [reuse.output(ids, SKIP, tokens=24, logprobs=1) for ids, _ in jobs]
    return {
        "off": [off(done[number], wanted[number]) for number in range(len(jobs))],
        "after": [off(out, own) for out, own in zip(after, wanted, strict=True)],
        "approximate": sum(bool(approximate(out)) for out in done.values()),
        "preempted": len(preempted),
    }


def beside_pictures(reuse: PictureReuse) -> dict[str, Any]:
    """The extra pass in steps in which pictures of other requests are computed: they lose nothing of them."""
    ids, places = reuse.compose(reuse.text(50), 1, 2, 0, reuse.text(33))
    crowded = [
        reuse.compose(*(part for n in (2, 3, 4) for part in (reuse.picture(n, 3), reuse.text(1))))[
            0
        ]
        for _ in range(4)
    ]
    wanted = [reuse.cold(asked) for asked in [ids, *crowded]]
    core = reuse.engine.llm.llm_engine
    said = {"spans": places, "repair": 0}
    for number, asked in enumerate([ids, *crowded]):
        given = {"max_offload_tokens": 0, "semkv": {"skip": True} if number else said}
        params = sampling({"kv_transfer_params": given}, tokens=8)
        core.add_request(str(number), reuse.as_prompt(asked), params)
    done = {}
    while core.has_unfinished_requests():
        done |= {int(out.request_id): out for out in core.step() if out.finished}
    reuse.forget()
    return {
        "off": [off(done[number], own) for number, own in enumerate(wanted)],
        "reused": approximate(done[0]),
    }


def hostile(reuse: PictureReuse) -> dict[str, Any]:
    """What is not to be found, or not asked for at all."""
    ids, places = reuse.compose(reuse.text(45), 0, 2, reuse.text(20))
    other = Text(ids)
    other.pictures = (7,)  # the same tokens, another picture
    begin, end = places[0]
    found = {}
    for name, asked, spans, salt in (
        ("as it is", ids, places, None),
        ("another picture", other, places, None),
        ("another tenant", ids, places, "other"),
        ("cut in front", ids, [[begin + 9, end]], None),
        ("cut behind", ids, [[begin, begin + 9]], None),
    ):
        reuse.forget()
        wanted = reuse.cold(asked)
        out = reuse.reused(asked, spans, 0, salt=salt)
        found[name] = [off(out, wanted), approximate(out)]
    found["one name for two"] = [0.0, named_twice(reuse, ids, other, places)]
    return found


def named_twice(reuse: PictureReuse, ids: Text, other: Text, places: Any) -> int:
    """How much is reused for a picture with a name that another one had before: vLLM takes it for that one."""
    reuse.forget()
    core = reuse.engine
    said = {"kv_transfer_params": {"semkv": {"spans": places, "repair": 0}}}
    reused = 0
    for asked in (other, ids):
        prompt = reuse.as_prompt(asked)
        prompt["multi_modal_uuids"] = {"image": ["a name"]}
        (out,) = core.outputs([prompt], tokens=2, extra_args=said, logprobs=None)
        reused = approximate(out)
    return reused


def identity(model: str, cache: str, layers: int, ahead: bool) -> dict[str, Any]:
    if ahead:
        vllm_defaults.plan_ahead()
    reuse = PictureReuse(model, cache, layers)
    found: dict[str, Any] = {"refused": reuse.half.refused}
    for name in ("again", "moved", "some", "after", "reused"):
        found[name] = []
    for ids, places in reuse.layouts():
        wanted = reuse.cold(ids)
        with all_computed_again():
            found["again"].append(off(reuse.reused(ids, places, 0), wanted))
        found["after"].append(off(reuse.exact(ids), wanted))
        reuse.forget()
        for repair, name in ((0, "moved"), (32, "some")):
            moved = reuse.reused(ids, places, repair)
            found[name].append(off(moved, wanted))
            found["reused"].append(approximate(moved))
            found["after"].append(off(reuse.exact(ids), wanted))
            reuse.forget()
    found["crowd"] = crowd(reuse)
    found["hostile"] = hostile(reuse)
    found["beside"] = beside_pictures(reuse)
    found["mismatches"] = reuse.counters["document_mismatches"]
    found["errors"] = reuse.counters["errors"]
    found["left"] = reuse.engine.left()
    reuse.engine.close()
    return found


def several_layers(model: str, cache: str) -> dict[str, Any]:
    """How far answers are off, with two and with three pictures: all computed again, then nothing."""
    reuse = PictureReuse(model, cache, layers=4)
    found: dict[str, Any] = {"refused": reuse.half.refused, "again": [], "moved": [], "after": []}
    for ids, places in list(reuse.layouts())[-2:]:
        wanted = reuse.cold(ids)
        with all_computed_again():
            found["again"].append(off(reuse.reused(ids, places, 0), wanted))
        found["after"].append(off(reuse.exact(ids), wanted))
        reuse.forget()
        found["moved"].append(off(reuse.reused(ids, places, 0), wanted))
        found["after"].append(off(reuse.exact(ids), wanted))
    found["mismatches"] = reuse.counters["document_mismatches"]
    reuse.engine.close()
    return found


@pytest.mark.engine
def test_pictures_in_several_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Here what is computed again counts: each layer sees what stands before."""
    found = in_child(several_layers, checkpoint("qwen3-vl"), tmp_path)
    assert (found["refused"], found["mismatches"]) == ("", 0)
    assert max(found["again"] + found["after"]) <= CLOSE
    assert min(found["moved"]) > CLOSE  # this can fail, so the other figures mean something


@pytest.mark.engine
@pytest.mark.parametrize(("family", "ahead"), [("qwen3-vl-shallow", True), ("qwen2.5-vl", False)])
def test_pictures(checkpoint: Checkpoint, tmp_path: Path, family: str, ahead: bool) -> None:
    """Deepstack and interleaved axes; axes by sections."""
    found = in_child(identity, checkpoint(family), tmp_path, 1, ahead)
    assert (found["refused"], found["mismatches"], found["errors"]) == ("", 0, 0)
    assert max(found["again"] + found["after"]) <= CLOSE
    assert max(found["moved"] + found["some"]) <= CLOSE
    assert min(found["reused"]) > 60
    assert found["left"] == NOTHING
    crowd = found["crowd"]
    assert max(crowd["off"] + crowd["after"]) <= CLOSE
    assert crowd["preempted"] > 0
    assert crowd["approximate"] > 2
    beside = found["beside"]
    assert max(beside["off"]) <= CLOSE
    assert beside["reused"] > 100
    hostile = found["hostile"]
    assert max(wrong for wrong, _ in hostile.values()) <= CLOSE
    assert hostile.pop("as it is")[1] > 200
    only_text = hostile.pop("another picture")[1]
    assert hostile.pop("one name for two")[1] == only_text < 200
    assert {name: count for name, (_, count) in hostile.items() if count} == {}
