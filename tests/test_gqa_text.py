"""Real questions with a model's answers as labels, no model: the text tiers, and why their scope is one image."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lab_helpers import quiet
from semkv.cache import SemanticCache
from semkv.engines.scripted import ScriptedEngine
from semkv.errors import DatasetError
from semkv.types import TextSegment
from semkv_lab.datasets import load_samples
from semkv_lab.metrics import Figures
from semkv_lab.run import run
from semkv_lab.samples import DatasetOptions, Sample, label_answers
from semkv_lab.settings import resolve

ROOT = Path(__file__).parents[1]
REAL = ROOT.parent / "shared" / "data" / "gqa_testdev_llava13b.jsonl.gz"
real = pytest.mark.skipif(not REAL.is_file(), reason=f"{REAL.name} is not beside the project")

ROWS = [
    {"questionId": "1", "imageId": "n1", "question": "Is it red?", "model": "Yes"},
    {"questionId": "2", "imageId": "n2", "question": "is it  red?", "model": "No"},
    {"questionId": "3", "imageId": "n1", "question": "Is  it red?", "model": "Yes."},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_become_samples_with_cards_for_images(tmp_path: Path, name: str) -> None:
    options = DatasetOptions(data_dir=tmp_path / "data", root=write(tmp_path / name, ROWS))
    with ThreadPoolExecutor(4) as pool:  # several runs may draw the cards at once
        samples, *others = pool.map(lambda _: load_samples("gqa-text", options), range(4))
    assert others == [samples] * 3
    assert [(s.sample_id, s.question, s.answer) for s in samples] == [
        ("1", "Is it red?", "Yes"),
        ("2", "is it  red?", "No"),
        ("3", "Is  it red?", "Yes."),
    ]
    first, second, third = (s.images[0].path for s in samples)
    assert first == third
    assert first is not None
    assert second is not None
    assert first.read_bytes() != second.read_bytes()
    with Image.open(first) as card:
        assert card.size == (160, 120)
    before = first.stat().st_mtime_ns
    assert load_samples("gqa-text", options) == samples
    assert first.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"questionId": "4", "imageId": "n1", "model": "x"}, "line 2: expected questionId"),
        ({"questionId": "4", "imageId": "n1", "question": "q"}, "and one field more"),
        ({"questionId": "4", "imageId": "../up", "question": "q", "a": "x"}, "a plain file name"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[0], row])
    with pytest.raises(DatasetError) as caught:
        load_samples("gqa-text", DatasetOptions(data_dir=tmp_path, root=path))
    assert str(caught.value).startswith(f"{path}, line 2")
    assert message in str(caught.value)


def measure(tmp_path: Path, path: Path, samples: list[Sample], **flags: Any) -> Figures:
    settings = resolve(
        preset="opt-125m",
        engine="scripted",
        dataset="gqa-text",
        dataset_root=path,
        cache_dir=tmp_path,
        baseline=True,
        **flags,
    )
    answers = label_answers(samples)
    _, summary = run(
        settings, samples, lambda *_: ScriptedEngine(answer=answers), lambda s: SemanticCache(s.cache), quiet(settings)
    )
    return summary


def test_a_hit_gets_the_donors_label(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    samples = load_samples("gqa-text", DatasetOptions(data_dir=tmp_path / "data", root=path))
    assert label_answers(samples)((TextSegment("unknown"),)) == ""
    alone = {"disable_semantic_cache": True}
    media = measure(tmp_path / "media", path, samples, scope="media", **alone)
    assert (media["hits"], media["accuracy_on_hits"]["value"], media["accuracy"]["value"]) == (1, 1.0, 1.0)
    everywhere = measure(tmp_path / "any", path, samples, scope="any", **alone)
    assert (everywhere["hits"], everywhere["accuracy_on_hits"]["value"]) == (2, 0.5)
    assert everywhere["wrong_hit_share"]["value"] == pytest.approx(1 / 3)
    assert everywhere["faults"] == {}


@real
def test_identical_text_on_another_image_mostly_has_another_answer(tmp_path: Path) -> None:
    samples = load_samples("gqa-text", DatasetOptions(data_dir=tmp_path / "data", root=REAL))
    assert len(samples) == 12_578
    part = samples[:3_000]
    flags = {"disable_semantic_cache": True, "data_dir": tmp_path / "data"}
    everywhere = measure(tmp_path / "any", REAL, part, scope="any", **flags)
    media = measure(tmp_path / "media", REAL, part, scope="media", **flags)
    # The same words on another image: mostly another answer. Within one image: the same, where asked twice at all.
    assert everywhere["hits"] > 100
    assert everywhere["accuracy_on_hits"]["high"] is not None
    assert everywhere["accuracy_on_hits"]["high"] < 0.4
    assert media["hits"] < 10
    assert media["wrong_hit_share"]["value"] == 0.0
    assert media["accuracy"]["value"] == 1.0
