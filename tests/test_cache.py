"""`SemanticCache`: what may be substituted, by which tier, and what is recorded."""

from __future__ import annotations

import doctest
import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

import semkv.cache
from cache_helpers import LAYERS, Bench, WrittenEncoder, WrittenHook, direction, line, seen
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.errors import ConfigError
from semkv.keys import media_id, segment_key
from semkv.tiers.policies import FEATURES, Calibration, Decider, Decision
from semkv.tiers.sharing import dump, load
from semkv.types import (
    CacheMode,
    EmbeddingLayer,
    Entry,
    Exactness,
    Match,
    MediaSegment,
    Namespace,
    PolicyName,
    Request,
    ReuseReport,
    Scope,
    TextSegment,
)
from semkv_lab.best_layer import BestLayerCache

DOCUMENT = " ".join(f"Sentence number {n} says something about topic {n}." for n in range(30))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(**settings: Any) -> Bench:
        return Bench(tmp_path, **settings)

    return build


def test_the_example_in_the_module_runs() -> None:
    assert doctest.testmod(semkv.cache).failed == 0


def entry_of(bench: Bench, entry_id: str | None = None) -> Entry:
    """What the catalog has of an entry, or of the one asked last."""
    entry = bench.cache._catalog.get(entry_id or bench.entry)
    assert entry is not None
    return entry


# -- the table: what may be substituted -------------------------------------------------------------------------------


def of(question: str | None, image: str | Sequence[str] = (), **rest: Any) -> dict[str, Any]:
    return {"question": question, "image": image, **rest}


LAST = DOCUMENT + " the last one."
NEARLY = DOCUMENT + " the last one.~0.97"
MATTERS = DOCUMENT.replace("topic", "matter")
ANY, ALL_IMAGES, TEXTS = {"kind": BestLayerCache}, {"scope": Scope.ANY}, {"embedding_layers": ()}


@dataclass
class Row:
    """After one request was recorded, another is asked: what the engine gets for it, and why. Nothing on a miss."""

    recorded: dict[str, Any]
    asked: dict[str, Any]
    provenance: str = ""
    sent: str = ""
    statuses: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


