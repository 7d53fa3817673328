"""Engines that reuse documents at other positions: what tests, and a long random load, ask of them.

Nothing here needs pytest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import tiny_models
from kv_engines import BLOCK, SKIP, Engine, connector, prompt, report, token_ids

WORKER = "semkv_vllm.worker.DocumentWorker"
CLOSE = 1e-4  # of log-probabilities
SIZES = (131, 77, 190, 50, 128)
LAYERS = {"llama3": 1, "yarn": 1}
LAYER_BYTES = 2 * 2 * 32 * BLOCK * 4  # of a block
BLOCKS = 40  # a few requests at once, and the others wait or are preempted

BROKEN_RANK = "broken_rank.BrokenRank"
"""A worker extension: the second rank fails as a file says, whose path is in the variable `SIGN`."""
SIGN = "BROKEN_RANK"
FAILED = "failed"  # beside the file: a byte for each time that it did
ALL_AGAIN = "all again"  # in the file: nothing fails, and all that was moved is computed again

HOOKS = (
    "documents.Documents.on_new_request", "documents.Documents.matched", "documents.Documents._is_worth_it",
    "documents.Documents.allocated", "documents.Documents.take_orders", "documents.Documents.arrived",
    "documents.Documents.give_pictures", "documents.Documents.ended", "documents.replace", "private.load_blocks",
    "placement.Placement._moved",
    "placement.Placement._is_right", "placement.Placement._passes", "placement.Placement.take_news",
    "repair.Repair.run", "gate.Layers.move",
)  # fmt: skip


class Reuse:
    """An engine that may reuse documents, some of which it has stored; ``rows``: its ``document_rows``."""

    def __init__(self, model: str, cache: str, *, rows: int = 1000, **args: Any) -> None:
        settings = {
            "document_tokens": 0,
            "document_rows": rows,
            "capture_decode": True,
            "document_separator": [11, 12, 11],
        }
        usual: dict[str, Any] = {
            "worker_cls": WORKER,
            "max_logprobs": -1,
            "max_num_batched_tokens": 160,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": BLOCKS * LAYERS.get(Path(model).name, 2) * LAYER_BYTES,
        }
        self.engine = Engine(model, connector(cache, **settings), **(usual | args))
        self.rng = random.Random(1)
        self.documents = [token_ids(self.rng, size) for size in SIZES]
        self.store()

    @property
    def half(self) -> Any:
        """The scheduler's half of ours."""
        return self.engine.scheduler.connector._documents

    @property
    def counters(self) -> Any:
        return self.engine.scheduler.connector.shared.counters

    def store(self) -> None:
        asked = [self.as_prompt(ids) for ids in self.documents]
        self.engine.outputs(asked, tokens=1, logprobs=None)
        self.engine.forget(keep_host=True)

    def text(self, count: int) -> list[int]:
        return token_ids(self.rng, count)

    def compose(self, *parts: list[int] | int) -> tuple[list[int], list[list[int]]]:
        """A prompt of texts and documents, and where the documents are."""
        ids: list[int] = []
        places = []
        for part in parts:
            given = self.documents[part] if isinstance(part, int) else part
            if isinstance(part, int):
                places.append([len(ids), len(ids) + len(given)])
            ids += given
        return ids, places

    def layouts(self) -> Iterator[tuple[list[int], list[list[int]]]]:
        yield self.compose(self.text(45), 2, 0, 3, 4, 1, self.text(20))
        yield self.compose(self.text(64), 4, self.text(7), 2)  # the prompt ends with a document
        yield self.compose(self.text(3), 1, self.text(88), 0, 0, self.text(1))  # one comes twice

    def submit(
        self,
        number: int,
        ids: list[int],
        places: list[list[int]] | None,
        repair: int,
        tokens: int = 48,
    ) -> None:
        """Let a request wait whose name is a number, with documents at some places, or with none."""
        said = {"spans": places, "repair": repair} if places else {"skip": True}
        params = sampling({"kv_transfer_params": {"semkv": said}}, tokens)
        self.engine.llm.llm_engine.add_request(str(number), self.as_prompt(ids), params)

    def as_prompt(self, ids: list[int], salt: str | None = None) -> Any:
        return prompt(ids, salt)

    def output(self, ids: list[int], extra: Any, tokens: int = 8, **fields: Any) -> Any:
        fields = {"logprobs": -1} | fields
        salt = fields.pop("salt", None)
        asked = self.as_prompt(ids, salt)
        (found,) = self.engine.outputs([asked], tokens, extra_args=extra, **fields)
        return found

    def exact(self, ids: list[int]) -> Any:
        """Without the connector; vLLM's own cache counts."""
        return self.output(ids, SKIP)

    def together(
        self, prompts: list[list[int]], *, load: bool = False, tokens: int = 48
    ) -> list[Any]:
        """Exact answers to many at once; with ``load`` from what is stored."""
        asked = [self.as_prompt(ids) for ids in prompts]
        extra = {"kv_transfer_params": {"max_offload_tokens": 0}} if load else SKIP
        return self.engine.outputs(asked, tokens, extra_args=extra, logprobs=2)

    def cold(self, ids: list[int]) -> Any:
        """All of it computed."""
        self.forget()
        found = self.exact(ids)
        self.forget()
        return found

    def reused(self, ids: list[int], places: Any, repair: int | None = None, **fields: Any) -> Any:
        said = {"spans": places} | ({} if repair is None else {"repair": repair})
        limit = {"max_offload_tokens": 0}  # what is stored exactly would be found first
        return self.output(ids, {"kv_transfer_params": {"semkv": said, **limit}}, **fields)

    def forget(self) -> None:
        self.engine.settle()
        assert self.engine.llm.reset_prefix_cache()


