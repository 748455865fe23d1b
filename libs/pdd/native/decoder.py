"""The forward pass in C++ over a KV pool in this machine's memory."""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence

import torch

from pdd.attention.interface import LayerViews, SequenceSlice
from pdd.model.config import ModelConfig
from pdd.model.parameters import Layer, Parameters
from pdd.model.rope import rotation
from pdd.native import library

_PANEL = 16
_LINE = 64
"""Bytes of a cache line, to which vectors are aligned."""


def unsupported(config: ModelConfig) -> str | None:
    """Why a model's shape does not suit the kernels, or None if it does."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
    }
    odd = [f"{name} = {size}" for name, size in sizes.items() if size % _PANEL]
    if odd:
        return f"{', '.join(odd)} is not a multiple of {_PANEL}"
    if config.head_dim > 512:
        return f"head_dim = {config.head_dim} exceeds 512"
    return None


class NativeDecoder:
    """A `Decoder` of own kernels. The parameters' matrices become its own, in panels of 16 columns.

    A row of logits depends on its sequence's tokens alone, bit for bit, in float32 and in bfloat16: neither on what
    else is in the batch, nor on how a prompt was cut into steps, nor on the number of threads.
    """

    def __init__(self, parameters: Parameters, kv: Sequence[LayerViews], *, threads: int) -> None:
        """`kv` are the pool's views of each layer. Raises `OSError` if there is no library."""
        config = parameters.config
        self._library = library.load()
        self._config = config
        self._dtype = parameters.dtype
        self._is_bfloat16 = parameters.dtype is torch.bfloat16
        self._threads = threads
        self._matrices: list[tuple[int, int, int]] = []
        self._kept: list[object] = [kv]
        self._workspace = torch.empty(0, dtype=torch.uint8)
        keys = kv[0][0]
        layers = (library.Layer * config.num_layers)()
        for index, layer in enumerate(parameters.layers):
            layers[index] = self._layer(layer, kv[index])
        tied = parameters.head is parameters.embedding
        embedding = self._packed([parameters.embedding])
        parameters.embedding = parameters.embedding.new_empty(0)
        head = embedding if tied else self._packed([parameters.head])
        parameters.head = parameters.embedding
        self._model = library.Model(
            is_bfloat16=self._is_bfloat16,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            num_layers=config.num_layers,
            block_size=keys.shape[1],
            block_stride=keys.stride(0),
            token_stride=keys.stride(1),
            rms_norm_eps=config.rms_norm_eps,
            layers=layers,
            embedding=embedding,
            norm=self._wide(parameters.norm),
            head=head,
        )

    @property
    def vocab_size(self) -> int:
        """See `Decoder`."""
        return self._config.vocab_size

    def forward(self, tokens: Sequence[int], slices: Sequence[SequenceSlice], rows: Sequence[int]) -> torch.Tensor:
        """See `Decoder`; logits are float32."""
        size = self._model.block_size
        pages = [-(-part.context_len // size) for part in slices]
        ids = array.array("i", tokens)
        starts = array.array("i", itertools.accumulate((part.query_len for part in slices), initial=0))
        contexts = array.array("i", [part.context_len for part in slices])
        tables = array.array("i", itertools.accumulate(pages, initial=0))
        blocks = array.array("i")
        for part, count in zip(slices, pages, strict=True):
            blocks.extend(part.blocks[:count])
        wanted = array.array("i", rows)
        cos, sin = rotation(self._config, slices)
        step = library.Step(
            tokens=len(tokens),
            sequences=len(slices),
            rows=len(rows),
            ids=_address(ids),
            starts=_address(starts),
            contexts=_address(contexts),
            tables=_address(tables),
            blocks=_address(blocks),
            rows_wanted=_address(wanted),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )
        logits = torch.empty(len(rows), self._config.vocab_size)
        memory = self._memory(len(tokens), len(rows))
        self._library.pdd_forward(self._model, step, logits.data_ptr(), memory, self._threads)
        return logits

    def products(self, tokens: int) -> None:
        """Multiply all matrices, one after the other, by `tokens` rows of zeros: what a step takes at least."""
        pointers = array.array("q", [address for address, _, _ in self._matrices])
        sizes = array.array("q", [size for _, rows, k in self._matrices for size in (rows, k)])
        memory = torch.zeros(2 * tokens * max(sizes))
        self._library.pdd_products(
            _address(pointers),
            _address(sizes),
            len(pointers),
            tokens,
            memory.data_ptr(),
            self._is_bfloat16,
            self._threads,
        )

    def _memory(self, tokens: int, rows: int) -> int:
        needed = self._library.pdd_workspace(self._model, tokens, rows, self._threads) + _LINE
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        address = self._workspace.data_ptr()
        return address + -address % _LINE

    def _layer(self, layer: Layer, kv: LayerViews) -> library.Layer:
        q_norm, k_norm = (None, None) if layer.qk_norms is None else map(self._wide, layer.qk_norms)
        gate_up = layer.gate_up.take()
        return library.Layer(
            input_norm=self._wide(layer.input_norm),
            q_norm=q_norm,
            k_norm=k_norm,
            mlp_norm=self._wide(layer.mlp_norm),
            qkv=self._packed([layer.qkv.take()]),
            attention_out=self._packed([layer.attention_out.take()]),
            gate_up=self._packed(list(gate_up.chunk(2))),
            down=self._packed([layer.down.take()]),
            qkv_bias=self._wide(layer.qkv.bias),
            attention_out_bias=self._wide(layer.attention_out.bias),
            gate_up_bias=self._wide(layer.gate_up.bias),
            down_bias=self._wide(layer.down.bias),
            keys=kv[0].data_ptr(),
            values=kv[1].data_ptr(),
        )

    def _packed(self, parts: list[torch.Tensor]) -> int:
        """Address of matrices `[rows, k]` of equal shape in panels, which alternate."""
        rows, k = parts[0].shape
        panels = torch.empty(len(parts) * -(-rows // _PANEL) * _PANEL * k, dtype=self._dtype)
        for index, part in enumerate(parts):
            self._library.pdd_pack(panels.data_ptr(), part.data_ptr(), rows, k, index, len(parts), self._is_bfloat16)
        self._kept.append(panels)
        self._matrices.append((panels.data_ptr(), panels.numel() // k, k))
        return panels.data_ptr()

    def _wide(self, values: torch.Tensor | None) -> int | None:
        """Address of a vector in float32; None stays None."""
        if values is None:
            return None
        wide = values.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _address(values: array.array[int]) -> int:
    return values.buffer_info()[0]
