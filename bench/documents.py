"""Documents of invented facts that return: the workload of ``bench/long_context.py``.

Each comes back later with other white space, in other case, with one sentence reworded, and with one fact edited, each
time with another question. So a cache can reuse its context, and can also be caught answering from the text as it was
before the edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from semkv_lab.minigqa.documents import Document, draw_count, draw_time, make_document

VARIANTS = ("original", "whitespace", "case", "reworded", "edited", "other")
"""What a row's context is, in the order the rows of one document are written."""


def edit(document: Document, index: int, rng: Random) -> Document:
    """The document with other words in one slot of entry ``index``: its count, or else its time."""
    entry = document.entries[index]
    name = rng.choice([answer for _, answer in entry.fact.questions if answer in ("count", "time")])
    value = entry.slots[name]
    while value == entry.slots[name]:
        value = draw_count(rng) if name == "count" else draw_time(rng)
    entries = list(document.entries)
    entries[index] = replace(entry, slots={**entry.slots, name: value})
    return replace(document, entries=tuple(entries))


_ASIDES = ("As before, ", "As expected, ", "Once again, ", "In addition, ")


def reword(document: Document, rng: Random) -> Document:
    """The document with one sentence of filler worded otherwise; every fact stays."""
    entries = list(document.entries)
    index = rng.randrange(len(entries))
    filler = entries[index].filler
    entries[index] = replace(entries[index], filler=rng.choice(_ASIDES) + filler[0].lower() + filler[1:])
    return replace(document, entries=tuple(entries))


def loosen(text: str, rng: Random) -> str:
    """The text with other white space: about a tenth of its spaces doubled, some lines indented or spread."""
    lines = []
    for line in text.split("\n"):
        words = line.split(" ")
        spaced = "".join(word + ("  " if rng.random() < 0.1 else " ") for word in words[:-1]) + words[-1]
        lines.append(rng.choice(("", "", "", "  ", "\t")) + spaced + rng.choice(("", "", " ", "\n")))
    return "\n".join(lines)


def generate_documents(out_jsonl: Path, *, documents: int, seed: int = 0, words: int = 1300) -> Path:
    """Writes the workload as JSON lines and returns the path; the same arguments write the same bytes.

    Each of ``documents`` documents gives six rows, in the order of the requests but mixed with the others': the
    original, then at any later time the same in other white space, in lower case, with one sentence of filler reworded
    and with one fact edited, and an unrelated document (``other``). Every row asks another question of its own context;
    every second edited row asks about the edited sentence (``asksEdit``), so that its answer differs from what the
    original says.

    Fields: ``context``, ``question``, ``answer``, ``variant`` (one of `VARIANTS`), ``document`` (the number of the
    document it came from), ``asksEdit``. 1,300 words are about 2,000 tokens of minigqa-vlm's tokenizer.
    """
    rng = Random(f"documents:{seed}")  # noqa: S311
    rows: list[tuple[float, dict[str, object]]] = []
    for number in range(documents):
        first = rng.random()
        for row in _rows(rng, number, words):
            place = first if row["variant"] == "original" else rng.uniform(first, 1)
            rows.append((place, row))
    rows.sort(key=lambda pair: pair[0])
    out_jsonl.parent.mkdir(parents=True, exist_ok=True)
    out_jsonl.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in rows), encoding="utf-8")
    return out_jsonl


def _rows(rng: Random, number: int, words: int) -> Iterator[dict[str, object]]:
    document, other = make_document(rng, words), make_document(rng, words)
    changed = rng.randrange(len(document.entries))
    edited = edit(document, changed, rng)
    reworded = reword(document, rng)
    asks_edit = number % 2 == 0
    asked: set[str] = set()
    for variant in VARIANTS:
        source = {"reworded": reworded, "edited": edited, "other": other}.get(variant, document)
        text = source.text
        if variant == "whitespace":
            text = loosen(text, rng)
        elif variant == "case":
            text = text.lower()
        about_edit = variant == "edited" and asks_edit
        question, answer = _ask(rng, document, source, changed, about_edit, asked)
        asked.add(question)
        yield {
            "context": text,
            "question": question,
            "answer": answer,
            "variant": variant,
            "document": number,
            "asksEdit": about_edit,
        }


def _ask(
    rng: Random, original: Document, source: Document, changed: int, about_edit: bool, asked: set[str]
) -> tuple[str, str]:
    """A question not asked before where there is one; about the edit: one whose answer the edit changed."""
    if about_edit:
        before = dict(original.entries[changed].questions)
        return next((q, a) for q, a in source.entries[changed].questions if before.get(q) != a)
    pairs = [pair for i, entry in enumerate(source.entries) if i != changed for pair in entry.questions]
    pairs = pairs or list(source.entries[0].questions)
    fresh = [pair for pair in pairs if pair[0] not in asked]
    return rng.choice(fresh or pairs)
