"""The transformer of a sentence-transformers model for one short text at a time, on one core.

`LeanBert` has the model's own numbers in 0.4 of the time; `Int8States` takes an eighth, with other vectors
(``bench/encoder.py``).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError

logger = logging.getLogger("semkv")

_PROBES = ("one", "What color is the car, and how many wheels does it have?")
_TOKENS = 16  # of a short text: for how many rows packed weights are laid out
# By how much the states of a probe may differ, which are of the order of one; and the outputs of a packed layer, as a
# share of their largest number.
_SAME = 1e-4

_NEEDED = ("onnx", "onnxruntime")
_OPSET = 17
_FORMAT = "int8 a channel, 1"  # of kept graphs; another one wherever `_export` or `_quantized` changes


class LeanBert:
    """BERT without what batches need: one text has no padding, and so no mask, and every step is one call of torch.

    The kernels are those that transformers comes to, so the numbers are the same; the way there took a quarter of the
    time of a short text.

    Args:
        bert: a `BertModel`, best with its linear layers packed by `pack_linear_layers`.
    """

    def __init__(self, bert: Any) -> None:
        table = bert.embeddings
        self._words, self._kinds = table.word_embeddings.weight, table.token_type_embeddings.weight
        self._places, self._norm = table.position_embeddings.weight, table.LayerNorm
        self._heads = int(bert.config.num_attention_heads)
        self._layers = [
            (
                (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value),
                (layer.attention.output.dense, layer.attention.output.LayerNorm),
                (layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm),
            )
            for layer in bert.encoder.layer
        ]

    def __call__(self, features: dict[str, Any]) -> Any:
        """The states of the tokens, [1, tokens, width], from ``input_ids`` and ``token_type_ids``, [1, tokens]."""
        import torch

        attend, linear = torch.nn.functional.scaled_dot_product_attention, torch.ops.mkldnn._linear_pointwise

        def run(layer: Any, rows: Any, after: str = "none") -> Any:
            return linear(rows, layer.weight, layer.bias, after, [], "none" if after == "gelu" else "")

        ids, kinds = features["input_ids"], features["token_type_ids"]
        count = ids.shape[1]
        states = self._norm(self._words[ids] + self._kinds[kinds] + self._places[:count])
        for parts, (joined, norm), (up, down, last) in self._layers:
            heads = (run(part, states).view(1, count, self._heads, -1).transpose(1, 2) for part in parts)
            seen = attend(*heads).transpose(1, 2).reshape(1, count, -1)
            states = norm(run(joined, seen) + states)
            states = last(run(down, run(up, states, "gelu")) + states)
        return states


def lean_bert(model: Any) -> LeanBert | None:
    """A `SentenceTransformer`'s BERT as `LeanBert`; None for another model, and where it does not give the same."""
    import torch

    try:
        bert = model[0].auto_model
        lean = LeanBert(bert)
        with torch.inference_mode():
            for probe in _PROBES:
                features = {k: v for k, v in model.preprocess([probe]).items() if isinstance(v, torch.Tensor)}
                if not torch.allclose(lean(features), bert(**features)[0], atol=_SAME):
                    return None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # not of this form
        return None
    return lean


def pack_linear_layers(model: Any) -> int:
    """Put a packed layer in the place of each float32 linear layer of a model; how many.

    A short text is bound by reading the weights, and the BLAS behind plain layers reads them less than half as fast.
    The numbers differ in the last bits alone. Nothing is done where torch has no such kernels (or none that work).
    """
    import torch

    class Packed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, plain: Any) -> None:
            super().__init__()
            self.weight = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _TOKENS)
            self.bias = None if plain.bias is None else plain.bias.detach()

        def forward(self, rows: Any) -> Any:
            return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")

    def packed(plain: Any) -> Any:
        rows = torch.linspace(-1, 1, 3 * plain.in_features, dtype=torch.float32).reshape(1, 3, -1)
        expected, layer = plain(rows), Packed(plain)
        difference = (layer(rows) - expected).abs().max()
        return layer if difference <= _SAME * expected.abs().max() else plain

    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32
    ]
    done = 0
    with torch.inference_mode():
        for parent, name, plain in places:
            try:
                layer = packed(plain)
            except (AttributeError, RuntimeError):  # the kernels are torch's own business, so they may be missing
                break
            setattr(parent, name, layer)
            done += layer is not plain
    return done


