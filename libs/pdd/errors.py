"""Every error the library raises on purpose, in one tree.

Errors are raised where they happen and translated once, at the edge: the gateway turns them into OpenAI's
error shape, a control endpoint into a coded NATS reply, the command line into one clear line.
"""

from __future__ import annotations


class PddError(Exception):
    """Root of the tree. `str(error)` is one line fit for a user; it never holds prompt text."""

    code = "internal"


class ConfigError(PddError):
    """A setting is missing, malformed or contradicts another. Raised before anything is started."""

    code = "config"


class ModelError(PddError):
    """Weights, tokenizer or configuration of a model cannot be used; the text says which part."""

    code = "model"


class CapacityError(PddError):
    """There is no room (blocks, seats) right now; trying again later may succeed."""

    code = "no_capacity"


class TooLargeError(PddError):
    """The request can never fit this instance, however long it waits."""

    code = "too_large"


class StaleError(PddError):
    """The message belongs to an attempt, ticket or epoch that is over. Dropped and counted."""

    code = "stale"


class UnknownRequestError(PddError):
    """The instance holds nothing under this attempt."""

    code = "unknown_request"


class IncompatibleError(PddError):
    """Two peers cannot exchange KV; `field` is the first property that differs."""

    code = "incompatible"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"peers differ in {field}: {ours!r} here, {theirs!r} there")
        self.field = field


class TransferError(PddError):
    """KV could not be moved: the peer refused, a checksum was wrong, or the line stayed down."""

    code = "transfer"


class UnreachableError(PddError):
    """Nobody answers at the subject: the instance is gone or the link to its datacenter is down."""

    code = "unreachable"


class UnavailableError(PddError):
    """No live instance of a role that the request needs."""

    code = "unavailable"


class DeadlineError(PddError):
    """A wait ended by its deadline."""

    code = "deadline"


class RemoteError(PddError):
    """A peer answered with an error; `code` is the peer's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
