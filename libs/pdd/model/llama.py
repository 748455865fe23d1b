"""The Llama family as one forward pass over a ragged batch.

Owns the parameters (each held once) and the arithmetic. It knows nothing of sequences, blocks or files: attention
comes as an argument, weights are filled into `Llama.slots` by `pdd.model.weights.fill`.

Linear layers compute in the weights' dtype; RMSNorm and RoPE in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pdd.attention.interface import AttentionBackend
from pdd.model.config import ModelConfig
from pdd.model.linear import Linear


class Layer:
    """Parameters of one decoder layer. Projections of the same input are fused row-wise into one matrix."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        self.input_norm = torch.empty(hidden, dtype=dtype)
        self.qkv = Linear((config.num_heads + 2 * config.num_kv_heads) * head_dim, hidden, dtype)
        self.attention_out = Linear(hidden, config.num_heads * head_dim, dtype)
        self.mlp_norm = torch.empty(hidden, dtype=dtype)
        self.gate_up = Linear(2 * config.intermediate_size, hidden, dtype)
        self.down = Linear(hidden, config.intermediate_size, dtype)

    def slots(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(Hugging Face name within the layer, the memory it belongs in)`."""
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = self.qkv.weight
        q, k, v = qkv[:q_rows], qkv[q_rows:-kv_rows], qkv[-kv_rows:]
        gate, up = self.gate_up.weight.chunk(2)
        yield "input_layernorm.weight", self.input_norm
        yield "self_attn.q_proj.weight", q
        yield "self_attn.k_proj.weight", k
        yield "self_attn.v_proj.weight", v
        yield "self_attn.o_proj.weight", self.attention_out.weight
        yield "post_attention_layernorm.weight", self.mlp_norm
        yield "mlp.gate_proj.weight", gate
        yield "mlp.up_proj.weight", up
        yield "mlp.down_proj.weight", self.down.weight


class Llama:
    """See the module. Parameters are uninitialised until all `slots` are filled; `pack` comes after that."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = [Layer(config, dtype) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = 1.0 / config.rope_theta**exponents

    def slots(self) -> dict[str, torch.Tensor]:
        """The memory of every parameter, by Hugging Face name. A tied head has no slot of its own."""
        slots = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if self.head is not self.embedding:
            slots["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            for name, memory in layer.slots(self.config):
                slots[f"model.layers.{index}.{name}"] = memory
        return slots

    def pack(self) -> None:
        """Reorder the layers' matrices for speed; there are no slots any more. The head stays plain: it may be tied."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
                linear.pack()

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a planned step and return the logits of some of its rows.

        `tokens` and `positions` are `[n]` int64, `rows` is `[m]` int64: the indices of the tokens after which the
        next one is wanted. Returns `[m, vocab]` in the weights' dtype.
        """
        config = self.config
        q_heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = self._rotation(positions)
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm)).view(-1, q_heads + 2 * kv_heads, head_dim)
            rotated = _rotate(qkv[:, : q_heads + kv_heads], cos, sin)
            q, k, v = rotated[:, :q_heads], rotated[:, q_heads:], qkv[:, q_heads + kv_heads :]
            attended = attention.run(index, q, k, v).reshape(-1, q_heads * head_dim)
            x = x + layer.attention_out(attended)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return F.linear(self._rms_norm(x[rows], self.norm), self.head)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # torch's CPU kernel computes bfloat16 in float32 and rounds once, at the end.
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `_rotate`, `[n, 1, head_dim]` float32 each."""
        angles = torch.outer(positions.float(), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x`, `[n, heads, head_dim]` (RoPE as Hugging Face's Llama pairs it)."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
