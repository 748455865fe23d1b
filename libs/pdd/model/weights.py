"""Weights as they lie on disk: one stream of named tensors from a GGUF file or a Hugging Face directory.

Names are Hugging Face's parameter names in both cases. Owns the files' formats and their identity; which parameters
a model has, and where they go, is the model's business.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from pdd.errors import ModelError
from pdd.model.config import GGUF_ROPE_DIVISORS, ModelConfig

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""What old versions of transformers saved along with the weights, though the configuration says it all."""


class GgufFile(gguf.GGUFReader):
    """A GGUF file, mapped into memory. Reading a header takes thousands of slices, and those of a plain array are
    several times cheaper than those of the `memmap` the reader would use."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)


class Checkpoint:
    """A model on disk: its configuration, its tensors one after the other, and the identity of its weights."""

    def __init__(self, path: Path) -> None:
        """`path` is a GGUF file or a Hugging Face directory. Raises `ModelError` if it is neither."""
        self._gguf: gguf.GGUFReader | None = None
        if path.is_dir():
            self.files = _safetensors_files(path)
            config = ModelConfig.from_hf(_read_json(path / "config.json"))
            # A head in the files wins over the flag, as in transformers: some checkpoints hold both.
            tied = config.tie_word_embeddings and not any("lm_head.weight" in _names(file) for file in self.files)
            self.config = replace(config, tie_word_embeddings=tied)
            return
        self.files = [path]
        try:
            self._gguf = GgufFile(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not a GGUF file: {error}") from None
        self.config = ModelConfig.from_gguf(self._gguf)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(Hugging Face parameter name, tensor)`; float32 from GGUF, as stored from safetensors.

        One tensor is in memory at a time, if the caller keeps none. Raises `ModelError` if one cannot be read.
        """
        return _safetensors(self.files) if self._gguf is None else _gguf_tensors(self._gguf, self.config)

    def identity(self) -> str:
        """SHA-256 (hex) of the weights: of the file, or of the digests of the files in the order of their names."""
        digests: list[bytes] = []
        for file in self.files:
            with file.open("rb") as stream:
                digests.append(hashlib.file_digest(stream, "sha256").digest())
        return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def fill(slots: Mapping[str, torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy each tensor into the slot of its name, converting the dtype.

    Raises `ModelError` if a slot stays empty, a tensor has no slot, or shapes differ.
    """
    empty = dict(slots)
    for name, tensor in tensors:
        slot = empty.pop(name, None)
        if slot is None:
            raise ModelError(f"unexpected weight: {name}")
        if slot.shape != tensor.shape:
            raise ModelError(f"weight {name} has shape {tuple(tensor.shape)}, expected {tuple(slot.shape)}")
        slot.copy_(tensor)
    if empty:
        raise ModelError(f"missing weight: {min(empty)}" + (f" and {len(empty) - 1} more" if len(empty) > 1 else ""))


def _gguf_tensors(reader: gguf.GGUFReader, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    for stored in reader.tensors:
        if stored.name == GGUF_ROPE_DIVISORS:
            continue  # part of the configuration
        name = _hf_name(stored.name)
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            raise ModelError(f"weight {stored.name}: type {stored.tensor_type.name} is not supported") from None
        tensor = torch.from_numpy(np.require(values, requirements="W"))  # what needs no conversion is a read-only map
        if config.architecture == "llama" and ".q_proj." in name:
            tensor = _halves(tensor, config.num_heads)
        elif config.architecture == "llama" and ".k_proj." in name:
            tensor = _halves(tensor, config.num_kv_heads)
        yield name, tensor


def _hf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = _GGUF_LAYER_NAME.fullmatch(name)
    part = _GGUF_LAYER.get(match[2]) if match else None
    if match is None or part is None:
        raise ModelError(f"unexpected weight: {name}")
    return f"model.layers.{match[1]}.{part}.{match[3]}"


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows, `[heads, pair, 2]`, to `[heads, 2, pair]`: RoPE here pairs halves.

    llama.cpp reorders them for the architecture `llama` alone. `weight` may be a matrix or a bias.
    """
    return weight.view(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = cast("dict[str, str]", _read_json(index).get("weight_map", {}))
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise ModelError(f"{directory} lacks {missing[0] if missing else 'the weights its index names'}")
    return files


def _safetensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in _names(file):
            if _DERIVED.fullmatch(name):
                continue
            with _open(file) as stored:
                yield name, stored.get_tensor(name)


def _names(file: Path) -> list[str]:
    with _open(file) as stored:
        return list(stored.keys())


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold an object")
    return cast("dict[str, Any]", content)