CAR = of("color", "car")
PAIR = of("differ", ["car", "house"])
SAID = of("color", "car", system="sys")
READ, READ_BOTH = of("one", context=LAST), of("one", context=[LAST, MATTERS])
TABLE = [
    Row(SAID, SAID, "text:exact", "sys | <car> | color", "hit skip skip skip"),
    *(
        Row(of("what color"), of(t), "text:normalised", "what color")
        for t in ("What  color", " what color\n", "ｗｈａｔ color")
    ),
    Row(CAR, of("color~0.9", "car"), "embedding:prompt", "<car> | color", "miss hit hit skip"),
    # The weaker of the two decides.
    Row(
        CAR, of("color~0.93", "car~0.95"), "embedding:prompt", "<car> | color", "miss hit hit skip"
    ),
    Row(CAR, of("Color", "car~0.95"), "embedding:vision", "<car> | color"),
    Row(
        CAR,
        of("shape", "car~0.95"),
        "embedding:vision/media",
        "<car> | shape",
        "miss hit miss skip",
    ),
    *(Row(CAR, of(q, "house"), statuses="miss miss miss miss") for q in ("color", "color~0.95")),
    Row(CAR, of("color", "missing"), statuses="miss skip miss miss"),  # a file that is not there
    # Text alone, and the text before an image.
    Row(
        of("color", system="sys"),
        of("color~0.9", system="Sys"),
        "embedding:prompt",
        "sys | color",
        "miss skip hit skip",
    ),
    Row(of("color", system="sys"), of("color~0.9", system="other")),
    Row(of("color", system="x"), of("color", context="x")),  # a role is part of a prompt
    Row(of("one", system="a long system prompt"), of("two", system="a long system prompt")),
    Row(SAID, of("shape", "car~0.95", system="other")),
    Row(
        SAID, of("shape", "car~0.95", system="Sys"), "embedding:vision/media", "sys | <car> | shape"
    ),
    # Several images: all similar, in their order.
    Row(
        PAIR,
        of("differ~0.9", ["car~0.95", "house~0.96"]),
        "embedding:prompt",
        "<car> | <house> | differ",
    ),
    Row(
        PAIR,
        of("other", ["car", "house~0.95"]),
        "embedding:vision/media",
        "<car> | <house> | other",
    ),
    *(
        Row(PAIR, of("differ", images))
        for images in (["house", "car"], ["car", "tree"], ["car~0.99", "house~0.85"], "car")
    ),
    # Contexts: other white space, and what differs more.
    Row(
        of("one", context=DOCUMENT, system="sys"),
        of("two", context=DOCUMENT.replace(" ", "  ").upper(), system="sys"),
        "text:normalised/context",
        f"sys | {DOCUMENT} | two",
        "hit skip miss miss",
    ),
    Row(READ, of("two", context=NEARLY)),
    Row(
        READ_BOTH,
        of("two", context=[LAST.upper(), NEARLY]),
        "text:normalised/context",
        f"{LAST} | {NEARLY} | two",
    ),
    Row(of("one", "car", context=" "), of("two", "car", context=" ")),  # a blank one is none
    # Settings.
    Row(CAR, of("color~0.95", "car"), "text:semantic", "<car> | color", "miss hit", TEXTS),
    *(
        Row(CAR, asked, settings=TEXTS)
        for asked in (of("color~0.85", "car"), of("color~0.95", "house"))
    ),
    Row(CAR, of("shape", "car~0.95"), "embedding:vision", "<car> | color", settings=ANY),
    Row(
        CAR,
        of("color~0.9", "house"),
        "embedding:prompt",
        "<car> | color",
        "miss miss hit skip",
        ANY,
    ),
    Row(CAR, of("shape", "house"), settings=ANY),
    Row(
        CAR,
        of("Color", "house"),
        "text:approximate",
        "<car> | color",
        settings={**TEXTS, **ALL_IMAGES},
    ),
    Row(
        CAR,
        of("color~0.95", "house"),
        "text:semantic",
        "<car> | color",
        settings={**TEXTS, **ALL_IMAGES},
    ),
]


@pytest.mark.parametrize(
    "row", TABLE, ids=lambda row: f"{row.provenance or 'miss'}, {row.asked['question']}"
)
def test_what_may_be_substituted(make: Make, row: Row) -> None:
    bench = make(**{"similarity_threshold": 0.9, **row.settings})
    bench.ask(**row.recorded)
    report = bench.look(**row.asked)
    assert all(bench.encoder.fits(text) for text in bench.encoder.calls)  # never a whole document
    assert report.provenance == row.provenance
    assert row.statuses in ("", " ".join(report.statuses.values()))
    if not row.provenance:
        assert not report.hit
        assert report.plan.segments == report.request.segments
        return
    match, full = report.plan.match, "/" not in row.provenance
    assert (seen(report.plan.segments), report.plan.full) == (row.sent, full)
    assert report.donor_response == (row.sent if full else None)
    assert match is not None
    kinds = {"text:exact": Exactness.EXACT, "text:normalised": Exactness.NORMALISED}
    assert match.exactness is kinds.get(row.provenance.partition("/")[0], Exactness.APPROXIMATE)
    for image in report.plan.segments:
        assert (
            not isinstance(image, MediaSegment)
            or image.source.read_bytes() == f"bytes of {image.name}".encode()
        )


