"""Operating-system processes: start them with a log file each, see them die, stop them all.

Every process leads a session of its own: a Ctrl-C in the terminal reaches the supervisor alone, and what a process
started in turn goes down with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from pdd.errors import PddError

STOP_GRACE_S = 15.0
"""From SIGTERM to SIGKILL: more than a stage may take to drain."""


class ProcessSpec(msgspec.Struct, frozen=True):
    """A process to start. `env` is added to the supervisor's environment; `cores` (empty: any) is what it runs on."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    cores: tuple[int, ...] = ()


class ProcessId(msgspec.Struct, frozen=True):
    """A process that cannot be mistaken for a later one with the same PID."""

    name: str
    pid: int
    created: float

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessId:
        """Identify a running process. Raises `psutil.NoSuchProcess`."""
        return cls(name, pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, if this very one still runs."""
        try:
            process = psutil.Process(self.pid)
            if process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.NoSuchProcess:
            pass
        return None


class StartError(PddError):
    """A process did not come up. `log_tail` holds its last log lines."""

    code = "start"

    def __init__(self, message: str, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log_tail = list(log_tail)


class ProcessGroup:
    """The running processes, in the order they were started. Whoever starts them stops them."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._running: dict[str, psutil.Popen] = {}

    def log_path(self, name: str) -> Path:
        """Where a process writes its output."""
        return self._log_dir / f"{name}.log"

    def ids(self) -> list[ProcessId]:
        """Identities of all processes that have been started and not been seen to end."""
        return [ProcessId(name, one.pid, one.create_time()) for name, one in self._running.items()]

    def start(self, spec: ProcessSpec) -> None:
        """Start one process. Raises `StartError` if its program cannot be run at all."""
        with self.log_path(spec.name).open("ab") as log, _signals_deferred():
            try:
                self._running[spec.name] = psutil.Popen(
                    spec.argv,
                    env={**os.environ, **spec.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"{spec.name} cannot be started: {error}") from None

    def wait_any(self, timeout_s: float) -> dict[str, int]:
        """Wait for `timeout_s`, or until all have ended; return the exit status of each one that ended by then."""
        psutil.wait_procs(list(self._running.values()), timeout=timeout_s)
        ended = {name: one.returncode for name, one in self._running.items() if one.poll() is not None}
        for name in ended:
            del self._running[name]
        return ended

    def wait_for(self, missing: Callable[[], str], deadline_s: float) -> None:
        """Poll `missing` until it says nothing is. Raises `StartError` if a process ends first or time is up."""
        deadline = time.monotonic() + deadline_s
        while what := missing():
            for name, status in self.wait_any(0.1).items():
                tail = last_lines(self.log_path(name), 12)
                reason = f": {tail[-1]}" if tail else ""
                raise StartError(f"{name} ended with status {status} during start{reason}", tail)
            if time.monotonic() > deadline:
                raise StartError(f"not ready after {deadline_s:.0f} s: {what}")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process, without waiting."""
        self._running[name].send_signal(number)

    def stop(self, names: Sequence[str] | None = None) -> None:
        """Stop the named processes (default: all): SIGTERM, a grace, SIGKILL for the process and its children."""
        chosen = {
            name: self._running[name]
            for name in (list(self._running) if names is None else names)
            if name in self._running
        }
        try:
            for one in chosen.values():
                if one.poll() is None:
                    one.send_signal(signal.SIGTERM)
            psutil.wait_procs(list(chosen.values()), timeout=STOP_GRACE_S)
        finally:  # also when the wait is interrupted: impatience must not leave anything behind
            for name, one in chosen.items():
                kill_session(one.pid)
                one.wait()
                del self._running[name]


@contextlib.contextmanager
def _signals_deferred() -> Generator[None]:
    """Hold SIGINT and SIGTERM back: what has been started must be written down before anything unwinds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for number in caught:
        signal.raise_signal(number)


def kill_session(leader: int) -> None:
    """Kill whatever is left of the process group that `leader` led."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def stop_leftovers(left: Sequence[ProcessId]) -> list[str]:
    """Stop processes of an earlier supervisor, those only that match PID and start time. Returns their names."""
    found = [(one.name, process) for one in left if (process := one.find()) is not None]
    for _, process in found:
        process.terminate()
    _, stubborn = psutil.wait_procs([process for _, process in found], timeout=STOP_GRACE_S)
    for process in stubborn:
        kill_session(process.pid)
    return [name for name, _ in found]


def last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a log file; none if it does not exist."""
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            return list(deque((line.rstrip() for line in log if line.strip()), count))
    except FileNotFoundError:
        return []
