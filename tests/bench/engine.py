"""The engine beside transformers on the default model in bfloat16: prefill, decode, extend. `make bench-engine`.

All that is compared is measured in turn, round by round, in one process; the table in docs/benchmarks.md holds medians
and extremes over the rounds. Both start from the same weights and use the same threads.
"""

from __future__ import annotations

import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from pdd.engine.engine import Engine
from pdd.engine.loading import LoadedEngine, load_engine
from pdd.engine.sequence import SequenceSpec
from pdd.model.source import ensure_default_model
from pdd.model.weights import Checkpoint
from pdd.types import AttemptKey, Sampling, StopRule

ROUNDS = 5
PREFILLS = (1024, 4096)
BATCHES = (1, 8, 32)
CONTEXT = 512
STEPS = 8
"""Decode steps per round; contexts grow by as many, on both sides."""
EXTENDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEP_TOKENS = 512
KNEE = 2.0
"""The knee is the longest extend of which a step takes at most so many decode steps' time."""
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MARKS = ("<!-- engine: begin -->", "<!-- engine: end -->")

Probe = Callable[[], float]
"""Does its work once and says how many seconds it took."""


@dataclass(frozen=True)
class Figure:
    """Milliseconds over the rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ms ({self.least:.1f} to {self.most:.1f})"


def in_turn(probes: Mapping[str, Probe], rounds: int = ROUNDS) -> dict[str, Figure]:
    """Every probe once to warm up, then all of them in turn, round by round."""
    for probe in probes.values():
        probe()
    took: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(rounds):
        for name, probe in probes.items():
            took[name].append(probe() * 1e3)
    return {name: Figure(statistics.median(all_), min(all_), max(all_)) for name, all_ in took.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Ours:
    """Sequences on the engine."""

    def __init__(self, model: Path, threads: int, step_tokens: int = STEP_TOKENS) -> None:
        self.loaded: LoadedEngine = load_engine(
            model,
            dtype="bfloat16",
            block_size=16,
            pool_tokens=32_768,
            step_tokens=step_tokens,
            seats=64,
            threads=threads,
        )
        self.engine: Engine = self.loaded.engine
        self._draw = random.Random(1)
        self._made = 0

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1000, 40_000) for _ in range(count)]

    def add(self, prompt_tokens: int, *, limit: int | None = None) -> AttemptKey:
        self._made += 1
        key = AttemptKey(f"{self._made:032x}", 1)
        stop = StopRule(2000)
        self.engine.add(SequenceSpec(key, self.tokens(prompt_tokens), [], Sampling(), stop, sample_limit=limit))
        return key

    def prefill(self, count: int) -> float:
        key = self.add(count, limit=1)
        took = timed(lambda: list(self.run()))
        self.engine.release(key)
        return took

    def run(self) -> Iterator[float]:
        """Step until nothing is left; seconds of each."""
        while self.engine.has_work():
            yield timed(self.engine.step)

    def start(self, batch: int) -> list[AttemptKey]:
        """Sequences that decode from a context of `CONTEXT` on."""
        keys = [self.add(CONTEXT - 1, limit=1) for _ in range(batch)]
        list(self.run())
        for key in keys:
            self.engine.set_sample_limit(key, None)
        return keys

    def stop(self, keys: list[AttemptKey]) -> None:
        for key in keys:
            self.engine.release(key)

    def steps(self) -> float:
        return timed(lambda: [self.engine.step() for _ in range(STEPS)]) / STEPS


class Theirs:
    """transformers with one of its attention implementations."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()

    @classmethod
    def packed(cls, model: Path) -> Theirs:
        """As it loads a GGUF file: weights stay packed, kernels compute in float32, which it calls its fastest way."""
        return cls(AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32))

    @classmethod
    def plain(cls, model: Path, attention: str, dtype: torch.dtype) -> Theirs:
        """As it runs a directory with the same weights, unpacked."""
        config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name)
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        made.load_state_dict(dict(Checkpoint(model).tensors()), strict=not config.tie_word_embeddings)
        made.tie_weights()
        return cls(made)

    @torch.inference_mode()
    def prefill(self, count: int) -> float:
        tokens = torch.randint(1000, 40_000, (1, count))
        return timed(lambda: self._model(tokens, past_key_values=DynamicCache(), logits_to_keep=1))

    @torch.inference_mode()
    def start(self, batch: int) -> Probe:
        """A batch whose contexts are `CONTEXT` long; each call decodes `STEPS` tokens more."""
        cache = DynamicCache()
        self._model(torch.randint(1000, 40_000, (batch, CONTEXT)), past_key_values=cache, logits_to_keep=1)
        last = torch.full((batch, 1), 1000)

        @torch.inference_mode()
        def steps() -> None:
            nonlocal last
            for _ in range(STEPS):
                last = self._model(last, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)

        return lambda: timed(steps) / STEPS


