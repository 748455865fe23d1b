"""What runs for a mesh on one machine: every process, its arguments and its environment. Pure: starts nothing.

Datacenter A holds P, RLD, the cache, the gateway and the MainDecodes of `pd-local`; datacenter B holds the
MainDecodes of the other layouts. What crosses between them goes through the WAN shaper's ports.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from pydantic_settings import BaseSettings

from pdd.config import CacheSettings, Dtype, GatewaySettings, StageSettings
from pdd.errors import ConfigError
from pdd.local.cores import Assignment, assign
from pdd.local.emulator import Route
from pdd.local.line import LineSpec
from pdd.local.shaper import ShaperSpec
from pdd.local.supervisor import ProcessSpec
from pdd.types import Pipeline, Role


class Pace(msgspec.Struct, frozen=True):
    """How long a step of a stage takes at least: `step_ms` plus `token_us` for each scheduled token."""

    step_ms: float
    token_us: float


PACES: dict[str, dict[Role, Pace]] = {
    # Slower than one core of a current laptop computes the default model, so that a paced stage sleeps in every step
    # and no stage can take from another: 333 prompt tokens/s, 8 output tokens/s for each of a few sequences.
    "laptop": {
        Role.PREFILL: Pace(step_ms=20.0, token_us=3000.0),
        Role.RELAY: Pace(step_ms=120.0, token_us=3000.0),
        Role.MAIN_DECODE: Pace(step_ms=120.0, token_us=3000.0),
    },
}
"""Named profiles of `--pace`."""


class MeshOptions(msgspec.Struct, frozen=True):
    """What `pdd up` can be asked for. `main_decode` are in datacenter B, `local_main_decode` in A (for `pd-local`).

    `gateway_port` 0 and `port_base` None take free ports; `env` is added to every service (experiments).
    """

    prefill: int = 1
    relay: int = 1
    main_decode: int = 1
    local_main_decode: int = 1
    model: Path | None = None
    """None: the default model, downloaded once."""
    dtype: str = "bfloat16"
    pool_tokens: int = 16_384
    max_model_len: int | None = None
    wan_mbps: float = 100.0
    wan_delay_ms: float = 15.0
    wan_jitter_ms: float = 1.0
    pipeline: Pipeline = Pipeline.PDD
    pace: str | None = None
    fabric: str = "auto"
    gateway_port: int = 8000
    port_base: int | None = None
    env: Mapping[str, str] = {}

    @property
    def line(self) -> LineSpec:
        """The WAN."""
        return LineSpec(self.wan_mbps, self.wan_delay_ms, self.wan_jitter_ms)

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be planned."""
        if self.prefill < 1 or self.main_decode + self.local_main_decode < 1 or self.relay < 0:
            raise ConfigError("a mesh needs at least one prefill and one main_decode instance")
        if min(self.main_decode, self.local_main_decode) < 0:
            raise ConfigError("the number of main_decode instances cannot be negative")
        if self.max_model_len is not None and self.max_model_len > self.pool_tokens:
            raise ConfigError(f"a KV pool of {self.pool_tokens} tokens cannot hold {self.max_model_len}")
        if self.pace is not None and self.pace not in PACES:
            raise ConfigError(f"there is no pace {self.pace!r}; known: {', '.join(PACES)}")
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(Dtype))}, not {self.dtype!r}")
        try:
            _ = self.line
        except ValueError as error:
            raise ConfigError(str(error)) from None


class Stage(msgspec.Struct, frozen=True):
    """One stage instance of the mesh. `name` is the process's."""

    name: str
    dc: str
    role: Role
    instance: str


class Ports(msgspec.Struct, frozen=True):
    """Every fixed port. `kv` and `kv_wan` (the shaper's side) have one entry per MainDecode of datacenter B."""

    nats_a: int
    nats_a_http: int
    leaf: int
    nats_b: int
    nats_b_http: int
    valkey: int
    shaper_control: int
    leaf_wan: int
    gateway: int
    cache_metrics: int
    kv: list[int]
    kv_wan: list[int]


def hand_out(options: MeshOptions, free: Sequence[int]) -> Ports:
    """Name the ports of a mesh. `free` has `ports_needed` of them; the gateway's own wish comes first."""
    nats_a, nats_a_http, leaf, nats_b, nats_b_http, valkey, shaper_control, leaf_wan, gateway, cache_metrics, *kv = free
    return Ports(
        nats_a=nats_a,
        nats_a_http=nats_a_http,
        leaf=leaf,
        nats_b=nats_b,
        nats_b_http=nats_b_http,
        valkey=valkey,
        shaper_control=shaper_control,
        leaf_wan=leaf_wan,
        gateway=options.gateway_port or gateway,
        cache_metrics=cache_metrics,
        kv=kv[0::2],
        kv_wan=kv[1::2],
    )


