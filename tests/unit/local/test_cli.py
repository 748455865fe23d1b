"""The command line: one clear line and status 1 for whatever is wrong."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdd.cli import app
from pdd.local.state import RunState, StateDir
from pdd.local.supervisor import ProcessId

runner = CliRunner()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return StateDir(tmp_path / "pdd")


def error_line(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pdd: ")
    return done.stderr


@pytest.mark.parametrize("command", ["status", "demo"])
def test_nothing_to_look_at(command: str) -> None:
    assert "no mesh is running; `pdd up` starts one" in error_line(command)


def test_down_without_a_mesh_is_no_error() -> None:
    done = runner.invoke(app, ["down"])
    assert (done.exit_code, done.stdout) == (0, "No mesh is running.\n")


def test_up_refuses_before_it_starts_anything(tmp_path: Path, state: StateDir) -> None:
    model = tmp_path / "m.gguf"
    assert f"there is no model at {model}" in error_line("up", "--model", str(model))
    model.touch()
    assert "no pace 'warp'" in error_line("up", "--pace", "warp")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} is taken" in error_line("up", "--model", str(model), "--port", port)
    assert list(state.logs.iterdir()) == []
    assert state.read() is None


def test_one_mesh_at_a_time(state: StateDir) -> None:
    with state.held():
        state.write(RunState(ProcessId.of("supervisor", os.getpid()), [], "http://127.0.0.1:8000", 1))
        assert "a mesh is already running at http://127.0.0.1:8000; `pdd down` stops it" in error_line("up")


def test_logs_name_what_there_is(state: StateDir) -> None:
    state.logs.mkdir(parents=True)
    (state.logs / "relay-0.log").write_text("one\ntwo\n")
    assert runner.invoke(app, ["logs", "relay"]).stdout == "relay-0: one\nrelay-0: two\n"
    assert "there are no logs of cache; there are: relay-0" in error_line("logs", "cache")
