"""Data sets: what is read, in which order, and how bad input is reported."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from PIL import Image

from command_line import invoke
from semkv import keys
from semkv.errors import ConfigError, DatasetError
from semkv.types import MediaSegment, Namespace, Role, TextSegment
from semkv_lab.datasets import find_image, load_samples
from semkv_lab.minigqa import generate, make_document, returning, scenes
from semkv_lab.samples import (
    ZIPF_EXPONENT,
    ChunkSource,
    DatasetOptions,
    ImageRef,
    RequestBuilder,
    Sample,
    arrange,
    chunk_text,
)


@pytest.fixture(autouse=True)
def _no_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GQA_ROOT", "GQA_IMAGE_ROOT", "SEMANTIC_CACHE_IMAGE_ROOT", "LLAVA_IMAGE_ROOT"):
        monkeypatch.delenv(name, raising=False)


def options(tmp_path: Path, **values: Any) -> DatasetOptions:
    return DatasetOptions(data_dir=tmp_path / "data", **values)


def jpeg(color: str) -> bytes:
    return scenes.jpeg(Image.new("RGB", (8, 8), color))


def write_lines(path: Path, *rows: object) -> Path:
    lines = (
        r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode()
        for r in rows
    )
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


QUESTIONS = {
    "05515938": {
        "imageId": "2405722",
        "question": "What is this bird called?",
        "answer": "parrot",
        "semanticStr": "select: bird (329774)->query: name [0]",
        "groups": {"global": "bird", "local": "03s-bird"},
        "types": {"detailed": "categoryThis", "semantic": "cat", "structural": "query"},
        "entailed": ["05515938", "05515940"],
    },
    "05515940": {
        "imageId": "2405723",
        "question": "Is it red?",
        "answer": "no",
        "groups": {"global": None},
    },
}


@pytest.fixture
def gqa_root(tmp_path: Path) -> Path:
    root = tmp_path / "gqa"
    (root / "images").mkdir(parents=True)
    (root / "val_balanced_questions.json").write_text(json.dumps(QUESTIONS), encoding="utf-8")
    (root / "images" / "2405722.jpg").write_bytes(jpeg("red"))
    return root


# --- jsonl


def test_jsonl_takes_all_fields(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").write_bytes(jpeg("blue"))
    row = {
        "id": 7,
        "system": "s",
        "context": "c",
        "images": ["pictures/a.jpg"],
        "question": "q?",
        "answer": 4,
    }
    path = write_lines(tmp_path / "prompts.jsonl", row, "", {"question": "alone"})
    first, second = load_samples("jsonl", options(tmp_path, root=path))
    image = ImageRef("pictures/a.jpg", tmp_path / "pictures" / "a.jpg")
    assert first == Sample("7", "q?", "4", (image,), "s", "c")
    assert second == Sample("00000003", "alone")
    assert load_samples(str(path), options(tmp_path)) == [first, second]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows writes UTF-8
    assert load_samples(str(path), options(tmp_path)) == [first, second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected an object, found list"),
        ({"answer": "x"}, "question: Field required"),
        ({"question": "x", "images": [[3]]}, "images"),
        ({"question": "x", "prompt": "y"}, "prompt: Unexpected keyword argument"),
        ({"question": "x", "id": "1"}, "another line has the id '1'"),
        ('{"question": "q", "answer": ' + "[" * 99_999, "not valid JSON"),
        ('{"question": "\\uD800?"}', "at question: '\\ud800' is half of a character"),
        (b'{"question": "caf\xe9"}', "not UTF-8 text (byte 0xe9)"),
        ('{"question": "q", "answer": NaN, "id": Infinity, "group": []}', "group: Input"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", {"id": 1, "question": "fine"}, line)
    with pytest.raises(DatasetError) as caught:
        load_samples("jsonl", options(tmp_path, root=path))
    assert str(caught.value).startswith(
        (f"{path}, line 2: {message}", f"{path}, line 2, {message}")
    )


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "x/" * 3000])
def test_a_name_that_no_file_can_have_is_a_missing_picture(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "odd.jsonl", {"question": "q?", "image": name})
    (sample,) = load_samples(str(path), options(tmp_path))
    assert not sample.complete


def test_an_unknown_or_unreadable_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none\.jsonl: No such"):
        load_samples(str(tmp_path / "none.jsonl"), options(tmp_path))
    with pytest.raises(ConfigError, match="--dataset-root"):
        load_samples("jsonl", options(tmp_path))
    with pytest.raises(ConfigError, match="gqa, jsonl, minigqa, minigqa-text"):
        load_samples("coco", options(tmp_path))


# --- order and size


def test_shuffling_is_repeatable_and_cutting_comes_last(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "many.jsonl", *({"id": str(i), "question": f"q{i}"} for i in range(50))
    )
    samples = load_samples(str(path), options(tmp_path, shuffle_seed=1, max_samples=9))
    assert [s.sample_id for s in samples] == ["2", "15", "47", "9", "21", "29", "48", "5", "46"]


# --- GQA


def test_official_gqa(gqa_root: Path, tmp_path: Path) -> None:
    bird, red = load_samples("gqa", options(tmp_path, root=gqa_root))
    assert bird == Sample(
        sample_id="05515938",
        question="What is this bird called?",
        answer="parrot",
        images=(ImageRef("2405722", gqa_root / "images" / "2405722.jpg"),),
        semantic_str="select: bird (329774)->query: name [0]",
        groups=("bird", "03s-bird"),
        group="bird",
        types=("query", "cat", "categoryThis"),
        entailed=("05515940",),
    )
    assert red.images == (ImageRef("2405723", None),)
    assert red.groups == ()


def test_parts_and_choices_of_the_official_archive(gqa_root: Path, tmp_path: Path) -> None:
    parts = gqa_root / "questions" / "train_all_questions"
    parts.mkdir(parents=True)
    for number in range(11):
        row = {str(number): {**QUESTIONS["05515940"], "question": f"Is it {number}?"}}
        (parts / f"train_all_questions_{number}.json").write_text(json.dumps(row), encoding="utf-8")
    (gqa_root / "eval").mkdir()
    choices = {"3": {"valid": ["yes", "no"], "plausible": ["yes"]}}
    (gqa_root / "eval" / "train_choices.json").write_text(json.dumps(choices), encoding="utf-8")
    samples = load_samples("gqa", options(tmp_path, root=gqa_root, config="train_all_instructions"))
    assert (samples[3].valid, samples[3].plausible, samples[4].valid) == (
        ("yes", "no"),
        ("yes",),
        (),
    )
    assert [s.question for s in samples] == [f"Is it {number}?" for number in range(11)]
    (parts / "train_all_questions_11.json").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(DatasetError, match="1 ids stand for two samples, such as '10'"):
        load_samples("gqa", options(tmp_path, root=gqa_root, config="train_all_instructions"))


@pytest.mark.parametrize(
    ("choices", "why"), [({"valid": "red"}, "its choices: valid"), ([1], "its choices")]
)
def test_odd_choices_are_named(gqa_root: Path, tmp_path: Path, choices: object, why: str) -> None:
    (gqa_root / "val_choices.json").write_text(json.dumps({"05515938": choices}), encoding="utf-8")
    with pytest.raises(DatasetError, match=f"question 05515938, {why}: Input should be"):
        load_samples("gqa", options(tmp_path, root=gqa_root))


def test_gqa_root_and_image_root_from_the_environment(
    gqa_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "2405723.png").write_bytes(jpeg("red"))
    monkeypatch.setenv("GQA_ROOT", str(gqa_root))
    monkeypatch.setenv("GQA_IMAGE_ROOT", str(tmp_path / "pictures"))
    samples = load_samples("gqa", options(tmp_path))
    assert samples[1].images[0].path == tmp_path / "pictures" / "2405723.png"


def test_an_image_name_is_never_a_path(gqa_root: Path) -> None:
    (gqa_root / "secret.jpg").write_bytes(b"x")
    assert find_image("secret", [gqa_root]) is not None
    for name in ("../secret", "images/../secret", "", ".secret", "a" * 200):
        assert find_image(name, [gqa_root / "images"]) is None


def test_gqa_faults_are_named(gqa_root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"testdev_balanced_questions\.json .* testdev_balanced_instructions"
    ):
        load_samples("gqa", options(tmp_path, root=gqa_root, split="testdev"))
    with pytest.raises(ConfigError, match="<split>_balanced_instructions"):
        load_samples("gqa", options(tmp_path, root=gqa_root, config="val_some"))
    rows = {"17": {"imageId": "1", "question": "Is it red?", "groups": {"global": ["x"]}}}
    (gqa_root / "val_all_questions.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(
        DatasetError, match=r"val_all_questions\.json, question 17: groups.global: "
    ):
        load_samples("gqa", options(tmp_path, root=gqa_root, config="val_all_instructions"))


@pytest.mark.parametrize(
    ("row", "answer"), [('"answer": NaN', None), ('"answer": -Infinity', None), ('"answer": 1e999', None),
                        ('"answer": 2.5', "2.5")]
)  # fmt: skip
def test_a_number_that_is_none_is_no_answer(
    gqa_root: Path, tmp_path: Path, row: str, answer: str | None
) -> None:
    (gqa_root / "val_balanced_questions.json").write_text(
        '{"1": {"question": "q?", ' + row + "}}", encoding="utf-8"
    )
    (sample,) = load_samples("gqa", options(tmp_path, root=gqa_root))
    assert sample.answer == answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"1": {"question": NaN}}', "question 1: question: Input should be a valid string"),
        ('{"1": {"question": "q?"}, "1": {"question": "r?"}}', "at 1: the name '1' comes twice"),
        (
            '{"1": {"question": "q?", "answer": "a", "answer": "b"}}',
            "at 1.answer: the name 'answer' comes twice",
        ),
    ],
)
def test_gqa_that_can_be_read_in_two_ways_is_refused(
    gqa_root: Path, tmp_path: Path, text: str, said: str
) -> None:
    (gqa_root / "val_balanced_questions.json").write_text(text, encoding="utf-8")
    with pytest.raises(DatasetError, match=re.escape(said)):
        load_samples("gqa", options(tmp_path, root=gqa_root))


def test_advice_for_a_missing_picture_works(
    gqa_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message says is done, and the picture is found."""
    path = write_lines(tmp_path / "rows.jsonl", {"question": "q?", "image": "a/b.jpg"})
    flags = ["--engine", "labels", "--disable-semantic-cache", "--embedding-hook", "none", "--strict", "--quiet",
             "--cache-dir", str(tmp_path / "cache")]  # fmt: skip
    said = invoke(["run", "--dataset", str(path), *flags]).stderr
    (found,) = re.findall(r"there is no file (\S+);", said)
    Path(found).parent.mkdir()
    Path(found).write_bytes(jpeg("red"))
    assert invoke(["run", "--dataset", str(path), *flags]).exit_code == 0

    asked = ["run", "--dataset", "gqa", "--dataset-root", str(gqa_root), *flags]
    said = invoke(asked).stderr
    name, places, variable = re.findall(
        r"there is no (\S+) or .* in (.*); (\S+) names another folder", said
    )[0]
    assert str(gqa_root / "images") in places.split(", ")
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / name).write_bytes(jpeg("red"))
    assert invoke(asked).exit_code == 0


