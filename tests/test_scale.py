"""The model of ``bench/scale.py``: it decides as the parts do that it is made of, and the same at each time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from scale_model import Costs, Sizes, replay
from scale_trace import Asked, Shape, drawn

QUESTION = "How do I bake sourdough bread at home?"
REWORDED = "How can I bake sourdough bread at home?"
SYSTEM = ("system", "word " * 400)


class Reworded:
    """Takes two texts for one question; the encoder and the guards do the same."""

    def donors(self, text: str) -> Iterator[str]:
        others = {QUESTION: REWORDED, REWORDED: QUESTION}
        yield from [others[text]] if text in others else []


def asked(at: float, text: str, tenant: str = "a") -> Asked:
    return Asked(at, tenant, (SYSTEM, ("user", text)), 4)


def play(trace: list[Asked], sizes: Sizes | None = None) -> dict:
    return replay(trace, Reworded(), sizes=sizes or Sizes(), costs=Costs())


def test_what_one_gateway_had_computed_hits_at_another_for_its_tenant_alone() -> None:
    texts = [(0.0, QUESTION), (2.0, QUESTION), (4.0, REWORDED), (6.0, REWORDED)]
    found = play([asked(at, text) for at, text in texts])
    assert found["how"] == {"miss": 1, "store": 1, "near": 2}
    found = play([asked(0.0, QUESTION), asked(2.0, QUESTION, "b"), asked(4.0, REWORDED, "c")])
    assert found["how"] == {"miss": 3}


def test_equal_requests_at_once_are_computed_once() -> None:
    one = replace(Sizes(), gateways=1)
    found = play([asked(0.0, QUESTION), asked(0.001, QUESTION), asked(0.002, REWORDED)], one)
    assert found["how"] == {"miss": 1, "joined": 2}


def test_a_replica_loads_what_it_holds_and_others_share_through_the_bucket() -> None:
    follow = [asked(0.1 * n, f"Question {n}?") for n in range(30)]
    few = replace(Sizes(), gateways=1, device=256, host=100_000)
    assert play(follow, few)["kv_tokens"]["host"] > 0
    fast = replace(Costs(), from_bucket=0.000001, first=0.0)
    spread = [asked(5.0 * n, f"Question {n}?", f"{n % 2}") for n in range(8)]
    sizes = replace(Sizes(), device=64, host=64, bucket=100_000)
    found = replay(spread, Reworded(), sizes=sizes, costs=fast)
    assert found["kv_tokens"]["bucket"] > 0
    assert found["bucket_requests"]["put file"] == 2, "each tenant's beginning once"


def test_a_replay_is_the_same_each_time() -> None:
    trace = drawn(Shape(seconds=10.0), seed=3)
    sizes = replace(Sizes(), peers=1, nodes=3)
    assert play(trace, sizes) == play(trace, sizes)
    assert trace == drawn(Shape(seconds=10.0), seed=3)
