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
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from io import BytesIO
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from semkv.errors import ConfigError
from semkv_lab.minigqa.gqa_format import needs, question_record, scene_graph, settles
from semkv_lab.minigqa.questions import (
    KINDS,
    Program,
    Ref,
    ask,
    ask_any,
    attribute,
    change_case,
    change_whitespace,
    fill,
    only_neighbour,
    opposite_side,
    short_relation,
    yes_no,
)  # fmt: skip
from semkv_lab.minigqa.scenes import OPPOSITE, Scene, draw, jpeg, make_scene, recolor, relation_holds, side_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Order(StrEnum):
    """``grouped``: all questions of a picture together, as 96.8% of GQA's are. ``shuffled``: all questions mixed."""

    GROUPED = "grouped"
    SHUFFLED = "shuffled"


class QuestionVariant(StrEnum):
    """What a question is to the earlier one it was made from; see `Knobs`."""

    ORIGINAL = "original"
    REPEAT = "repeat"
    CASE = "case"
    WHITESPACE = "whitespace"
    PARAPHRASE = "paraphrase"
    NEGATIVE = "negative"


class ImageVariant(StrEnum):
    """What a picture is to the one it was made from; see `Knobs`."""

    ORIGINAL = "original"
    REENCODED = "reencoded"
    RESIZED = "resized"
    BRIGHTNESS = "brightness"
    SHIFTED = "shifted"
    LOOKALIKE = "lookalike"


@dataclass(frozen=True, slots=True)
class Knobs:
    """The size of a data set and the rates of what returns in it. Raises `ConfigError` on a value out of range.

    The defaults describe a service whose users come back; `gqa()` gives the rates of GQA's balanced testdev split
    itself, where almost nothing returns (12,578 questions on 398 images, 8 of them exact repeats).

    Attributes:
        images: base pictures.
        questions_per_image: mean number of questions on a base picture; GQA has 31.6.
        questions_spread: standard deviation of that number.
        repeat: share of the questions on a base picture that repeat an earlier one, byte for byte.
        case: share that repeat an earlier one in other case.
        whitespace: share that repeat an earlier one with other white space.
        paraphrase: share that ask an earlier one in other words.
        negative: share that take an earlier one's sentence with another argument, nearly always with another answer.
        reencoded: derived pictures per base picture: the same, encoded at JPEG quality 60.
        resized: the same at 120 x 120 pixels.
        brightness: the same, 6% brighter.
        shifted: the same, moved by one pixel.
        lookalike: the same scene with one object in another colour.
        asked_again: share of a base picture's questions that are asked of each picture derived from it.
        order: whether the questions of a picture come together.
    """

    images: int = 12
    questions_per_image: float = 31.6
    questions_spread: float = 7.0
    repeat: float = 0.06
    case: float = 0.03
    whitespace: float = 0.03
    paraphrase: float = 0.10
    negative: float = 0.12
    reencoded: float = 0.17
    resized: float = 0.17
    brightness: float = 0.17
    shifted: float = 0.17
    lookalike: float = 0.25
    asked_again: float = 0.25
    order: Order = Order.GROUPED

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ConfigError("minigqa.images", self.images, "at least 1")
        if not 1 <= self.questions_per_image <= 200:
            raise ConfigError("minigqa.questions_per_image", self.questions_per_image, "1 to 200")
        if self.questions_spread < 0:
            raise ConfigError("minigqa.questions_spread", self.questions_spread, "0 or more")
        for field in fields(self)[3:14]:
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ConfigError(f"minigqa.{field.name}", value, "a share from 0 to 1")
        if self.repeat + self.case + self.whitespace + self.paraphrase + self.negative > 0.8:
            raise ConfigError("minigqa", "the rates of the question variants", "a sum of at most 0.8")
        object.__setattr__(self, "order", Order(self.order))

    @classmethod
    def gqa(cls, images: int = 398) -> Knobs:
        """GQA's balanced testdev split: 31.6 questions an image, 0.06% exact repeats, 5.7% near-equal neighbours."""
        none = dict.fromkeys(("case", "whitespace", "reencoded", "resized", "brightness", "shifted", "lookalike"), 0.0)
        return cls(images=images, repeat=0.0006, paraphrase=0.02, negative=0.037, **none)  # type: ignore[arg-type]


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
        program = ask_any(picture.scene, rng)
        templates = KINDS[program.kind].wordings
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
            template = rng.choice([t for t in KINDS[program.kind].wordings if t != template])
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


