"""Logs: one JSON object a line on stdout, events with fields, never prompt text."""

from __future__ import annotations

import logging
import sys

import structlog

from pdd.types import Peer


def configure(level: str, me: Peer) -> None:
    """Set up structlog for this process; every event carries who said it."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(dc=me.dc, role=me.role.value, instance=me.instance)
