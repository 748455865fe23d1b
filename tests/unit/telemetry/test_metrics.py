"""Labels stay few, and a process says who it is."""

from __future__ import annotations

from prometheus_client import generate_latest

from pdd.local.scrape import Samples
from pdd.telemetry.metrics import BoundedLabel, process_registry
from pdd.types import Peer, Role


def test_a_label_keeps_its_first_values() -> None:
    label = BoundedLabel(2)
    assert [label(value) for value in ("a", "b", "c", "a", "d", "b")] == ["a", "b", "other", "a", "other", "b"]


def test_a_process_says_who_it_is() -> None:
    samples = Samples(generate_latest(process_registry(Peer("b", Role.MAIN_DECODE, "7", "e"))).decode())
    assert samples.total("pdd_process_info", dc="b", role="main_decode", name="7") == 1
    assert samples.total("process_resident_memory_bytes") > 1e6
