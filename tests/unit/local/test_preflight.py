"""What fails is known beforehand, and said."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdd.errors import ConfigError, ModelError
from pdd.local.footprint import PROCESS_BYTES, read_config, stage_bytes, weight_count
from pdd.local.preflight import check_memory, free_ports
from pdd.model.source import ensure_default_model


@pytest.mark.model
def test_footprint_of_the_default_model() -> None:
    config = read_config(ensure_default_model())
    assert weight_count(config) == 134_515_008  # as the GGUF file's own tensors add up
    # 30 layers x (k, v) x 3 heads x 64 x 2 bytes = 23,040 bytes a token.
    assert stage_bytes(config, "bfloat16", 16_384) == PROCESS_BYTES + 2 * 134_515_008 + 23_040 * 16_384


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nonsense" * 10)
    for path in (tmp_path / "x.gguf", tmp_path):
        with pytest.raises(ModelError, match="is no model") as caught:
            read_config(path)
        assert "\n" not in str(caught.value)


def test_too_little_memory() -> None:
    check_memory(10, 10)
    with pytest.raises(ConfigError, match=r"need about 4.0 GB of memory and 3.0 GB are available"):
        check_memory(4_000_000_000, 3_000_000_000)


def test_ports_are_free_and_a_taken_base_is_refused() -> None:
    ports = free_ports(20, None)
    assert len(set(ports)) == 20
    with socket.create_server(("127.0.0.1", ports[3])), pytest.raises(ConfigError, match="not all of the 2 ports"):
        free_ports(2, ports[3])
