"""The live instances of a mesh, as its gateway sees them."""

from __future__ import annotations

import httpx
import msgspec

from pdd.local.loopback import client
from pdd.mesh.messages import Load

PROBE_TIMEOUT_S = 2.0


class Instance(msgspec.Struct, frozen=True):
    """A live instance as the gateway reports it. Its metrics are at `metrics_port`."""

    dc: str
    role: str
    instance: str
    epoch: str
    pid: int
    fabric: str
    dtype: str
    max_model_len: int
    metrics_port: int
    load: Load


class MeshReport(msgspec.Struct, frozen=True):
    """What `GET /mesh` answers. `cache` is `up` or `down`."""

    instances: list[Instance]
    cache: str


def mesh_report(gateway_url: str) -> MeshReport | None:
    """What the gateway knows of the mesh (`GET /mesh`); None while it does not answer."""
    try:
        answer = client().get(f"{gateway_url}/mesh", timeout=PROBE_TIMEOUT_S)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=MeshReport)
    except (httpx.HTTPError, msgspec.DecodeError):
        return None
