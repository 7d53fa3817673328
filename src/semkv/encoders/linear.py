"""Linear layers whose weights lie in memory as oneDNN reads them."""

from __future__ import annotations

from typing import Any

_TOKENS = 16  # of a short text: for how many rows the weights are laid out
_SAME = 1e-4  # by how much a layer's output may differ from the plain one's, of its largest number


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
