"""Writes a MiniGQA data set: a folder in GQA's layout, with a stream of requests on which a cache can win and fail.

    images/<imageId>.jpg
    <split>_balanced_questions.json   question id -> record, in the order of the requests
    <split>_sceneGraphs.json          image id -> scene graph
    provenance.json                   split -> what every image and question is; GQA's own files keep GQA's schema

A cache wins on repeats, paraphrases and near-duplicate pictures. It fails, if it is careless, on negatives (the same
sentence with one other word, and another answer) and on look-alikes (the same picture with one object recoloured).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from semkv.errors import ConfigError
from semkv_lab.minigqa.answers import restate
from semkv_lab.minigqa.draw import draw, jpeg
from semkv_lab.minigqa.knobs import ImageVariant, Knobs, Order, QuestionVariant
from semkv_lab.minigqa.program import Program
from semkv_lab.minigqa.questions import WEIGHTS, ask, ask_any
from semkv_lab.minigqa.records import needs, question_record, scene_graph, settles
from semkv_lab.minigqa.scene import Scene, make_scene, recolor
from semkv_lab.minigqa.surfaces import SURFACES, change_case, change_whitespace, fill

if TYPE_CHECKING:
    from PIL.Image import Image

SPLITS = ("train", "val", "testdev")


@dataclass(frozen=True, slots=True)
class _Picture:
    """A picture to be written: its scene, its bytes, and how its boxes differ from the scene's."""

    image_id: str
    scene: Scene
    data: bytes
    variant: ImageVariant = ImageVariant.ORIGINAL
    derived_from: str = ""
    scale: float = 1.0
    shift: int = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question as it is asked. ``of`` is the id of the question it was made from; ``place`` sorts the requests."""

    question_id: str
    image_id: str
    program: Program
    template: str
    text: str
    place: float
    variant: QuestionVariant = QuestionVariant.ORIGINAL
    of: str = ""


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids that are unique over splits and seeds: digits, as GQA's are."""

    split: str
    seed: int

    def image(self, number: int) -> str:
        return f"{SPLITS.index(self.split) + 1}{self.seed:04d}{number:05d}"

    def question(self, number: int) -> str:
        return f"{SPLITS.index(self.split) + 1}{self.seed:04d}{number:07d}"

    def things(self, image_id: str, scene: Scene) -> list[str]:
        return [f"{image_id}{i}" for i in range(len(scene.things))]


def generate(out: Path, knobs: Knobs, *, seed: int = 0, split: str = "val") -> Path:
    """Writes one split of a data set into the folder ``out`` and returns the folder.

    The same arguments write the same bytes. Splits and seeds share no scene. A split that is there already is
    replaced, other splits are left.

    Raises:
        ConfigError: an unknown split, or a seed outside 0 to 9999.
    """
    if split not in SPLITS:
        raise ConfigError("split", split, SPLITS)
    if not 0 <= seed <= 9999:
        raise ConfigError("seed", seed, "0 to 9999")
    rng = Random(f"minigqa:{split}:{seed}")  # noqa: S311
    ids = _Ids(split, seed)
    pictures = list(_pictures(knobs, rng, ids))
    asked = _ask_all(knobs, rng, ids, pictures)
    _order(knobs, rng, pictures, asked)
    (out / "images").mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (out / "images" / f"{picture.image_id}.jpg").write_bytes(picture.data)
    _write_json(out / f"{split}_balanced_questions.json", _records(ids, pictures, asked))
    graphs = {
        p.image_id: scene_graph(p.scene, ids.things(p.image_id, p.scene), scale=p.scale, shift=p.shift)
        for p in pictures
    }
    _write_json(out / f"{split}_sceneGraphs.json", graphs)
    _write_provenance(out / "provenance.json", knobs, ids, pictures, asked)
    return out


def _pictures(knobs: Knobs, rng: Random, ids: _Ids) -> Iterator[_Picture]:
    bases = []
    for number in range(knobs.images):
        scene = make_scene(rng)
        bases.append(_Picture(ids.image(number), scene, jpeg(draw(scene))))
    yield from bases
    number = knobs.images
    for variant in list(ImageVariant)[1:]:
        rate = getattr(knobs, variant.value)
        for base in rng.sample(bases, round(rate * len(bases))):
            yield _derive(base, variant, ids.image(number), rng)
            number += 1