@pytest.mark.parametrize("policy", [PolicyName.FIXED, PolicyName.CALIBRATED])
def test_another_image_does_not_bring_a_text_that_the_same_image_does_not(
    bench: Bench, policy: PolicyName
) -> None:
    weights = {**dict.fromkeys(FEATURES, 0.0), "cosine": -60.0}
    Calibration("written", 56.5, weights, 0.05).save(
        bench.root / "calibration.json"
    )  # the risk is .25 at .96
    calibrated = {
        "policy": policy,
        "calibration": bench.root / "calibration.json",
        "embedding_hook": "prompt_vision",
    }
    served = policy is PolicyName.FIXED  # whose thresholds are .8 for the text and .9 for the image
    bench.reopen(**{} if served else calibrated)
    bench.ask("color", "car")
    assert bench.look("color~0.96", "car").plan.full == served
    assert seen(bench.look("color~0.96", "car~0.92").plan.segments) == (
        "<car> | color" if served else "<car> | color~0.96"
    )
    report = bench.look("color~0.999", "car~0.92")
    assert report.plan.full
    match = report.plan.match
    assert match is not None
    assert [score.tier for score in match.scores] == ["embedding:vision", "embedding:prompt"]
    assert [score.cosine for score in match.scores] == pytest.approx([0.92, 0.999], abs=1e-3)
    assert bench.cache.checked(report.hit_id, False)
    assert not bench.look("color~0.999", "car~0.92").hit, "the pair was found wrong"
    assert bench.look("color~0.9995", "car~0.92").plan.full


def test_ones_own_image_is_its_own_donor(bench: Bench) -> None:
    bench.ask("color", "car")
    bench.ask("shape", "car~0.85")  # too far: computed by itself
    assert not bench.look("size", "car~0.85").hit


def test_every_text_layer_must_agree(make: Make) -> None:
    bench = make(embedding_layers=(*LAYERS, EmbeddingLayer("other", 64, 0.9)), semantic=False)
    bench.hook.other = "thing"
    bench.ask("color", "car")
    bench.hook.other = "thing~0.95"
    report = bench.look("color~0.9", "car")
    assert line(report).startswith(
        "exact_text=miss, embedding:vision=hit, embedding:prompt=hit, embedding:other=hit"
    )
    bench.hook.other = "nothing of the kind"
    assert not bench.look("color~0.9", "car").hit


# -- switches ---------------------------------------------------------------------------------------------------------


def test_dry_run_reports_and_sends_the_request_as_it_came(make: Make) -> None:
    bench = make()
    bench.ask("color", "car")
    bench.reopen(mode=CacheMode.DRY_RUN)
    report = bench.ask("color~0.9", "car~0.95", response="own")
    assert report.hit
    assert report.plan.segments == report.request.segments
    assert report.plan.substituted == 0
    assert report.proposed is not None
    assert seen(report.proposed.segments) == "<car> | color"
    assert report.donor_response == "<car> | color"
    assert report.provenance == "embedding:prompt"
    assert bench.look("x", "car~0.96").provenance == "embedding:vision/media"
    entry = entry_of(bench)
    assert entry.response == "own"
    assert seen(entry.segments) == "<car~0.95> | color~0.9"


def test_each_tier_can_be_turned_off_and_so_can_all(make: Make) -> None:
    bench = make(mode=CacheMode.OFF)
    assert not bench.ask("color", "car").hit
    assert bench.entry is None
    assert not bench.ask("color", "car").hit
    assert bench.hook.calls == 0
    bench.reopen(mode=CacheMode.LIVE, exact=False, semantic=False, embedding_layers=())
    for _ in range(2):
        assert line(bench.ask("color", "car")) == "exact_text=skip, semantic_text=skip"
    assert (bench.cache.stats().entries, bench.cache.stats().repeats) == (1, 1), (
        "byte-equal: not a second entry"
    )


def test_a_decider_may_refuse_an_approximate_match_and_no_other(tmp_path: Path) -> None:
    asked = []

    class Never(Decider):
        def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
            asked.append(match.tier)
            return Decision(False, "never")

    helper = Bench(tmp_path)
    cache = SemanticCache(
        helper.cache.config, hook=helper.hook, text_encoder=helper.encoder, decider=Never()
    )
    helper.ask("color", "car")
    report = cache.try_reuse(helper.request("color~0.99", "car"))
    assert not report.hit
    assert "embedding:prompt=miss, semantic_text=miss" in line(report)
    assert asked == ["embedding:prompt", "semantic_text"]
    assert cache.stats().refused == 2
    assert cache.try_reuse(helper.request("Color", "car")).hit