def test_the_hugging_face_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path / "hf"
    rows = [
        {"id": "1", "imageId": "n1", "question": "Is it red?", "answer": "yes", "semanticStr": "s",
         "groups": {"global": "color", "local": None}, "entailed": "['1', '2']"},
        {"id": "2", "imageId": "n2", "question": "Is it blue?", "answer": "no", "semanticStr": "t",
         "groups": {"global": "color", "local": "l"}, "entailed": None},
    ]  # fmt: skip
    pictures = [
        {"id": "n1", "image": {"bytes": jpeg("red"), "path": None}},
        {"id": "../n2", "image": None},
    ]
    for folder, table in (("val_balanced_instructions", rows), ("val_balanced_images", pictures)):
        (root / folder).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(table), root / folder / "val-00000-of-00001.parquet")
    first, second = load_samples("gqa", options(tmp_path, root=root))
    path = first.images[0].path
    assert path is not None
    assert path.read_bytes() == jpeg("red")
    assert first.entailed == ("2",)
    assert first.groups == ("color",)
    assert second.images == (ImageRef("n2", None),)

    (tmp_path / "a file").touch()
    with pytest.raises(DatasetError, match=r"n1\.jpg: cannot be written"):
        load_samples("gqa", DatasetOptions(data_dir=tmp_path / "a file", root=root))
    table = root / "val_balanced_instructions" / "val-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist([rows[0], rows[1] | {"id": None}]), table)
    with pytest.raises(DatasetError, match=r"\(val_balanced_instructions, val\), row 2: no id"):
        load_samples("gqa", options(tmp_path, root=root))
    table.write_bytes(b"no parquet")
    with pytest.raises(DatasetError, match=r"val_balanced_instructions, val\) cannot be read"):
        load_samples("gqa", options(tmp_path, root=root))


