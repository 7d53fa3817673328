"""A sentence-transformers model as an int8 ONNX graph: a short text in a fraction of the time, with its own vectors."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import ConfigError

if TYPE_CHECKING:
    from semkv.types import Vector

_NEEDED = ("onnx", "onnxruntime")
_RUNTIME = ("onnxruntime", "onnxruntime.quantization")
_OPSET = 17


class Int8Forward:
    """The transformer of a model with 8-bit weights a channel and activations scaled as they come, on ONNX Runtime.

    A pass runs on one core, in any thread: ONNX Runtime keeps threads of its own, also where vLLM's CPU backend has
    bound torch's. Texts are run one by one, since the scale of a batch would make a vector depend on its company.

    Args:
        key, name: the setting and its value, for errors.
        model: a `SentenceTransformer` whose first module is a transformer.

    Raises:
        ConfigError: ONNX Runtime is not installed, or the model cannot be exported.
    """

    def __init__(self, key: str, name: str, model: Any) -> None:
        if any(importlib.util.find_spec(module) is None for module in _NEEDED):
            raise ConfigError(key, name, "an encoder without @onnx-int8, or: pip install onnx onnxruntime")
        self._model = model
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._inputs = _export(model, Path(folder))
                self._session = _session(Path(folder))
            except (RuntimeError, AttributeError, TypeError, ValueError) as error:
                raise ConfigError(key, name, f"an encoder that can be exported to ONNX ({error})") from error

    def __call__(self, text: str) -> Vector:
        """The unit vector of one text."""
        import torch

        features = self._model.preprocess([text])
        feed = {name: features[name].numpy() for name in self._inputs}
        with torch.inference_mode():
            features["token_embeddings"] = torch.from_numpy(self._session.run(None, feed)[0])
            for module in list(self._model)[1:]:
                features = module(features)
            vector: Vector = features["sentence_embedding"][0].float().numpy()
        return (vector / np.linalg.norm(vector)).astype(np.float32)


def _export(model: Any, folder: Path) -> list[str]:
    """Write ``plain.onnx``; the names of its inputs."""
    import torch

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
                str(folder / "plain.onnx"),
                input_names=names,
                output_names=["states"],
                dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*names, "states")},
                opset_version=_OPSET,
                dynamo=False,
            )
    finally:
        model[0].auto_model.set_attn_implementation(before)
    return names


def _session(folder: Path) -> Any:
    onnxruntime, quantization = (importlib.import_module(name) for name in _RUNTIME)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises a step for models with images
    try:
        small = folder / "int8.onnx"
        quantization.quantize_dynamic(
            folder / "plain.onnx", small, per_channel=True, weight_type=quantization.QuantType.QInt8
        )
    finally:
        root.setLevel(level)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(small), options, providers=["CPUExecutionProvider"])