# -- who shares with whom ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        ANY,
        {"scope": Scope.ANY},
        {"embedding_layers": ()},
        {"exact": False},
    ],
)
def test_tenants_share_nothing(make: Make, options: dict[str, Any]) -> None:
    bench = make(**options)
    document = DOCUMENT + " the last one."
    for context in ((), document):
        bench.ask("color", "car", tenant="a", context=context)
        for question in ("color", "Color", "color~0.99", "else"):
            for image in ("car", "car~0.99"):
                assert not bench.look(question, image, tenant="b", context=context).hit
        assert bench.look("color", "car", tenant="a", context=context).hit


# -- recording --------------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_the_canonical_prompt_once(bench: Bench) -> None:
    bench.ask("color", "car")
    donor = bench.entry
    bench.ask("shape", "car~0.95", response="round")
    entry = entry_of(bench)
    assert (seen(entry.segments), entry.response) == ("<car> | shape", "round")
    report = bench.look("shape", "car")
    assert (report.provenance, report.donor_response) == ("text:exact", "round")
    for cosine in (0.95, 0.9, 0.85):  # approximate hits record nothing
        bench.ask(f"color~{cosine}", "car")
        assert bench.entry == donor
    assert bench.cache.stats().entries == 2
    bench.ask("shape", "house")  # hits are written with what is recorded next
    assert entry_of(bench, donor).hits == 4


def test_a_byte_equal_repeat_keeps_the_first_answer_and_takes_the_tags(bench: Bench) -> None:
    start = time.time()
    bench.ask("color", "car", response="red")
    report = bench.look("color", "car")
    assert bench.cache.add_observation(report, "blue", tags=["later"]) == bench.entry
    entry = entry_of(bench)
    assert (entry.response, entry.hits, entry.tags) == ("red", 1, ("later",))
    assert entry.last_hit >= entry.created >= start
    assert bench.cache.invalidate(entry_id=bench.entry) == 1
    assert bench.cache.add_observation(report, "red") is None, "nothing comes back"
    assert bench.cache.stats().entries == 0


def test_invalidation_reaches_every_tier_and_the_image(bench: Bench) -> None:
    report = bench.look("color", "car", context=DOCUMENT)
    bench.cache.add_observation(report, "red", tags=["cars"])
    assert bench.cache.invalidate(tag="cars", dry_run=True) == 1
    assert bench.look("color", "car", context=DOCUMENT).hit
    assert bench.cache.invalidate(tag="cars") == 1
    for question, image in (("color", "car"), ("color~0.99", "car"), ("color", "car~0.99")):
        assert not bench.look(question, image, context=DOCUMENT).hit
    assert bench.cache.stats().media_bytes == 0
    with pytest.raises(ValueError, match="tag"):
        bench.cache.invalidate()


def test_another_process_and_a_restart_give_the_same_hits(bench: Bench) -> None:
    document = DOCUMENT + " the last one."
    other = SemanticCache(bench.cache.config, hook=WrittenHook(), text_encoder=WrittenEncoder())
    bench.ask("one", context=document)
    bench.ask("color", "car", system="sys")
    asked = [
        bench.request("Color", "car", system="sys"),
        bench.request("color~0.9", "car", system="sys"),
        bench.request("color~0.9", "car~0.95", system="sys"),
        bench.request("shape", "car~0.95", system="sys"),
        bench.request("two", context=document.upper()),
        bench.request("color", "house", system="sys"),
    ]

    def found(cache: SemanticCache) -> list[Any]:
        reports = [cache.try_reuse(request) for request in asked]
        return [(r.hit, r.plan.match, seen(r.plan.segments), line(r)) for r in reports]

    own = found(bench.cache)
    assert [hit for hit, *_ in own] == [True] * 5 + [False]
    assert found(other) == found(other) == own, "the second time it may be remembered"
    bench.reopen()
    assert found(bench.cache) == own
    bench.cache.invalidate(entry_id=bench.entry)
    assert (
        [hit for hit, *_ in found(other)]
        == [hit for hit, *_ in found(bench.cache)]
        == [False] * 4 + [True, False]
    )


