"""The dense families' forward pass in torch, on any device: the plain path, and the oracle of faster ones.

Linear layers compute in the weights' dtype; RMSNorm and RoPE in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdd.attention.interface import AttentionBackend, AttentionBatch, SequenceSlice
from pdd.model.parameters import Layer, Parameters
from pdd.model.rope import rotation


class TorchDecoder:
    """A `Decoder` of torch's operations and an attention backend."""

    def __init__(self, parameters: Parameters, attention: AttentionBackend) -> None:
        """`parameters` are filled; matrices are reordered where that makes torch faster. The head stays plain: it may
        be tied to the embedding, of which rows are wanted."""
        self._parameters = parameters
        self._config = parameters.config
        self._attention = attention
        for layer in parameters.layers:
            for linear in layer.linears:
                linear.pack()

    @property
    def vocab_size(self) -> int:
        """See `Decoder`."""
        return self._config.vocab_size

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], slices: Sequence[SequenceSlice], rows: Sequence[int]) -> torch.Tensor:
        """See `Decoder`; logits are of the weights' dtype."""
        config, weights = self._config, self._parameters
        q_heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._attention.plan(AttentionBatch(slices))
        cos, sin = self._rotation(slices)
        x = F.embedding(torch.tensor(tokens, device=weights.device), weights.embedding)
        for index, layer in enumerate(weights.layers):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm)).view(-1, q_heads + 2 * kv_heads, head_dim)
            rotated = _rotate(self._qk_norm(qkv[:, : q_heads + kv_heads], layer), cos, sin)
            q, k, v = rotated[:, :q_heads], rotated[:, q_heads:], qkv[:, q_heads + kv_heads :]
            attended = self._attention.run(index, q, k, v).reshape(-1, q_heads * head_dim)
            x = x + layer.attention_out(attended)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        wanted = x[torch.tensor(rows, dtype=torch.int64, device=weights.device)]
        return F.linear(self._rms_norm(wanted, weights.norm), weights.head).cpu()

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # torch's CPU kernel computes bfloat16 in float32 and rounds once, at the end.
        return F.rms_norm(x, (self._config.hidden_size,), weight, self._config.rms_norm_eps)

    def _qk_norm(self, qk: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Normalise each head of `qk`, `[n, q_heads + kv_heads, head_dim]`, if the model does."""
        if layer.qk_norms is None:
            return qk
        heads, shape, eps = self._config.num_heads, (self._config.head_dim,), self._config.rms_norm_eps
        q_weight, k_weight = layer.qk_norms
        q, k = F.rms_norm(qk[:, :heads], shape, q_weight, eps), F.rms_norm(qk[:, heads:], shape, k_weight, eps)
        return torch.cat((q, k), dim=1)

    def _rotation(self, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `_rotate`, `[n, 1, head_dim]` float32 each."""
        cos, sin = (part.to(self._parameters.device) for part in rotation(self._config, slices))
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x`, `[n, heads, head_dim]` (RoPE as Hugging Face pairs it)."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
