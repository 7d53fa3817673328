"""Writes a MiniGQA data set: a folder in GQA's layout, with a stream of requests on which a cache can win and fail.

    images/<imageId>.jpg
    <split>_balanced_questions.json   question id -> record, in the order of the requests

A cache wins on repeats, paraphrases and near-duplicate pictures. It fails, if it is careless, on negatives (the same
sentence with one other word, and another answer) and on look-alikes (the same picture with one object recoloured).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from semkv.errors import ConfigError
from semkv_lab.minigqa.questions import (
    KINDS,
    NOUN,
    Program,
    Ref,
    ask,
    ask_any,
    axis_of,
    change_case,
    change_whitespace,
    draw_wording,
    fill,
    restate,
    split,
)
from semkv_lab.minigqa.scenes import Scene, draw, jpeg, make_scene, recolor

if TYPE_CHECKING:
    from PIL.Image import Image

SPLITS = ("train", "val", "testdev")
ORIGINAL = "original"
QUESTIONS_PER_IMAGE, QUESTIONS_SPREAD = 31.6, 7.0
"""Mean number of questions on a base picture, GQA's, and its standard deviation."""
ASKED_AGAIN = 0.25
"""Share of a base picture's questions that are asked of each picture derived from it."""

# The defaults describe a service whose users come back. In GQA's balanced testdev split almost nothing returns: of
# 12,578 questions on 398 images 8 are exact repeats.
QUESTION_VARIANTS = {
    "repeat": 0.06,
    "case": 0.03,
    "whitespace": 0.03,
    "paraphrase": 0.10,
    "negative": 0.12,
}
"""Shares of the questions on a base picture that take an earlier one: byte for byte, in other case, with other white
space, in other words, or its sentence with another argument, nearly always with another answer."""
IMAGE_VARIANTS = {
    "reencoded": 0.17,
    "resized": 0.17,
    "brightness": 0.17,
    "shifted": 0.17,
    "lookalike": 0.25,
}
"""Derived pictures per base picture: the same at JPEG quality 60, at 120 x 120 pixels, 6% brighter, moved by one pixel;
and the same scene with one object in another color."""


