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
from semkv.engines import EnginePrompt, EngineResult
from semkv.engines.vllm import ConnectorOptions, VllmEngine, VllmOptions
from semkv.errors import EngineError
from semkv.types import MediaSegment, Role, Segment, Status, TextSegment

pytestmark = pytest.mark.engine

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{{ '\\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}"
    "{% endfor %}answer:"
)
CONTEXT = "The house stands by the river, and a red car is parked in front of it. " * 2


@contextmanager
def engine(options: VllmOptions) -> Iterator[VllmEngine]:
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


def prompt(image: MediaSegment, question: str, tenant: str = "", context: str = CONTEXT) -> EnginePrompt:
    segments: tuple[Segment, ...] = (
        TextSegment("Be brief.", Role.SYSTEM),
        image,
        TextSegment(context, Role.CONTEXT),
        TextSegment(question),
    )
    return EnginePrompt(segments, tenant=tenant, max_tokens=6)


def test_a_chat_model_with_images(llava: Path, image: MediaSegment) -> None:
    with engine(VllmOptions(str(llava), max_model_len=1024)) as vllm:
        assert vllm.accepts_images
        question = prompt(image, "What colour is the car?", tenant="b")
        rendered, tokenization = vllm._render(question)
        assert rendered["prompt"] == (
            f"<s>system: Be brief.\nuser: <image>\n{CONTEXT}\nWhat colour is the car?\nanswer:"
        )
        assert rendered["multi_modal_uuids"] == {"image": [question.uuid(image)]}
        assert rendered["cache_salt"] == question.cache_salt
        assert tokenization == {"add_special_tokens": False}

        first = vllm.generate(question)
        assert first.prompt_tokens > 64
        assert (first.cached_tokens, first.loaded_tokens, first.kv, first.fusion) == (0, None, Status.SKIP, Status.SKIP)
        assert first.ttft_s is not None
        assert 0 < first.ttft_s <= first.latency_s
        again = vllm.generate(question)
        assert again.cached_tokens == (first.prompt_tokens - 1) // 32 * 32
        assert again.token_ids == first.token_ids
        assert vllm.generate(replace(question, tenant="c")).cached_tokens == 0
        with pytest.raises(EngineError, match="vLLM failed on a prompt"):
            vllm.generate(prompt(image, "word " * 2000))
        assert vllm.generate(question).token_ids == first.token_ids
        before = vllm.fingerprint()
    with pytest.raises(EngineError, match="closed"):
        vllm.generate(question)
    (llava / "chat_template.jinja").write_text(TEMPLATE.replace("answer", "reply"), encoding="utf-8")
    try:
        with engine(VllmOptions(str(llava), max_model_len=1024)) as other:
            assert other.fingerprint() != before
    finally:
        (llava / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def test_stored_state_outlives_the_engine(llava: Path, image: MediaSegment, tmp_path: Path) -> None:
    connectors = ConnectorOptions(tmp_path / "cache", fusion=True)
    questions = ["What colour is the car?", "Who lives in the house by the river?"]

    def answers(options: VllmOptions, tenant: str = "") -> list[EngineResult]:
        with engine(options) as vllm:
            return [vllm.generate(prompt(image, q, tenant)) for q in questions]

    plain = VllmOptions(str(llava), max_model_len=1024)
    attached = replace(plain, connectors=connectors)
    cold, first, second, other = (
        answers(plain), answers(attached), answers(attached), answers(attached, "other"),
    )  # fmt: skip
    for results in (first, second, other):
        assert [r.token_ids for r in results] == [r.token_ids for r in cold]
    assert first[0].kv is Status.MISS
    assert first[0].fusion is Status.MISS
    assert second[0].kv is Status.HIT
    assert second[0].loaded_tokens == (cold[0].prompt_tokens - 1) // 32 * 32
    assert second[0].prefix_tokens == 0
    assert second[1].prefix_tokens >= cold[1].cached_tokens
    assert other[0].kv is Status.MISS
    assert other[0].loaded_tokens == 0


def test_a_fusion_hit_where_the_kv_missed(llava: Path, image: MediaSegment, tmp_path: Path) -> None:
    options = VllmOptions(str(llava), max_model_len=1024, connectors=ConnectorOptions(tmp_path, fusion=True))
    with engine(options) as vllm:
        assert vllm.generate(prompt(image, "one?")).fusion is Status.MISS
    with engine(options) as vllm:
        segments = (TextSegment("Another system text.", Role.SYSTEM), image, TextSegment("one?"))
        result = vllm.generate(EnginePrompt(segments, max_tokens=4))
        assert (result.kv, result.fusion) == (Status.MISS, Status.HIT)


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
