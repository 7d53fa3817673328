"""The prompt of minigqa-vlm: its chat template, its tokenizer, and the token ids of a question in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from semkv_lab.minigqa import make_document
from semkv_lab.minigqa.questions import ask_any, change_case, word
from semkv_lab.minigqa.scenes import make_scene

BOS, EOS, PAD, IMAGE = "<s>", "</s>", "<pad>", "<image>"
BOS_ID, EOS_ID, PAD_ID, IMAGE_ID = 0, 1, 2, 3
VOCABULARY = 1536
IMAGE_TOKENS = 144
"""(96 / 8) squared: one token for each patch of a picture."""

CHAT_TEMPLATE = (
    "{{- '<s>' -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- 'USER: ' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- ' ASSISTANT: ' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}{{- '<image>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- if message['role'] == 'system' -%}{{- '\\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- '</s>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- ' ASSISTANT:' -}}{%- endif -%}"
)
"""``<s>SYSTEM\\nUSER: <image>\\nCONTEXT\\nQUESTION ASSISTANT:``, then `` ANSWER</s>``: parts in the order they are
given, one line each, and no text is trimmed. vLLM sees the loop over ``content`` and passes parts as a list."""

_SAMPLE_SYSTEM = (
    "You are a helpful assistant.",
    "Answer the question using a single word or phrase.",
    "You answer questions about pictures. Be brief.",
    "A chat between a curious human and an assistant that gives short and polite answers.",
)
SYSTEM_TEXTS = (
    *_SAMPLE_SYSTEM,
    "Look at the picture and answer in one word.",
    "Give the answer only.",
)
CONTEXT_TEXTS = (
    "Here is a picture with some objects in it.",
    "The picture was drawn on a computer.",
    "Answer the question using a single word or phrase.",
    "There are small and large objects on the ground.",
)


def head(*, image: bool = True, system: str = "", context: str = "") -> str:
    """The prompt up to the question, without the line break before it. Text only when there is a context or image."""
    parts = [part for part in (IMAGE if image else "", context) if part]
    return f"{BOS}{system}{chr(10) if system else ''}USER: " + "\n".join(parts)


def tail(question: str) -> str:
    """The question's part of the prompt after `head`; the two tokenise apart exactly as they do together."""
    return f"\n{question} ASSISTANT:"


def messages(
    question: str, *, image: bool = True, system: str = "", context: str = ""
) -> list[dict[str, Any]]:
    """The same prompt as chat messages, with a part for each segment."""
    content: list[dict[str, Any]] = [{"type": "image"}] if image else []
    content += [{"type": "text", "text": text} for text in (context, question) if text]
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return [*chat, {"role": "user", "content": content}]


def expand(ids: list[int]) -> list[int]:
    """Each image placeholder as the 144 tokens the model sees."""
    out: list[int] = []
    for token in ids:
        out.extend([IMAGE_ID] * IMAGE_TOKENS if token == IMAGE_ID else [token])
    return out


def train_tokenizer(seed: int = 0) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of 1,536 tokens; digits stand alone, any text can be written."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD, IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(Random(seed)), trainer)  # noqa: S311
    return bpe


def load_tokenizer(checkpoint: Path) -> Any:
    """The `tokenizers.Tokenizer` of an exported checkpoint."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def _corpus(rng: Random) -> Iterator[str]:
    yield from SYSTEM_TEXTS * 20
    yield from CONTEXT_TEXTS * 20
    for _ in range(1500):
        scene = make_scene(rng)
        for _ in range(8):
            program = ask_any(scene, rng)
            question = word(program, rng)
            if rng.random() < 0.15:
                question = change_case(question, rng)
            yield f"USER: \n{question} ASSISTANT: {program.answer}"
    for _ in range(60):
        document = make_document(rng)
        yield document.text
        for entry in document.entries:
            yield from (f"\n{question} ASSISTANT: {answer}" for question, answer in entry.questions)


def save_tokenizer(bpe: Any, out: Path) -> None:
    """The tokenizer, processor and chat template as transformers and vLLM load them."""
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    images = CLIPImageProcessor(
        size={"shortest_edge": 96},
        crop_size={"height": 96, "width": 96},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(out)
    processor.save_pretrained(out)
