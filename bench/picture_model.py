"""A small Qwen3-VL that is trained from nothing: its files, its pixels, and its pass over many equal pictures at once.

transformers' own pass takes pictures one after the other and draws nothing. Here all pictures are square and of one
size, so they are one batch; `differs_from_transformers` says how far that is from transformers' own pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import picture_questions as questions
import torch
from picture_questions import CELL, SHADES, Batch
from torch import Tensor
from torch.nn import functional

MERGED = 2  # patches of a token, in a row and in a column
PATCH = CELL // MERGED
LONGEST = 2048
TEXT = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
VISION = {"depth": 2, "hidden_size": 192, "intermediate_size": 512, "num_heads": 3}
TINY_TEXT = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TINY_VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 1}
SPECIAL = {
    questions.BEGIN: "<s>",
    questions.END_OF_TEXT: "</s>",
    questions.UNKNOWN: "<unk>",
    questions.VISION_START: "<|vision_start|>",
    questions.VISION_END: "<|vision_end|>",
    questions.PICTURE: "<|image_pad|>",
    questions.VIDEO: "<|video_pad|>",
}


def new_model(*, side: int, tiny: bool, seed: int) -> Any:
    """A `Qwen3VLForConditionalGeneration` with drawn weights, for pictures of ``side`` by ``side`` tokens."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    width = (TINY_TEXT if tiny else TEXT)["hidden_size"]
    text = {
        **(TINY_TEXT if tiny else TEXT),
        "vocab_size": questions.VOCABULARY,
        "head_dim": 64,
        "max_position_embeddings": LONGEST,
        "bos_token_id": questions.BEGIN,
        "eos_token_id": questions.END_OF_TEXT,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
        },
    }
    vision = {
        **(TINY_VISION if tiny else VISION),
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 2,
        "out_hidden_size": width,
        "num_position_embeddings": (MERGED * side) ** 2,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=questions.PICTURE,
        video_token_id=questions.VIDEO,
        vision_start_token_id=questions.VISION_START,
        vision_end_token_id=questions.VISION_END,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen3VLForConditionalGeneration(config)


def save_processor(folder: Path, side: int) -> Any:
    """Tokenizer and image processor of such a model, for vLLM."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {SPECIAL.get(number, f"t{number}"): number for number in range(questions.VOCABULARY)}
    words = Tokenizer(models.WordLevel(names, SPECIAL[questions.UNKNOWN]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(SPECIAL.values()))
    marks = {"bos": "<s>", "eos": "</s>", "pad": "</s>", "unk": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        **{f"{use}_token": name for use, name in marks.items()},
    )
    pixels = (side * CELL) ** 2
    half = [0.5, 0.5, 0.5]
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": pixels, "longest_edge": pixels},
            patch_size=PATCH,
            merge_size=MERGED,
            image_mean=half,
            image_std=half,
        ),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGED),
    )
    processor.save_pretrained(folder)
    return processor


# ---------------------------------------------------------------------- pixels


class Painter:
    """Draws scenes, on a device."""

    def __init__(self, device: str) -> None:
        self._glyphs = torch.from_numpy(questions.shifted_glyphs()).to(device)
        self._shades = torch.from_numpy(SHADES).to(device)
        self._device = device

    def paint(self, scenes: np.ndarray, grounds: np.ndarray) -> Tensor:
        """Pictures, uint8 ``[pictures, side * CELL, side * CELL, 3]``, of what a `Batch` has under these names."""
        count, cells, _ = scenes.shape
        side = round(cells**0.5)
        glyph, colour, shift = torch.from_numpy(scenes).to(self._device).long().unbind(-1)
        grey = torch.from_numpy(grounds).to(self._device)[:, None, None, None, None]
        shade = self._shades[colour][:, :, None, None, :]
        painted = torch.where(self._glyphs[glyph, shift][..., None], shade, grey)
        grid = painted.view(count, side, side, CELL, CELL, 3).transpose(2, 3)
        return grid.reshape(count, side * CELL, side * CELL, 3)


def patches(pictures: Tensor) -> Tensor:
    """What the image processor makes of pictures, ``[pictures, patches, values]``: the patches of a token together."""
    count, height, width, _ = pictures.shape
    values = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1.0
    split = values.view(
        count,
        3,
        height // CELL,
        MERGED,
        PATCH,
        width // CELL,
        MERGED,
        PATCH,
    )
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7).flatten(1, 4)  # patches, channel, row, column
    twice = ordered[:, :, :, None].expand(-1, -1, -1, 2, -1, -1)  # a picture is two equal frames
    return twice.flatten(2)


# ---------------------------------------------------------------------- the pass


class Network:
    """A model's pass over texts with equal pictures.

    Args:
        model: of `new_model`, on a device.
        side: tokens of a picture in a row, and in a column.
    """

    def __init__(self, model: Any, side: int) -> None:
        self._model = model
        self._side = side
        self._device = str(model.device)
        self._painter = Painter(self._device)
        grid = torch.arange((MERGED * side) ** 2, device=self._device)
        split = grid.view(side, MERGED, side, MERGED)
        self._order = split.transpose(1, 2).flatten()  # of the patches, by token
        self._turns = self._vision_turns()

    def _vision_turns(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine for the patches of a picture, each ``[patches, width of a head]``: rows, then columns."""
        config = self._model.config.vision_config
        half = config.hidden_size // config.num_heads // 2
        exponents = torch.arange(0, half, 2, device=self._device) / half
        row = self._order // (MERGED * self._side)
        column = self._order % (MERGED * self._side)
        angles = torch.cat([place[:, None] / 10000.0**exponents for place in (row, column)], dim=-1)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()

    def hidden(self, ids: Tensor, given: Batch) -> Tensor:
        """The last hidden states, ``[rows, length, width]``."""
        pictures = self._painter.paint(given.scenes, given.grounds)
        first, added = self._seen(patches(pictures))
        body = self._model.model.language_model
        is_picture = (ids == questions.PICTURE).unsqueeze(-1)
        hidden = body.embed_tokens(ids)
        hidden = hidden.masked_scatter(is_picture, first.to(hidden.dtype))
        extra = torch.zeros_like(hidden).masked_scatter(is_picture, added.to(hidden.dtype))
        turns = body.rotary_emb(hidden, positions(ids, self._side))
        for number, layer in enumerate(body.layers):
            hidden = layer(hidden, attention_mask=None, position_embeddings=turns)
            if number == 0:
                hidden = hidden + extra
        normed: Tensor = body.norm(hidden)
        return normed

    def _seen(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder makes of pictures: for the embeddings, and what is added behind the first layer."""
        tower = self._model.model.visual
        first = tower.patch_embed.proj
        hidden = functional.linear(values, first.weight.flatten(1), first.bias)
        hidden = hidden + tower.pos_embed(self._order)
        added = None
        for block in tower.blocks:
            hidden = hidden + self._attended(block.attn, block.norm1(hidden))
            hidden = hidden + block.mlp(block.norm2(hidden))
            if added is None:
                added = tower.deepstack_merger_list[0](hidden.flatten(0, 1))
        return tower.merger(hidden.flatten(0, 1)), added

    def _attended(self, attention: Any, hidden: Tensor) -> Tensor:
        count, size, _ = hidden.shape
        split = attention.qkv(hidden).view(count, size, 3, attention.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        found = functional.scaled_dot_product_attention(
            self._turned(query).to(value.dtype),
            self._turned(key).to(value.dtype),
            value,
        )
        attended: Tensor = attention.proj(found.transpose(1, 2).flatten(2))
        return attended

    def _turned(self, rows: Tensor) -> Tensor:
        cos, sin = self._turns
        first, second = rows.float().chunk(2, dim=-1)
        return rows.float() * cos + torch.cat((-second, first), dim=-1) * sin


def positions(ids: Tensor, side: int) -> Tensor:
    """M-RoPE's positions of texts with pictures, ``[3, rows, length]``: a picture takes as many as its side."""
    is_picture = (ids == questions.PICTURE).long()
    before = is_picture.cumsum(-1) - is_picture
    place = before % (side * side)
    text = torch.arange(ids.shape[-1], device=ids.device) - before
    base = text + before // (side * side) * side
    axes = torch.stack((torch.zeros_like(place), place // side, place % side))
    return base + axes * is_picture


def differs_from_transformers(model: Any, given: Batch, side: int, folder: Path) -> float:
    """The largest difference of a logit between `Network` and transformers' pass over what its processor makes."""
    from PIL import Image

    device = model.device
    ids = torch.from_numpy(given.ids.astype(np.int64)).to(device)
    pictures = Painter("cpu").paint(given.scenes, given.grounds)
    images = [Image.fromarray(picture.numpy()) for picture in pictures]
    seen = save_processor(folder, side).image_processor(images, return_tensors="pt")
    with torch.inference_mode():
        own = model.lm_head(Network(model, side).hidden(ids, given))
        wanted = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == questions.PICTURE).int(),
            pixel_values=seen["pixel_values"].to(device),
            image_grid_thw=seen["image_grid_thw"].to(device),
        ).logits
    return float((own - wanted).abs().max())
