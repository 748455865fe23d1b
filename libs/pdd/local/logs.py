"""Reads the log files of a mesh: the last lines of each, and what is added to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from pdd.errors import ConfigError
from pdd.local.supervisor import last_lines

POLL_S = 0.3


def choose(log_dir: Path, service: str | None) -> list[Path]:
    """Log files whose name begins with `service` (None: all). Raises `ConfigError`, naming those there are."""
    files = sorted(log_dir.glob("*.log"))
    chosen = [file for file in files if file.stem.startswith(service or "")]
    if not chosen:
        known = ", ".join(file.stem for file in files) or "none"
        raise ConfigError(f"there are no logs of {service or 'a mesh'}; there are: {known}")
    return chosen


def tail(files: list[Path], count: int) -> Iterator[tuple[str, str]]:
    """The last `count` lines of each file, as (name, line)."""
    for file in files:
        for line in last_lines(file, count):
            yield file.stem, line


def follow(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Whole lines that are added to the files from now on, as (name, line). Never ends."""
    with ExitStack() as stack:
        logs = {file.stem: stack.enter_context(file.open(encoding="utf-8", errors="replace")) for file in files}
        partial = dict.fromkeys(logs, "")
        for log in logs.values():
            log.seek(0, 2)
        while True:
            for name, log in logs.items():
                *lines, partial[name] = (partial[name] + log.read()).split("\n")
                for line in lines:
                    yield name, line
            time.sleep(POLL_S)
