"""How much memory loading takes at its worst, in a process that does nothing else."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdd.model.weights import Checkpoint
from tests.bench.engine.settings import BLOCK_SIZE

_POLL_S = 0.002


class Loaded(msgspec.Struct, frozen=True):
    """Bytes of anonymous memory beyond what the process had before: at its most, and at the end."""

    peak: int
    held: int


def lines(model: Path) -> Iterator[str]:
    """Of each kind of kernels, over the weights' own size."""
    checkpoint = Checkpoint(model)
    weights = 2 * sum(tensor.numel() for _, tensor in checkpoint.tensors())
    yield "| kernels | weights | most while loading | held afterwards |"
    yield "|---|---|---|---|"
    for kernels in ("native", "torch"):
        command = [sys.executable, "-m", __spec__.name, str(model), kernels]
        loaded = msgspec.json.decode(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout, type=Loaded)
        yield f"| {kernels} | {_mb(weights)} | {_mb(loaded.peak)} | {_mb(loaded.held)} |"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _anonymous() -> int:
    """Bytes of this process's anonymous memory that are resident. The mapped file is not among them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this kernel does not say how much memory is anonymous")


def _load(model: Path, kernels: str) -> Loaded:
    # Here, so that the imports are memory that the process has before.
    from pdd.engine.loading import load_engine

    before = peak = _anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_POLL_S):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaded = load_engine(
            model,
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            pool_tokens=BLOCK_SIZE,
            step_tokens=1,
            seats=1,
            kernels=kernels,  # pyright: ignore[reportArgumentType]
        )
    finally:
        done.set()
        watcher.join()
    gc.collect()
    held = _anonymous() - before
    del loaded
    return Loaded(peak - before, held)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_load(Path(sys.argv[1]), sys.argv[2])))
