"""The in-process vLLM engine on tiny random checkpoints: how prompts are rendered, what is reused, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_models
from semkv import keys
from semkv.engines import EnginePrompt
from semkv.errors import EngineError
from semkv.types import MediaSegment, Role, Segment, Status, TextSegment
from semkv_lab.vllm_engine import ConnectorOptions, VllmEngine, VllmOptions
from vllm_forks import quicken

pytestmark = pytest.mark.engine

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{{ '\\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}"
    "{% endfor %}answer:"
)
CONTEXT = "The house stands by the river, and a red car is parked in front of it. " * 2


@contextmanager
def engine(options: VllmOptions) -> Iterator[VllmEngine]:
    quicken()
    made = VllmEngine(options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def llava(checkpoint: tiny_models.Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = shutil.copytree(checkpoint("llava"), tmp_path_factory.mktemp("chat") / "llava")
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> MediaSegment:
    path = tmp_path_factory.mktemp("images") / "a.png"
    tiny_models.picture(1).save(path)
    return MediaSegment(keys.media_id(path.read_bytes()), path, "a")


def prompt(
    image: MediaSegment, question: str, tenant: str = "", context: str = CONTEXT
) -> EnginePrompt:
    segments: tuple[Segment, ...] = (
        TextSegment("Be brief.", Role.SYSTEM),
        image,
        TextSegment(context, Role.CONTEXT),
        TextSegment(question),
    )
    return EnginePrompt(segments, tenant=tenant, max_tokens=6)


def test_a_chat_model_with_images_and_what_outlives_it(
    llava: Path, image: MediaSegment, tmp_path: Path
) -> None:
    plain = VllmOptions(str(llava), max_model_len=1024)
    question = prompt(image, "What colour is the car?")
    with engine(plain) as vllm:
        assert vllm.accepts_images
        asked = replace(question, tenant="b")
        rendered, tokenization = vllm._render(asked)
        assert rendered["prompt"] == (
            f"<s>system: Be brief.\nuser: <image>\n{CONTEXT}\nWhat colour is the car?\nanswer:"
        )
        assert rendered["multi_modal_uuids"] == {"image": [asked.uuid(image)]}
        assert rendered["cache_salt"] == asked.cache_salt
        assert tokenization == {"add_special_tokens": False}

        cold = vllm.generate(question)
        usable = (cold.prompt_tokens - 1) // 32 * 32
        assert usable >= 64
        assert (cold.cached_tokens, cold.loaded_tokens, cold.kv, cold.fusion) == (
            0,
            None,
            Status.SKIP,
            Status.SKIP,
        )
        assert cold.ttft_s is not None
        assert 0 < cold.ttft_s <= cold.latency_s
        again = vllm.generate(question)
        assert (again.cached_tokens, again.token_ids) == (usable, cold.token_ids)
        assert vllm.generate(asked).cached_tokens == 0
        with pytest.raises(EngineError, match="vLLM failed on a prompt"):
            vllm.generate(prompt(image, "word " * 2000))
        assert vllm.generate(question).token_ids == cold.token_ids
        before = vllm.fingerprint()
        vllm._chat_template = "another"
        del vllm._fingerprint
        assert vllm.fingerprint() != before
    with pytest.raises(EngineError, match="closed"):
        vllm.generate(question)

    attached = replace(plain, connectors=ConnectorOptions(tmp_path / "cache", fusion=True))
    with engine(attached) as vllm:
        stored = vllm.generate(question)
        assert (stored.token_ids, stored.kv, stored.fusion) == (
            cold.token_ids,
            Status.MISS,
            Status.MISS,
        )
    with engine(attached) as vllm:
        found = vllm.generate(question)
        assert (found.token_ids, found.kv, found.loaded_tokens) == (
            cold.token_ids,
            Status.HIT,
            usable,
        )
        assert found.prefix_tokens == 0
        segments = (TextSegment("Another system text.", Role.SYSTEM), image, TextSegment("one?"))
        result = vllm.generate(EnginePrompt(segments, max_tokens=4))
        assert (result.kv, result.fusion) == (Status.MISS, Status.HIT)
        other = vllm.generate(replace(question, tenant="other"))
        assert (other.token_ids, other.kv, other.loaded_tokens) == (cold.token_ids, Status.MISS, 0)


def test_a_model_without_a_chat_template_gets_plain_text(
    checkpoint: tiny_models.Checkpoint, image: MediaSegment
) -> None:
    with engine(VllmOptions(str(checkpoint("opt")), max_model_len=256)) as vllm:
        assert not vllm.accepts_images
        text = EnginePrompt((TextSegment("S", Role.SYSTEM), TextSegment("Who?")), max_tokens=3)
        assert vllm._render(text) == ({"prompt": "S\nWho?"}, {})
        assert len(vllm.generate(text).token_ids) > 0
        with pytest.raises(EngineError, match="takes no images"):
            vllm.generate(prompt(image, "Who?"))


def test_a_checkpoint_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"a directory without a config\.json"):
        VllmEngine(VllmOptions(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}', encoding="utf-8")
    with pytest.raises(EngineError, match=f"model '{tmp_path}' cannot be loaded"):
        VllmEngine(VllmOptions(str(tmp_path)))
