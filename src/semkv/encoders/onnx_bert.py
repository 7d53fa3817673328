"""The states of a BERT's tokens by ONNX Runtime, on one core.

The graph has a node for each step of a layer, of those that ONNX Runtime computes in one piece (its contrib operators:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). It takes 5 kB and is built at each start;
the weights are handed over beside it, as they lie in ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.encoders.bert import OtherFormError

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.encoders.bert import Numbers, States

    Array = npt.NDArray[np.float32]

Run = Callable[["Numbers", "Numbers", "Numbers"], "Array"]
"""Makes states, [texts, tokens, width], of tokens, of the place of their text among two, 0 or 1, and of 1 where there
is a token and 0 behind them; each [texts, tokens]."""
_OWN = "com.microsoft"  # domain of ONNX Runtime's operators
_OPSET = 17
_IR_VERSION = 8  # of the file format that has this opset
_ERRORS_ONLY = 3
_FIRST = "embeddings.word_embeddings.weight"
"""A file that has it names its weights as this module does."""


def onnx_states(directory: Path, config: Mapping[str, Any]) -> States:
    """What computes the states of a model's tokens.

    Raises:
        OtherFormError: there is no ``model.safetensors``, or its weights have other names, or are no float32.
        ValueError: one of them is missing.
        Exception: what safetensors and ONNX Runtime raise where the file is damaged, or weights have other shapes than
            the config names.
    """
    run = onnx_run(read_weights(directory), config)

    def states(ids: Numbers, there: Numbers) -> Array:
        return run(ids, np.zeros_like(ids), there)

    return states


def onnx_run(weights: Mapping[str, Array], config: Mapping[str, Any]) -> Run:
    """What computes the states of a model's tokens, by its weights. Raises as `onnx_states` does."""
    import onnxruntime

    graph = _Graph(weights, config)
    options = onnxruntime.SessionOptions()
    # Threads that wait for one another stand still when other work has the cores (docs/performance.md).
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it would keep what the longest texts took
    options.log_severity_level = _ERRORS_ONLY
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(weight)
        for name, weight in graph.weights.items()
    }
    options.add_external_initializers([*values], [*values.values()])
    session = onnxruntime.InferenceSession(
        graph.serialized(), options, providers=["CPUExecutionProvider"]
    )

    def run(ids: Numbers, kinds: Numbers, there: Numbers) -> Array:
        given = {"ids": ids, "kinds": kinds, "there": there}
        small = {name: numbers.astype(np.int32) for name, numbers in given.items()}
        states: Array = session.run(["states"], small)[0]
        return states

    return run


def read_weights(directory: Path) -> dict[str, Array]:
    """The weights by name. Raises `OtherFormError` where there is no ``model.safetensors``."""
    from safetensors.numpy import load_file

    file = directory / "model.safetensors"
    if not file.is_file():
        raise OtherFormError("it has no model.safetensors")
    found: dict[str, Array] = load_file(file)
    return found