def test_a_chunk_text_with_a_context_that_was_substituted_is_not_the_entrys(bench: Bench) -> None:
    other = LAST.replace(" ", "  ")
    bench.encoder.window = 1000
    bench.ask("one", context=LAST, chunk=f"one {LAST}")
    report = bench.ask("two", context=other, chunk=f"two {other}")
    assert seen(report.plan.segments) == f"{LAST} | two"
    entry = entry_of(bench)
    assert entry.chunk_text == "two"
    assert bench.entry not in bench.cache._similar.layers["semantic_text"].items


def test_the_bound_on_entries_holds_in_every_tier(make: Make) -> None:
    bench = make(max_entries=5)
    for n in range(12):
        bench.ask(f"question{n}", f"image{n}")
        assert bench.cache.stats().entries <= 5
    assert not bench.look("question0~0.99", "image0").hit
    assert not bench.look("else", "image0~0.99").hit
    assert bench.look("question11~0.99", "image11~0.99").hit
    similar = bench.cache._similar
    sizes = {name: len(layer.index) for name, layer in similar.layers.items()}
    unencoded = len(similar._unencoded.entries())
    assert sizes == {"vision": 5, "prompt": 5, "semantic_text": 5 - unencoded}


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_text_beyond_the_window_never_matches_semantically(make: Make) -> None:
    bench = make(embedding_layers=())
    long = "thing " * 21
    bench.ask(long + "first", "car")
    report = bench.look(long + "second", "car")
    assert not report.hit
    assert line(report) == "exact_text=miss, semantic_text=skip"
    assert not bench.encoder.calls
    assert bench.look((long + "first").upper(), "car").provenance == "text:normalised"


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_donor_whose_image_is_gone_serves_only_those_who_bring_it(
    bench: Bench, damage: str
) -> None:
    bench.ask("color", "car")
    image = bench.image("car")
    file = bench.cache.media.path(image.media_id)
    assert file is not None
    if damage == "flip":
        file.write_bytes(b"bytes of cat")
    else:
        file.unlink()
    report = bench.look("color", "car~0.95")
    assert not report.hit
    assert report.plan.segments == report.request.segments
    assert bench.cache.stats().faults["donor media lost"] >= 1
    assert bench.look("color~0.9", "car").hit


def test_a_damaged_key_that_names_another_tenants_entry_finds_nothing(bench: Bench) -> None:
    bench.ask("color", "car", tenant="a")
    bench.ask("color", "car", tenant="b")
    with bench.cache._catalog.database.write() as db:
        db.execute("DELETE FROM entry_keys WHERE entry=(SELECT MIN(id) FROM entries)")
        db.execute("UPDATE entry_keys SET entry=(SELECT MIN(id) FROM entries)")
    bench.reopen(semantic=False, embedding_layers=())
    assert not bench.look("color", "car", tenant="b").hit


def test_a_file_with_other_bytes_is_not_stored_as_the_image(bench: Bench) -> None:
    image = bench.image("car")
    assert image.source is not None
    image.source.write_bytes(b"something else")
    request = Request("1", Namespace(), (image, TextSegment("color")))
    bench.cache.add_observation(bench.cache.try_reuse(request), "red")
    assert bench.cache.media.path(image.media_id) is None
    assert bench.cache.stats().faults == {"media not found": 1}


@pytest.mark.parametrize("part", ["hook", "encoder"])
def test_an_encoder_that_fails_is_a_counted_miss(bench: Bench, part: str) -> None:
    bench.ask("color", "car")
    getattr(bench, part).error = RuntimeError("out of memory")
    report = bench.look("else~0.9", "car")
    assert not report.hit
    assert "skip" not in line(report)
    assert sum(bench.cache.stats().faults.values()) == 1
    bench.cache.add_observation(report, "answer")
    getattr(bench, part).error = None
    assert bench.look("color", "car").hit


