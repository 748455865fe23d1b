"""Builds an engine from a model on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pdd.attention.torch_backend import TorchAttention
from pdd.engine.block_pool import BlockPool
from pdd.engine.engine import Engine
from pdd.engine.kv_pool import KvPool
from pdd.engine.radix import RadixCache
from pdd.errors import ConfigError, ModelError
from pdd.kv import KvSpec, ModelIdentity
from pdd.model.config import ModelConfig
from pdd.model.decoder import Decoder
from pdd.model.weights import Checkpoint, fill


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, its pool, and what others must know of the model."""

    engine: Engine
    kv_pool: KvPool
    identity: ModelIdentity
    config: ModelConfig
    max_model_len: int


def load_engine(
    model: Path,
    *,
    dtype: str,
    block_size: int,
    pool_tokens: int,
    step_tokens: int,
    seats: int,
    max_model_len: int | None = None,
    threads: int = 1,
    prefix_cache: bool = False,
) -> LoadedEngine:
    """Load weights and make a pool of at least `pool_tokens` tokens.

    Raises `ModelError` if the model cannot be used, `ConfigError` if `max_model_len` exceeds what it was made for.
    """
    torch.set_num_threads(threads)
    checkpoint = Checkpoint(model)
    config = checkpoint.config
    longest = max_model_len or config.context_length
    if longest > config.context_length:
        raise ConfigError(f"PDD_MAX_MODEL_LEN: {longest} exceeds the model's context of {config.context_length}")
    if config.sliding_window is not None and longest > config.sliding_window:
        raise ModelError(
            f"sliding_window = {config.sliding_window} is not supported for contexts of {longest} tokens "
            f"(at most {config.sliding_window}: set PDD_MAX_MODEL_LEN)"
        )
    decoder = Decoder(config, getattr(torch, dtype))
    fill(decoder.slots(), checkpoint.tensors())
    decoder.pack()
    spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    pool = KvPool(spec, 1 + spec.blocks_for(pool_tokens))
    cache = RadixCache(BlockPool(pool.num_blocks), block_size, enabled=prefix_cache)
    attention = TorchAttention([pool.layer(index) for index in range(config.num_layers)])
    engine = Engine(
        decoder,
        attention,
        cache,
        step_tokens=step_tokens,
        seats=seats,
        max_model_len=longest,
    )
    identity = ModelIdentity(
        weights=checkpoint.identity(),
        architecture=config.architecture,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
    )
    return LoadedEngine(engine, pool, identity, config, longest)
