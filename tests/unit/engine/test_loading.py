"""What `load_engine` says of a model, and the default model answering through it as it is served."""

from __future__ import annotations

import json

import pytest

from pdd.engine.engine import SequenceSpec, generate
from pdd.engine.loading import load_engine
from pdd.errors import ConfigError, ModelError
from pdd.model.source import SHA256
from pdd.model.tokenizer import load_tokenizer
from pdd.types import AttemptKey, Sampling, StopRule
from tests.model_fixtures import default_model_path, save_tiny, save_tiny_llama
from tests.unit.engine.conftest import MakeEngine, Tiny


def test_the_pool_holds_what_was_asked_for(make_engine: MakeEngine) -> None:
    loaded = make_engine(block_size=16, pool_tokens=100)
    assert loaded.engine.cache.total_blocks == 7
    assert loaded.kv_pool.num_blocks == 8
    assert loaded.kv_pool.spec.block_bytes == 2 * 2 * 16 * 2 * 16 * 4
    assert loaded.max_model_len == loaded.config.context_length == 512


def test_identity_is_of_the_weights_not_of_page_size_or_dtype(
    make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    identity = make_engine().identity
    assert identity == make_engine(dtype="bfloat16", block_size=16).identity
    other = tmp_path_factory.mktemp("other")
    save_tiny_llama(other, seed=1)
    theirs = load_engine(other, dtype="float32", block_size=4, pool_tokens=64, step_tokens=16, seats=1).identity
    assert theirs.fingerprint != identity.fingerprint


def test_a_limit_beyond_the_models_context_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="PDD_MAX_MODEL_LEN"):
        load_engine(tiny[0], dtype="float32", block_size=4, pool_tokens=64, step_tokens=16, seats=1, max_model_len=513)


def test_a_model_that_cannot_be_used_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("mixtral")
    save_tiny_llama(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(ModelError, match="mixtral"):
        load_engine(directory, dtype="float32", block_size=4, pool_tokens=64, step_tokens=16, seats=1)


def test_a_sliding_window_is_refused_unless_no_context_reaches_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("mistral")
    save_tiny(directory, "mistral", sliding_window=64)

    def load(max_model_len: int | None) -> int:
        loaded = load_engine(
            directory,
            dtype="float32",
            block_size=4,
            pool_tokens=64,
            step_tokens=16,
            seats=1,
            max_model_len=max_model_len,
        )
        return loaded.max_model_len

    assert load(64) == 64
    for too_long in (None, 65):
        with pytest.raises(ModelError, match="sliding_window = 64"):
            load(too_long)


@pytest.mark.model
def test_the_default_model_answers_as_it_is_served() -> None:
    path = default_model_path()
    loaded = load_engine(path, dtype="bfloat16", block_size=16, pool_tokens=1024, step_tokens=128, seats=2)
    assert loaded.identity.weights == SHA256
    tokenizer = load_tokenizer(path)
    spec = SequenceSpec(
        key=AttemptKey("0" * 32, 1),
        prompt=tokenizer.encode("The capital of France is"),
        outputs=[],
        sampling=Sampling(),
        stop=StopRule(8, tokenizer.stop_token_ids),
    )
    assert "Paris" in tokenizer.backend.decode(generate(loaded.engine, spec))
