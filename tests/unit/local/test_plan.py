"""The plan of a mesh: settings that the services accept, and no way between datacenters but the WAN."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdd.config import CacheSettings, GatewaySettings, StageSettings, load
from pdd.errors import ConfigError
from pdd.local.plan import (
    PACES,
    MeshOptions,
    environment,
    hand_out,
    placement,
    ports_needed,
    service_processes,
    shaper_process,
    stages,
)
from pdd.local.shaper import ShaperSpec
from pdd.local.supervisor import ProcessSpec
from pdd.types import Pipeline, Role

OPTIONS = MeshOptions(
    prefill=2,
    main_decode=2,
    wan_mbps=50,
    wan_delay_ms=7.5,
    pipeline=Pipeline.PD_WAN,
    pace="laptop",
    gateway_port=0,
    env={"PDD_KV_CONNECTIONS": "2"},
)
PORTS = hand_out(OPTIONS, range(20_000, 20_000 + ports_needed(OPTIONS)))


@pytest.fixture
def specs() -> dict[str, ProcessSpec]:
    planned = service_processes(OPTIONS, Path("m.gguf"), PORTS, placement(OPTIONS, [0, 1]), "tcp,self")
    return {one.name: one for one in planned}


def test_names_and_order(specs: dict[str, ProcessSpec]) -> None:
    assert list(specs) == [
        "prefill-0",
        "prefill-1",
        "relay-0",
        "main_decode-b-0",
        "main_decode-b-1",
        "main_decode-a-0",
        "cache",
        "gateway",
    ]
    places = [(one.dc, one.role, one.instance) for one in stages(OPTIONS)]
    assert len(set(places)) == len(places)


def test_each_service_reads_its_settings_as_planned(
    specs: dict[str, ProcessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(name: str, kind: type) -> object:
        with monkeypatch.context() as patch:
            for key, value in specs[name].env.items():
                patch.setenv(key, value)
            return load(kind)

    remote = settings("main_decode-b-1", StageSettings)
    assert isinstance(remote, StageSettings)
    assert (remote.dc, remote.instance, remote.cores, remote.threads) == ("b", "1", "1", 1)
    assert remote.nats_url.endswith(str(PORTS.nats_b))
    assert (remote.kv_port, remote.advertised) == (PORTS.kv[1], ("127.0.0.1", PORTS.kv_wan[1]))
    assert (remote.line_mbps, remote.line_delay_ms) == (50, 7.5)
    assert remote.pace_step_ms > 0
    assert remote.kv_connections == 2

    local = settings("main_decode-a-0", StageSettings)
    assert isinstance(local, StageSettings)
    assert (local.dc, local.instance, local.kv_port, local.advertised) == ("a", "0", 0, None)
    assert local.nats_url.endswith(str(PORTS.nats_a))

    gateway = settings("gateway", GatewaySettings)
    assert isinstance(gateway, GatewaySettings)
    assert (gateway.port, gateway.pipeline, gateway.line_mbps) == (PORTS.gateway, Pipeline.PD_WAN, 50)
    cache = settings("cache", CacheSettings)
    assert isinstance(cache, CacheSettings)
    assert cache.redis_url.endswith(f":{PORTS.valkey}/0")


def test_the_only_way_to_b_is_the_wan(specs: dict[str, ProcessSpec]) -> None:
    wan = msgspec.json.decode(shaper_process(OPTIONS, PORTS).argv[-1], type=ShaperSpec)
    forwarded = {(one.listen_port, one.target_port, one.dialer) for one in wan.routes}
    assert forwarded == {
        (PORTS.leaf_wan, PORTS.leaf, "b"),
        (PORTS.kv_wan[0], PORTS.kv[0], "a"),
        (PORTS.kv_wan[1], PORTS.kv[1], "a"),
    }
    for spec in specs.values():
        if not spec.name.startswith("main_decode-b"):
            assert not {str(PORTS.nats_b), *map(str, PORTS.kv)} & {part.split("/")[-1] for part in spec.env.values()}


def test_ports_are_distinct() -> None:
    fields = msgspec.structs.asdict(PORTS)
    ports = [*fields.pop("kv"), *fields.pop("kv_wan"), *fields.values()]
    assert len(set(ports)) == len(ports) == ports_needed(OPTIONS)


def test_a_misspelt_setting_is_found_here() -> None:
    with pytest.raises(KeyError):
        environment(GatewaySettings, {"prot": 8000})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (MeshOptions(prefill=0), "at least one prefill"),
        (MeshOptions(main_decode=0, local_main_decode=0), "at least one"),
        (MeshOptions(pace="warp"), "known: laptop"),
        (MeshOptions(dtype="int4"), "dtype must be one of"),
        (MeshOptions(wan_mbps=0), "rate above 0"),
    ],
)
def test_what_cannot_be_planned_is_said(options: MeshOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.check()


def test_roles_have_a_pace_each() -> None:
    assert all(set(profile) == {Role.PREFILL, Role.RELAY, Role.MAIN_DECODE} for profile in PACES.values())
