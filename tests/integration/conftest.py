"""Real servers for the control plane: two NATS servers joined by a leaf link, and Valkey. One set for all tests."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from pdd.local import servers
from pdd.local.preflight import free_ports
from pdd.local.supervisor import ProcessGroup, ProcessSpec
from tests.model_fixtures import save_tiny_llama

START_S = 20.0


@dataclass(frozen=True)
class ControlPlane:
    """Where the servers listen: NATS of datacenter a and of b (by client URL), Valkey by port."""

    nats_a: str
    nats_b: str
    valkey: int


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Generator[ControlPlane]:
    """Both NATS servers with their leaf link up, and Valkey. Nothing of them is left behind."""
    folder: Path = tmp_path_factory.mktemp("control-plane")
    a, a_http, leaf, b, b_http, valkey = free_ports(6, None)
    group = ProcessGroup(folder)
    try:
        group.start(servers.nats_server("a", folder, a, a_http, servers.leaf_listener(leaf)))
        group.start(servers.nats_server("b", folder, b, b_http, servers.leaf_remote(leaf)))
        group.start(servers.valkey_server(folder, valkey))
        group.wait_for(
            lambda: "" if servers.leaf_ready(b_http) and servers.valkey_ready(valkey) else "nats, valkey", START_S
        )
        yield ControlPlane(f"nats://127.0.0.1:{a}", f"nats://127.0.0.1:{b}", valkey)
    finally:
        _stop(group)


class OwnServer:
    """A server of one test's own, which it may stop and start again on the same port."""

    def __init__(self, group: ProcessGroup, spec: ProcessSpec, port: int, ready: Callable[[], bool]) -> None:
        self.port = port
        self._group = group
        self._spec = spec
        self._ready = ready

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._group.start(self._spec)
        self._group.wait_for(lambda: "" if self._ready() else self._spec.name, START_S)

    def stop(self) -> None:
        """End it."""
        self._group.stop([self._spec.name])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, to freeze it or to let it go on."""
        self._group.signal(self._spec.name, number)


@pytest.fixture
def own_nats(tmp_path: Path) -> Generator[OwnServer]:
    """A NATS server without a leaf link."""
    port, http = free_ports(2, None)
    group = ProcessGroup(tmp_path)
    server = OwnServer(
        group, servers.nats_server("a", tmp_path, port, http, ""), port, lambda: servers.nats_ready(http)
    )
    try:
        server.start()
        yield server
    finally:
        _stop(group)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Generator[OwnServer]:
    """A Valkey."""
    (port,) = free_ports(1, None)
    group = ProcessGroup(tmp_path)
    server = OwnServer(group, servers.valkey_server(tmp_path, port), port, lambda: servers.valkey_ready(port))
    try:
        server.start()
        yield server
    finally:
        _stop(group)


@pytest.fixture
def unique() -> str:
    """A name that no other test uses: the servers are shared, subjects and keys are not."""
    return secrets.token_hex(4)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama on disk."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory)
    return directory


def _stop(group: ProcessGroup) -> None:
    ids = group.ids()
    group.stop()
    assert [one.name for one in ids if psutil.pid_exists(one.pid)] == []
