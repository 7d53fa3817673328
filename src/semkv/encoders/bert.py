"""BERT for one text at a time, with weights as oneDNN reads them."""

from __future__ import annotations

from typing import Any

_PROBES = ("one", "What color is the car, and how many wheels does it have?")
_TOKENS = 16  # of a short text: for how many rows packed weights are laid out
# By how much the states of a probe may differ, which are of the order of one; and the outputs of a packed layer, as a
# share of their largest number.
_SAME = 1e-4


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
