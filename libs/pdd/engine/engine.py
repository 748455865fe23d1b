"""The engine: sequences, their blocks, and the step that lets computed tokens catch up with known ones.

Synchronous and for one thread; knows no network. Prefill, extend and decode are the same operation with different
query lengths: stages differ in what they ask for.

A sequence takes blocks as it grows. When there are none, the newest one gives its own up and waits at the head of the
line: it finds its KV cached when it comes back, or computes it again, and goes on with the same tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pdd.attention.interface import SequenceSlice
from pdd.engine.logprobs import TokenLogprobs, token_logprobs
from pdd.engine.penalties import History, adjusted
from pdd.engine.radix import RadixCache
from pdd.engine.sampler import sample
from pdd.engine.scheduler import Chunk, Pending, StepPlan, schedule
from pdd.engine.sequence import RunningSequence, SequenceSpec
from pdd.errors import CapacityError, TooLargeError, UnknownRequestError
from pdd.model.decoder import Decoder
from pdd.types import AttemptKey, FinishReason

GROWTH_TOKENS = 128
"""Room for so many further tokens is wanted before a sequence is admitted, so that it is not preempted at once."""


@dataclass(frozen=True)
class SequenceUpdate:
    """What a step did to one sequence, also if nothing was sampled.

    The KV of its first `num_computed` tokens is in its blocks. `new_tokens` begin at `first_position` (index in
    prompt + output); the token that ended the answer, if `finish` is set, is the last of them.
    """

    key: AttemptKey
    num_computed: int
    first_position: int
    new_tokens: list[int]
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Of the new token, if there is one and its request wants them."""


@dataclass(frozen=True)
class StepResult:
    """What a step did. `duration_s` is real compute, `scheduled_tokens` went through the forward pass, `decodes` of
    the `sequences` in the batch computed their newest token only; `preempted` ones gave their blocks up before it."""

    updates: tuple[SequenceUpdate, ...]
    duration_s: float
    scheduled_tokens: int
    sequences: int
    decodes: int
    preempted: int


@dataclass(frozen=True)
class EngineStatus:
    """Counts, now and since the start.

    `running` sequences have something to compute; those that are frozen, finished or at their limit are not counted,
    nor do they take one of the `seats`. `waiting` ones are not admitted yet; `preempted` ones among them were before.
    `free_blocks` hold nothing,
    `evictable_blocks` are cached and not in use. `prompt_tokens_computed` are prompt
    positions that went through a forward pass: where KV arrives from elsewhere it stays 0. `last_step` is the
    newest step's result, None before the first.
    """

    running: int
    waiting: int
    preempted: int
    seats: int
    step_tokens: int
    free_blocks: int
    evictable_blocks: int
    total_blocks: int
    steps: int
    prompt_tokens_computed: int
    output_tokens: int
    last_step: StepResult | None