def prefill_rows(ours: Ours, theirs: Mapping[str, Theirs]) -> Iterator[str]:
    for count in PREFILLS:
        probes: dict[str, Probe] = {"PDD": lambda count=count: ours.prefill(count)}
        probes |= {name: lambda one=one, count=count: one.prefill(count) for name, one in theirs.items()}
        yield comparison(f"prefill of {count:,} tokens", in_turn(probes))


def decode_rows(ours: Ours, theirs: Mapping[str, Theirs]) -> Iterator[str]:
    for batch in BATCHES:
        keys = ours.start(batch)
        probes: dict[str, Probe] = {"PDD": ours.steps} | {name: one.start(batch) for name, one in theirs.items()}
        figures = in_turn(probes)
        ours.stop(keys)
        yield comparison(f"decode step, batch {batch}, context {CONTEXT}", figures, tokens=batch)


def comparison(what: str, figures: Mapping[str, Figure], tokens: int = 0) -> str:
    mine = figures["PDD"]
    best, other = min(((n, f) for n, f in figures.items() if n != "PDD"), key=lambda item: item[1].median)
    rate = f", {tokens / mine.median * 1e3:,.0f} tokens/s" if tokens else ""
    return f"| {what} | {mine}{rate} | {other} ({best}) | {other.median / mine.median:.2f} |"


