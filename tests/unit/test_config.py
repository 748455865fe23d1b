"""Settings come from the environment, once, and a wrong one is named in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdd.config import CacheSettings, GatewaySettings, ProcessSettings, StageSettings, load
from pdd.errors import ConfigError
from pdd.types import Pipeline, Role


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PDD_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", [StageSettings, GatewaySettings, CacheSettings])
def test_every_process_starts_without_any_setting(kind: type[ProcessSettings]) -> None:
    assert load(kind).dc == "a"


def test_the_environment_is_read_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PDD_MODEL": "/models/tiny",
        "PDD_DTYPE": "float32",
        "PDD_MAX_MODEL_LEN": "4096",
        "PDD_LINE_MBPS": "12.5",
        "PDD_KV_ADVERTISE": "wan.example:7001",
        "PDD_PIPELINE": "pd-wan",
        "UNRELATED": "1",
    }.items():
        monkeypatch.setenv(name, value)
    stage = load(StageSettings)
    assert (stage.model, stage.dtype, stage.max_model_len) == (Path("/models/tiny"), "float32", 4096)
    assert (stage.line_mbps, stage.advertised) == (12.5, ("wan.example", 7001))
    assert load(GatewaySettings).pipeline is Pipeline.PD_WAN


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDD_MAX_MODEL_LEN", "PDD_KV_ADVERTISE", "PDD_POOL_TOKENS"):
        monkeypatch.setenv(name, "")
    stage = load(StageSettings)
    assert (stage.max_model_len, stage.advertised, stage.pool_tokens) == (None, None, 16_384)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (StageSettings, "PDD_BLOCK_SIZE", "0"),
        (StageSettings, "PDD_DTYPE", "float64"),
        (StageSettings, "PDD_FABRIC", "carrier-pigeon"),
        (StageSettings, "PDD_KV_PORT", "70000"),
        (StageSettings, "PDD_LEASE_S", "-1"),
        (StageSettings, "PDD_POOL_TOKENS", "many"),
        (StageSettings, "PDD_LINE_MBPS", "0"),
        (GatewaySettings, "PDD_PIPELINE", "pd"),
        (GatewaySettings, "PDD_MAX_ATTEMPTS", "0"),
        (CacheSettings, "PDD_REDIS_TIMEOUT_MS", "0"),
        # These become tokens of NATS subjects: nothing in them may be a separator, a wildcard or a control character.
        (CacheSettings, "PDD_DC", "a.b"),
        (CacheSettings, "PDD_DC", "*"),
        (CacheSettings, "PDD_INSTANCE", ">"),
        (CacheSettings, "PDD_INSTANCE", "a b"),
        (CacheSettings, "PDD_INSTANCE", "0\n"),
        (CacheSettings, "PDD_INSTANCE", "x" * 65),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[ProcessSettings], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^{name}: ") as told:
        load(kind)
    assert repr(value) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("value", ["7001", "host:", ":7001", "host:0", "host:65536", "host:port"])
def test_an_address_to_advertise_needs_both_parts(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PDD_KV_ADVERTISE", value)
    with pytest.raises(ConfigError, match="kv_advertise must be host:port"):
        load(StageSettings)


def test_every_start_is_an_epoch_of_its_own() -> None:
    settings = CacheSettings(dc="b", instance="3")
    first, second = settings.peer(Role.CACHE), settings.peer(Role.CACHE)
    assert (first.dc, first.role, first.instance) == ("b", Role.CACHE, "3")
    assert first.epoch != second.epoch
