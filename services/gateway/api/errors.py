"""Errors as clients see them: OpenAI's shape, with an HTTP status. The one place where errors are translated."""

from __future__ import annotations

from typing import Any

import structlog

from pdd.errors import PddError

_log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
"""What a client that met no room, or nobody, is told to wait."""


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault, as in `messages[0].content`."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        return {"retry-after": str(RETRY_AFTER_S)} if self.status == 503 else {}

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A 400: the request is at fault, in `param`."""
    return ApiError(400, message, param=param, code=code)


_STATUS = {"no_capacity": 503, "unavailable": 503, "unreachable": 503, "deadline": 503, "too_large": 400}
"""By `PddError.code`; any other is a 500 that tells nothing about our insides."""

_INSIDE = frozenset({"unreachable", "deadline"})
"""Errors whose text names our own instances and subjects."""


def translate(error: Exception, request_id: str) -> ApiError:
    """Whatever ended a request, as the client is to see it; what the client is not told is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PddError) and error.code in _STATUS:
        if error.code in _INSIDE:
            _log.warning("request_unserved", request_id=request_id, error=str(error))
            return ApiError(_STATUS[error.code], "The service cannot be reached right now.", code=error.code)
        return ApiError(_STATUS[error.code], str(error), code=error.code)
    _log.error("request_failed", request_id=request_id, exc_info=error)
    return ApiError(500, f"The server failed to answer this request (request {request_id}).", code="internal")


def shutting_down() -> ApiError:
    """What a request gets that is still running when the server must end."""
    return ApiError(503, "The server is shutting down.", code="shutting_down")