def test_a_hit_gets_the_donors_label(tmp_path: Path) -> None:
    rows = [
        ("red", "Is it red?", "Yes"),
        ("blue", "is it  red?", "No"),
        ("red", "Is  it red?", "Yes."),
    ]
    rows.append(("a missing file", "Is it red?", "Yes"))
    for color in ("red", "blue"):
        (tmp_path / color).write_bytes(jpeg(color))
    path = write_lines(
        tmp_path / "rows.jsonl", *({"image": i, "question": q, "answer": a} for i, q, a in rows)
    )
    command = f"run --preset opt-125m --engine labels --dataset {path} --baseline --quiet --disable-semantic-cache"
    for scope, hits, right, wrong in (("media", 1, 1.0, 0.0), ("any", 2, 0.5, 1 / 3)):
        flags = {
            "--scope": scope,
            "--cache-dir": tmp_path / scope,
            "--summary-out": tmp_path / "summary.json",
        }
        words = [f"{flag}={value}" for flag, value in flags.items()]
        assert invoke([*command.split(), *words]).exit_code == 0
        summary = json.loads((tmp_path / "summary.json").read_text())["summary"]
        assert (summary["hits"], summary["accuracy_on_hits"]["value"]) == (hits, right)
        assert summary["wrong_hit_share"]["value"] == pytest.approx(wrong)