@dataclass(frozen=True, slots=True)
class _Picture:
    """A picture to be written."""

    image_id: str
    scene: Scene
    data: bytes
    variant: str = ORIGINAL
    derived_from: str = ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question as it is asked. ``of`` is the id of the question it was made from; ``place`` sorts the requests."""

    question_id: str
    image_id: str
    program: Program
    template: str
    text: str
    place: float
    variant: str = ORIGINAL
    of: str = ""


def generate(
    out: Path,
    images: int,
    *,
    seed: int = 0,
    split: str = "val",
    questions: Mapping[str, float] = QUESTION_VARIANTS,
    pictures: Mapping[str, float] = IMAGE_VARIANTS,
) -> Path:
    """Writes one split of a data set into the folder ``out`` and returns the folder.

    The same arguments write the same bytes. Splits and seeds share no scene. A split that is there already is
    replaced, other splits are left.

    Args:
        out: the folder.
        images: number of base pictures.
        seed: of all draws.
        split: one of `SPLITS`.
        questions: rates as in `QUESTION_VARIANTS`.
        pictures: rates as in `IMAGE_VARIANTS`.
    """
    if split not in SPLITS:
        raise ConfigError("split", split, SPLITS)
    rng = Random(f"minigqa:{split}:{seed}")  # noqa: S311
    prefix = f"{SPLITS.index(split) + 1}{seed:04d}"  # ids are unique over splits and seeds, and digits, as GQA's are
    drawn = list(_pictures(images, pictures, rng, prefix))
    asked = list(_questions(questions, rng, drawn, (f"{prefix}{number:07d}" for number in count())))
    # What was made from something comes after it, everything else at random.
    turn: dict[str, float] = {}
    for p in drawn:
        turn[p.image_id] = rng.uniform(turn.get(p.derived_from, 0.0), 1)
    asked.sort(key=lambda q: (turn[q.image_id], q.place))

    (out / "images").mkdir(parents=True, exist_ok=True)
    for p in drawn:
        (out / "images" / f"{p.image_id}.jpg").write_bytes(p.data)
    records = json.dumps(_records(drawn, asked), ensure_ascii=False) + "\n"
    (out / f"{split}_balanced_questions.json").write_text(records, encoding="utf-8")
    return out


def _records(pictures: Sequence[_Picture], asked: Sequence[_Asked]) -> dict[str, Any]:
    """Every question in GQA's schema, as far as a cache has use for it, and from which question (``of``) it was made by
    what: ``repeat`` ..., or ``image:shifted`` ... where it is asked again of a derived picture."""
    images = {p.image_id: "" if p.variant == ORIGINAL else f"image:{p.variant}" for p in pictures}
    object_ids = {
        p.image_id: [f"{p.image_id}{i}" for i in range(len(p.scene.things))] for p in pictures
    }
    by_image: dict[str, list[_Asked]] = {}
    for question in asked:
        by_image.setdefault(question.image_id, []).append(question)
    records = {}
    for question in asked:
        program, settled = question.program, settles(question.program)
        records[question.question_id] = {
            "question": question.text,
            "imageId": question.image_id,
            "answer": program.answer,
            "groups": {"global": KINDS[program.kind].group or None, "local": _local_group(program)},
            "semanticStr": semantic_str(program, object_ids[question.image_id]),
            "variant": images[question.image_id]
            if question.variant == ORIGINAL
            else question.variant,
            "of": question.of or None,
            "entailed": sorted(
                q.question_id
                for q in by_image[question.image_id]
                if q is not question and needs(q.program) and needs(q.program) <= settled
            ),
        }
    return records


# -- pictures ------------------------------------------------------------


def _pictures(
    images: int, rates: Mapping[str, float], rng: Random, prefix: str
) -> Iterator[_Picture]:
    """The base pictures, then those made from them."""
    ids = (f"{prefix}{number:05d}" for number in count())
    bases = []
    for _ in range(images):
        scene = make_scene(rng)
        bases.append(_Picture(next(ids), scene, jpeg(draw(scene))))
    yield from bases
    for variant, rate in rates.items():
        for base in rng.sample(bases, round(rate * len(bases))):
            yield _derive(base, variant, next(ids), rng)


def _derive(
    base: _Picture,
    variant: str,
    image_id: str,
    rng: Random,
) -> _Picture:
    from PIL import Image, ImageChops, ImageEnhance

    if variant == "lookalike":
        scene = recolor(base.scene, rng)
        return _Picture(
            image_id=image_id,
            scene=scene,
            data=jpeg(draw(scene)),
            variant=variant,
            derived_from=base.image_id,
        )
    image: Image = Image.open(BytesIO(base.data))
    quality = 60 if variant == "reencoded" else 90
    if variant == "resized":
        image = image.resize((120, 120), Image.Resampling.BICUBIC)
    elif variant == "brightness":
        image = ImageEnhance.Brightness(image).enhance(1.06)
    elif variant == "shifted":
        image = ImageChops.offset(image, 1, 1)
    return _Picture(
        image_id=image_id,
        scene=base.scene,
        data=jpeg(image, quality),
        variant=variant,
        derived_from=base.image_id,
    )


# -- questions ------------------------------------------------------------


def _questions(
    rates: Mapping[str, float],
    rng: Random,
    pictures: Sequence[_Picture],
    ids: Iterator[str],
) -> Iterator[_Asked]:
    """Every question, picture by picture."""
    by_image: dict[str, list[_Asked]] = {}
    for picture in pictures:
        if picture.derived_from:
            yield from _ask_again(rng, picture, by_image[picture.derived_from], ids)
        else:
            by_image[picture.image_id] = _ask_base(rates, rng, picture, ids)
            yield from by_image[picture.image_id]


def _ask_base(
    rates: Mapping[str, float],
    rng: Random,
    picture: _Picture,
    ids: Iterator[str],
) -> list[_Asked]:
    total = max(4, round(rng.gauss(QUESTIONS_PER_IMAGE, QUESTIONS_SPREAD)))
    plan = rng.choices([*rates, ORIGINAL], [*rates.values(), 1 - sum(rates.values())], k=total)
    plan.sort(key=lambda variant: variant != ORIGINAL)
    plan[0] = ORIGINAL
    made: list[_Asked] = []
    for variant in plan:
        texts = {q.text for q in made}
        originals = [q for q in made if q.variant == ORIGINAL]
        new = (
            _variant(rng, picture, variant, originals, texts, ids) if variant != ORIGINAL else None
        )
        made.append(new or _original(rng, picture, texts, ids))
    return made


def _original(
    rng: Random,
    picture: _Picture,
    texts: set[str],
    ids: Iterator[str],
) -> _Asked:
    while True:
        program = ask_any(picture.scene, rng)
        template = draw_wording(program, rng)
        if not any(fill(t, program) in texts for t in KINDS[program.kind].wordings):
            return _Asked(
                question_id=next(ids),
                image_id=picture.image_id,
                program=program,
                template=template,
                text=fill(template, program),
                place=rng.random(),
            )


def _variant(
    rng: Random,
    picture: _Picture,
    variant: str,
    originals: Sequence[_Asked],
    texts: set[str],
    ids: Iterator[str],
) -> _Asked | None:
    """A question made from one of the originals; None where none of 20 tries gives a new text."""
    for _ in range(20):
        source = rng.choice(originals)
        program = source.program
        template = source.template
        text = source.text
        if variant == "case":
            text = change_case(text, rng)
        elif variant == "whitespace":
            text = change_whitespace(text, rng)
        elif variant == "paraphrase":
            template = rng.choice([t for t in KINDS[program.kind].wordings if t != template])
            text = fill(template, program)
        elif variant == "negative":
            other = _other_argument(rng, picture.scene, source)
            if other is None:
                continue
            program, text = other, fill(template, other)
        if variant == "repeat" or text not in texts:
            return _Asked(
                place=rng.uniform(source.place, 1),
                question_id=next(ids),
                image_id=picture.image_id,
                program=program,
                template=template,
                text=text,
                variant=variant,
                of=source.question_id,
            )
    return None


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
        if text == source.text or _core(program) == _core(source.program):
            continue
        other = set(text.split())
        score = (program.answer != source.program.answer, len(words & other) / len(words | other))
        if best is None or score > best:
            best, chosen = score, program
    return chosen


def _core(program: Program) -> tuple[object, ...]:
    """A program but for which phrase names an object, and for the order of a choice."""
    choice = (program.value, program.other)
    a, b = (r.index if r and r.index >= 0 else r for r in (program.a, program.b))
    return (
        program.answer,
        a,
        b,
        choice if program.kind.startswith("verify") else tuple(sorted(choice)),
    )


def _ask_again(
    rng: Random, picture: _Picture, base: Sequence[_Asked], ids: Iterator[str]
) -> Iterator[_Asked]:
    """Asks some of the base picture's questions of a picture derived from it, with the answers it shows.

    Of a look-alike, up to half are questions whose answer has changed: what a careless cache gets wrong.
    """
    originals = [q for q in base if q.variant == ORIGINAL]
    rng.shuffle(originals)
    restated = [(q, p) for q in originals if (p := restate(picture.scene, q.program)) is not None]
    wanted = max(1, round(ASKED_AGAIN * len(base)))
    changed = [(q, p) for q, p in restated if p.answer != q.program.answer][: wanted // 2]
    rest = [pair for pair in restated if pair not in changed]
    for source, program in (changed + rest)[:wanted]:
        yield _Asked(
            question_id=next(ids),
            image_id=picture.image_id,
            program=program,
            template=source.template,
            text=source.text,
            place=rng.random(),
            of=source.question_id,
        )


# -- as GQA writes it ------------------------------------------------------------

_GQA_NAME = {
    "shape": "name",
    "color": "color",
    "size": "size",
}


def semantic_str(program: Program, object_ids: Sequence[str]) -> str:
    """The program as GQA's operations, in its one-line form: ``select: cube (7)->query: color [0]``."""
    steps = _Steps(program, object_ids)
    steps.write()
    return "->".join(steps.written)


