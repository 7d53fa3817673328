"""What the demo asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from semkv.engines import EnginePrompt
from semkv.keys import media_id
from semkv.types import MediaSegment, Role, TextSegment
from semkv_demo.names import DOCUMENT, PICTURE
from semkv_lab.minigqa import make_document
from semkv_lab.minigqa.questions import KINDS, ask, fill, restate
from semkv_lab.minigqa.scenes import OPPOSITE, draw, jpeg, make_scene

_KIND = "rel_query_color"
_WORDS = 2600  # about 4,000 tokens


@dataclass(frozen=True)
class Sizes:
    """How much is asked."""

    pictures: int = 16
    documents: int = 5
    large_pictures: int = 8


@dataclass(frozen=True)
class Asked:
    """Questions about one picture.

    Attributes:
        picture: A JPEG file.
        question: Such as "What color is the object above the cube?".
        reworded: The same in other words.
        trap: The same words but for the direction; the right answer is another one.
    """

    picture: bytes
    question: str
    reworded: str
    trap: str


def questions(count: int) -> list[Asked]:
    """Of ``count`` pictures."""
    found: list[Asked] = []
    rng = Random("demo")  # noqa: S311
    first, *others = KINDS[_KIND].wordings
    while len(found) < count:
        scene = make_scene(rng)
        program = ask(scene, rng, _KIND)
        if program is None:
            continue
        other = restate(scene, replace(program, value=OPPOSITE[program.value]))
        if other is None or other.answer == program.answer:
            continue
        asked = Asked(
            picture=jpeg(draw(scene)),
            question=fill(first, program),
            reworded=fill(rng.choice(others), program),
            trap=fill(first, other),
        )
        found.append(asked)
    return found


def prompts(sizes: Sizes, folder: Path) -> dict[str, list[list[EnginePrompt]]]:
    """By row: of each document or picture the prompt before the restart, and the one after it."""
    rng = Random("demo")  # noqa: S311
    found: dict[str, list[list[EnginePrompt]]] = {DOCUMENT: [], PICTURE: []}
    for _ in range(sizes.documents):
        document = make_document(rng, _WORDS)
        asked = rng.sample([text for entry in document.entries for text, _ in entry.questions], 2)
        texts = [f"{document.text}\n{question}" for question in asked]
        found[DOCUMENT].append([EnginePrompt((TextSegment(text),)) for text in texts])
    for number in range(sizes.large_pictures):
        picture = write_picture(folder / f"{number}.jpg", rng)
        chats = ["You are a helpful assistant.", "Answer in one word."]
        found[PICTURE].append([about(picture, system) for system in chats])
    return found


def write_picture(file: Path, rng: Random) -> MediaSegment:
    data = jpeg(draw(make_scene(rng)))
    file.write_bytes(data)
    return MediaSegment(media_id(data), file)


def about(picture: MediaSegment, system: str) -> EnginePrompt:
    before = TextSegment(system, Role.SYSTEM)
    return EnginePrompt((before, picture, TextSegment("What is in this picture?")))