# --- MiniGQA


def test_minigqa_text_asks_about_documents_that_return(tmp_path: Path) -> None:
    samples = load_samples("minigqa-text", DatasetOptions(tmp_path, max_samples=20))
    assert samples == load_samples("minigqa-text", DatasetOptions(tmp_path, max_samples=20)), (
        "the same each time"
    )
    assert len({sample.sample_id for sample in samples}) == 20
    assert {sample.variant for sample in samples} > {"", "document:edited", "document:whitespace"}
    assert all(
        sample.answer and sample.question and len(sample.context.split()) > 1200
        for sample in samples
    )
    with pytest.raises(ConfigError, match="split"):
        load_samples("minigqa-text", DatasetOptions(tmp_path, split="test"))


def test_minigqa_is_drawn_once_and_the_same_each_time(tmp_path: Path) -> None:
    here, there = (
        load_samples("minigqa", DatasetOptions(tmp_path / d, max_samples=64)) for d in "ab"
    )
    assert len(here) == 64
    for one, other in zip(here, there, strict=True):
        assert replace(one, images=()) == replace(other, images=())
        mine, theirs = one.images[0].path, other.images[0].path
        assert mine is not None
        assert theirs is not None
        assert mine.read_bytes() == theirs.read_bytes()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    load_samples("minigqa", DatasetOptions(tmp_path / "a", max_samples=64))
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}


