"""After an approximate hit, the exact twin of that request gets the tokens it gets cold.

The thresholds are set so low that the hits are wrong on purpose: whatever a wrong donor leaves behind must not reach a
request that asks for the same thing exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from semkv import keys
from semkv.cache import SemanticCache
from semkv.config import CacheConfig, get_preset
from semkv.engines import EnginePrompt
from semkv.types import (
    EmbeddingLayer,
    MediaSegment,
    Namespace,
    Request,
    Segment,
    TextSegment,
)
from semkv_lab.best_layer import BestLayerCache
from semkv_lab.minigqa.scenes import draw, jpeg, make_scene
from semkv_lab.vllm_engine import ConnectorOptions, VllmEngine, VllmOptions
from vllm_forks import quicken

pytestmark = pytest.mark.engine
MODEL = get_preset("minigqa").model
DONOR_QUESTION, QUESTION = "What color is the large cube?", "What color is the small ball?"


@dataclass
class Case:
    """How a donor is forced on a request, and what of it stands in."""

    name: str
    settings: dict[str, object]
    own_image: bool
    own_question: bool
    kind: type[SemanticCache] = SemanticCache


VISION = (EmbeddingLayer("vision", 6912, 0.0),)
LOOSE = {"guards": False, "vision_encoder": MODEL, "embedding_hook": "vision", "exact": False}
CASES = [
    Case(
        "text", {"guards": False, "similarity_threshold": 0.0}, own_image=True, own_question=False
    ),
    Case(
        "image",
        {**LOOSE, "embedding_layers": VISION, "semantic": False},
        own_image=False,
        own_question=True,
    ),
    Case(
        "both",
        {**LOOSE, "embedding_layers": VISION, "semantic": False},
        own_image=False,
        own_question=False,
        kind=BestLayerCache,
    ),
]


def picture(folder: Path, seed: str) -> MediaSegment:
    file = folder / f"{seed}.jpg"
    file.write_bytes(jpeg(draw(make_scene(Random(seed)))))
    return MediaSegment(keys.media_id(file.read_bytes()), file, seed)


def engine(folder: Path | None) -> VllmEngine:
    connectors = ConnectorOptions(folder, fusion=True) if folder else None
    quicken()
    return VllmEngine(VllmOptions(MODEL, max_model_len=512, connectors=connectors))


def tokens(vllm: VllmEngine, segments: tuple[Segment, ...], tenant: str = "") -> tuple[int, ...]:
    return vllm.generate(EnginePrompt(segments, tenant=tenant, max_tokens=8)).token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contamination")


@pytest.fixture(scope="module")
def images(folder: Path) -> tuple[MediaSegment, MediaSegment]:
    """The donor's picture (a blue cube, a purple ball) and another, with a ball of another color."""
    return picture(folder, "readme9"), picture(folder, "readme8")


@pytest.fixture(scope="module")
def cold(
    images: tuple[MediaSegment, MediaSegment],
) -> Iterator[dict[tuple[str, str], tuple[int, ...]]]:
    """What every prompt gives without any of our caches."""
    vllm = engine(None)
    questions = (DONOR_QUESTION, QUESTION)
    yield {(m.name, q): tokens(vllm, (m, TextSegment(q))) for m in images for q in questions}
    vllm.close()


def donate(
    case: Case,
    vllm: VllmEngine,
    images: tuple[MediaSegment, MediaSegment],
    cold: dict[tuple[str, str], tuple[int, ...]],
    folder: Path,
) -> tuple[Segment, ...]:
    """Answer a request with the donor's plan, which is returned, and then its exact twin."""
    donor_image, other = images
    own_image = donor_image if case.own_image else other
    twin: tuple[Segment, ...] = (own_image, TextSegment(QUESTION))
    cache = case.kind(CacheConfig(folder / case.name, **case.settings))  # type: ignore[arg-type]
    first = cache.try_reuse(
        Request("donor", Namespace(), (donor_image, TextSegment(DONOR_QUESTION)))
    )
    donated = tokens(vllm, first.plan.segments, case.name)
    assert donated == cold[donor_image.name, DONOR_QUESTION]
    cache.add_observation(first, "blue")

    report = cache.try_reuse(Request("request", Namespace(), twin))
    asked = QUESTION if case.own_question else DONOR_QUESTION
    assert report.hit
    assert [s.media_id for s in report.plan.segments if isinstance(s, MediaSegment)] == [
        donor_image.media_id
    ]
    assert [s.text for s in report.plan.segments if isinstance(s, TextSegment)] == [asked]
    answered = tokens(vllm, report.plan.segments, case.name)
    cache.add_observation(report, "whatever")
    assert answered == cold[donor_image.name, asked]
    assert answered != cold[own_image.name, QUESTION] or case.own_question
    assert tokens(vllm, twin, case.name) == cold[own_image.name, QUESTION]
    cache.close()
    return first.plan.segments


def test_the_exact_twin_gets_its_own_tokens(
    images: tuple[MediaSegment, MediaSegment],
    cold: dict[tuple[str, str], tuple[int, ...]],
    folder: Path,
) -> None:
    """Also after a restart. Each case is a tenant of its own, whose values no other one finds."""
    donor_image, other = images
    vllm = engine(folder / "store")
    donors = {case.name: donate(case, vllm, images, cold, folder) for case in CASES}
    vllm.close()

    restarted = engine(folder / "store")
    for case in CASES:
        own_image = donor_image if case.own_image else other
        twin = (own_image, TextSegment(QUESTION))
        assert tokens(restarted, twin, case.name) == cold[own_image.name, QUESTION]
        found = tokens(restarted, donors[case.name], case.name)
        assert found == cold[donor_image.name, DONOR_QUESTION]
    restarted.close()
