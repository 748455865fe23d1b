"""Processes are started, seen to die, and never left behind: with real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pdd.errors import ConfigError
from pdd.local import supervisor
from pdd.local.logs import choose, tail
from pdd.local.state import RunState, StateDir
from pdd.local.supervisor import ProcessGroup, ProcessId, ProcessSpec, StartError, stop_leftovers

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(child.pid, flush=True); time.sleep(60)"
)


def python(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code), {"GREETING": "hello"})


def wait_for_line(path: Path) -> str:
    deadline = time.monotonic() + 10
    while not (lines := supervisor.last_lines(path, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return lines[0]


def test_a_death_during_start_is_one_clear_line(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path)
    group.start(python("bad", "import os, sys; print(os.environ['GREETING']); sys.exit('PDD_PORT: not a port')"))
    with pytest.raises(StartError) as caught:
        group.wait_for(lambda: "bad", 10)
    assert str(caught.value) == "bad ended with status 1 during start: PDD_PORT: not a port"
    assert sorted(caught.value.log_tail) == ["PDD_PORT: not a port", "hello"]
    assert group.ids() == []


def test_a_start_has_a_deadline(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path)
    group.start(python("slow", "import time; time.sleep(60)"))
    try:
        with pytest.raises(StartError, match=r"not ready after 0 s: nothing yet"):
            group.wait_for(lambda: "nothing yet", 0.3)
    finally:
        group.stop(["slow"])
    assert group.ids() == []


def test_a_missing_program_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="x cannot be started"):
        ProcessGroup(tmp_path).start(ProcessSpec("x", (str(tmp_path / "none"),)))


def test_stop_ends_the_stubborn_and_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.3)
    group = ProcessGroup(tmp_path)
    group.start(python("stubborn", STUBBORN))
    group.start(python("parent", PARENT))
    wait_for_line(group.log_path("stubborn"))
    child = psutil.Process(int(wait_for_line(group.log_path("parent"))))
    grandchild = ProcessId("grandchild", child.pid, child.create_time())
    pids = [one.pid for one in group.ids()]
    group.stop(["stubborn", "parent", "unknown"])
    assert not any(psutil.pid_exists(pid) for pid in pids)
    deadline = time.monotonic() + 5
    while grandchild.find() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_leftovers_are_stopped_only_if_they_are_the_same_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as process:
        me = ProcessId.of("left", process.pid)
        assert stop_leftovers([ProcessId("left", me.pid, me.created - 5)]) == []
        assert process.poll() is None
        assert stop_leftovers([me]) == ["left"]
    assert me.find() is None


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "pdd")
    with state.held():
        run = RunState(ProcessId.of("supervisor", psutil.Process().pid), [], "http://127.0.0.1:1", 2)
        state.write(run)
        assert StateDir(tmp_path / "pdd").read() == run
        with pytest.raises(ConfigError, match=r"already running at http://127.0.0.1:1"), state.held():
            pass
    with state.held():
        state.clear()
    assert state.read() is None


def test_logs_by_the_start_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "relay-0.log").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "gateway.log").write_text("four\n")
    assert list(tail(choose(tmp_path, "rel"), 2)) == [("relay-0", "two"), ("relay-0", "three")]
    assert [name for name, _ in tail(choose(tmp_path, None), 1)] == ["gateway", "relay-0"]
    with pytest.raises(ConfigError, match=r"no logs of cache; there are: gateway, relay-0"):
        choose(tmp_path, "cache")


def test_an_interrupt_never_hides_a_process_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = ProcessGroup(tmp_path)
    start = psutil.Popen

    def interrupted(*args: object, **kwargs: object) -> psutil.Popen:
        process = start(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)  # Ctrl-C in the worst moment
        return process

    monkeypatch.setattr(psutil, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.start(python("one", "import time; time.sleep(60)"))
    assert [one.name for one in group.ids()] == ["one"]
    group.stop(["one"])