class _Steps:
    """GQA's operations of a program; each is known by its place, and names those that it takes its input from."""

    def __init__(self, program: Program, object_ids: Sequence[str]) -> None:
        self.written: list[str] = []
        self._program = program
        self._object_ids = object_ids
        self._choice = f"{program.value}|{program.other}"
        self._task, self._name = split(program.kind)

    def write(self) -> None:
        a = self._program.a
        b = self._program.b
        if self._task == "ground":
            self._value(self._name, "location", self._add("select", "scene"))
        elif a is None:
            raise ValueError(f"a {self._program.kind} program names no object")
        elif b is None:
            self._of_one(a)
        else:
            self._of_two(a, b)

    def _of_one(self, a: Ref) -> None:
        first = self._select(a)
        if self._task == "exist":
            self._add("exist", "?", first)
        elif self._task == "position":
            self._value(self._name, axis_of(self._program), first)
        elif self._name == "both":
            color = self._add("verify color", self._program.value, first)
            size = self._add("verify size", self._program.other, first)
            self._add("and", "", color, size)
        else:
            self._value(self._task, _GQA_NAME[self._name], first)

    def _of_two(self, a: Ref, b: Ref) -> None:
        kind = self._program.kind
        if kind.startswith(("rel_query", "rel_exist")):
            self._related(a, b)
        elif self._task == "exist":
            first = self._add("exist", "?", self._select(a))
            self._add(self._name, "", first, self._add("exist", "?", self._select(b)))
        else:
            both = self._select(a), self._select(b)
            if self._task == "rel":
                relation = self._program.value if self._name == "verify" else self._choice
                self._add(
                    f"{self._name} rel", f"{b.shape or NOUN},{relation},o {self._one(b)}", *both
                )
            elif kind == "compare_size":
                self._add(f"choose {self._program.value}", "", *both)
            else:
                self._add(kind.replace("_", " "), "", *both)

    def _related(self, a: Ref, b: Ref) -> None:
        """Something in a relation to ``b``: whether it is there, or a value of it."""
        noun = (a.shape or NOUN) if self._name == "exist" else "_"
        at = self._add("relate", f"{noun},{self._program.value},s {self._one(a)}", self._select(b))
        if self._name == "exist":
            self._add("exist", "?", self._narrow(a, at))
        else:
            self._add("query", _GQA_NAME[self._name.removeprefix("query_")], at)

    def _add(self, operation: str, argument: str, *dependencies: int) -> int:
        self.written.append(
            f"{operation}: {argument}" + (f" {list(dependencies)}" if dependencies else "")
        )
        return len(self.written) - 1

    def _one(self, ref: Ref) -> str:
        return f"({self._object_ids[ref.index] if ref.index >= 0 else '-'})"

    def _narrow(self, ref: Ref, at: int) -> int:
        if ref.color:
            at = self._add("filter color", ref.color, at)
        return self._add("filter size", ref.size, at) if ref.size else at

    def _select(self, ref: Ref) -> int:
        return self._narrow(ref, self._add("select", f"{ref.shape or NOUN} {self._one(ref)}"))

    def _value(self, task: str, what: str, at: int) -> int:
        if task == "query":
            return self._add("query", what, at)
        return self._add(
            f"{task} {what}", self._program.value if task == "verify" else self._choice, at
        )