def matrix_row(ours: Ours) -> str:
    """Batch-1 decode beside its matrices alone, one after the other, by the faster of two kernels."""
    model = ours.engine._model  # pyright: ignore[reportPrivateUsage]
    packed = [one for layer in model.layers for one in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
    c = model.config
    heads = c.num_heads * c.head_dim
    shapes = [
        (heads + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
        (c.hidden_size, heads),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ] * c.num_layers
    plain = [torch.randn(shape).bfloat16() for shape in shapes]
    inputs = [torch.randn(1, columns).bfloat16() for _, columns in shapes]
    x = torch.randn(1, c.hidden_size).bfloat16()

    @torch.inference_mode()
    def by_packed() -> None:
        for one, given in zip(packed, inputs, strict=True):
            one(given)
        F.linear(x, model.head)

    @torch.inference_mode()
    def by_plain() -> None:
        for one, given in zip(plain, inputs, strict=True):
            F.linear(given, one)
        F.linear(x, model.head)

    stream = torch.ones(256 << 20, dtype=torch.float32)
    keys = ours.start(1)
    figures = in_turn(
        {
            "decode": ours.steps,
            "packed": lambda: timed(by_packed),
            "plain": lambda: timed(by_plain),
            "read": lambda: timed(stream.sum),
        }
    )
    ours.stop(keys)
    name, best = min((("packed", figures["packed"]), ("plain", figures["plain"])), key=lambda item: item[1].median)
    weights = 2 * (sum(rows * columns for rows, columns in shapes) + model.head.numel())
    bandwidth = stream.numel() * 4 / figures["read"].median / 1e6
    share = weights / figures["decode"].median / 1e6 / bandwidth
    return (
        f"| batch-1 decode beside its matrices alone | {figures['decode']} | {best} ({name}) |"
        f" {best.median / figures['decode'].median:.2f} |\n\n"
        f"Weights are read at {weights / figures['decode'].median / 1e6:.1f} GB/s in batch-1 decode, {share:.0%} of the"
        f" {bandwidth:.1f} GB/s at which a plain sum reads memory."
    )


def overhead(ours: Ours, batch: int = 8) -> float:
    """Share of a decode step outside the model's forward pass."""
    model = ours.engine._model  # pyright: ignore[reportPrivateUsage]
    forward, inside = model.forward, 0.0

    def watched(*given: torch.Tensor) -> torch.Tensor:
        nonlocal inside
        began = time.perf_counter()
        try:
            return forward(*given)  # type: ignore[arg-type]
        finally:
            inside += time.perf_counter() - began

    keys = ours.start(batch)
    ours.steps()
    model.forward = watched  # type: ignore[method-assign]
    inside = 0.0
    whole = sum(ours.steps() for _ in range(ROUNDS)) * STEPS
    del model.forward
    ours.stop(keys)
    return 1 - inside / whole


def interference(ours: Ours, batch: int = 8, prompt: int = 4096) -> str:
    """Steps of running streams while a long prompt is computed among them."""
    keys = ours.start(batch)
    ours.steps()
    alone = [timed(ours.engine.step) * 1e3 for _ in range(STEPS)]
    long = ours.add(prompt, limit=1)
    during: list[float] = []
    while not ours.engine.outputs(long):
        during.append(timed(ours.engine.step) * 1e3)
    ours.stop([*keys, long])
    usual, slowed = statistics.median(alone), statistics.median(during)
    return (
        f"{batch} streams at {usual:.1f} ms a token get theirs every {slowed:.0f} ms (at most {max(during):.0f}) during"
        f" the {len(during)} steps in which a prompt of {prompt:,} tokens is computed among them, {STEP_TOKENS} tokens"
        " a step."
    )


def extend_table(model: Path, threads: int) -> Iterator[str]:
    """Time of a step in which one of the batch extends by n tokens, over that of a step in which all decode."""
    ours = Ours(model, threads, step_tokens=1024)
    yield "| n | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |"
    yield "|---|" + "---|" * len(BATCHES)
    ratios: dict[int, list[float]] = {n: [] for n in EXTENDS}
    for batch in BATCHES:
        keys = ours.start(batch)
        ours.steps()
        decode = statistics.median(timed(ours.engine.step) for _ in range(ROUNDS))
        ours.stop(keys[:1])
        for n in EXTENDS:
            took: list[float] = []
            for _ in range(3):
                for key in keys[1:]:
                    ours.engine.freeze(key)
                extended = ours.add(CONTEXT - 1, limit=1)
                list(ours.run())
                ours.engine.append(extended, ours.tokens(n))
                for key in keys[1:]:
                    ours.engine.thaw(key)
                took.append(timed(ours.engine.step))
                ours.stop([extended])
            ratios[n].append(statistics.median(took) / decode)
        ours.stop(keys[1:])
    for n, row in ratios.items():
        yield f"| {n} | " + " | ".join(f"{ratio:.2f}" for ratio in row) + " |"
    knees = [max((n for n in EXTENDS if ratios[n][index] <= KNEE), default=0) for index in range(len(BATCHES))]
    yield ""
    yield (
        f"The knee, the longest extend within {KNEE:g} decode steps' time: "
        + ", ".join(f"{knee} at batch {batch}" for knee, batch in zip(knees, BATCHES, strict=True))
        + "."
    )


def report() -> str:
    """Measure everything; the page's part between the marks."""
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    model = ensure_default_model(print)
    ours = Ours(model, threads)
    theirs = {
        "sdpa, bf16": Theirs.plain(model, "sdpa", torch.bfloat16),
        "eager, bf16": Theirs.plain(model, "eager", torch.bfloat16),
        "sdpa, fp32": Theirs.plain(model, "sdpa", torch.float32),
        "packed GGUF, fp32": Theirs.packed(model),
    }
    lines = [
        f"{model.stem} in bfloat16, {processor()}, {threads} threads, torch {torch.__version__}, transformers"
        f" {transformers.__version__}, Python {platform.python_version()}. Medians of {ROUNDS} rounds in turn, with the"
        " least and the most. transformers at the fastest of four ways: sdpa and eager in bfloat16, sdpa in float32,"
        " the GGUF's packed weights in float32; logits of the last token only. llama.cpp was not measured.",
        "",
        "| what | PDD | beside | ratio |",
        "|---|---|---|---|",
        *prefill_rows(ours, theirs),
        *decode_rows(ours, theirs),
        matrix_row(ours),
        "",
        f"Outside the forward pass: {overhead(ours):.1%} of a decode step at batch 8.",
        "",
        interference(ours),
        "",
        "One sequence of the batch extends by n tokens while the others decode, over a step in which all decode:",
        "",
        *extend_table(model, threads),
    ]
    return "\n".join(lines)


def processor() -> str:
    """The CPU's name as Linux has it."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def main() -> None:
    """Measure, print, and write the page."""
    measured = report()
    print(measured)
    page = PAGE.read_text()
    begin, end = (page.index(mark) for mark in MARKS)
    PAGE.write_text(f"{page[: begin + len(MARKS[0])]}\n\n{measured}\n\n{page[end:]}")


if __name__ == "__main__":
    main()