def ports_needed(options: MeshOptions) -> int:
    """How many free ports `hand_out` names."""
    return 10 + 2 * options.main_decode


def stages(options: MeshOptions) -> list[Stage]:
    """All stage instances, in the order they are started."""
    counted = [
        ("prefill", "a", Role.PREFILL, options.prefill),
        ("relay", "a", Role.RELAY, options.relay),
        ("main_decode-b", "b", Role.MAIN_DECODE, options.main_decode),
        ("main_decode-a", "a", Role.MAIN_DECODE, options.local_main_decode),
    ]
    return [Stage(f"{name}-{n}", dc, role, str(n)) for name, dc, role, count in counted for n in range(count)]


def placement(options: MeshOptions, cores: Sequence[int]) -> list[Assignment]:
    """Cores and threads of every stage."""
    return assign([(stage.name, stage.role) for stage in stages(options)], cores)


def shaper_process(options: MeshOptions, ports: Ports) -> ProcessSpec:
    """The WAN: B dials A's leaf port, P and RLD dial B's KV ports."""
    routes = [Route("leaf", ports.leaf_wan, ports.leaf, "b")]
    for n, (target, listen) in enumerate(zip(ports.kv, ports.kv_wan, strict=True)):
        routes.append(Route(f"kv-{n}", listen, target, "a"))
    spec = ShaperSpec(options.line, routes, ports.shaper_control)
    return ProcessSpec("shaper", (*_python("pdd.local.shaper"), msgspec.json.encode(spec).decode()))


def service_processes(
    options: MeshOptions, model: Path, ports: Ports, assignments: Sequence[Assignment], ucx_tls: str
) -> list[ProcessSpec]:
    """All services of the mesh: the stages, the cache, the gateway (last). `ucx_tls`: transports NIXL may use."""
    line = {"line_mbps": options.wan_mbps, "line_delay_ms": options.wan_delay_ms}
    nats = {"a": f"nats://127.0.0.1:{ports.nats_a}", "b": f"nats://127.0.0.1:{ports.nats_b}"}
    specs: list[ProcessSpec] = []
    for stage, where in zip(stages(options), assignments, strict=True):
        values: dict[str, object] = {
            **line,
            "dc": stage.dc,
            "instance": stage.instance,
            "nats_url": nats[stage.dc],
            "model": model,
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
            "pool_tokens": options.pool_tokens,
            "fabric": options.fabric,
            "threads": where.threads,
            "cores": ",".join(map(str, where.cores)),
        }
        if options.pace is not None:
            pace = PACES[options.pace][stage.role]
            values |= {"pace_step_ms": pace.step_ms, "pace_token_us": pace.token_us}
        if stage.dc == "b":
            n = int(stage.instance)
            values |= {"kv_port": ports.kv[n], "kv_advertise": f"127.0.0.1:{ports.kv_wan[n]}"}
        env = {"UCX_TLS": ucx_tls, **environment(StageSettings, values), **options.env}
        specs.append(ProcessSpec(stage.name, _python(f"services.{stage.role}"), env, where.cores))
    cache: dict[str, object] = {
        "nats_url": nats["a"],
        "redis_url": f"redis://127.0.0.1:{ports.valkey}/0",
        "metrics_port": ports.cache_metrics,
    }
    gateway: dict[str, object] = {
        **line,
        "nats_url": nats["a"],
        "port": ports.gateway,
        "model": model,
        "max_model_len": options.max_model_len,
        "pipeline": options.pipeline.value,
    }
    for role, kind, values in ((Role.CACHE, CacheSettings, cache), (Role.GATEWAY, GatewaySettings, gateway)):
        env = {**environment(kind, {"dc": "a", "instance": "0", **values}), **options.env}
        specs.append(ProcessSpec(role.value, _python(f"services.{role}"), env))
    return specs


def environment(kind: type[BaseSettings], values: Mapping[str, object]) -> dict[str, str]:
    """Settings as environment variables; None leaves a setting at its default. A misspelt name is a `KeyError`."""
    for name in values:
        kind.model_fields[name]
    return {f"PDD_{name.upper()}": str(value) for name, value in values.items() if value is not None}


def _python(module: str) -> tuple[str, ...]:
    # -P: a folder of the caller's that happens to be called `services` is not ours.
    return (sys.executable, "-P", "-m", module)
