"""minigqa-vlm's training data: packed rows equal separate prompts, and the chat template writes the training prompt."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'semkv[cpu]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'semkv[cpu]'")

SCRIPTS = Path(__file__).parents[1] / "training" / "minigqa_vlm"
pytestmark = pytest.mark.skipif(
    not SCRIPTS.is_dir(), reason="needs the folder training/ of the repository"
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    names = ("prompt", "data", "network")
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def checkpoint(
    scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    bpe = scripts["prompt"].train_tokenizer()
    folder = tmp_path_factory.mktemp("checkpoint")
    size = scripts["network"].export(scripts["network"].build(), bpe, folder)
    assert size < 16 << 20
    return folder, bpe


def test_the_chat_template_writes_the_training_prompt(
    scripts: dict[str, ModuleType], checkpoint: tuple[Path, Any]
) -> None:
    from transformers import AutoProcessor

    prompt = scripts["prompt"]
    folder, bpe = checkpoint
    processor = AutoProcessor.from_pretrained(folder)
    questions = (
        "Is the cube red?",
        "  is THE cube\tred ?\n",
        "WHAT IS IT?",
        "naïve 數 🙂?",
        "12 of 345",
    )
    for question in questions:
        for options in (
            {},
            {"system": "Be brief."},
            {"context": "Line 1.\n\nLine 2"},
            {"image": False, "context": "C."},
        ):
            text = processor.apply_chat_template(
                prompt.messages(question, **options), add_generation_prompt=True
            )
            assert text == prompt.head(**options) + prompt.tail(question)
            apart = bpe.encode(prompt.head(**options)).ids + bpe.encode(prompt.tail(question)).ids
            assert bpe.encode(text).ids == apart
            assert processor.tokenizer(text, add_special_tokens=False)["input_ids"] == apart
            assert bpe.decode(apart, skip_special_tokens=False) == text


@pytest.mark.parametrize("rows", ["pictures", "documents"])
def test_packed_rows_predict_what_separate_prompts_predict(
    scripts: dict[str, ModuleType], checkpoint: tuple[Path, Any], rows: str
) -> None:
    from transformers import LlavaForConditionalGeneration

    data, network, prompt = scripts["data"], scripts["network"], scripts["prompt"]
    folder, bpe = checkpoint
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    texts = rows == "documents"
    chunk = (
        data.make_text_chunk(Random(1), bpe, 1, most_words=400)
        if texts
        else data.make_chunk(Random(0), bpe, 1)
    )
    most = network.TEXT_TARGETS if texts else network.TARGETS
    ids, segments, positions, labels = (
        torch.from_numpy(a[:1]).long()
        for a in (chunk.ids, chunk.segments, chunk.positions, chunk.labels)
    )
    targets, columns = network.targets_of(labels, most)
    assert int((targets >= 0).sum()) == int((labels >= 0).sum()) < most
    pixels = None if texts else network.normalise(torch.from_numpy(chunk.images))
    with torch.no_grad():
        packed = network.forward(model, pixels, ids, segments, positions, columns)[0]
        for question in (1, 5, 11):
            keep = (segments[0] == 0) | (segments[0] == question)
            alone = ids[0][keep][None]
            logits = model(
                input_ids=alone, pixel_values=pixels, attention_mask=torch.ones_like(alone)
            ).logits[0]
            for target, column in zip(targets[0], columns[0], strict=True):
                if target >= 0 and segments[0, column] == question:
                    place = int(keep[:column].sum())
                    assert alone[0, place + 1] == target
                    slot = int((columns[0] == column).nonzero())
                    torch.testing.assert_close(packed[slot], logits[place], atol=1e-4, rtol=1e-3)
            assert alone[0, -1] == prompt.EOS_ID
