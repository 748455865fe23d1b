"""Measures everything, prints it, and writes the page and its picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

from pdd.model.source import ensure_default_model
from pdd.model.weights import Checkpoint
from pdd.native.decoder import NativeDecoder
from tests.bench.engine import comparison, extend, hit_rate, llama, matrices, memory, page, streams, targets
from tests.bench.engine.measuring import processor
from tests.bench.engine.ours import Ours
from tests.bench.engine.settings import HIT_CONTEXT, HIT_PROMPTS, HIT_ROUNDS, ROUNDS, SCALING
from tests.bench.engine.theirs import Rival, Theirs

_PICTURE = "engine-hit-rate.svg"


def transformers_ways(model: Path) -> dict[str, Rival]:
    """All that could be its fastest. With torch.compile each step took longer than without, and is left out."""
    sdpa = Theirs.plain(model, "sdpa", torch.bfloat16)
    ways = {
        "sdpa, bf16": sdpa,
        "sdpa, bf16, static cache": sdpa.with_static_cache(),
        "eager, bf16": Theirs.plain(model, "eager", torch.bfloat16),
        "sdpa, fp32": Theirs.plain(model, "sdpa", torch.float32),
        "packed GGUF, fp32": Theirs.packed(model),
    }
    return {f"{comparison.TRANSFORMERS}, {name}": way for name, way in ways.items()}


def llama_ways(model: Path, threads: int, stack: ExitStack) -> dict[str, Rival]:
    """llama.cpp with the same weights in bfloat16 and as the file has them, if it is installed."""
    if llama.version() is None:
        return {}
    plain = stack.enter_context(llama.bfloat16_copy(model))
    ways = {f"llama.cpp, {name}": llama.Llama(path, threads) for name, path in (("bf16", plain), ("Q4_1", model))}
    for way in ways.values():
        stack.callback(way.close)
    return dict(ways)


def report() -> Iterator[str]:
    """The page's part, line by line, as it is measured."""
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    model = ensure_default_model(print)
    ours = Ours(model, threads)
    kernels = "native kernels" if isinstance(ours.decoder, NativeDecoder) else "torch's kernels"
    yield (
        f"{model.stem} in bfloat16 with {kernels}; {processor()}, {threads} threads, Python"
        f" {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        + (f"llama-cpp-python {llama.version()}" if llama.version() else "llama.cpp not installed")
        + f". Medians of {ROUNDS} rounds in turn, with the least and the most."
    )
    with ExitStack() as stack:
        rivals = transformers_ways(model) | llama_ways(model, threads, stack)
        prefills, decodes = comparison.prefill_rows(ours, rivals), comparison.decode_rows(ours, rivals)
    throughput = comparison.scaling(ours, SCALING)
    alone = matrices.beside_its_matrices(ours, Checkpoint(model).config)
    yield from ("", "### Beside transformers", "")
    yield from comparison.summary([*prefills, *decodes])
    yield from ("", "All ways that were measured:", "")
    yield from comparison.all_ways([*prefills, *decodes])
    yield from ("", "### Targets", "")
    yield from targets.table(
        [*comparison.targets(prefills, decodes, throughput), alone.target(), matrices.overhead(ours)]
    )
    yield from ("", "### Decoding", "")
    yield from alone.lines()
    yield from ("", "Throughput of the engine alone:", "")
    yield "| batch | " + " | ".join(map(str, throughput)) + " |"
    yield "|---|" + "---|" * len(throughput)
    yield "| tokens/s | " + " | ".join(f"{rate:,.0f}" for rate in throughput.values()) + " |"
    yield ""
    yield from streams.lines(ours)
    yield from ("", "### Extending", "")
    yield "A step in which one of the batch extends by n tokens while the others decode, over one in which all decode:"
    yield ""
    yield from extend.lines(model, threads)
    yield from ("", "### Throughput over hit rate", "")
    points = hit_rate.measure(ours)
    yield (
        f"{HIT_PROMPTS} prompts of {HIT_CONTEXT:,} tokens at once, the same share of each cached; medians of"
        f" {HIT_ROUNDS} rounds. The share of the step's budget that is used follows from the schedule alone."
    )
    yield from ("", f"![Throughput over hit rate]({_PICTURE})", "")
    yield from hit_rate.table(points)
    hit_rate.plot(points, page.DOCS / _PICTURE)
    yield from ("", "### Memory while loading", "")
    yield from memory.lines(model)


def main() -> None:
    """See the module."""
    lines: list[str] = []
    for line in report():
        print(line, flush=True)
        lines.append(line)
    page.write("\n".join(lines))


if __name__ == "__main__":
    main()
