"""What is remembered of a running mesh between two commands: who supervises it, its processes, where it answers.

One file, `run.json`, in the state folder, and a lock that the supervisor holds for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from pdd.errors import ConfigError
from pdd.local.supervisor import ProcessId


class RunState(msgspec.Struct, frozen=True):
    """A mesh as its supervisor last described it. `ready` turns true once all instances are live.

    `ended` are the names of processes that ran and are gone; nothing starts them again. The cache does not beat, so
    that nobody else could say at which port its metrics are (0: none).
    """

    supervisor: ProcessId
    processes: list[ProcessId]
    gateway_url: str
    shaper_control: int
    ready: bool = False
    cache_metrics: int = 0
    ended: list[str] = []


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/pdd`, by default under `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pdd"


class StateDir:
    """The folder a mesh keeps its state in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self._file = path / "run.json"

    def read(self) -> RunState | None:
        """The last state written, or None; its processes may be gone."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=RunState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, state: RunState) -> None:
        """Replace the state; a reader sees the old one or the new one."""
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(state))
        draft.replace(self._file)

    def clear(self) -> None:
        """Forget the state."""
        self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Be the one supervisor of this folder. Raises `ConfigError` if there is one already."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                state = self.read()
                where = f" at {state.gateway_url}" if state is not None else ""
                raise ConfigError(f"a mesh is already running{where}; `pdd down` stops it") from None
            yield
