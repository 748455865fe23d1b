"""The live instances of a mesh, as its gateway sees them."""

from __future__ import annotations

import httpx
import msgspec

from pdd.local.loopback import client

PROBE_TIMEOUT_S = 2.0


class Load(msgspec.Struct, frozen=True):
    """The figures of an instance that `pdd status` shows."""

    running: int = 0
    waiting: int = 0
    reserved: int = 0
    seats: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    output_tokens: int = 0
    wan_goodput_bytes_per_s: float | None = None


class Instance(msgspec.Struct, frozen=True):
    """A live instance as the gateway reports it."""

    dc: str
    role: str
    instance: str
    epoch: str = ""
    pid: int = 0
    fabric: str = ""
    dtype: str = ""
    max_model_len: int = 0
    load: Load = Load()


class _MeshReport(msgspec.Struct, frozen=True):
    instances: list[Instance]


def live_instances(gateway_url: str) -> list[Instance] | None:
    """What the gateway knows of the mesh (`GET /mesh`); None while it does not answer."""
    try:
        answer = client().get(f"{gateway_url}/mesh", timeout=PROBE_TIMEOUT_S)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=_MeshReport).instances
    except (httpx.HTTPError, msgspec.DecodeError):
        return None