class Int8States:
    """The transformer of a model with 8-bit weights a channel and activations scaled as they come, on ONNX Runtime.

    A pass runs on one core, in any thread: ONNX Runtime keeps threads of its own, also where vLLM's CPU backend has
    bound torch's. Texts are run one by one, since the scale of a batch would make a vector depend on its company.

    The graph is exported once and kept in ``folder``, by a digest of the weights and of the versions that made it; a
    damaged file is made anew.

    Args:
        key, name: the setting and its value, for errors.
        model: a `SentenceTransformer` whose first module is a transformer.
        folder: of kept graphs.

    Raises:
        ConfigError: ONNX Runtime is not installed, or the model cannot be exported.
    """

    def __init__(self, key: str, name: str, model: Any, folder: Path) -> None:
        if any(importlib.util.find_spec(module) is None for module in _NEEDED):
            raise ConfigError(key, name, "an encoder without @onnx-int8, or: pip install 'semkv[onnx]'")
        try:
            self._session = _session(_graph(model, folder / _identity(model)))
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(key, name, f"an encoder that can be exported to ONNX ({error})") from error
        self._inputs = [given.name for given in self._session.get_inputs()]

    def __call__(self, features: dict[str, Any]) -> Any:
        """The states of the tokens of one text, [1, tokens, width]."""
        import torch

        feed = {name: features[name].numpy() for name in self._inputs}
        return torch.from_numpy(self._session.run(None, feed)[0])


def _runtime(part: str = "") -> Any:
    """ONNX Runtime or a part of it, told to report nothing to its maker: from 1.29 on it does unless the process says
    so before the first import."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module(f"onnxruntime{part}")


def _identity(model: Any) -> str:
    """Names what an export is made of: weights, settings, and the versions of what makes it."""
    import torch

    versions = [f"{package}={importlib.metadata.version(package)}" for package in ("torch", *_NEEDED)]
    transformer = model[0].auto_model
    h = hashlib.sha256(json.dumps([_FORMAT, versions, transformer.config.to_json_string()]).encode())
    for name, tensor in transformer.state_dict().items():
        h.update(name.encode() + b"\0")
        h.update(tensor.detach().flatten().view(torch.uint8).numpy())
    return h.hexdigest()[:32]


def _graph(model: Any, folder: Path) -> bytes:
    """The int8 graph: the file in ``folder`` that is named by its own SHA-256, or a new one, which is kept there."""
    for file in folder.glob("*.onnx"):
        with suppress(OSError):
            data = file.read_bytes()
            if hashlib.sha256(data).hexdigest() == file.stem:
                return data
            logger.warning("%s is damaged: the encoder is exported anew", file)
            file.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        data = _quantized(_export(model, Path(scratch)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            part.write(data)
        Path(part.name).replace(folder / f"{hashlib.sha256(data).hexdigest()}.onnx")
    except OSError as error:  # the next start exports it again
        logger.warning("the exported encoder cannot be kept in %s: %s", folder, error)
    return data


def _export(model: Any, folder: Path) -> Path:
    """The transformer as float32 ONNX, from token ids to the states of the tokens."""
    import torch

    plain = folder / "plain.onnx"
    features = model.preprocess(["one", "two words"])
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in features]

    class States(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model[0].auto_model

        def forward(self, *inputs: Any) -> Any:
            return self.inner(**dict(zip(names, inputs, strict=True)))[0]

    before = model[0].auto_model.config._attn_implementation
    model[0].auto_model.set_attn_implementation("eager")  # what the exporter knows
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                States().eval(),
                tuple(features[name] for name in names),
                str(plain),
                input_names=names,
                output_names=["states"],
                dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*names, "states")},
                opset_version=_OPSET,
                dynamo=False,
            )
    finally:
        model[0].auto_model.set_attn_implementation(before)
    return plain


def _quantized(plain: Path) -> bytes:
    quantization = _runtime(".quantization")
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises a step for models with images
    try:
        small = plain.with_name("int8.onnx")
        quantization.quantize_dynamic(plain, small, per_channel=True, weight_type=quantization.QuantType.QInt8)
    finally:
        root.setLevel(level)
    return small.read_bytes()


def _session(graph: bytes) -> Any:
    onnxruntime = _runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