@pytest.mark.parametrize("bad", [np.full(64, np.nan), np.full(64, np.inf), np.zeros(64)])
def test_a_vector_that_is_no_direction_is_a_counted_miss(
    bench: Bench, bad: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ask("color", context=LAST)
    assert not bench.cache.try_reuse(
        bench.request("color"), embeddings={"prompt": bad.astype(np.float32)}
    ).hit
    bench.ask("shape")
    monkeypatch.setattr(bench.encoder, "encode", lambda texts: np.tile(bad, (len(texts), 1)))
    assert not bench.look("else").hit
    assert bench.cache.stats().faults == {"hook": 1, "semantic_text": 1}


def test_vectors_of_another_length_than_1_are_compared_by_their_angle(make: Make) -> None:
    bench = make(embedding_layers=())
    plain = bench.encoder.encode
    bench.encoder.encode = lambda texts: 1e30 * plain(texts)  # type: ignore[method-assign]
    bench.ask("color")
    assert not bench.look("color~0.85").hit
    assert bench.look("color~0.95").plan.full


def test_a_broken_catalog_leaves_what_needs_it_not_and_records_nothing(bench: Bench) -> None:
    bench.ask("color", "car")
    bench.cache._catalog.database.connection.execute("DROP TABLE entry_keys")
    report = bench.look("color", "car")
    assert report.statuses["exact_text"] == "miss"
    assert seen(report.plan.segments) == "<car> | color"
    assert bench.cache.stats().faults == {"exact_text": 1, "embedding": 1}
    bench.ask("shape", "house")
    assert bench.entry is None
    assert bench.cache.stats().faults["record"] == 1


def test_a_text_that_is_no_unicode_and_a_closed_cache_are_counted_misses(bench: Bench) -> None:
    for broken in ({"question": "color \ud800"}, {"tenant": "\ud800"}, {"system": "\ud800"}):
        assert not bench.ask(**{"question": "color", "image": "car", **broken}).hit
        assert bench.entry is None
    assert bench.cache.stats().faults["record"] == 3
    bench.ask("color", "car", response="red")
    assert bench.look("color", "car", chunk="\udfff").hit, "an exact one"
    assert bench.cache.add_observation(bench.look("size"), "\ud800") is None
    assert bench.look("color", "car").donor_response == "red"
    bench.cache.close()
    assert not bench.ask("color", "car").hit
    assert bench.entry is None


def test_odd_prompts_do_no_harm(bench: Bench) -> None:
    empty = bench.request(None)
    assert bench.cache.add_observation(bench.cache.try_reuse(empty), "") is None
    for _ in range(2):
        bench.ask(None, "car")
        bench.ask("", "car")
        bench.ask(None, context="Only a context.")
    assert not bench.cache.stats().faults
    assert bench.look(None, "car").provenance == "text:exact"
    request = Request(
        "1", Namespace("", "model"), (TextSegment("color"), bench.image("car"))
    )  # text first
    bench.cache.add_observation(bench.cache.try_reuse(request), "red")
    similar = Request("2", Namespace("", "model"), (TextSegment("color~0.9"), bench.image("car")))
    assert seen(bench.cache.try_reuse(similar).plan.segments) == "color | <car>"


def test_settings_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    def build(layer: EmbeddingLayer, hook: Any, name: str = "prompt") -> SemanticCache:
        config = CacheConfig(
            tmp_path, embedding_layers=(layer,), embedding_hook=name, semantic=False
        )
        return SemanticCache(config, hook=hook, text_encoder=WrittenEncoder())

    with pytest.raises(
        ConfigError,
        match=r"'prompt:512' is not allowed; expected prompt:64, the dimension that hook",
    ):
        build(EmbeddingLayer("prompt", 512), WrittenHook())
    with pytest.raises(ConfigError, match=r"'sound'.*a layer that hook"):
        build(EmbeddingLayer("sound", 64), WrittenHook())
    silent = build(
        EmbeddingLayer("prompt", 8), lambda request: {"prompt": np.ones(4)}, "mine"
    )  # declares nothing
    with pytest.raises(ConfigError, match="prompt:4, the dimension that hook mine returns"):
        silent.try_reuse(Request("1", Namespace(), (TextSegment("x"),)))


def test_many_threads_may_ask(bench: Bench) -> None:
    def work(request: Request) -> None:
        bench.cache.add_observation(bench.cache.try_reuse(request), "")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [bench.request(f"q{i % 5}", f"image{i % 3}") for i in range(32)]))
    stats = bench.cache.stats()
    assert not stats.faults
    assert stats.entries == len({(i % 5, i % 3) for i in range(32)})
    assert stats.lookups == 32


