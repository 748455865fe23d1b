"""Every setting of every process: typed, with its environment name, in one place.

A process reads its settings once, at start (`load`), and passes values on; nothing else reads the environment.
`docs/configuration.md` is generated from the classes below.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pdd.errors import ConfigError
from pdd.types import Peer, Pipeline, Role

Token = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""A name that may stand in a NATS subject."""

Dtype = Literal["float32", "bfloat16"]


class ProcessSettings(BaseSettings):
    """What every process of the mesh has."""

    model_config = SettingsConfigDict(
        env_prefix="PDD_", extra="ignore", frozen=True, env_ignore_empty=True, protected_namespaces=()
    )

    dc: Token = Field("a", description="Datacenter this process runs in.")
    instance: Token = Field("0", description="Name of this instance, unique within its role and datacenter.")
    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS server of this datacenter.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    cores: str = Field("", description="CPU cores to run on, for example `0` or `0,1`; empty: no pinning.")

    def peer(self, role: Role) -> Peer:
        """Identity of this process, with a fresh epoch."""
        return Peer(dc=self.dc, role=role, instance=self.instance, epoch=secrets.token_hex(8))


class LineSettings(BaseSettings):
    """What is assumed of the line between the datacenters until it has been measured."""

    model_config = SettingsConfigDict(env_prefix="PDD_", extra="ignore", frozen=True, env_ignore_empty=True)

    line_mbps: float = Field(100.0, gt=0, description="Rate of the WAN line (Mbit/s), until measured.")
    line_delay_ms: float = Field(15.0, ge=0, description="One-way delay of the WAN line (ms), until measured.")
    exposed_wait_budget_ms: float = Field(
        300.0, ge=0, description="Predicted exposed wait up to which a request goes straight to MainDecode (ms)."
    )


class MetricsSettings(BaseSettings):
    """Where a process that is no web server shows its metrics; the gateway shows its own beside its API."""

    model_config = SettingsConfigDict(env_prefix="PDD_", extra="ignore", frozen=True, env_ignore_empty=True)

    metrics_host: str = Field("127.0.0.1", description="Address Prometheus' metrics are served on.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port Prometheus' metrics are served on (`/metrics`); 0: any free one."
    )


class StageSettings(ProcessSettings, LineSettings, MetricsSettings):
    """Settings of the three stages: prefill, relay, main_decode."""

    model: Path = Field(Path(), description="GGUF file or Hugging Face directory of the model.")
    dtype: Dtype = Field("bfloat16", description="Type of weights and KV.")
    max_model_len: int | None = Field(None, gt=1, description="Longest prompt + output; empty: the model's own.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    pool_tokens: int = Field(16_384, gt=0, description="Tokens that the KV pool holds.")
    prefix_cache: bool = Field(True, description="Keep the KV of earlier prompts and answers (prefill, main_decode).")
    step_tokens: int = Field(512, gt=0, description="Token budget of one engine step.")
    max_running: int = Field(16, gt=0, description="Sequences that run at once (seats).")
    threads: int = Field(1, gt=0, description="Intra-op threads of the engine.")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="Kernels of the forward pass; `auto`: the native ones where they can be used, else torch's."
    )
    pace_step_ms: float = Field(0.0, ge=0, description="A step takes at least this long (ms); 0: unpaced.")
    pace_token_us: float = Field(0.0, ge=0, description="... plus this long for each scheduled token (us).")
    kv_host: str = Field("127.0.0.1", description="Address the KV stream listens on.")
    kv_port: int = Field(0, ge=0, le=65535, description="Port the KV stream listens on; 0: any free one.")
    kv_advertise: str = Field(
        "", description="`host:port` at which another datacenter reaches the KV stream; empty: where it listens."
    )
    fabric: Literal["auto", "nixl", "stream"] = Field(
        "auto", description="KV transport inside the datacenter; `auto`: NIXL where it works, else the stream."
    )
    kv_connections: int = Field(4, ge=1, le=64, description="TCP connections of the KV stream per peer.")
    kv_window_bytes: int = Field(
        2 << 20, ge=1 << 16, description="KV bytes in flight per peer (sent, not acknowledged as applied)."
    )
    max_waiting: int = Field(256, ge=0, description="Requests that may wait for prefill; more are refused.")
    held_for_wan_share: float = Field(
        0.4, gt=0, le=1, description="Share of prefill's pool above which prompts waiting for the WAN stop admission."
    )
    idle_reserved_share: float = Field(
        0.3, gt=0, le=1, description="Share of main_decode's pool that reservations may hold while their KV is awaited."
    )
    lease_s: float = Field(
        30.0, gt=0, description="An attempt is dropped after this long without a beat of its gateway (s)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> StageSettings:
        if self.kv_advertise:
            host, _, port = self.kv_advertise.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"kv_advertise must be host:port, not {self.kv_advertise!r}")
        return self

    @property
    def advertised(self) -> tuple[str, int] | None:
        """`kv_advertise` as an address, or None."""
        host, _, port = self.kv_advertise.rpartition(":")
        return (host, int(port)) if host else None


class GatewaySettings(ProcessSettings, LineSettings):
    """Settings of the gateway."""

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port the HTTP server listens on.")
    model: Path = Field(Path(), description="GGUF file or Hugging Face directory (tokenizer and chat template).")
    model_name: str = Field("", description="Name clients use for the model; empty: from the file's own name.")
    max_model_len: int | None = Field(None, gt=1, description="Longest prompt + output; empty: the model's own.")
    pipeline: Pipeline = Field(
        Pipeline.PDD, description="Default layout: `pdd` (the router chooses), `pd-wan` or `pd-local`."
    )
    relay_max_tokens: int = Field(
        512, ge=1, description="Output tokens RelayDecode produces for one request before it pauses for MainDecode."
    )
    default_max_tokens: int = Field(
        2048,
        ge=1,
        description="Longest answer of a chat that names no limit.",
    )
    max_waiting: int = Field(256, ge=0, description="Requests that may wait for room, per layout; more get 503.")
    queue_timeout_s: float = Field(30.0, gt=0, description="Longest wait for a stage with room; then 503 (s).")
    stall_timeout_s: float = Field(60.0, gt=0, description="An attempt without any progress fails after this (s).")
    max_attempts: int = Field(3, ge=1, le=16, description="Attempts per request before the client gets an error.")
    cache_timeout_ms: float = Field(50.0, gt=0, description="Longest wait for the prefix index (ms); then a cold view.")
    max_body_bytes: int = Field(8 << 20, gt=0, description="Largest request body accepted.")


class CacheSettings(ProcessSettings, MetricsSettings):
    """Settings of the cache service (prefix index)."""

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey that holds the prefix index.")
    redis_timeout_ms: float = Field(50.0, gt=0, description="Longest wait for one index operation (ms).")


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load(kind: type[SettingsT]) -> SettingsT:
    """Read `kind` from the environment. Raises `ConfigError`, one line, naming the variable that is wrong."""
    try:
        return kind()
    except ValidationError as error:
        first = error.errors()[0]
        name = "PDD_" + "_".join(str(part) for part in first["loc"]).upper() if first["loc"] else "settings"
        raise ConfigError(f"{name}: {first['msg']} (got {first.get('input')!r})") from None
