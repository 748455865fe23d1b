"""What can be known to fail before anything is started, each with one clear line."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from pdd.errors import ConfigError

PORT_RANGE = (15_000, 32_000)
"""Below the range that outgoing connections take theirs from, so that a free port stays free."""


def check_model(model: Path) -> None:
    """Raise `ConfigError` if there is nothing at `model`."""
    if not model.exists():
        raise ConfigError(f"there is no model at {model}")


def check_memory(needed_bytes: int, available_bytes: int) -> None:
    """Raise `ConfigError` if the stages would not fit into memory."""
    if needed_bytes > available_bytes:
        raise ConfigError(
            f"the stages need about {needed_bytes / 1e9:.1f} GB of memory and {available_bytes / 1e9:.1f} GB are "
            "available; take fewer stages, a smaller --pool-tokens or another --dtype"
        )


def check_gateway_port(port: int) -> None:
    """Raise `ConfigError` if somebody listens on `port`."""
    if not _is_free(port):
        raise ConfigError(f"port {port} is taken; choose another one for the gateway with --port")


def free_ports(count: int, base: int | None) -> list[int]:
    """`count` free ports: from `base` on, or anywhere. Raises `ConfigError` if they are not free."""
    wanted = range(base, base + count) if base is not None else random.sample(range(*PORT_RANGE), 20 * count)
    free = [port for port in wanted if _is_free(port)][:count]
    if len(free) < count:
        raise ConfigError(f"not all of the {count} ports this mesh needs are free{f' from {base} on' if base else ''}")
    return free


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do: a port in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