def restate(scene: Scene, program: Program) -> Program | None:
    """The program with the objects and the answer that its words have in ``scene``.

    None where the words no longer make a fair question there: a phrase fits no object or two, a choice offers no true
    alternative, a relation is not clear.
    """
    if program.kind.startswith("ground"):
        return _ground(scene, program)
    if program.kind in ("exist", "exist_and", "exist_or", "rel_exist"):
        return _existence(scene, program)
    a = _the_one(scene, program.a) if program.kind not in ("rel_query_shape", "rel_query_color") else None
    b = _the_one(scene, program.b)
    if (a is None and not program.kind.startswith("rel_query")) or (b is None and program.b is not None):
        return None
    if program.kind.startswith("rel_"):
        return _relation(scene, program, a, b)
    if b is not None and a is not None:
        return _comparison(scene, program, a, b)
    return None if a is None else _single(scene, program, a)


def _fitting(scene: Scene, ref: Ref | None) -> list[int]:
    return [] if ref is None else [i for i, thing in enumerate(scene.things) if ref.fits(thing)]


def _the_one(scene: Scene, ref: Ref | None) -> Ref | None:
    found = _fitting(scene, ref)
    return replace(ref, index=found[0]) if ref is not None and len(found) == 1 else None


def _ground(scene: Scene, program: Program) -> Program | None:
    if program.kind == "ground_verify":
        return replace(program, answer=yes_no(scene.ground == program.value))
    if program.kind == "ground_choose" and scene.ground not in (program.value, program.other):
        return None
    return replace(program, answer=scene.ground)


def _existence(scene: Scene, program: Program) -> Program | None:
    found = _fitting(scene, program.a)
    if program.kind == "rel_exist":
        b = _the_one(scene, program.b)
        if b is None or b.index in found:
            return None
        sides = {i: relation_holds(scene, i, program.value, b.index) for i in found}
        if None in sides.values():
            return None
        found = [i for i, holds in sides.items() if holds]
        return replace(program, answer=yes_no(bool(found)), a=_first(program.a, found), b=b)
    others = _fitting(scene, program.b)
    if program.kind == "exist":
        truth = bool(found)
    else:
        if set(found) & set(others):
            return None
        truth = bool(found and others) if program.kind == "exist_and" else bool(found or others)
    return replace(program, answer=yes_no(truth), a=_first(program.a, found), b=_first(program.b, others))


def _first(ref: Ref | None, found: list[int]) -> Ref | None:
    return None if ref is None else replace(ref, index=found[0] if found else -1)


def _relation(scene: Scene, program: Program, a: Ref | None, b: Ref | None) -> Program | None:
    if b is None:
        return None
    if a is None:
        found = only_neighbour(scene, b.index, program.value)
        if found is None:
            return None
        name = program.kind.removeprefix("rel_query_")
        return replace(program, answer=attribute(scene.things[found], name), a=Ref(found), b=b)
    truth = relation_holds(scene, a.index, program.value, b.index)
    if truth is None or a.index == b.index:
        return None
    chosen = program.value if truth else OPPOSITE[program.value]
    answer = yes_no(truth) if program.kind == "rel_verify" else short_relation(chosen)
    return replace(program, answer=answer, a=a, b=b)


def _comparison(scene: Scene, program: Program, a: Ref, b: Ref) -> Program | None:
    if a.index == b.index:
        return None
    first, second = scene.things[a.index], scene.things[b.index]
    if program.kind == "compare_size":
        if first.size == second.size or first.shape == second.shape:
            return None
        wanted = "large" if program.value == "larger" else "small"
        return replace(program, answer=first.shape if first.size == wanted else second.shape, a=a, b=b)
    same, name = program.kind.split("_")
    equal = attribute(first, name) == attribute(second, name)
    return replace(program, answer=yes_no(equal == (same == "same")), a=a, b=b)


def _single(scene: Scene, program: Program, a: Ref) -> Program | None:
    task, name = program.kind.split("_")
    if task == "position":
        axis = "vposition" if program.value in ("top", "bottom") else "hposition"
        side = side_of(scene, a.index, axis)
        if side is None or (name == "choose" and opposite_side(program.value) != program.other):
            return None
        return replace(program, answer=yes_no(side == program.value) if name == "verify" else side, a=a)
    thing = scene.things[a.index]
    if name == "both":
        return replace(program, answer=yes_no((thing.color, thing.size) == (program.value, program.other)), a=a)
    own = attribute(thing, name)
    if task == "verify":
        return replace(program, answer=yes_no(own == program.value), a=a)
    if task == "choose" and own not in (program.value, program.other):
        return None
    return replace(program, answer=own, a=a)
