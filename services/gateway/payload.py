"""Whether the longest prompt fits one message: the server's limit is its own, and too late to meet with a request."""

from __future__ import annotations

from pdd.errors import ConfigError
from pdd.mesh.messages import encode

_REST_BYTES = 8 << 10
"""For all of a message but its tokens: keys, peers, sampling, stop IDs, trace headers. Measured, some 700 bytes."""


def require_prompts_fit(max_payload: int, max_model_len: int, vocab_size: int) -> None:
    """Check that `Submit` and `Reserve` with `max_model_len` tokens (prompt and output IDs) fit `max_payload` bytes.

    A token takes 1 to 5 bytes; the widest of the vocabulary counts. Raises `ConfigError` with what would fit.
    """
    token_bytes = len(encode(max(vocab_size - 1, 0)))
    needed = max_model_len * token_bytes + _REST_BYTES
    if needed <= max_payload:
        return
    fits = (max_payload - _REST_BYTES) // token_bytes
    advice = f"set PDD_MAX_MODEL_LEN to {fits} at most or raise" if fits > 1 else "raise"
    raise ConfigError(
        f"PDD_MAX_MODEL_LEN: {max_model_len} tokens may need {needed} bytes in one message, and the NATS server takes "
        f"{max_payload}: {advice} the server's max_payload"
    )
