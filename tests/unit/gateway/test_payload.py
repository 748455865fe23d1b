"""A gateway does not start with prompts that the NATS server would refuse later, one by one."""

from __future__ import annotations

import pytest

from pdd.errors import ConfigError
from pdd.mesh.messages import Submit, encode
from pdd.types import AttemptKey, Peer, Role, Sampling, StopRule
from services.gateway.payload import require_prompts_fit


def submit_bytes(tokens: int, vocab_size: int) -> int:
    """Size of a `Submit` with that many of the widest token IDs."""
    gateway = Peer("a" * 20, Role.GATEWAY, "g" * 64, "e" * 16)
    stop = StopRule(tokens, frozenset(range(vocab_size - 20, vocab_size)))
    key = AttemptKey("f" * 32, 1)
    return len(encode(Submit(key, gateway, [vocab_size - 1] * tokens, [], Sampling(seed=1 << 62), stop, "s" * 64)))


@pytest.mark.parametrize("vocab_size", [128, 49_152, 151_936])
def test_what_is_let_through_fits_and_the_advice_is_right(vocab_size: int) -> None:
    max_payload = 64 << 10
    with pytest.raises(ConfigError, match=r"PDD_MAX_MODEL_LEN to \d+ at most") as told:
        require_prompts_fit(max_payload, 100_000, vocab_size)
    fits = int(str(told.value).split("PDD_MAX_MODEL_LEN to ")[1].split()[0])
    require_prompts_fit(max_payload, fits, vocab_size)
    assert submit_bytes(fits, vocab_size) + 512 < max_payload
    with pytest.raises(ConfigError):
        require_prompts_fit(max_payload, fits + 1, vocab_size)


def test_a_server_that_takes_next_to_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match="raise the server's max_payload"):
        require_prompts_fit(1024, 8192, 49_152)
