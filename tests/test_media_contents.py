"""A media item goes by what the encoder is given, whatever it is called: by a client, by vLLM, by a counter."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_models
from kv_engines import CachedEngine, in_child
from semkv_vllm.media import ByContent, Media, UnreadableError, content_digest

pytestmark = pytest.mark.engine

BLOCK = 4


class Item(dict[str, Any]):
    """Stands for vLLM's MultiModalKwargsItem, of which only these methods are used."""


def item(**fields: Any) -> Item:
    return Item({name: SimpleNamespace(data=value) for name, value in fields.items()})


def pixels(value: float, dtype: str = "float32") -> Any:
    import torch

    return item(
        pixel_values=torch.full((2, 3), value, dtype=getattr(torch, dtype)),
        grid=torch.tensor([1, 2]),
    )


def feature(data: Any, name: str = "cat", at: int = 0) -> Any:
    position = SimpleNamespace(offset=at, length=2)
    return SimpleNamespace(data=data, modality="image", identifier=name, mm_position=position)


class Asked:
    def __init__(self, *features: Any, blocks: int = 4) -> None:
        self.mm_features = list(features)
        self.block_hashes = [bytes([n]) * 32 for n in range(blocks)]
        self.kv_transfer_params: dict[str, Any] = {}


def test_whatever_differs_in_what_the_encoder_is_given_differs_in_the_digest() -> None:
    import numpy as np
    import torch

    one = torch.arange(6, dtype=torch.float32)
    given = [
        pixels(1.0),
        pixels(2.0),
        pixels(1.0, "bfloat16"),
        item(pixel_values=one),
        item(pixel_values=one.reshape(2, 3)),
        item(pixel_values=one.reshape(3, 2)),
        item(pixel_values=one.view(torch.int32)),
        item(other=one),
        item(pixel_values=[one[:3], one[3:]]),
        item(pixel_values=[[one[:3]], one[3:]]),
        item(pixel_values=one, count=1),
        item(pixel_values=one, count=True),
        item(pixel_values=one, count="1"),
        item(pixel_values=torch.tensor(1.0)),
        item(pixel_values=torch.tensor([1.0])),
        item(pixel_values=one[:0], a=one),
    ]
    digests = [content_digest("image", each) for each in given]
    assert len(set(digests)) == len(given)
    assert content_digest("video", given[0]) not in digests
    assert content_digest("image", pixels(1.0)) == digests[0]
    assert (
        content_digest("image", item(pixel_values=one.reshape(2, 3).t().contiguous().t()))
        == digests[4]
    )
    assert content_digest("image", item(pixel_values=np.arange(6, dtype=np.float32))) == digests[3]