def test_what_a_seed_gives_stays_as_it_is(tmp_path: Path) -> None:
    """The bundled model was trained on this data, and the tables in ``docs/results`` were made from it."""
    folder = generate(tmp_path, 30, seed=2, split="train")
    questions = (folder / "train_balanced_questions.json").read_bytes()
    assert (
        hashlib.sha256(questions).hexdigest()
        == "14360763e8580a6244ae62c3da26c6001ab278b924fa66c10c2b6b47689cc5ff"
    )
    pictures = b"".join(p.read_bytes() for p in sorted((folder / "images").iterdir()))
    assert (
        hashlib.sha256(pictures).hexdigest()
        == "ed40dff7567f3fa4b291974bf0c9f06e59c5fb30a8aa0a0e842cd583a4701a3c"
    )
    texts = "".join(make_document(Random(seed)).text for seed in range(20)) + json.dumps(
        returning(6, seed=4)
    )
    assert (
        hashlib.sha256(texts.encode()).hexdigest()
        == "9ab0579e40c18af7ea9f74b786f51e6d4512fa102791a5e9a337feae13366e4a"
    )


# --- requests


def test_chunk_sources() -> None:
    sample = Sample("1", "Q?", semantic_str="select: x", groups=("g", "l"), system="S", context="C")
    sources: tuple[ChunkSource, ...] = get_args(ChunkSource)
    texts = ["Q?", "select: x", "g l", "Q? | select: x | g l", "S\nC\nQ?"]
    assert [chunk_text(sample, source) for source in sources] == texts
    assert chunk_text(sample, "semantic", 6) == "select"
    assert chunk_text(Sample("1", "Q?"), "group") == "Q?"


def test_a_request_has_its_segments_in_prompt_order(gqa_root: Path, tmp_path: Path) -> None:
    (bird,) = load_samples("gqa", options(tmp_path, root=gqa_root, max_samples=1))
    builder = RequestBuilder(Namespace("t", "m"), instruction="One word.")
    sample = Sample("1", "Q?", images=bird.images, system="S", context="C")
    request = builder.build(sample)
    path = gqa_root / "images" / "2405722.jpg"
    assert request.segments == (
        TextSegment("S", Role.SYSTEM),
        MediaSegment(keys.media_id(path.read_bytes()), path, "2405722"),
        TextSegment("C", Role.CONTEXT),
        TextSegment("Q?\nOne word.", Role.QUESTION),
    )
    assert request.chunk_text == "Q?"
    builder.images = False
    assert builder.build(sample).media == ()


# --- traces


SAMPLES = [
    Sample(
        f"{image}-{number}", f"question {number} on {image}", images=(ImageRef(f"i{image}", None),)
    )
    for image in range(40)
    for number in range(5)
]
ORIGINALS = {sample.sample_id: sample for sample in SAMPLES}


def asked(**options: Any) -> list[Sample]:
    return arrange(SAMPLES, DatasetOptions(**options))


def test_in_order_is_the_data_sets_own_order_round_and_round() -> None:
    assert asked() == SAMPLES
    assert [sample.sample_id for sample in asked(trace_requests=202)][200:] == ["0-0#2", "0-1#2"]
    samples = [Sample("a", "one?"), Sample("a#2", "two?"), Sample("a#2#2", "three?")]
    requests = arrange(samples, DatasetOptions(trace_requests=9))
    assert [r.sample_id for r in requests] == [
        "a", "a#2", "a#2#2", "a#3", "a#2#3", "a#2#2#2", "a#4", "a#2#4", "a#2#2#3",
    ]  # fmt: skip
    assert [r.image_name for r in requests] == ["a", "a#2", "a#2#2"] * 3, (
        "a repeat counts with its original"
    )


def test_zipf_asks_for_the_image_of_rank_r_in_proportion_to_r_to_the_minus_exponent() -> None:
    requests = asked(trace="zipf", trace_requests=40_000)
    assert requests[:90] == asked(trace="zipf", trace_requests=90)
    assert len({r.sample_id for r in requests}) == 40_000
    counts = [n for _, n in Counter(r.image_name for r in requests).most_common()]
    total = sum(rank**-ZIPF_EXPONENT for rank in range(1, 41))
    for rank in (1, 2, 4, 8):
        assert counts[rank - 1] / 40_000 == pytest.approx(rank**-ZIPF_EXPONENT / total, rel=0.1)
