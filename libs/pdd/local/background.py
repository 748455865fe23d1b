"""A mesh that outlives the terminal: `python -m pdd.local.background OPTIONS STATE_DIR`, started by `pdd up --detach`.

Writes its progress to stdout, and as its last line, marked, what stopped it; ends by SIGTERM (`pdd down`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from pdd.errors import PddError
from pdd.local.mesh import LocalMesh
from pdd.local.plan import MeshOptions
from pdd.local.supervisor import StartError

ERROR_MARK = "error: "
"""What the line begins with that says why there is no mesh: for whoever started this one, not progress."""


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that everything is unwound."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def stay(mesh: LocalMesh, say: Callable[[str], None]) -> None:
    """Watch a running mesh until this process is interrupted; say which of its processes end."""
    while True:
        for name, status in mesh.wait_any(1.0).items():
            say(f"{name} ended with status {status}; the mesh goes on without it (`pdd logs {name}`)")


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""

    def say(line: str) -> None:
        print(line, flush=True)

    interrupt_on_sigterm()
    try:
        options = msgspec.json.decode(arguments[0], type=MeshOptions, dec_hook=lambda kind, value: kind(value))
        with LocalMesh(options, Path(arguments[1]), say) as mesh:
            say(f"Ready at {mesh.gateway_url}")
            stay(mesh, say)
    except KeyboardInterrupt:
        return 0
    except PddError as error:
        for line in error.log_tail if isinstance(error, StartError) else ():
            say(f"  {line}")
        say(f"{ERROR_MARK}{error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
