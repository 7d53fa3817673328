"""Time to the first token without semkv, of a hit and of a miss of every tier, by size of model, image and text.

    python bench/tiers_by_size.py --out bench/results/h100/tiers-by-size.json
    python bench/tiers_by_size.py --tiny --out /tmp/tiers.json         (on a CPU, to see that it runs)
    python bench/tiers_by_size.py --table bench/results/h100/tiers-by-size.json

Qwen3-VL's shapes with dummy weights, one request at a time, times of the client: with semkv they hold the lookup, the
digest of the image's file included. The arms of a row take turns. Without semkv is an engine without connectors beside
the other on the same GPU. With the 32B shape, of which two do not fit, it is the engine with the connectors, asked to
leave the request alone.

A request comes at once, when the GPU holds all of the request before it, or later, when it holds nothing any more and
semkv's blocks lie in host memory. Every repeat has another variant of the request, so that no cache but the measured
one has it. Dummy weights say nothing of answers.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Answer, Child, ChildError, machine, options_of, write_json
from models import learn_words, write_shape

PLAIN, CONNECTORS = "without", "connectors"
START_LIMIT_S, LIMIT_S = 240, 60  # of a start and of one command
START_S = 60.0  # no shape begins later before the end
NEW_ARMS = 3  # that ask about a new image
MOST, LEAST, ROW_S = 5, 3, 4.0  # repeats of a row: so many, or fewer where they take longer
TOPICS = "harbor bridge garden museum railway library market stadium".split()
WORDS = (
    "the a of and to in is was for on that with as by at from it are this which have be not were their has but they"
    " one all new more when there can out other some what time into only could these two may first then any like"
    " work now year people way over such make even most after also many before must through years where much well"
    " down should because each just those how too little state good very world still own see men long here get both"
    " between life being under never day same another know while last might great old since against come right used"
    " take three water house room land river city plan number report section committee history building material"
).split()


@dataclass(frozen=True)
class Size:
    """What is asked of a model, and how much memory that takes."""

    texts: tuple[int, ...]  # tokens
    sides: tuple[int, ...]  # pixels
    kv_gib: float
    host_gib: float
    pair: bool = True  # whether an engine without connectors fits beside the other


SIZES = {
    "qwen3-vl-8b": Size((2000, 8000, 30000), (512, 1024, 2048), kv_gib=11, host_gib=12),
    "qwen3-vl-32b": Size((2000, 8000), (512, 1024, 2048), kv_gib=6, host_gib=10, pair=False),
    "qwen3-vl-2b": Size((2000, 8000, 30000), (512, 1024, 2048), kv_gib=9, host_gib=10),
    "tiny": Size((600,), (320,), kv_gib=0.25, host_gib=0.25),
}

# ------------------------------------------------------------------ requests


def document(tokens: int, seed: object) -> str:
    """Sentences of about so many tokens."""
    rng = random.Random(str(seed))  # noqa: S311
    sentences = []
    left = tokens
    while left > 0:
        count = min(left, rng.randint(8, 20))
        words = rng.choices(WORDS, k=count)
        sentences.append(f"{' '.join(words).capitalize()}.")
        left -= count + 2
    return " ".join(sentences)


def typed_otherwise(text: str, turn: int) -> str:
    """A text with one space more."""
    words = text.split(" ", turn + 2)
    return " ".join([*words[: turn + 1], "", *words[turn + 1 :]])


def about(turn: int) -> str:
    return f"What does the report say about the {TOPICS[turn]}?"


def reworded(turn: int) -> str:
    return f"What does this report say about the {TOPICS[turn]}?"


def another(turn: int) -> str:
    return f"Who paid for the {TOPICS[turn]} in the end?"


def scene(side: int, seed: object) -> Any:
    """Soft colors, things, a word and a camera's grain."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    rng = random.Random(str(seed))  # noqa: S311
    noise = np.random.default_rng(rng.getrandbits(32))
    coarse = noise.integers(40, 216, (9, 9, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(24):
        x, y = (rng.randrange(side) for _ in range(2))
        reach = rng.randrange(side // 40 + 2, side // 8)
        color = tuple(rng.randrange(256) for _ in range(3))
        draw = rng.choice((pen.ellipse, pen.rectangle))
        draw((x - reach, y - reach, x + reach, y + reach), fill=color)
    font = ImageFont.load_default(side // 12)
    pen.text((side // 3, side // 2), rng.choice(TOPICS), (250, 250, 250), font, stroke_width=2)
    grain = noise.integers(-4, 5, (side, side, 3), dtype=np.int16)
    return Image.fromarray((np.asarray(image, np.int16) + grain).clip(0, 255).astype(np.uint8))


def with_a_thing_more(image: Any, turn: int) -> Any:
    from PIL import ImageDraw

    changed = image.copy()
    reach = image.width // 100  # too small to be seen in a small copy
    x = image.width * (turn + 1) // (MOST + 2)
    y = image.height // 4
    box = (x - reach, y - reach, x + reach, y + reach)
    ImageDraw.Draw(changed).ellipse(box, fill=(200, 40, 40))
    return changed


class Pictures:
    """JPEG files of one size: a donor, copies encoded anew, changed ones, and others."""

    def __init__(self, folder: Path, side: int) -> None:
        self.folder = folder / str(side)
        self.folder.mkdir()
        image = scene(side, "donor")
        self.donor = self._saved("donor", image, 90)
        self.copies = [self._saved(f"copy{turn}", image, 84 - turn) for turn in range(MOST)]
        self.changed = [
            self._saved(f"changed{turn}", with_a_thing_more(image, turn), 90)
            for turn in range(MOST)
        ]
        self.new = {
            (turn, arm): self._saved(f"new{turn}-{arm}", scene(side, (turn, arm)), 90)
            for turn in range(MOST)
            for arm in range(NEW_ARMS)
        }

    def _saved(self, name: str, image: Any, quality: int) -> str:
        file = self.folder / f"{name}.jpg"
        image.save(file, quality=quality)
        return str(file)


Segments = list[list[str]]  # role and text, or "media" and a file


def of_text(text: str, question: str) -> Segments:
    return [["system", "You answer questions."], ["context", text], ["question", question]]


def of_picture(file: str, question: str, system: str = "You look at images.") -> Segments:
    return [["system", system], ["media", file], ["question", question]]


@dataclass(frozen=True)
class Row:
    """One row of the table: the arms that take turns, and what each asks in each turn."""

    what: str
    later: bool
    arms: tuple[str, ...]
    asked: list[list[Segments]] = field(repr=False)  # by turn and arm


def rows_of_text(tokens: int) -> Iterator[Row]:
    text = document(tokens, "donor")
    by_meaning = ("semantic", "semantic, cuda")

    def row(what: str, later: bool, arms: tuple[str, ...], *turns: Segments) -> Row:
        arms = (PLAIN, *arms)
        return Row(what, later, arms, [[turn] * len(arms) for turn in turns])

    turns = range(MOST)
    otherwise = [of_text(typed_otherwise(text, turn), about(turn)) for turn in turns]
    similar = [of_text(text, reworded(turn)) for turn in turns]
    others = [of_text(text, another(turn)) for turn in turns]
    last = [of_text(text, f"Where is the {topic}?") for topic in TOPICS]
    yield row("the document typed otherwise", False, ("exact",), *otherwise)
    yield row("a reworded question", False, by_meaning, *similar)
    yield row("another question", False, by_meaning, *others)
    yield row("the document typed otherwise", True, ("exact",), *otherwise)
    yield row("a reworded question", True, by_meaning, *similar)
    yield row("another question", True, (CONNECTORS,), *last[:MOST])
    arms = (PLAIN, CONNECTORS, "exact", *by_meaning)
    new = [
        [of_text(document(tokens, (turn, arm)), about(turn)) for arm in range(len(arms))]
        for turn in turns
    ]
    yield Row("a new document", True, arms, new)


def rows_of_pictures(pictures: Pictures) -> Iterator[Row]:
    donor = pictures.donor
    by_meaning = ("semantic", "semantic, cuda")
    turns = range(MOST)

    def row(what: str, later: bool, arms: tuple[str, ...], *turns: Segments) -> Row:
        arms = (PLAIN, *arms)
        return Row(what, later, arms, [[turn] * len(arms) for turn in turns])

    question = about(0)
    typed = [of_picture(donor, typed_otherwise(about(turn), turn)) for turn in turns]
    similar = [of_picture(donor, reworded(turn)) for turn in turns]
    copies = [of_picture(file, question) for file in pictures.copies]
    changed = [of_picture(file, question) for file in pictures.changed]
    others = [of_picture(donor, another(turn)) for turn in turns]
    systems = [of_picture(donor, another(turn), f"You look at a {TOPICS[turn]}.") for turn in turns]
    yield row("the question typed otherwise", False, ("exact",), *typed)
    yield row("a reworded question", False, by_meaning, *similar)
    yield row("a copy of the image", False, ("vision",), *copies)
    yield row("a changed image", False, ("vision",), *changed)
    yield row("a copy of the image", True, ("vision",), *copies)
    yield row("another question", True, (CONNECTORS,), *others)
    yield row("another text before the image", True, (CONNECTORS,), *systems)
    arms = (PLAIN, CONNECTORS, "vision")
    new = [
        [of_picture(pictures.new[turn, arm], about(turn)) for arm in range(len(arms))]
        for turn in turns
    ]
    yield Row("a new image", True, arms, new)


def donors_of_text(tokens: int) -> list[Segments]:
    text = document(tokens, "donor")
    return [of_text(text, about(turn)) for turn in range(len(TOPICS))]


def donors_of_pictures(pictures: Pictures) -> list[Segments]:
    return [of_picture(pictures.donor, about(turn)) for turn in range(len(TOPICS))]


# ------------------------------------------------------------------ an engine's process


class Engine:
    """vLLM, and in front of it a semantic cache for each tier."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.scratch = Path(spec["scratch"])
        self.connected = spec["connected"]
        start = time.perf_counter()
        self.llm = self._llm(spec)
        started = time.perf_counter()
        self.caches: dict[str, Any] = {}
        self.encoders: dict[str, Any] = {}
        self.gpu_mib = 0.0  # of an encoder
        if self.connected:
            self._open_caches()
        self.facts = {
            "start_s": round(started - start, 1),
            "caches_s": round(time.perf_counter() - started, 1),
            "caches": list(self.caches),
            "encoder_gpu_mib": self.gpu_mib,
            "machine": machine("vllm", "torch", "transformers", "opencv-python-headless"),
        }

    def _llm(self, spec: Mapping[str, Any]) -> Any:
        # two engines that start at once would write the same compiled files
        os.environ["VLLM_CACHE_ROOT"] = str(self.scratch / f"compiled-{self.connected}")
        from vllm import LLM

        from semkv_vllm import EC_CONNECTOR, EC_MODULE, KV_CONNECTOR, KV_MODULE, register

        register()  # installed, vLLM finds the connectors by itself
        extra = {"cache_dir": str(self.scratch / "stores"), "report_loads": True}
        kv = {
            "kv_connector": KV_CONNECTOR,
            "kv_connector_module_path": KV_MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra
            # no block fits on the disk: KV comes from host memory alone
            | {"host_bytes": spec["host_bytes"], "max_bytes": 1},
        }
        ec = {
            "ec_connector": EC_CONNECTOR,
            "ec_connector_module_path": EC_MODULE,
            "ec_role": "ec_both",
            "ec_connector_extra_config": extra,
        }
        connectors = {"kv_transfer_config": kv, "ec_transfer_config": ec} if self.connected else {}
        return LLM(**spec["arguments"], **connectors)

    def _open_caches(self) -> None:
        from semkv.cache import SemanticCache
        from semkv.config import CacheConfig
        from semkv.encoders.text import SentenceEncoder
        from semkv.errors import ConfigError
        from semkv.types import EmbeddingLayer

        off = {"exact": False, "semantic": False}
        layers = (EmbeddingLayer("vision", 512, 0.82),)
        settings: dict[str, dict[str, Any]] = {
            "exact": off | {"exact": True},
            "semantic": off | {"semantic": True},
            "semantic, cuda": off | {"semantic": True},
            "vision": off
            | {"embedding_layers": layers, "embedding_hook": "vision", "vision_encoder": "small"},
        }
        for name, chosen in settings.items():
            config = CacheConfig(self.scratch / name, **chosen)
            encoder = None
            free = self._free_mib()
            if config.semantic:
                encoder = SentenceEncoder(device="cuda" if "cuda" in name else "cpu")
            try:
                cache = SemanticCache(config, text_encoder=encoder)
            except ConfigError as error:  # there is no GPU
                print(name, error, flush=True)
                continue
            cache.warm_up()
            self.caches[name] = cache
            if encoder is not None:
                self.encoders[name] = encoder
                self.gpu_mib = round(free - self._free_mib(), 1)

    @staticmethod
    def _free_mib() -> float:
        """Of the GPU. The driver is asked, since torch would make a context for its answer."""
        command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except OSError:
            return 0.0
        return float(told.split()[0])

    def ask(
        self, arm: str, segments: Segments, later: bool, record: bool = False
    ) -> dict[str, Any]:
        """One answer of one token: milliseconds to it, and what it came from."""
        if later:
            self.forget()
        for encoder in self.encoders.values():
            encoder.forget()  # what it remembers of the donors' questions, and of the repeat before
        cache = self.caches.get(arm)
        start = time.perf_counter()
        request = self._request(segments)
        sent = request.segments
        found: dict[str, Any] = {}
        if cache is None:  # the digests of images are semkv's
            start = time.perf_counter()
        else:
            report = cache.try_reuse(request)
            sent = report.plan.segments
            found["lookup_ms"] = round(1e3 * (time.perf_counter() - start), 3)
            found["hit"] = report.hit
            found["tiers"] = {name: str(status) for name, status in report.statuses.items()}
        output = self._generated(sent, skip=arm == PLAIN)
        found["ms"] = round(1e3 * (time.perf_counter() - start), 3)
        if record:
            for own in self.caches.values():
                own.add_observation(own.try_reuse(request), "an answer")
        return found | self._outcome(output)

    def _outcome(self, output: Any) -> dict[str, Any]:
        from semkv_vllm import read_outcome

        outcome = read_outcome(output)
        return {
            "tokens": len(output.prompt_token_ids),
            "cached": outcome.cached_tokens,
            "loaded": outcome.loaded_tokens,
            "encoder_loaded": outcome.fusion_loaded,
        }

    def _request(self, segments: Segments) -> Any:
        from semkv.keys import media_id
        from semkv.types import MediaSegment, Namespace, Request, Role, TextSegment

        made: list[Any] = []
        for role, text in segments:
            if role == "media":
                file = Path(text)
                made.append(MediaSegment(media_id(file.read_bytes()), file))
            else:
                made.append(TextSegment(text, Role(role)))
        return Request("", Namespace(), tuple(made))

    def _generated(self, segments: tuple[Any, ...], skip: bool) -> Any:
        from vllm import SamplingParams

        from semkv.engines import EnginePrompt, load_image, system_text, user_parts

        prompt = EnginePrompt(segments)
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_pil", "image_pil": load_image(part), "uuid": prompt.uuid(part)}
            for part in user_parts(segments)
        ]
        messages = [
            {"role": "system", "content": system_text(segments)},
            {"role": "user", "content": content},
        ]
        alone = {"semkv": {"skip": True}}
        extra = {"kv_transfer_params": alone, "ec_transfer_params": alone}
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args=extra if skip and self.connected else None,
        )
        (output,) = self.llm.chat(messages, params, use_tqdm=False)
        return output

    def forget(self) -> None:
        """Leave nothing in the GPU's caches, once the connectors have stored what is theirs."""
        deadline = time.monotonic() + LIMIT_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("vLLM's prefix cache cannot be emptied")
            time.sleep(0.01)
        self.llm.llm_engine.reset_encoder_cache()

    def close(self) -> None:
        for cache in self.caches.values():
            cache.close()


def obey(spec: dict[str, Any], answer: Answer) -> None:
    """Start the engine and do what is asked until the standard input ends."""
    logging.basicConfig(level=logging.INFO)
    engine = Engine(spec)
    answer(engine.facts)
    for line in sys.stdin:
        given = json.loads(line)
        given.pop("do")
        answer(engine.ask(**given))
    engine.close()


# ------------------------------------------------------------------ the measuring process


class Model:
    """The engines of one shape."""

    def __init__(self, name: str, options: argparse.Namespace, scratch: Path) -> None:
        self.size = SIZES[name]
        self.scratch = scratch
        model = scratch / "model"
        model.mkdir()
        side = max(self.size.sides)
        write_shape(model, name, max(side * side, 65537))
        learn_words(model, document(20_000, "words"))
        arguments = self._arguments(model, options.tiny)
        names = [CONNECTORS, PLAIN] if self.size.pair else [CONNECTORS]
        self.children = {
            kind: Child(
                f"{name} {kind}",
                {
                    "scratch": str(scratch),
                    "connected": kind == CONNECTORS,
                    "host_bytes": int(self.size.host_gib * 2**30),
                    "arguments": arguments,
                },
                options.logs / f"tiers-{name}-{kind}.log",
                {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.tiny else {},
            )
            for kind in names
        }
        self.facts: dict[str, Any] = {}

    def _arguments(self, model: Path, tiny: bool) -> dict[str, Any]:
        longest = int(1.1 * max(*self.size.texts, max(self.size.sides) ** 2 // 1024)) + 512
        chosen: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy",
            "max_model_len": longest,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8192,  # as `vllm serve` on this GPU
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": int(self.size.kv_gib * 2**30),
            "limit_mm_per_prompt": {"image": 1, "video": 0},
            "compilation_config": {
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
            },
            "seed": 0,
        }
        if tiny:
            del chosen["compilation_config"]
            chosen |= {"enforce_eager": True, "block_size": 32}
        return chosen

    def wait(self) -> None:
        for kind, child in self.children.items():
            self.facts[kind] = child.answer("start", START_LIMIT_S)

    def ask(self, arm: str, segments: Segments, **how: Any) -> dict[str, Any]:
        kind = PLAIN if arm == PLAIN and self.size.pair else CONNECTORS
        return self.children[kind].ask("ask", LIMIT_S, arm=arm, segments=segments, **how)

    def teach(self, donors: list[Segments]) -> None:
        """Have both engines compute the donors, and every cache record them."""
        for segments in donors:
            self.ask(CONNECTORS, segments, later=False, record=True)
            if self.size.pair:
                self.ask(PLAIN, segments, later=False)

    def measure(self, row: Row) -> dict[str, Any]:
        there = (PLAIN, CONNECTORS, *self.facts[CONNECTORS]["caches"])
        arms = [arm for arm in row.arms if arm in there]
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        began = time.monotonic()
        for turn, asked in enumerate(row.asked):
            if turn >= LEAST and time.monotonic() - began > ROW_S:
                break
            order = arms[turn % len(arms) :] + arms[: turn % len(arms)]
            for arm in order:
                segments = asked[row.arms.index(arm)]
                found[arm].append(self.ask(arm, segments, later=row.later))
        return {
            "request": row.what,
            "later": row.later,
            "arms": {arm: summary(answers) for arm, answers in found.items()},
        }

    def close(self) -> None:
        for child in self.children.values():
            child.close(limit_s=10)


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of an arm, and all that it answered."""
    found = {"ms": round(statistics.median(answer["ms"] for answer in answers), 2)}
    if "lookup_ms" in answers[0]:
        lookups = (answer["lookup_ms"] for answer in answers)
        found["lookup_ms"] = round(statistics.median(lookups), 2)
        found["hits"] = sum(answer["hit"] for answer in answers)
    return found | {"count": len(answers), "answers": answers}


def measured(
    name: str, options: argparse.Namespace, drawn: dict[int, Pictures], write: Any
) -> dict[str, Any]:
    """All rows of one shape; ``write`` is called after each. Pictures are ``drawn`` by size when they are missing,
    while the engines start."""
    found: dict[str, Any] = {"shape": name, "rows": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        model = Model(name, options, scratch)
        try:
            for side in model.size.sides:
                if side not in drawn:
                    drawn[side] = Pictures(options.pictures, side)
            model.wait()
            found["engines"] = model.facts
            write(found)
            for size, donors, rows in inputs(model.size, drawn):
                model.teach(donors)
                for row in rows:
                    found["rows"].append(size | model.measure(row))
                    write(found)
                    print(line(found["rows"][-1]), flush=True)
                    if time.monotonic() > options.deadline:
                        raise TimeoutError(f"cut after {options.seconds} s")
        except (ChildError, TimeoutError) as error:
            found["error"] = str(error)
            print(name, error, flush=True)
        finally:
            model.close()
    return found


def inputs(
    size: Size, drawn: Mapping[int, Pictures]
) -> Iterator[tuple[dict[str, int], list[Segments], Iterator[Row]]]:
    """Pictures and texts by size, the sizes that matter most first."""
    for side in sorted(size.sides, key=lambda pixels: pixels != 1024):
        own = drawn[side]
        yield {"pixels": side}, donors_of_pictures(own), rows_of_pictures(own)
    for tokens in sorted(size.texts, key=lambda count: count != 8000):
        yield {"tokens": tokens}, donors_of_text(tokens), rows_of_text(tokens)


def line(row: Mapping[str, Any]) -> str:
    size = f"{row['pixels']} px" if "pixels" in row else f"{row['tokens']} tokens"
    when = "later" if row["later"] else "at once"
    arms = []
    for name, arm in row["arms"].items():
        more = f" (lookup {arm['lookup_ms']}, hits {arm['hits']})" if "lookup_ms" in arm else ""
        arms.append(f"{name} {arm['ms']}{more}")
    return f"{size}, {row['request']}, {when}: {'; '.join(arms)}"


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each arm with semkv, a column for each shape.

    A cell has the time without semkv, the time with it and, where there was a lookup, its share and how many hit.
    """
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for shape in result["shapes"]:
        for row in shape["rows"]:
            size = f"{row['pixels']}²" if "pixels" in row else f"{row['tokens']:,} tokens"
            when = "later" if row["later"] else "at once"
            without = row["arms"][PLAIN]["ms"]
            for name, arm in row["arms"].items():
                if name == PLAIN:
                    continue
                cell = f"{without:.0f}, {arm['ms']:.0f}"
                if "lookup_ms" in arm:
                    cell += f" ({arm['lookup_ms']:.0f}; {arm['hits']} of {arm['count']})"
                cells.setdefault((size, row["request"], when, name), {})[shape["shape"]] = cell
    shapes = [shape["shape"] for shape in result["shapes"]]
    head = [
        "size",
        "request",
        "comes",
        "arm",
        *(shape.rpartition("-")[2].upper() for shape in shapes),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key, found in cells.items():
        columns = [*key, *(found.get(shape, "-") for shape in shapes)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = [name for name in SIZES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=chosen, default=chosen)
    parser.add_argument("--seconds", type=float, default=440.0, help="no row begins after that")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--table", type=Path, help="print the table of a result instead")
    options = options_of(parser, obey)
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    options.deadline = time.monotonic() + options.seconds
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    result: dict[str, Any] = {"settings": {"repeats": [LEAST, MOST], "row_s": ROW_S}, "shapes": []}

    def write(found: dict[str, Any]) -> None:
        write_json(options.out, result | {"shapes": [*result["shapes"], found]})

    drawn: dict[int, Pictures] = {}
    with tempfile.TemporaryDirectory() as folder:
        options.pictures = Path(folder)
        for name in ["tiny"] if options.tiny else options.shapes:
            if time.monotonic() + START_S < options.deadline:
                found = measured(name, options, drawn, write)
                write(found)
                result["shapes"].append(found)
    print(table(result))


if __name__ == "__main__":
    main()
