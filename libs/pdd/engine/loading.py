"""Builds an engine from a model on disk."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
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
from pdd.model.parameters import Parameters
from pdd.model.torch_decoder import TorchDecoder
from pdd.model.weights import Checkpoint, fill
from pdd.native import library
from pdd.native.decoder import NativeDecoder, unsupported

Kernels = Literal["auto", "native", "torch"]

log = structlog.get_logger()


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
    kernels: Kernels = "auto",
    device: str = "cpu",
) -> LoadedEngine:
    """Load weights and make a pool of at least `pool_tokens` tokens, both on torch's `device`.

    `kernels` "auto" takes the native ones where they can be used and torch's elsewhere. Raises `ModelError` if the
    model cannot be used, `ConfigError` if `max_model_len` exceeds what it was made for or native kernels are asked for
    and cannot be used.
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
    parameters = Parameters(config, getattr(torch, dtype), torch.device(device))
    fill(parameters.slots(), checkpoint.tensors())
    spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    pool = KvPool(spec, 1 + spec.blocks_for(pool_tokens), device)
    cache = RadixCache(BlockPool(pool.num_blocks), block_size, enabled=prefix_cache)
    engine = Engine(
        _decoder(parameters, pool, kernels, threads),
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
    del checkpoint
    _settle_memory()
    return LoadedEngine(engine, pool, identity, config, longest)


def _settle_memory() -> None:
    """Have glibc give back what loading freed, and from here on keep what one step frees for the next.

    By default it maps tensors of some megabytes anew at each use, and the kernel clears every page of them: several
    times the cost of what is computed there. Other C libraries go their own way.
    """
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):
        c_library.malloc_trim(0)
        mmap_threshold, trim_threshold = -3, -1
        c_library.mallopt(mmap_threshold, 32 << 20)
        c_library.mallopt(trim_threshold, 256 << 20)


def _decoder(parameters: Parameters, pool: KvPool, kernels: Kernels, threads: int) -> Decoder:
    """The fastest decoder that `kernels` allow. Raises `ConfigError`."""
    views = [pool.layer(index) for index in range(parameters.config.num_layers)]
    obstacle = "PDD_KERNELS is torch" if kernels == "torch" else _no_native_kernels(parameters)
    if obstacle is None:
        log.info("kernels_chosen", kernels="native", threads=threads)
        return NativeDecoder(parameters, views, threads=threads)
    if kernels == "native":
        raise ConfigError(f"PDD_KERNELS: native kernels cannot be used: {obstacle}")
    log.info("kernels_chosen", kernels="torch", threads=threads, not_native=obstacle)
    return TorchDecoder(parameters, TorchAttention(views))


def _no_native_kernels(parameters: Parameters) -> str | None:
    """Why they cannot be used, or None if they can."""
    if parameters.device.type != "cpu":
        return f"they compute on the CPU, not on {parameters.device}"
    return unsupported(parameters.config) or library.missing()