class Engine:
    """See the module. `cache` may be used from any thread, everything else from one."""

    def __init__(
        self,
        model: Decoder,
        cache: RadixCache,
        *,
        step_tokens: int,
        seats: int,
        max_model_len: int,
    ) -> None:
        """`step_tokens` is the token budget of a step, `seats` how many sequences run at once, `max_model_len` the
        longest prompt + output."""
        self.cache = cache
        self._model = model
        self._block_size = cache.block_size
        self._step_tokens = step_tokens
        self._seats = seats
        self._max_model_len = max_model_len
        self._waiting: dict[AttemptKey, RunningSequence] = {}
        self._admitted: dict[AttemptKey, RunningSequence] = {}
        self._arrivals = 0
        self._preemptions = 0
        self._steps = 0
        self._prompt_tokens_computed = 0
        self._output_tokens = 0
        self._last_step: StepResult | None = None

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence. Its references to blocks are the engine's from here on, even if this raises.

        It gets blocks when it is admitted and as it grows. Raises `TooLargeError` if it can never fit, `ValueError` if
        its key is taken, none of its tokens is left to compute, or it is biased towards a token that does not exist.
        """
        try:
            if spec.key in self._waiting or spec.key in self._admitted:
                raise ValueError(f"{spec.key} is here already")
            sequence = RunningSequence(spec, self._arrivals)
            if unknown := [one for one, _ in spec.sampling.logit_bias if not 0 <= one < self._model.vocab_size]:
                raise ValueError(f"logit_bias names tokens that do not exist: {unknown[:3]}")
            self._require_fit(sequence.final_len)
        except (ValueError, TooLargeError):
            self.cache.release(spec.blocks)
            raise
        self._arrivals += 1
        self._waiting[spec.key] = sequence
        self._publish(sequence)

    def append(self, key: AttemptKey, ids: list[int]) -> None:
        """Take in output IDs that were produced elsewhere; the engine extends over them.

        Raises `UnknownRequestError`, `TooLargeError` (nothing is changed), or `ValueError` if the answer has ended.
        """
        sequence = self._get(key)
        if sequence.finish is not None:
            raise ValueError(f"the answer of {key} has ended")
        if ids:
            self._require_fit(max(sequence.final_len, len(sequence.tokens) + len(ids)))
            sequence.append(ids)

    def set_sample_limit(self, key: AttemptKey, limit: int | None) -> None:
        """Sample only while there are fewer than `limit` outputs (None: the stop rule alone decides).

        Raises `UnknownRequestError` or `TooLargeError` (nothing is changed).
        """
        sequence = self._get(key)
        self._require_fit(sequence.final_len_under(limit))
        sequence.sample_limit = limit

    def freeze(self, key: AttemptKey) -> list[int]:
        """Compute nothing more of a sequence until `thaw`; its output IDs, which stand still from here on.

        An unknown key gives none: the sequence may just have ended and been released.
        """
        sequence = self._find(key)
        if sequence is None:
            return []
        sequence.frozen = True
        return sequence.outputs

    def thaw(self, key: AttemptKey) -> None:
        """Go on with a frozen sequence. Unknown keys are ignored, as in `freeze`."""
        sequence = self._find(key)
        if sequence is not None:
            sequence.frozen = False

    def outputs(self, key: AttemptKey) -> list[int]:
        """All output IDs of a sequence, whoever produced them. Raises `UnknownRequestError`."""
        return self._get(key).outputs

    def release(self, key: AttemptKey) -> None:
        """Forget a sequence and give up its references to blocks; what it has computed may stay cached.

        Unknown keys are ignored: it is gone already.
        """
        sequence = self._waiting.pop(key, None) or self._admitted.pop(key, None)
        if sequence is not None:
            self._give_up_blocks(sequence)

    def has_work(self) -> bool:
        """Whether a step would compute anything, or free blocks for one that does."""
        return bool(self._plan().chunks) or self._idle_holder() is not None

    def step(self) -> StepResult:
        """Plan, compute one ragged batch, draw next tokens, update."""
        started = time.perf_counter()
        preempted = self._preemptions
        plan = self._plan_and_admit()
        batch = [(self._admitted[chunk.key], chunk) for chunk in plan.chunks]
        drawn = self._compute(batch) if batch else {}
        updates = tuple(self._update(sequence, chunk, drawn.get(chunk.key)) for sequence, chunk in batch)
        self._steps += 1
        self._last_step = StepResult(
            updates=updates,
            duration_s=time.perf_counter() - started,
            scheduled_tokens=plan.scheduled_tokens,
            sequences=len(batch),
            decodes=sum(chunk.tokens == 1 and chunk.is_last for chunk in plan.chunks),
            preempted=self._preemptions - preempted,
        )
        return self._last_step

    def status(self) -> EngineStatus:
        """Counts; see `EngineStatus`."""
        return EngineStatus(
            running=sum(sequence.uncomputed > 0 for sequence in self._admitted.values()),
            waiting=len(self._waiting),
            preempted=sum(sequence.preempted for sequence in self._waiting.values()),
            seats=self._seats,
            step_tokens=self._step_tokens,
            free_blocks=self.cache.free_blocks,
            evictable_blocks=self.cache.evictable_blocks,
            total_blocks=self.cache.total_blocks,
            steps=self._steps,
            prompt_tokens_computed=self._prompt_tokens_computed,
            output_tokens=self._output_tokens,
            last_step=self._last_step,
        )

    def _plan(self) -> StepPlan:
        return schedule(
            [Pending(key, s.uncomputed) for key, s in self._admitted.items() if s.uncomputed],
            [
                Pending(key, s.uncomputed, self._missing_blocks(s, 0 if s.blocks else GROWTH_TOKENS))
                for key, s in self._waiting.items()
                if s.uncomputed
            ],
            step_tokens=self._step_tokens,
            seats=self._seats,
            free_blocks=self.cache.available_blocks,
        )

    def _plan_and_admit(self) -> StepPlan:
        self._grow()
        while True:
            plan = self._plan()
            if not plan.chunks and (holder := self._idle_holder()) is not None:
                self._give_up_blocks(holder)
                holder.reset()
                continue
            back = [key for key in plan.admitted if self._waiting[key].preempted]
            try:
                for key in plan.admitted:
                    self._admit(self._waiting[key])
            except CapacityError:
                continue  # another thread took blocks since the plan was made: plan with what is left
            if not back:
                return plan
            # Those that came back may have found KV: they have less to compute than was planned.

    def _admit(self, sequence: RunningSequence) -> None:
        """Raises `CapacityError` if there are too few blocks; then it waits as before."""
        found: list[int] = []
        if sequence.preempted and sequence.namespace is not None:
            # The last token is computed in any case: it gives the logits.
            found = self.cache.match(sequence.namespace, sequence.tokens[:-1])
        try:
            missing = self._missing_blocks(sequence, 0 if sequence.blocks else GROWTH_TOKENS) - len(found)
            sequence.blocks += [*found, *self.cache.allocate(max(missing, 0))]
        except CapacityError:
            self.cache.release(found)
            raise
        if sequence.preempted:
            sequence.num_computed = len(found) * self._block_size
            sequence.preempted = False
        self._admitted[sequence.key] = self._waiting.pop(sequence.key)

    def _grow(self) -> None:
        """See to it that all that will run has blocks for the tokens it has, the oldest first."""
        for sequence in sorted(self._admitted.values(), key=lambda sequence: sequence.arrival):
            while sequence.uncomputed and not sequence.preempted:
                try:
                    sequence.blocks += self.cache.allocate(self._missing_blocks(sequence, 0))
                    break
                except CapacityError:
                    running = [one for one in self._admitted.values() if one.uncomputed]
                    self._preempt(max(running, key=lambda one: one.arrival))

    def _idle_holder(self) -> RunningSequence | None:
        """The newest of those behind the first in line that hold blocks, which that one may need."""
        holders = [sequence for sequence in self._waiting.values() if sequence.uncomputed]
        return next((sequence for sequence in reversed(holders[1:]) if sequence.blocks), None)

    def _preempt(self, sequence: RunningSequence) -> None:
        """Take its blocks, of which those that are cached may still be there when it comes back."""
        del self._admitted[sequence.key]
        self._give_up_blocks(sequence)
        sequence.reset()
        self._waiting = {sequence.key: sequence, **self._waiting}
        self._preemptions += 1

    def _give_up_blocks(self, sequence: RunningSequence) -> None:
        if sequence.namespace is None:
            self.cache.release(sequence.blocks)
        else:
            self.cache.retire(sequence.namespace, sequence.tokens[: sequence.num_computed], sequence.blocks)

    def _compute(
        self, batch: list[tuple[RunningSequence, Chunk]]
    ) -> dict[AttemptKey, tuple[int, TokenLogprobs | None]]:
        """Run the forward pass over the batch and draw the next token of each sequence that has caught up, with its
        log-probabilities if they are wanted."""
        tokens: list[int] = []
        slices: list[SequenceSlice] = []
        caught_up: list[RunningSequence] = []
        rows: list[int] = []
        for sequence, chunk in batch:
            end = sequence.num_computed + chunk.tokens
            tokens.extend(sequence.tokens[sequence.num_computed : end])
            slices.append(SequenceSlice(chunk.tokens, end, sequence.blocks))
            if end == len(sequence.tokens):
                caught_up.append(sequence)
                rows.append(len(tokens) - 1)
        logits = self._model.forward(tokens, slices, rows)
        if not caught_up:
            return {}
        samplings = [s.sampling for s in caught_up]
        histories = [History(s.sampling, s.tokens, s.prompt_len) for s in caught_up]
        drawn = sample(adjusted(logits, histories), samplings, [len(s.tokens) for s in caught_up])
        logprobs = token_logprobs(logits, drawn, [sampling.logprobs for sampling in samplings])
        return {s.key: draw for s, draw in zip(caught_up, zip(drawn, logprobs, strict=True), strict=True)}

    def _update(
        self, sequence: RunningSequence, chunk: Chunk, draw: tuple[int, TokenLogprobs | None] | None
    ) -> SequenceUpdate:
        first_position = len(sequence.tokens)
        before, sequence.num_computed = sequence.num_computed, sequence.num_computed + chunk.tokens
        if before < sequence.prompt_len:
            self._prompt_tokens_computed += min(sequence.num_computed, sequence.prompt_len) - before
            self._publish(sequence)
        new_tokens = [] if draw is None else [draw[0]]
        finish = sequence.append(new_tokens) if new_tokens else None
        self._output_tokens += len(new_tokens)
        logprobs = None if draw is None else draw[1]
        return SequenceUpdate(sequence.key, sequence.num_computed, first_position, new_tokens, finish, logprobs)

    def _publish(self, sequence: RunningSequence) -> None:
        """Let others share what is computed of a prompt. Answers follow on `release`: nobody asks for them before."""
        if sequence.namespace is not None:
            computed = sequence.tokens[: min(sequence.num_computed, sequence.prompt_len)]
            self.cache.publish(sequence.namespace, computed, sequence.blocks)

    def _require_fit(self, final_len: int) -> None:
        if final_len > self._max_model_len:
            raise TooLargeError(f"prompt and answer may reach {final_len} tokens, the limit is {self._max_model_len}")
        needed = self._blocks_needed(final_len)
        if needed > self.cache.total_blocks:
            raise TooLargeError(
                f"prompt and answer may need {needed} KV blocks, the pool has {self.cache.total_blocks}"
            )

    def _blocks_needed(self, final_len: int) -> int:
        # The last token of all is followed by nothing, so that nobody wants its KV.
        return -(-(final_len - 1) // self._block_size)

    def _missing_blocks(self, sequence: RunningSequence, growth: int) -> int:
        """Blocks that it lacks to compute the tokens it has and `growth` more, as far as it may grow."""
        # It is one longer once the next token is drawn.
        length = min(len(sequence.tokens) + 1 + growth, sequence.final_len)
        return max(self._blocks_needed(length) - len(sequence.blocks), 0)

    def _find(self, key: AttemptKey) -> RunningSequence | None:
        return self._admitted.get(key) or self._waiting.get(key)

    def _get(self, key: AttemptKey) -> RunningSequence:
        sequence = self._find(key)
        if sequence is None:
            raise UnknownRequestError(f"the engine holds no sequence {key}")
        return sequence


def generate(engine: Engine, spec: SequenceSpec) -> list[int]:
    """Run one sequence on an otherwise idle engine until it wants no more; all its output IDs."""
    engine.add(spec)
    while engine.has_work():
        engine.step()
    outputs = engine.outputs(spec.key)
    engine.release(spec.key)
    return outputs
