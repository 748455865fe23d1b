"""Compiles the kernels: `python -m pdd.native.build`, which `make` does.

The library lies beside its sources and carries a digest of them in its name, so that one built from other sources is
never loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Wno-uninitialized")
"""GCC's own headers of intrinsics hold what `-Wuninitialized` warns of."""
_TARGET = ("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")


def library_path() -> Path:
    """Where the library of today's sources is, or would be."""
    digest = hashlib.sha256(" ".join(_FLAGS + _TARGET).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".h", ".cpp"}:
            digest.update(source.read_bytes())
    return SOURCES.parent / "lib" / f"pdd-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile unless it is done. Raises `FileNotFoundError` without a compiler, `CalledProcessError` if it fails."""
    library = library_path()
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: set CXX, or install g++")
    library.parent.mkdir(exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run([compiler, *_FLAGS, *_TARGET, SOURCES / "decoder.cpp", "-o", unfinished], check=True)
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)
    for old in library.parent.glob("pdd-*.so"):
        if old != library:
            old.unlink()
    return library


def main() -> int:
    """Build, or say in one line why not (the torch path serves without it), and exit with 1."""
    try:
        print(build())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"No native kernels, torch's are used instead: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