def _local_group(program: Program) -> str:
    number = list(KINDS).index(program.kind)
    subject = (
        program.a.text
        if program.a and program.a.text != NOUN
        else program.b.text
        if program.b
        else "ground"
    )
    values = (
        "_".join(v for v in (program.value, program.other) if v) or program.kind.rsplit("_", 1)[-1]
    )
    return f"{number:02d}-{subject}_{values}".replace(" ", "-")


Fact = tuple[str, ...]


def settles(program: Program) -> frozenset[Fact]:
    """The facts of the scene that the question and its answer together state."""
    if program.kind.startswith(("verify", "ground_verify")) and program.answer != "yes":
        return frozenset()
    return needs(program)


def needs(program: Program) -> frozenset[Fact]:
    """The facts from which the question can be answered; empty where no single question states them."""
    kind = program.kind
    a = program.a
    b = program.b
    task, name = split(kind)
    if task == "ground":
        return frozenset({("ground",)})
    if a is None:
        return frozenset()
    if kind in ("rel_verify", "rel_choose") and b is not None:
        axis = "x" if program.value in ("to the left of", "to the right of") else "y"
        return frozenset({("rel", axis, *sorted((str(a.index), str(b.index))))})
    if task == "position":
        return frozenset({(axis_of(program), str(a.index))})
    if kind == "verify_both":
        return frozenset({("color", str(a.index)), ("size", str(a.index))})
    return frozenset({(name, str(a.index))} if task in ("query", "verify", "choose") else ())


# -- documents of invented facts, as logs of numbered entries; documents.toml has their words ------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a document: a fact of ``documents.toml`` with the words in its slots, and a sentence of filler."""

    fact: Mapping[str, Any]
    slots: Mapping[str, str]
    filler: str

    @property
    def sentence(self) -> str:
        return str(self.fact["sentence"].format(**self.slots))

    @property
    def questions(self) -> tuple[tuple[str, str], ...]:
        """Questions, each with the answer that the sentence gives."""
        return tuple(
            (text.format(**self.slots), self.slots[answer])
            for text, answer in self.fact["questions"]
        )