@pytest.mark.parametrize("what", ["nothing", "an address", "numbers", "an object", "no data"])
def test_what_cannot_be_seen_is_left_alone_and_said_once(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as vLLM's note of where in shared memory an item lies: another item may come to lie there."""
    import torch

    one = torch.zeros(3)
    data = {
        "nothing": None,
        "an address": item(address=4096, monotonic_id=3, signature=[1, 2], pixel_values=one),
        "numbers": item(place=4096, number=[3, 4]),
        "an object": item(pixel_values=one, more=object()),
        "no data": item(pixel_values=None),
    }[what]
    with pytest.raises(UnreadableError):
        content_digest("image", data)
    media, asked = Media(trusted=False), Asked(feature(data))
    assert not media.content(asked.mm_features[0])
    assert not media.knows(asked)
    assert len(caplog.records) == 1
    assert "trust_media_names" in caplog.text
    trusting = Media(trusted=True)
    assert trusting.knows(asked)
    assert (
        trusting.content(feature(data))
        == trusting.content(feature(data))
        != trusting.content(feature(data, "dog"))
    )


def test_a_name_that_stood_for_what_cannot_be_seen_stands_for_nothing_else() -> None:
    """vLLM's caches may hold the output of the one that was not seen, under the name of the one that is."""
    unseen, seen = feature(item(more=object())), feature(pixels(1.0))
    for first, second in ((unseen, seen), (seen, unseen)):
        stopped: list[Any] = []
        media = Media(trusted=False, stop_storing=stopped.append)
        earlier = Asked(first)
        assert media.knows(earlier) == (first is seen)
        assert not media.knows(Asked(second))
        assert not media.knows(Asked(seen))
        assert (earlier in stopped) == (first is seen)


def test_names_of_any_characters(caplog: pytest.LogCaptureFixture) -> None:
    media = Media(trusted=False)
    odd = [
        feature(pixels(float(n)), name) for n, name in enumerate(("", "\0", "\ud800", "é" * 9999))
    ]
    assert all(media.knows(Asked(each)) for each in odd)
    assert Media(trusted=True).knows(Asked(feature(None, "\ud800")))
    assert not caplog.records


def test_the_digest_of_an_item_is_made_once_and_forgotten_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from semkv_vllm import media as ours

    made: list[str] = []
    monkeypatch.setattr(
        ours, "content_digest", lambda modality, each: made.append(modality) or str(len(made))
    )
    media, kept = Media(trusted=False), pixels(1.0)
    assert {media.content(feature(kept)) for _ in range(3)} == {"1"}
    for _ in range(100):  # in the memory of those before them
        media.content(feature(pixels(1.0)))
    gc.collect()
    assert len(made) == 101
    assert len(media._digests) == 1


def test_a_block_is_found_by_the_content_before_its_end() -> None:
    media = Media(trusted=False)
    plain = Asked().block_hashes
    a, b = feature(pixels(1.0), "a", at=5), feature(pixels(2.0), "b", at=13)

    def hashes(*features: Any) -> list[bytes]:
        return ByContent(Asked(*features), media, BLOCK).block_hashes

    one, both = hashes(a), hashes(a, b)
    assert one[0] == plain[0], "nothing of it is in the first block"
    assert not set(one[1:]) & set(plain)
    assert both[:3] == one[:3], "what comes later changes nothing before it"
    assert both[3] != one[3]
    assert {len(each) for each in both} == {32}
    other = Media(trusted=False)
    renamed = Asked(feature(pixels(1.0), "z", at=5))
    assert ByContent(renamed, other, BLOCK).block_hashes == one
    changed = Asked(feature(pixels(3.0), "z", at=5))
    assert not set(ByContent(changed, Media(trusted=False), BLOCK).block_hashes[1:]) & set(one)
    growing = Asked(a, blocks=2)
    view = ByContent(growing, media, BLOCK)
    assert view.block_hashes == one[:2]
    growing.block_hashes, growing.mm_features = plain, [a, b]
    assert view.block_hashes == both
    assert view.kv_transfer_params is growing.kv_transfer_params


def test_a_name_that_has_stood_for_two_items_ends_the_storing_of_all_that_use_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's caches in the engine go by the name, so either may have been computed from the other one's."""
    stopped: list[Any] = []
    media = Media(trusted=False, stop_storing=stopped.append)
    first, other = Asked(feature(pixels(1.0))), Asked(feature(pixels(1.0), "dog"))
    assert media.knows(first)
    assert media.knows(other)
    assert not media.knows(Asked(feature(pixels(2.0))))
    assert first in stopped
    assert other not in stopped
    assert not media.knows(Asked(feature(pixels(1.0)))), (
        "the first one is as uncertain from then on"
    )
    assert not Media(trusted=False).knows(Asked(feature(pixels(1.0)), feature(pixels(2.0)))), (
        "in one request"
    )
    assert caplog.text.count("one name") == 2
    monkeypatch.setattr("semkv_vllm.media._NAMES", 3)
    for number in range(10):
        assert media.knows(Asked(feature(pixels(1.0), f"name {number}")))
    assert len(media._contents) == 3


# -- in an engine -----------------------------------------------------------------------------------------------------


def _pictures(model: str, folder: str) -> list[list[Any]]:
    """Of four engines on one directory, each asked in turn: tokens, KV loaded, encoder outputs loaded."""

    def asked(engine: CachedEngine, picture: int, name: str, salt: str) -> dict[str, Any]:
        return engine.prompt("", picture, salt) | {"multi_modal_uuids": {"image": [name]}}

    found: list[list[Any]] = []

    def ask(engine: CachedEngine, *what: Any) -> None:
        tokens, outcome = engine.one(asked(engine, *what))
        found.append([tokens, outcome.loaded_tokens, outcome.fusion_loaded])

    with CachedEngine(Path(model), Path(folder)) as engine:
        for picture in (0, 1):
            ask(engine, picture, f"own {picture}", "x")
    with CachedEngine(Path(model), Path(folder)) as engine:
        ask(engine, 0, "cat", "a")
        ask(engine, 1, "cat", "b")  # vLLM may show the other one: that is not kept
        engine.forget()
        ask(engine, 1, "cat", "b")
        ask(engine, 0, "cat", "a")
        engine.settle()
    for picture, salt in ((0, "a"), (1, "b"), (1, "a")):
        with CachedEngine(Path(model), Path(folder)) as engine:
            ask(engine, picture, "cat", salt)
            engine.settle()
    return found


def test_two_items_of_one_name_never_stand_for_each_other(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    found = in_child(_pictures, checkpoint("llava"), tmp_path)
    right = [tokens for tokens, _, _ in found[:2]]
    assert right[0] != right[1]
    *_, again_a, own_b, own_a = found
    assert [again_a[0], own_b[0], own_a[0]] == [right[0], right[1], right[1]]
    assert again_a[1], "what was stored before a second item had the name stays"
    assert not own_b[1]
    assert not own_a[1]
    assert not own_a[2]


def _counted(model: str, folder: str) -> list[list[Any]]:
    """Without prefix cache and processor cache vLLM names pictures by a counter."""
    found: list[list[Any]] = []
    for pictures in ([0, 1], [1, 0, 2]):
        bare = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
        with CachedEngine(Path(model), Path(folder), **bare) as engine:
            for picture in pictures:
                tokens, outcome = engine.one(engine.prompt("", picture))
                found.append([picture, tokens, outcome.fusion_loaded, outcome.fusion_encoded])
            engine.settle()
    return found


def test_pictures_that_are_named_by_a_counter(
    checkpoint: tiny_models.Checkpoint, tmp_path: Path
) -> None:
    found = in_child(_counted, checkpoint("llava"), tmp_path)
    assert [(loaded, encoded) for _, _, loaded, encoded in found] == [
        (0, 1),
        (0, 1),
        (1, 0),
        (1, 0),
        (0, 1),
    ]
    answers = {picture: tokens for picture, tokens, _, _ in found[:2]}
    assert [tokens for _, tokens, _, _ in found[2:4]] == [answers[1], answers[0]]
    assert found[4][1] not in answers.values()