def _derive(base: _Picture, variant: ImageVariant, image_id: str, rng: Random) -> _Picture:
    from PIL import Image, ImageChops, ImageEnhance

    if variant is ImageVariant.LOOKALIKE:
        scene = recolor(base.scene, rng)
        return _Picture(image_id, scene, jpeg(draw(scene)), variant, base.image_id)
    image: Image = Image.open(BytesIO(base.data))
    quality, scale, shift = 90, 1.0, 0
    if variant is ImageVariant.REENCODED:
        quality = 60
    elif variant is ImageVariant.RESIZED:
        image, scale = image.resize((120, 120), Image.Resampling.BICUBIC), 120 / image.width
    elif variant is ImageVariant.BRIGHTNESS:
        image = ImageEnhance.Brightness(image).enhance(1.06)
    else:
        image, shift = ImageChops.offset(image, 1, 1), 1
    return _Picture(image_id, base.scene, jpeg(image, quality), variant, base.image_id, scale, shift)


def _ask_all(knobs: Knobs, rng: Random, ids: _Ids, pictures: Sequence[_Picture]) -> list[_Asked]:
    """Every question, picture by picture; `_order` puts them in the order of the requests."""
    asked: list[_Asked] = []
    by_image: dict[str, list[_Asked]] = {}
    for picture in pictures:
        made: list[_Asked] = []
        if picture.derived_from:
            _ask_again(knobs, rng, ids, picture, by_image[picture.derived_from], made, len(asked))
        else:
            _ask_base(knobs, rng, ids, picture, made, len(asked))
            by_image[picture.image_id] = made
        asked += made
    return asked


def _ask_base(knobs: Knobs, rng: Random, ids: _Ids, picture: _Picture, made: list[_Asked], number: int) -> None:
    total = max(4, round(rng.gauss(knobs.questions_per_image, knobs.questions_spread)))
    variants = [v for v in QuestionVariant if v is not QuestionVariant.ORIGINAL]
    rates = [float(getattr(knobs, v.value)) for v in variants]
    plan = rng.choices([*variants, QuestionVariant.ORIGINAL], [*rates, 1 - sum(rates)], k=total)
    plan.sort(key=lambda v: v is not QuestionVariant.ORIGINAL)
    plan[0] = QuestionVariant.ORIGINAL
    texts: set[str] = set()
    for variant in plan:
        question_id = ids.question(number + len(made))
        originals = [q for q in made if q.variant is QuestionVariant.ORIGINAL]
        if variant is QuestionVariant.ORIGINAL or not originals:
            new = _original(rng, picture, question_id, texts)
        else:
            new = _variant(rng, picture, question_id, variant, originals, texts)
        texts.add(new.text)
        made.append(new)


def _original(rng: Random, picture: _Picture, question_id: str, texts: set[str]) -> _Asked:
    while True:
        program = ask_any(picture.scene, rng, WEIGHTS)
        templates = SURFACES[program.kind]
        template = templates[0] if rng.random() < 0.5 else rng.choice(templates)
        text = fill(template, program)
        if not any(fill(t, program) in texts for t in templates):
            return _Asked(question_id, picture.image_id, program, template, text, rng.random())


def _variant(
    rng: Random,
    picture: _Picture,
    question_id: str,
    variant: QuestionVariant,
    originals: Sequence[_Asked],
    texts: set[str],
) -> _Asked:
    """A question made from one of the originals; a fresh one where none of 20 tries gives a new text."""
    for _ in range(20):
        source = rng.choice(originals)
        program, template, text = source.program, source.template, source.text
        if variant is QuestionVariant.CASE:
            text = change_case(text, rng)
        elif variant is QuestionVariant.WHITESPACE:
            text = change_whitespace(text, rng)
        elif variant is QuestionVariant.PARAPHRASE:
            template = rng.choice([t for t in SURFACES[program.kind] if t != template])
            text = fill(template, program)
        elif variant is QuestionVariant.NEGATIVE:
            other = _other_argument(rng, picture.scene, source)
            if other is None:
                continue
            program, text = other, fill(template, other)
        if variant is QuestionVariant.REPEAT or text not in texts:
            place = rng.uniform(source.place, 1)
            return _Asked(question_id, picture.image_id, program, template, text, place, variant, source.question_id)
    return _original(rng, picture, question_id, texts)


