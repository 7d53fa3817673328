"""BERT for one text at a time."""

from __future__ import annotations

from typing import Any

_PROBES = ("one", "What color is the car, and how many wheels does it have?")
_SAME = 1e-4  # by how much the states of a probe may differ, which are of the order of one


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