# -- a property of every plan -----------------------------------------------------------------------------------------

_words = st.sampled_from(["color", "Color", "color~0.9", "shape", "shape~0.85", " shape ", "size"])
_images = st.sampled_from(
    [(), ("car",), ("car~0.95",), ("house",), ("car", "house"), ("car~0.95", "house~0.95")]
)
_contexts = st.sampled_from(
    [
        (),
        (DOCUMENT + " last.",),
        (DOCUMENT.upper() + " LAST.",),
        (DOCUMENT + " last.~0.97",),
        ("Short.", "Other."),
    ]
)
_prompts = st.lists(
    st.tuples(_words, _images, _contexts, st.sampled_from(["", "sys", "Sys"])),
    min_size=2,
    max_size=12,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    prompts=_prompts,
    kind=st.sampled_from([SemanticCache, BestLayerCache]),
    scope=st.sampled_from(Scope),
    exact=st.booleans(),
)
def test_a_plan_is_the_donors_leading_run_and_the_requests_own_rest(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[tuple[str, tuple[str, ...], tuple[str, ...], str]],
    kind: type[SemanticCache],
    scope: Scope,
    exact: bool,
) -> None:
    bench = Bench(tmp_path_factory.mktemp("plans"), kind=kind, scope=scope, exact=exact)
    answers: dict[str, str] = {}
    for question, images, contexts, system in prompts:
        report = bench.look(question, images, context=contexts, system=system)
        plan, own = report.plan, report.request.segments
        assert (plan.match is None) == (plan.substituted == 0)
        keys = [segment_key(s, normalised=False) for s in plan.segments]
        if plan.match is None:
            assert plan.segments == own
        else:
            donor = bench.cache._catalog.get(plan.match.entry_id)
            assert donor is not None
            run = plan.substituted
            assert keys[:run] == [segment_key(s, normalised=False) for s in donor.segments[:run]]
            rest = () if run == len(donor.segments) else own[run:]
            assert plan.segments[run:] == rest
            if plan.match.exactness is Exactness.EXACT:
                assert plan.segments == own
            if plan.full:
                assert report.donor_response == answers["|".join(keys)]
            for segment in plan.segments:
                assert not isinstance(segment, MediaSegment) or (
                    segment.source is not None and segment.source.exists()
                )
        answer = answers.setdefault("|".join(keys), f"answer {len(answers)}")
        assert bench.cache.add_observation(report, answer) is not None
    assert not bench.cache.stats().faults
    bench.cache.close()


def test_the_questions_are_guarded_where_other_texts_are_compared(make: Make) -> None:
    bench = make(guards=True, embedding_layers=())
    donor = bench.request("how many cubes are left of it", "car")
    bench.cache.add_observation(bench.cache.try_reuse(replace(donor, chunk_text="cubes")), "two")
    same = bench.request("how many cubes are on the left of it", "car")
    other = bench.request("how many cubes are right of it", "car")
    assert bench.cache.try_reuse(replace(same, chunk_text="cubes")).hit
    assert not bench.cache.try_reuse(replace(other, chunk_text="cubes")).hit
    assert bench.cache.stats().vetoes == {"direction": 1}


def test_a_guard_vetoes_a_similar_question(make: Make) -> None:
    bench = make(guards=True, similarity_threshold=0.5)
    hook = {"vision": direction("car"), "prompt": direction("same")}

    def look(question: str) -> Any:
        return bench.cache.try_reuse(bench.request(question, "car"), embeddings=hook)

    bench.cache.add_observation(look("the tree left of the car"), "yes")
    assert look("the tree to the left of the car").provenance == "embedding:prompt"
    assert not look("the tree right of the car").hit
    assert not look("the car left of the tree").hit
    assert bench.cache.stats().vetoes == {"direction": 1, "word order": 1}


# -- the guard of images ----------------------------------------------------------------------------------------------


class OneSpot:
    """A hook to which all images are the same."""

    dims: Mapping[str, int] = {"vision": 2}
    fingerprint = "one spot"

    def __call__(self, request: Request) -> dict[str, Any]:
        return {"vision": np.tile(np.array([1.0, 0.0], np.float32), (len(request.media), 1))}


