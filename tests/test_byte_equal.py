"""Without normalised hits: the exact tier takes the same bytes alone, and what differs in typing is at most similar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_helpers import LAYERS, Bench
from command_line import invoke
from gateway_helpers import Pair
from semkv.server.settings import ServerSettings
from semkv.tiers.policies import Decision, FixedThreshold
from semkv.types import Exactness, Scope

Make = Callable[..., Bench]
DOCUMENT = "The first sentence says one thing. The second says another."
TYPED = DOCUMENT.replace(" ", "  ")
SYSTEM = "answer only in english, and be brief"
TYPINGS = ("What  color", " what color\n", "ｗｈａｔ color", "WHAT COLOR")
SYSTEMS = ("answer only in  english, and be brief", SYSTEM.upper())


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(**settings: Any) -> Bench:
        plain = {"embedding_layers": (), "embedding_hook": "none", "semantic": False, "normalised": False}
        return Bench(tmp_path, **{**plain, **settings})

    return build


def of(question: str, image: str = "", **rest: Any) -> dict[str, Any]:
    return {"question": question, "image": image or (), **rest}


HOOKED = {"embedding_hook": "cache_helpers:WrittenHook"}
IMAGES, LAYERED = {**HOOKED, "embedding_layers": LAYERS[:1]}, {**HOOKED, "embedding_layers": LAYERS}
SEMANTIC = [{"semantic": True, "scope": scope} for scope in Scope]
COLOR, ABOUT = of("color", "car", system=SYSTEM), of("color", system=SYSTEM)
TABLE = [
    *(({}, of("what color", "car"), of("what color", "car"), of(t, "car"), "text:exact") for t in TYPINGS),
    ({}, of("one", context=DOCUMENT), of("two", context=DOCUMENT), of("two", context=TYPED), "text:exact/context"),
    *(
        (s, ABOUT, of("color~0.95", system=SYSTEM), of("color~0.95", system=o), "text:semantic")
        for o in SYSTEMS
        for s in SEMANTIC
    ),
    *((s, ABOUT, ABOUT, of("color", system=o), "text:exact") for o in SYSTEMS for s in SEMANTIC),
    *(
        (LAYERED, COLOR, of("color~0.9", i, system=SYSTEM), of("color~0.9", i, system=o), "embedding:prompt")
        for o in SYSTEMS
        for i in ("car", "car~0.95")
    ),
    *(
        (
            IMAGES,
            COLOR,
            of("size", "car~0.95", system=SYSTEM),
            of("size", "car~0.95", system=o),
            "embedding:vision/media",
        )
        for o in SYSTEMS
    ),
]


@pytest.mark.parametrize(("settings", "recorded", "same", "typed", "provenance"), TABLE)
def test_the_same_bytes_alone_and_all_again_when_it_is_back(
    make: Make,
    settings: dict[str, Any],
    recorded: dict[str, Any],
    same: dict[str, Any],
    typed: dict[str, Any],
    provenance: str,
) -> None:
    bench = make(**settings)
    bench.ask(**recorded)
    assert not bench.look(**typed).hit
    assert bench.look(**same).provenance == provenance
    bench.reopen(normalised=True)
    assert bench.look(**typed).provenance == provenance.replace("exact", "normalised")


def test_the_semantic_tier_has_it_judged_as_similar(make: Make) -> None:
    class Refuses(FixedThreshold):
        def accept(self, *_: Any) -> Decision:
            return Decision(False, "as it likes")

    bench = make(semantic=True, verify_rate=1.0)
    bench.ask("what color", "car")
    report = bench.look("What  color", "car")
    match = report.plan.match
    assert match is not None
    assert (report.provenance, match.exactness) == ("text:semantic", Exactness.APPROXIMATE)
    assert match.score == pytest.approx(1.0)
    assert bench.cache.should_check(report)
    assert bench.cache.checked(report.hit_id, False)
    assert not bench.look("What  color", "car").hit, "barred"
    bench.cache._planner._decider = Refuses({})
    assert not bench.look("what color ", "car").hit
    bench.ask("one", context=DOCUMENT)
    assert not bench.look("two", context=TYPED).hit
    assert bench.look("two", context=DOCUMENT).provenance == "text:exact/context"


class TestGateway:
    def settings(self, monkeypatch: pytest.MonkeyPatch, *flags: str) -> ServerSettings:
        found: list[ServerSettings] = []
        monkeypatch.setattr("semkv.server.serve.run_server", lambda settings, *_, **__: found.append(settings))
        out = invoke(["serve", *flags])
        assert out.exit_code == 0, out.output
        return found[0]

    @pytest.mark.parametrize(
        ("flags", "header"),
        [
            ((), "hit tier=text:normalised score=1.000"),
            (("--no-normalised",), "hit tier=text:semantic score=1.000"),
            (("--no-normalised", "--similarity-threshold", "1", "--policy", "bounded"), "miss"),
        ],
    )
    def test_the_flag_reaches_the_tier(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], header: str
    ) -> None:
        monkeypatch.setattr("semkv.server.cache_client._LOOKUP_S", 120.0)  # a busy machine is no fault
        given = self.settings(monkeypatch, *flags)
        chosen = {name: getattr(given, name) for name in ("normalised", "similarity_threshold", "policy")}
        with Pair(tmp_path, semantic=True, store_timeout=60.0, **chosen) as pair:
            assert pair.post("How do I bake bread at home?").headers["x-semkv"].startswith("miss")
            assert pair.post("how  do I bake bread at home?").headers["x-semkv"].startswith(header)
            assert pair.post("How do I bake bread at home?").headers["x-semkv"].startswith("hit tier=exact")
            assert pair.metric("semkv_faults_total") == 0
