"""What fails is known beforehand, and said."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pdd.errors import ConfigError, ModelError
from pdd.local.footprint import PROCESS_BYTES, ModelSize, model_size
from pdd.local.preflight import check_memory, free_ports
from pdd.model.source import ensure_default_model


@pytest.mark.model
def test_size_of_the_default_model() -> None:
    size = model_size(ensure_default_model())
    assert size == ModelSize(weights=134_515_008, num_layers=30, num_kv_heads=3, head_dim=64)
    # 30 layers x (k, v) x 3 heads x 64 x 2 bytes = 23,040 bytes a token.
    assert size.stage_bytes("bfloat16", 16_384) == PROCESS_BYTES + 2 * 134_515_008 + 23_040 * 16_384


def test_size_of_a_directory(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(4000))
    assert model_size(tmp_path) == ModelSize(weights=1000, num_layers=2, num_kv_heads=2, head_dim=8)


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nonsense" * 10)
    for path in (tmp_path / "x.gguf", tmp_path):
        with pytest.raises(ModelError, match="does not say how large") as caught:
            model_size(path)
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