@dataclass(frozen=True, slots=True)
class Document:
    """A title, an opening and entries; `text` is what a reader sees."""

    title: str
    opening: str
    entries: tuple[Entry, ...]

    @property
    def text(self) -> str:
        body = "\n".join(f"{entry.sentence} {entry.filler}" for entry in self.entries)
        return f"{self.title}\n{self.opening}\n{body}"


VARIANTS = ("original", "whitespace", "case", "reworded", "edited", "other")
"""How a document returns: as it is, with blanks doubled, in small letters, with the filler of an entry reworded, with
the number in an entry changed; ``other`` is an unrelated one."""

_ASIDES = ("As before, ", "As expected, ", "Once again, ", "In addition, ")
_WORDS: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("documents.toml").read_text(encoding="utf-8")
)


def make_document(rng: Random, words: int = 1100) -> Document:
    """A document of about ``words`` words: the last entry is the one that reaches that length."""
    topic = rng.choice(_WORDS["topics"])
    title = topic["title"].format(
        number=rng.randrange(1000, 10000), place=rng.choice(_WORDS["ports"])
    )
    entries: list[Entry] = []
    length = len(title.split()) + len(topic["opening"].split())
    while length < words or not entries:
        entry = _make_entry(rng, topic, len(entries) + 1)
        entries.append(entry)
        length += len(entry.sentence.split()) + len(entry.filler.split())
    return Document(title, topic["opening"], tuple(entries))


def returning(
    documents: int,
    *,
    seed: int = 0,
    words: int = 1300,
) -> list[dict[str, str]]:
    """Questions about documents that return: six rows a document, the original, then at any later time the rest.

    1,300 words are about 2,000 tokens of minigqa-vlm's tokenizer.

    Returns:
        In the order of the requests: ``variant``, ``document`` (its number), ``context``, ``question``, ``answer``.
    """
    rng = Random(f"documents:{seed}")  # noqa: S311
    placed: list[tuple[float, dict[str, str]]] = []
    for number in range(documents):
        document, first = make_document(rng, words), rng.random()
        for variant, (text, described) in _variants(
            document, make_document(rng, words), rng
        ).items():
            question, answer = rng.choice(
                [pair for entry in described.entries for pair in entry.questions]
            )
            row = {
                "variant": variant,
                "document": str(number),
                "context": text,
            }
            row |= {"question": question, "answer": answer}
            placed.append((first if variant == "original" else rng.uniform(first, 1), row))
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def _variants(
    document: Document,
    other: Document,
    rng: Random,
) -> dict[str, tuple[str, Document]]:
    """The text of each of `VARIANTS`, and the document that it describes."""
    at = rng.choice(
        [at for at, entry in enumerate(document.entries) if "{count}" in entry.fact["sentence"]]
    )
    entry = document.entries[at]
    count = rng.choice([c for c in map(str, range(12, 100)) if c != entry.slots["count"]])
    changed = {
        "reworded": replace(
            entry, filler=rng.choice(_ASIDES) + entry.filler[0].lower() + entry.filler[1:]
        ),
        "edited": replace(entry, slots={**entry.slots, "count": count}),
    }
    loose = "".join(
        word + ("  " if rng.random() < 0.1 else " ") for word in document.text.split(" ")
    ).rstrip(" ")
    found = {"original": (document.text, document), "whitespace": (loose, document)}
    found["case"] = (document.text.lower(), document)
    for variant, new in changed.items():
        described = replace(
            document, entries=(*document.entries[:at], new, *document.entries[at + 1 :])
        )
        found[variant] = (described.text, described)
    return {**found, "other": (other.text, other)}


def _make_entry(
    rng: Random,
    topic: Mapping[str, Any],
    number: int,
) -> Entry:
    fact = rng.choice(topic["facts"])
    slots = {
        "entry": str(number),
        "name": rng.choice(topic["names"]),
        "good": rng.choice(topic["goods"]),
        "place": rng.choice(topic["places"]),
        "count": str(rng.randrange(12, 100)),
        "time": f"{rng.randrange(5, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 40, 45, 50)):02d}",
    }
    return Entry(fact, slots, rng.choice(topic["filler"]))
