"""The compiled kernels, bound with ctypes. Structures and functions mirror `src/decoder.cpp`.

Calls release the GIL. OpenMP is the one that torch has loaded: torch is imported first.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch

from pdd.native.build import library_path


class Layer(ctypes.Structure):
    """One layer's parameters and where its KV lies."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            *("input_norm", "q_norm", "k_norm", "mlp_norm"),
            *("qkv", "attention_out", "gate_up", "down"),
            *("qkv_bias", "attention_out_bias", "gate_up_bias", "down_bias"),
            *("keys", "values"),
        )
    ]


class Model(ctypes.Structure):
    """A model's shape, its layers, and the KV pool's strides."""

    _fields_ = [
        *((name, c_int64) for name in ("is_bfloat16", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_int64) for name in ("vocab", "num_layers", "block_size", "block_stride", "token_stride")),
        ("rms_norm_eps", c_float),
        ("layers", POINTER(Layer)),
        *((name, c_void_p) for name in ("embedding", "norm", "head")),
    ]


class Step(ctypes.Structure):
    """A step's tokens and sequences."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "sequences", "rows")),
        *((name, c_void_p) for name in ("ids", "starts", "contexts", "tables", "blocks", "rows_wanted", "cos", "sin")),
    ]


@functools.cache
def load() -> ctypes.CDLL:
    """The library. Raises `OSError` if it has not been built from today's sources, or does not load."""
    library = ctypes.CDLL(str(library_path()))
    library.pdd_workspace.restype = c_int64
    library.pdd_workspace.argtypes = [POINTER(Model), c_int64, c_int64, c_int]
    library.pdd_forward.restype = None
    library.pdd_forward.argtypes = [POINTER(Model), POINTER(Step), c_void_p, c_void_p, c_int]
    library.pdd_pack.restype = None
    library.pdd_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int]
    library.pdd_products.restype = None
    library.pdd_products.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int, c_int]
    return library


def missing() -> str | None:
    """Why the kernels cannot be used on this machine, or None if they can."""
    if not torch.cpu._is_avx512_bf16_supported():  # pyright: ignore[reportPrivateUsage]
        return "the CPU has no AVX-512 with bfloat16 products"
    try:
        load()
    except OSError:
        return "they have not been built (make does, where there is a C++ compiler)"
    return None