def off(output: Any, wanted: Any) -> float:
    """The largest difference of two answers' log-probabilities; infinite where their tokens differ."""
    one, other = output.outputs[0], wanted.outputs[0]
    if one.token_ids != other.token_ids:
        return float("inf")
    return max(map(row_off, one.logprobs, other.logprobs))


def row_off(row: Any, wanted: Any) -> float:
    """The largest difference of log-probabilities at one place of an answer; 0 where no token has both."""
    return max(
        (abs(row[token].logprob - wanted[token].logprob) for token in row.keys() & wanted.keys()),
        default=0.0,
    )


def approximate(output: Any) -> int:
    return int(report(output).get("approximate_tokens", 0))


def sampling(extra: Any, tokens: int = 48) -> Any:
    """What each request of a crowd asks for."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=2,
        extra_args=extra,
    )


# ---------------------------------------------------------------------- pictures

SIDE = 256  # of a picture; it has some 64 tokens
PICTURE_LAYER_BYTES = 2 * 2 * 64 * BLOCK * 4  # of a block
TOKENS = {
    "qwen2.5-vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "qwen3-vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "llava": ("", "<image>", ""),
}


class Text(list[int]):
    """Tokens, and the pictures that they stand for, by number."""

    pictures: tuple[int, ...] = ()


class PictureReuse(Reuse):
    """As `Reuse`, with two documents that have a picture each: the first two."""

    def __init__(self, model: str, cache: str, layers: int, **args: Any) -> None:
        self.family = Path(model).name.removesuffix("-shallow")
        super().__init__(
            model,
            cache,
            limit_mm_per_prompt={"image": 3, "video": 0},
            kv_cache_memory_bytes=BLOCKS * layers * PICTURE_LAYER_BYTES,
            **args,
        )

    def store(self) -> None:
        tokenizer = self.engine.llm.get_tokenizer()
        self.marks = [tokenizer.convert_tokens_to_ids(name) for name in TOKENS[self.family] if name]
        (self.pad,) = tokenizer.convert_tokens_to_ids([TOKENS[self.family][1]])
        self.size = self.count()
        self.documents[:2] = [self.picture(0, 90), self.picture(1, 40)]
        super().store()

    def count(self) -> int:
        """Tokens of a picture."""
        self.size = 1
        asked = self.as_prompt(self.picture(0, 5))
        (out,) = self.engine.outputs([asked], tokens=1, logprobs=None)
        return list(out.prompt_token_ids).count(self.pad)

    def picture(self, number: int, words: int) -> Text:
        """A picture and some text behind it."""
        ids = Text()
        for mark in self.marks:
            ids += [mark] * (self.size if mark == self.pad else 1)
        ids += self.text(words)
        ids.pictures = (number,)
        return ids

    def compose(self, *parts: list[int] | int) -> tuple[list[int], list[list[int]]]:
        ids, places = super().compose(*parts)
        whole = Text(ids)
        given = [self.documents[part] if isinstance(part, int) else part for part in parts]
        whole.pictures = tuple(n for part in given for n in getattr(part, "pictures", ()))
        return whole, places

    def as_prompt(self, ids: list[int], salt: str | None = None) -> Any:
        """As a client says it: one mark for each picture."""
        short: list[int] = []
        for token, same in groupby(ids):
            short += [token] if token == self.pad else same
        asked: dict[str, Any] = {"prompt_token_ids": short}
        pictures = getattr(ids, "pictures", ())
        if pictures:
            drawn = [tiny_models.picture(number, SIDE) for number in pictures]
            asked["multi_modal_data"] = {"image": drawn}
        return asked | ({"cache_salt": salt} if salt is not None else {})

    def layouts(self) -> Iterator[tuple[list[int], list[list[int]]]]:
        other = self.picture(2, 3)
        yield self.compose(self.text(45), 2, 3, 4, self.text(20))  # no picture
        yield self.compose(self.text(7), other, 2, self.text(9), 3, self.text(5))  # one in front
        yield self.compose(self.text(40), 4, 2, self.text(9), other, self.text(5))  # one behind
        yield self.compose(self.text(50), 1, 2, 0, self.text(33))  # two that are documents
        yield self.compose(other, 1, self.text(3), 0, self.text(3))  # and one that is none
