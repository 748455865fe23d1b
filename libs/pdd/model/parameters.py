"""The parameters of the dense families (Llama, Mistral, Qwen2, Qwen3), each held once.

What a forward pass makes of them is the decoders' business (`pdd.model.torch_decoder`, `pdd.native.decoder`); they are
filled through `Parameters.slots` by `pdd.model.weights.fill`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pdd.model.config import ModelConfig
from pdd.model.linear import Linear

_CPU = torch.device("cpu")


class Layer:
    """Parameters of one decoder layer. Projections of the same input are fused row-wise into one matrix."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
        self.qkv = Linear(rows, hidden, dtype, device, bias=config.qkv_bias)
        self.qk_norms = torch.empty(2, head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.attention_out = Linear(hidden, config.num_heads * head_dim, dtype, device, bias=config.attention_out_bias)
        self.mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.gate_up = Linear(2 * config.intermediate_size, hidden, dtype, device, bias=config.mlp_bias)
        self.down = Linear(hidden, config.intermediate_size, dtype, device, bias=config.mlp_bias)

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """All projections, in the order in which they are used."""
        return self.qkv, self.attention_out, self.gate_up, self.down

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


class Parameters:
    """All parameters of a model, uninitialised until all `slots` are filled.

    A decoder may put them into another layout afterwards, and then they are its own: `slots` are empty.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device = _CPU) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [Layer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)

    def slots(self) -> dict[str, torch.Tensor]:
        """The memory of every parameter, by Hugging Face name. A tied head has no slot of its own."""
        slots = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if self.head is not self.embedding:
            slots["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            for name, memory in layer.slots(self.config):
                slots[f"model.layers.{index}.{name}"] = memory
        return slots