def _other_argument(rng: Random, scene: Scene, source: _Asked) -> Program | None:
    """Of 32 draws of the same kind: the one nearest in words, another answer before the same one."""
    words = set(source.text.split())
    best: tuple[bool, float] | None = None
    chosen = None
    for _ in range(32):
        program = ask(scene, rng, source.program.kind)
        if program is None:
            continue
        text = fill(source.template, program)
        if text == source.text or _same_question(program, source.program):
            continue
        other = set(text.split())
        score = (program.answer != source.program.answer, len(words & other) / len(words | other))
        if best is None or score > best:
            best, chosen = score, program
    return chosen


def _same_question(first: Program, second: Program) -> bool:
    """Whether two programs of a kind differ only in which phrase names an object, or in the order of a choice."""

    def core(p: Program) -> tuple[object, ...]:
        choice = (p.value, p.other) if p.kind.startswith("verify") else tuple(sorted((p.value, p.other)))
        a, b = (r.index if r and r.index >= 0 else r for r in (p.a, p.b))
        return (p.answer, a, b, choice)

    return core(first) == core(second)


def _ask_again(
    knobs: Knobs, rng: Random, ids: _Ids, picture: _Picture, base: Sequence[_Asked], made: list[_Asked], number: int
) -> None:
    """Asks some of the base picture's questions of a picture derived from it, with the answers it shows.

    Of a look-alike, up to half are questions whose answer has changed: what a careless cache gets wrong.
    """
    originals = [q for q in base if q.variant is QuestionVariant.ORIGINAL]
    rng.shuffle(originals)
    restated = [(q, p) for q in originals if (p := restate(picture.scene, q.program)) is not None]
    wanted = max(1, round(knobs.asked_again * len(base)))
    changed = [(q, p) for q, p in restated if p.answer != q.program.answer][: wanted // 2]
    rest = [pair for pair in restated if pair not in changed]
    for source, program in (changed + rest)[:wanted]:
        question_id = ids.question(number + len(made))
        place, of = rng.random(), source.question_id
        made.append(_Asked(question_id, picture.image_id, program, source.template, source.text, place, of=of))


def _order(knobs: Knobs, rng: Random, pictures: Sequence[_Picture], asked: list[_Asked]) -> None:
    """Sorts the requests: what was made from something comes after it, everything else at random."""
    if knobs.order is Order.SHUFFLED:
        when: dict[str, float] = {}
        for question in asked:
            when[question.question_id] = rng.uniform(when.get(question.of, 0.0), 1)
        asked.sort(key=lambda q: when[q.question_id])
        return
    turn: dict[str, float] = {}
    for picture in pictures:
        turn[picture.image_id] = rng.uniform(turn.get(picture.derived_from, 0.0), 1)
    asked.sort(key=lambda q: (turn[q.image_id], q.place))


def _records(ids: _Ids, pictures: Sequence[_Picture], asked: Sequence[_Asked]) -> dict[str, Any]:
    things = {p.image_id: ids.things(p.image_id, p.scene) for p in pictures}
    by_image: dict[str, list[_Asked]] = {}
    for question in asked:
        by_image.setdefault(question.image_id, []).append(question)
    records = {}
    for question in asked:
        around = by_image[question.image_id]
        settled = settles(question.program)
        entailed = [
            q.question_id for q in around if q is not question and needs(q.program) and needs(q.program) <= settled
        ]
        records[question.question_id] = question_record(
            question.program,
            question.template,
            question.text,
            image_id=question.image_id,
            object_ids=things[question.image_id],
            equivalent=sorted(q.question_id for q in around if q.program == question.program),
            entailed=sorted(entailed),
        )
    return records


def _write_provenance(
    path: Path, knobs: Knobs, ids: _Ids, pictures: Sequence[_Picture], asked: Sequence[_Asked]
) -> None:
    splits: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    splits[ids.split] = {
        "seed": ids.seed,
        "knobs": asdict(knobs),
        "images": {p.image_id: {"variant": p.variant.value, "derivedFrom": p.derived_from or None} for p in pictures},
        "questions": {q.question_id: {"variant": q.variant.value, "of": q.of or None} for q in asked},
    }
    _write_json(path, dict(sorted(splits.items())))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