def card(text: str, dx: int = 0) -> bytes:
    image = Image.new("RGB", (220, 80), (250, 245, 230))
    pen = ImageDraw.Draw(image)
    pen.text((20 + dx, 20), text, (30, 30, 60), ImageFont.load_default(14))
    pen.ellipse((150 + dx, 30, 180 + dx, 60), (200, 40, 40))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


GATE, ROW = card("Gate 37"), card("Row 5")


class Cards:
    """A cache to which all images look alike, with one card recorded that says ``Gate 37``, and one with ``Row 5``."""

    def __init__(
        self, folder: Path, kind: type[SemanticCache] = SemanticCache, **settings: Any
    ) -> None:
        self.folder = folder
        fixed = {
            "embedding_layers": (EmbeddingLayer("vision", 2, 0.9),),
            "embedding_hook": "own",
            "semantic": False,
        }
        config = CacheConfig(folder / "cache", **fixed, **settings)
        self.cache = kind(config, hook=OneSpot(), text_encoder=WrittenEncoder())
        self.cache.add_observation(self.look(GATE), "37")
        self.cache.add_observation(self.look(GATE, ROW), "37, 5")

    def request(self, *images: bytes, text: str = "Which gate?") -> Request:
        for data in images:
            (self.folder / media_id(data)).write_bytes(data)
        media = [MediaSegment(media_id(data), self.folder / media_id(data)) for data in images]
        return Request("", Namespace(), (*media, TextSegment(text)))

    def look(self, *images: bytes, text: str = "Which gate?") -> ReuseReport:
        return self.cache.try_reuse(self.request(*images, text=text))


def test_pixels_decide_whether_similar_images_stand_in(tmp_path: Path) -> None:
    cards = Cards(tmp_path)
    moved = cards.look(card("Gate 37", dx=1))
    assert (moved.provenance, moved.donor_response) == ("embedding:vision", "37")
    assert moved.plan.segments[0].media_id == media_id(GATE)  # type: ignore[union-attr]
    assert cards.look(card("Gate 37", dx=2), ROW).donor_response == "37, 5"
    for images, text in (
        ([card("Gate 31")], "Which gate?"),
        ([card("Gate 31")], "Which color is the disc?"),  # the image's prefix, as well
        ([b"no image"], "Which gate?"),
        ([card("Gate 37", dx=1), card("Row 6")], "Which gate?"),
        ([ROW, GATE], "Which gate?"),
    ):
        report = cards.look(*images, text=text)
        assert not report.hit
        assert report.plan.segments == report.request.segments
    assert cards.cache.stats().vetoes["image"] >= 5
    assert not cards.cache.stats().faults


def test_an_image_that_is_gone_is_compared_with_nothing(tmp_path: Path) -> None:
    cards = Cards(tmp_path)
    request = cards.request(card("Gate 37", dx=3))
    (tmp_path / request.media[0].media_id).unlink()
    assert not cards.cache.try_reuse(request).hit
    assert cards.look(card("Gate 37", dx=3)).hit, "a fault is not remembered"
    cards.cache.invalidate(namespace=Namespace())
    assert cards.cache.media.path(media_id(GATE)) is None
    assert not cards.look(card("Gate 37", dx=3)).hit


@pytest.mark.parametrize("settings", [{"guards": False}, {"scope": Scope.ANY}, ANY])
def test_the_literal_reading_compares_no_pixels(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert Cards(tmp_path, **settings).look(card("Gate 31")).hit


def test_an_entry_that_is_shared_has_the_vectors_of_all_its_images(bench: Bench) -> None:
    record = bench.cache._matching.record(bench.look("color", ("car", "tree")), "red", (), {}, 1.0)
    shared = load(dump(record))
    again = bench.cache._matching.shared_record(shared.entry, shared.vectors)
    assert len(again.media_vectors) == 2
    assert (again.media_vectors.keys(), again.vectors.keys()) == (
        record.media_vectors.keys(),
        record.vectors.keys(),
    )
    assert again.keys == record.keys
