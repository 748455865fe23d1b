"""Logs: one JSON object a line on stdout, events with fields, never prompt text.

Every event says which process said it and, inside a request's work, for which request (`request_id`) and where in its
trace (`trace_id`, `span_id`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

from pdd.telemetry import tracing
from pdd.types import Peer


def configure(level: str, me: Peer) -> None:
    """Set up structlog for this process."""
    structlog.configure(
        processors=[*processors(me), structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )


def processors(me: Peer) -> list[Processor]:
    """What makes a complete event of what was said, but for the way it is written."""

    def say_who(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # Not from context variables: other threads call into the loop, and theirs are empty.
        return {"dc": me.dc, "role": me.role.value, "instance": me.instance, **tracing.ids(), **event}

    return [
        structlog.contextvars.merge_contextvars,
        say_who,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
