"""The dense families (Llama, Mistral, Qwen2, Qwen3) as one forward pass over a ragged batch.

Owns the parameters (each held once) and the arithmetic. It knows nothing of sequences, blocks or files: attention
comes as an argument, weights are filled into `Decoder.slots` by `pdd.model.weights.fill`.

Linear layers compute in the weights' dtype; RMSNorm and RoPE in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pdd.attention.interface import AttentionBackend
from pdd.model.config import ModelConfig
from pdd.model.linear import Linear
from pdd.model.rope import frequencies


class Layer:
    """Parameters of one decoder layer. Projections of the same input are fused row-wise into one matrix."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        self.input_norm = torch.empty(hidden, dtype=dtype)
        rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
        self.qkv = Linear(rows, hidden, dtype, bias=config.qkv_bias)
        self.qk_norms = torch.empty(2, head_dim, dtype=dtype) if config.qk_norm else None
        self.attention_out = Linear(hidden, config.num_heads * head_dim, dtype, bias=config.attention_out_bias)
        self.mlp_norm = torch.empty(hidden, dtype=dtype)
        self.gate_up = Linear(2 * config.intermediate_size, hidden, dtype, bias=config.mlp_bias)
        self.down = Linear(hidden, config.intermediate_size, dtype, bias=config.mlp_bias)

    def slots(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(Hugging Face name within the layer, the memory it belongs in)`."""
        yield "input_layernorm.weight", self.input_norm
        yield "post_attention_layernorm.weight", self.mlp_norm
        if self.qk_norms is not None:
            yield "self_attn.q_norm.weight", self.qk_norms[0]
            yield "self_attn.k_norm.weight", self.qk_norms[1]
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        gate_rows = config.intermediate_size
        for linear, parts in (
            (self.qkv, {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}),
            (self.attention_out, {"self_attn.o_proj": config.hidden_size}),
            (self.gate_up, {"mlp.gate_proj": gate_rows, "mlp.up_proj": gate_rows}),
            (self.down, {"mlp.down_proj": config.hidden_size}),
        ):
            for kind, memory in (("weight", linear.weight), ("bias", linear.bias)):
                if memory is None:
                    continue
                first = 0
                for part, rows in parts.items():
                    yield f"{part}.{kind}", memory[first : first + rows]
                    first += rows


class Decoder:
    """See the module. Parameters are uninitialised until all `slots` are filled; `pack` comes after that."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = [Layer(config, dtype) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self._frequencies = frequencies(config.rotary, config.head_dim)

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
            rotated = _rotate(self._qk_norm(qkv[:, : q_heads + kv_heads], layer), cos, sin)
            q, k, v = rotated[:, :q_heads], rotated[:, q_heads:], qkv[:, q_heads + kv_heads :]
            attended = attention.run(index, q, k, v).reshape(-1, q_heads * head_dim)
            x = x + layer.attention_out(attended)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return F.linear(self._rms_norm(x[rows], self.norm), self.head)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # torch's CPU kernel computes bfloat16 in float32 and rounds once, at the end.
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _qk_norm(self, qk: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Normalise each head of `qk`, `[n, q_heads + kv_heads, head_dim]`, if the model does."""
        if layer.qk_norms is None:
            return qk
        heads, shape, eps = self.config.num_heads, (self.config.head_dim,), self.config.rms_norm_eps
        q_weight, k_weight = layer.qk_norms
        q, k = F.rms_norm(qk[:, :heads], shape, q_weight, eps), F.rms_norm(qk[:, heads:], shape, k_weight, eps)
        return torch.cat((q, k), dim=1)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `_rotate`, `[n, 1, head_dim]` float32 each."""
        angles = torch.outer(positions.float(), self._frequencies)
        scale = self.config.rotary.attention_factor
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x`, `[n, heads, head_dim]` (RoPE as Hugging Face pairs it)."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
