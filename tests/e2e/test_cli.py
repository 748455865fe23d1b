"""`pdd up --detach`, `status`, `logs`, `down`, as a user types them, in homes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdd.local.scrape import scrape
from pdd.model.source import ensure_default_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "160"}


def pdd(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdd.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def children(environment: dict[str, str]) -> Iterator[None]:
    """Nothing that was started in this environment is left behind."""
    yield
    home = environment["XDG_STATE_HOME"]
    left: list[list[str]] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_STATE_HOME") == home and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.cmdline())
    assert not left


@pytest.mark.usefixtures("children")
def test_up_status_logs_down(environment: dict[str, str]) -> None:
    model = str(ensure_default_model())
    port = str(free_port())
    small = ["--pool-tokens", "1024", "--no-demo", "--port", port, "--model", model, "--local-main-decode", "0"]
    up = pdd(environment, "up", "--detach", *small)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert f"http://127.0.0.1:{port}" in up.stdout

        status = pdd(environment, "status")
        assert status.returncode == 0
        assert "main_decode" in status.stdout
        assert "0/16" in status.stdout

        told = json.loads(pdd(environment, "status", "--json").stdout)
        assert {one["load"]["total_blocks"] for one in told["instances"]} == {64}
        ports = [*(one["metrics_port"] for one in told["instances"]), told["cache"]["metrics_port"]]
        urls = [f"http://127.0.0.1:{port}/metrics" for port in ports] + [told["gateway"]["url"] + "/metrics"]
        scrapes = [samples for url in urls if (samples := scrape(url)) is not None]
        roles = sorted(role for samples in scrapes for role in samples.by("pdd_process_info", "role"))
        assert roles == ["cache", "gateway", "main_decode", "prefill", "relay"]

        again = pdd(environment, "up", "--detach", *small)
        assert again.returncode == 1
        assert len((again.stdout + again.stderr).strip().splitlines()) == 1

        logs = pdd(environment, "logs", "prefill")
        assert "process_started" in logs.stdout
    finally:
        down = pdd(environment, "down")
    assert down.returncode == 0
    assert pdd(environment, "status").returncode == 1


@pytest.mark.usefixtures("children")
def test_ctrl_c_stops_everything_that_was_started(environment: dict[str, str]) -> None:
    model = str(ensure_default_model())
    port = str(free_port())
    small = ["--pool-tokens", "1024", "--no-demo", "--port", port, "--model", model, "--local-main-decode", "0"]
    command = [sys.executable, "-m", "pdd.cli", "up", *small]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        for line in up.stdout:
            if "curl" in line:
                break
        up.send_signal(signal.SIGINT)
        up.stdout.read()
        assert up.wait(timeout=60) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["--pool-tokens", "200000000"], "memory"),
    ],
)
def test_what_cannot_work_is_one_clear_line(environment: dict[str, str], arguments: list[str], says: str) -> None:
    result = pdd(environment, "up", "--detach", "--no-demo", "--port", str(free_port()), *arguments)
    assert result.returncode == 1
    last = (result.stdout + result.stderr).strip().splitlines()[-1]
    assert says in last
    assert "Traceback" not in result.stdout + result.stderr


def test_a_taken_port_is_one_clear_line(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = pdd(environment, "up", "--detach", "--no-demo", "--port", port)
    assert result.returncode == 1
    assert port in (result.stdout + result.stderr).strip().splitlines()[-1]
