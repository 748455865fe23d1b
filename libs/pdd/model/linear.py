"""A matrix in the layout that the CPU's kernels want.

In bfloat16, oneDNN multiplies blocked weights. Given a plain matrix it reorders it anew at each call, which for a
batch of a few tokens costs as much as the product; reordered once, the same kernels give the same results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """`x @ weight.T + bias` for a weight `[out_features, in_features]`, held once: as `weight` until `pack`.

    `bias` is `[out_features]`, or None.
    """

    def __init__(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, *, bias: bool = False
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Hand the weight over to one who puts it into another layout; `weight` is empty afterwards."""
        taken, self.weight = self.weight, self.weight.new_empty(0)
        return taken

    def pack(self) -> None:
        """Reorder the weight, once it is filled, if that helps. `weight` is empty then."""
        on_cpu = self.weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if self.weight.dtype is torch.bfloat16 and on_cpu:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.take())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is `[n, in_features]`; returns `[n, out_features]`."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], None)
