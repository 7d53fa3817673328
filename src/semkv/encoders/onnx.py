"""The transformer of a sentence-transformers model as an int8 ONNX graph: a third of the time, other vectors."""

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

_NEEDED = ("onnx", "onnxruntime")
_OPSET = 17
_FORMAT = "int8 a channel, 1"  # of kept graphs; another one wherever `_export` or `_quantized` changes


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
