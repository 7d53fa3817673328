"""Without normalised hits: the exact tier takes the same bytes alone, and what differs in typing is at most similar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_helpers import LAYERS, Bench
from command_line import invoke
from gateway_helpers import Pair, wait_until
from semkv.tiers.policies import Decision, FixedThreshold
from semkv.types import Exactness, Scope
from semkv_gateway.settings import ServerSettings

DOCUMENT = "The first sentence says one thing. The second says another."
TYPED = DOCUMENT.replace(" ", "  ")
SYSTEM = "answer only in english, and be brief"
PLAIN = {"embedding_layers": (), "embedding_hook": "none", "semantic": False, "normalised": False}
HOOKED = {"embedding_hook": "cache_helpers:WrittenHook"}
IMAGES, LAYERED = {**HOOKED, "embedding_layers": LAYERS[:1]}, {**HOOKED, "embedding_layers": LAYERS}


def of(
    question: str, image: str | tuple[str, ...] = (), system: str = SYSTEM, context: str = ""
) -> dict[str, Any]:
    return {"question": question, "image": image, "system": system, "context": context or ()}


TABLE = [
    *(
        ({}, of("what color", "car"), of(t, "car"), "text:exact")
        for t in ("What  color", " what color\n", "ｗｈａｔ color")
    ),
    ({}, of("one", context=DOCUMENT), of("two", context=TYPED), "text:exact/context"),
    ({"semantic": True}, of("color"), of("color", system=SYSTEM.upper()), "text:exact"),
    *(
        (
            {"semantic": True, "scope": s},
            of("color"),
            of("color~0.95", system=SYSTEM.upper()),
            "text:semantic",
        )
        for s in Scope
    ),
    (
        LAYERED,
        of("color", "car"),
        of("color~0.9", "car~0.95", system=SYSTEM.upper()),
        "embedding:prompt",
    ),
    (
        IMAGES,
        of("color", "car"),
        of("size", "car~0.95", system=SYSTEM.upper()),
        "embedding:vision/media",
    ),
]


@pytest.mark.parametrize(("settings", "recorded", "typed", "provenance"), TABLE)
def test_the_same_bytes_alone_and_all_again_when_it_is_back(
    tmp_path: Path,
    settings: dict[str, Any],
    recorded: dict[str, Any],
    typed: dict[str, Any],
    provenance: str,
) -> None:
    bench = Bench(tmp_path, **{**PLAIN, **settings})
    bench.ask(**recorded)
    assert not bench.look(**typed).hit
    own = {"question": recorded["question"]} if provenance == "text:exact" else {}
    same = {**typed, **own, "system": SYSTEM, "context": recorded["context"]}
    assert bench.look(**same).provenance == provenance
    bench.reopen(normalised=True)
    assert bench.look(**typed).provenance == provenance.replace("exact", "normalised")


def test_the_semantic_tier_has_it_judged_as_similar(tmp_path: Path) -> None:
    class Refuses(FixedThreshold):
        def accept(self, *_: Any) -> Decision:
            return Decision(False, "as it likes")

    bench = Bench(tmp_path, **{**PLAIN, "semantic": True, "verify_rate": 1.0})
    bench.ask("what color", "car")
    report = bench.look("What  color", "car")
    match = report.plan.match
    assert match is not None
    assert (report.provenance, match.exactness) == ("text:semantic", Exactness.APPROXIMATE)
    assert match.score == pytest.approx(1.0)
    assert bench.cache.should_check(report)
    assert bench.cache.checked(report.hit_id, False)
    assert not bench.look("What  color", "car").hit, "barred"
    bench.cache._planner._decider = Refuses()
    assert not bench.look("what color ", "car").hit


@pytest.mark.parametrize(
    ("flags", "header"),
    [
        ((), "hit tier=text:normalised score=1.000"),
        (("--no-normalised",), "hit tier=text:semantic score=1.000"),
        (("--no-normalised", "--similarity-threshold", "1", "--policy", "bounded"), "miss"),
    ],
)
def test_the_flag_reaches_the_gateways_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], header: str
) -> None:
    given: list[ServerSettings] = []
    monkeypatch.setattr(
        "semkv_gateway.serve.run_server", lambda settings, *_, **__: given.append(settings)
    )
    monkeypatch.setattr("semkv_gateway.cache_client._LOOKUP_S", 120.0)  # a busy machine is no fault
    out = invoke(["serve", *flags])
    assert out.exit_code == 0, out.output
    chosen = {
        name: getattr(given[0], name) for name in ("normalised", "similarity_threshold", "policy")
    }
    with Pair(tmp_path, semantic=True, store_timeout=60.0, **chosen) as pair:
        assert pair.post("How do I bake bread at home?").headers["x-semkv"].startswith("miss")
        wait_until(lambda: pair.entries == 1)
        assert pair.post("how  do I bake bread at home?").headers["x-semkv"].startswith(header)
        assert (
            pair.post("How do I bake bread at home?")
            .headers["x-semkv"]
            .startswith("hit tier=exact")
        )
        assert pair.metric("semkv_faults_total") == 0