class _Graph:
    """The nodes of a BERT, and the weights that they read, by the names that the nodes have for them."""

    def __init__(self, given: Mapping[str, Array], config: Mapping[str, Any]) -> None:
        self.weights: dict[str, Array] = {}
        self._given = given
        self._config = config
        self._nodes: list[Any] = []
        states = self._embeddings()
        for number in range(int(config["num_hidden_layers"])):
            states = self._layer(f"encoder.layer.{number}", states)
        self._add("Identity", [states], ["states"], domain="")

    def serialized(self) -> bytes:
        """The graph as ONNX Runtime reads it."""
        from onnx import TensorProto, helper

        shape = ["texts", "tokens"]
        width = int(self._config["hidden_size"])
        graph = helper.make_graph(
            self._nodes,
            name="bert",
            inputs=[
                helper.make_tensor_value_info(name, TensorProto.INT32, shape)
                for name in ("ids", "kinds", "there")
            ],
            outputs=[
                helper.make_tensor_value_info("states", TensorProto.FLOAT, [*shape, width]),
            ],
            initializer=[_placeholder(name, weight) for name, weight in self.weights.items()],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_OWN, 1)],
            ir_version=_IR_VERSION,
        )
        found: bytes = model.SerializeToString()
        return found

    def _embeddings(self) -> str:
        read = [
            "ids",
            "kinds",
            self._weight(_FIRST),
            self._weight("embeddings.position_embeddings.weight"),
            self._weight("embeddings.token_type_embeddings.weight"),
            *self._norm("embeddings.LayerNorm"),
            "there",
        ]
        # It also says how many tokens each text has, which is all of a mask that attention needs.
        self._add(
            "EmbedLayerNormalization",
            read,
            ["embedded", "counts"],
            epsilon=self._epsilon,
        )
        return "embedded"

    def _layer(self, layer: str, states: str) -> str:
        attended = self._attention(f"{layer}.attention.self", states)
        seen = self._projected(f"{layer}.attention.output", attended, states)
        up = self._product(f"{layer}.intermediate.dense", seen)
        bias = self._weight(f"{layer}.intermediate.dense.bias")
        fed = self._add("BiasGelu", [up, bias], [f"{layer}.fed"])
        return self._projected(f"{layer}.output", fed, seen)

    def _attention(self, name: str, states: str) -> str:
        parts = ("query", "key", "value")
        weights = [self._get(f"{name}.{part}.weight").T for part in parts]
        biases = [self._get(f"{name}.{part}.bias") for part in parts]
        read = [
            states,
            self._keep(f"{name}.weight", np.concatenate(weights, axis=1)),
            self._keep(f"{name}.bias", np.concatenate(biases)),
            "counts",
        ]
        heads = int(self._config["num_attention_heads"])
        return self._add("Attention", read, [f"{name}.attended"], num_heads=heads)

    def _projected(self, name: str, states: str, before: str) -> str:
        """A linear layer, what came before it added, at length 1."""
        product = self._product(f"{name}.dense", states)
        read = [
            product,
            before,
            *self._norm(f"{name}.LayerNorm"),
            self._weight(f"{name}.dense.bias"),
        ]
        return self._add("SkipLayerNormalization", read, [f"{name}.states"], epsilon=self._epsilon)

    def _product(self, name: str, states: str) -> str:
        weight = self._keep(f"{name}.weight", self._get(f"{name}.weight").T)
        return self._add("MatMul", [states, weight], [f"{name}.product"], domain="")

    def _norm(self, name: str) -> list[str]:
        return [self._weight(f"{name}.weight"), self._weight(f"{name}.bias")]

    @property
    def _epsilon(self) -> float:
        return float(self._config["layer_norm_eps"])

    def _add(
        self,
        operator: str,
        read: list[str],
        written: list[str],
        domain: str = _OWN,
        **attributes: Any,
    ) -> str:
        """Add a node; the name of what it writes."""
        from onnx import helper

        node = helper.make_node(operator, read, written, domain=domain, **attributes)
        self._nodes.append(node)
        return written[0]

    def _weight(self, name: str) -> str:
        return self._keep(name, self._get(name))

    def _get(self, name: str) -> Array:
        weight = self._given.get(name)
        if weight is None and _FIRST in self._given:  # a library would draw it at random
            raise ValueError(f"the weight {name} is missing")
        if weight is None or weight.dtype != np.float32:
            raise OtherFormError(f"it has no weight {name} in float32")
        return weight

    def _keep(self, name: str, weight: Array) -> str:
        self.weights[name] = np.ascontiguousarray(weight)
        return name


def _placeholder(name: str, weight: Array) -> Any:
    """A weight as the graph names it: its shape, and that its numbers are elsewhere."""
    from onnx import TensorProto

    found = TensorProto()
    found.name = name
    found.data_type = TensorProto.FLOAT
    found.dims.extend(weight.shape)
    found.data_location = TensorProto.EXTERNAL
    location = found.external_data.add()
    location.key = "location"
    location.value = "handed over"
    return found
