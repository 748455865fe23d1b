"""Documents against the code: what is generated is up to date, what is named exists, what is listed is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import msgspec
import pytest
import typer
from nats.aio.client import Client
from prometheus_client.metrics import MetricWrapperBase

from pdd import cli, config_docs, kv, types
from pdd.mesh import messages
from pdd.mesh.bus import Bus
from pdd.mesh.registry import Registry
from pdd.stage.metrics import StageMetrics
from pdd.telemetry.metrics import process_registry
from pdd.transfer import nixl_wire, wire
from pdd.types import Peer, Role
from services.cache.metrics import CacheMetrics
from services.gateway.api.metrics import Metrics
from services.gateway.coordinator import Coordinator, Limits
from services.gateway.mesh_metrics import MeshCollector
from services.gateway.prefix_view import PrefixView
from services.gateway.router import Router, RoutingPolicy
from tests.unit.mesh.beats import IDLE

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {config_docs.environment_name(name) for _, _, kind in config_docs.PROCESSES for name in kind.model_fields}
ON_THE_WIRE = [
    struct
    for module in (messages, types, kv, wire, nixl_wire)
    for struct in vars(module).values()
    if isinstance(struct, type) and issubclass(struct, msgspec.Struct) and struct.__module__ == module.__name__
    if struct is not messages.Message
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_PATH = re.compile(r"`((?:libs|services|tests|docs|\.ci)/[^`*{]*)`")


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_configuration_is_what_the_settings_say() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == config_docs.page(), "run `make docs`"


@each_document
def test_relative_links_resolve(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_document
def test_named_settings_exist(document: Path) -> None:
    assert set(re.findall(r"\bPDD_[A-Z0-9_]+", document.read_text())) <= SETTINGS


@each_document
def test_named_files_exist(document: Path) -> None:
    missing = [path for path in CODE_PATH.findall(document.read_text()) if not (ROOT / path).exists()]
    assert not missing


def test_every_option_of_pdd_up_is_in_the_readme() -> None:
    command = typer.main.get_command(cli.app).commands["up"]  # type: ignore[attr-defined]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts) if name != "--help"}
    section = (ROOT / "README.md").read_text().partition("## Options of `pdd up`")[2].partition("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`-.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(-[^`]+)`", row)
    }
    assert listed == options


@pytest.mark.parametrize("struct", ON_THE_WIRE, ids=lambda struct: f"{struct.__module__}.{struct.__name__}")
def test_the_protocol_lists_every_field(struct: type[msgspec.Struct]) -> None:
    """Two planes have messages of one name: one of the rows must fit."""
    rows = re.findall(
        rf"^\| `{struct.__name__}` \|(?:.*\|)? ?(.*?) ?\|$", (ROOT / "docs" / "protocol.md").read_text(), re.MULTILINE
    )
    assert list(struct.__struct_fields__) in [re.findall(r"`(\w+)`", row) for row in rows]


def shown_metrics() -> dict[str, tuple[str, list[str]]]:
    """Type and labels of every metric of ours, by the name under which Prometheus stores it."""
    registry = process_registry(Peer("a", Role.PREFILL, "0", "e"))
    stage = StageMetrics(registry)
    stage.beat(msgspec.structs.replace(IDLE, wan_goodput_bytes_per_s=1.0, wan_rtt_s=1.0))
    Metrics(registry)
    CacheMetrics(registry)
    heard = Registry(lambda: 0.0)
    coordinator = Coordinator(
        me=Peer("a", Role.GATEWAY, "0", "e"),
        bus=Bus(cast(Client, None)),
        registry=heard,
        router=Router(heard, RoutingPolicy(1.0, 0.0, 0.0)),
        prefixes=PrefixView(cast(Bus, None), "a", 1.0),
        limits=Limits(1.0, 1, 1.0, 1.0, 1, 1),
        now=lambda: 0.0,
    )
    registry.register(MeshCollector(coordinator))
    labels = {
        metric._name: list(metric._labelnames)
        for metric in registry._collector_to_names
        if isinstance(metric, MetricWrapperBase)
    }
    shown: dict[str, tuple[str, list[str]]] = {}
    for family in registry.collect():
        if not family.name.startswith("pdd_"):
            continue
        kind = {"info": "gauge"}.get(family.type, family.type)
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        sampled = [name for sample in family.samples[:1] for name in sample.labels if name != "le"]
        shown[name] = (kind, labels.get(family.name) or sampled)
    return shown


def test_every_metric_is_documented_as_it_is() -> None:
    rows = re.findall(
        r"^\| `(pdd_\w+)` \| (\w+) \| (.*?) ?\|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    assert {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows} == shown_metrics()


def test_every_span_is_listed() -> None:
    code = "".join(path.read_text() for folder in ("libs", "services") for path in (ROOT / folder).rglob("*.py"))
    begun = set(re.findall(r"\.(?:begin|during|child)\(\s*\"(\w+)\"", code))
    listed = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs" / "telemetry.md").read_text(), re.MULTILINE)
    assert begun
    assert begun <= {name for row in listed for name in re.findall(r"`(\w+)`", row)}
