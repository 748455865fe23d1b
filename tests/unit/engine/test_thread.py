"""The engine's thread: order of results and answers, bounds, pace, and that it never dies in silence."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pdd.engine.engine import Engine, SequenceSpec, StepResult, generate
from pdd.engine.thread import MAX_UNDELIVERED, EngineThread, Pace
from pdd.errors import PddError, TooLargeError
from pdd.types import AttemptKey, Sampling, StopRule
from tests.unit.engine.conftest import MakeEngine

KEY = AttemptKey("0" * 32, 1)
PROMPT = list(range(3, 24))


def spec(max_tokens: int = 12, *, key: AttemptKey = KEY, prompt: list[int] = PROMPT) -> SequenceSpec:
    return SequenceSpec(key, prompt, [], Sampling(), StopRule(max_tokens))


class Collected:
    """Takes step results on the event loop."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.tokens: list[int] = []
        self.threads: set[int] = set()
        self.finished = asyncio.Event()

    def __call__(self, result: StepResult) -> None:
        self.threads.add(threading.get_ident())
        self.results.append(result)
        for update in result.updates:
            self.tokens.extend(update.new_tokens)
            if update.finish is not None:
                self.finished.set()


@asynccontextmanager
async def running(
    engine: Engine, on_step: Callable[[StepResult], None], pace: Pace | None = None
) -> AsyncIterator[EngineThread]:
    thread = EngineThread(engine, pace=pace)
    thread.start(on_step)
    try:
        async with asyncio.timeout(30):
            yield thread
    finally:
        await thread.stop()


async def test_results_arrive_on_the_loop_in_order_and_make_up_the_answer(make_engine: MakeEngine) -> None:
    collected = Collected()
    async with running(make_engine().engine, collected) as thread:
        await thread.call(lambda engine: engine.add(spec()))
        await collected.finished.wait()
    assert collected.tokens == generate(make_engine().engine, spec())
    assert collected.threads == {threading.get_ident()}
    computed = [result.updates[0].num_computed for result in collected.results]
    assert computed == sorted(computed)


async def test_commands_run_in_order_on_the_engines_thread_and_bring_back_answer_or_error(
    make_engine: MakeEngine,
) -> None:
    async with running(make_engine().engine, Collected()) as thread:
        order: list[int] = []
        answers = [thread.call(lambda engine, i=i: order.append(i)) for i in range(20)]
        await asyncio.gather(*answers)
        assert order == list(range(20))
        assert await thread.call(lambda engine: threading.current_thread().name) == "engine"
        with pytest.raises(TooLargeError):
            await thread.call(lambda engine: engine.add(spec(100_000)))
        assert await thread.call(lambda engine: engine.status().waiting) == 0


async def test_when_a_command_is_answered_every_earlier_step_has_been_delivered(make_engine: MakeEngine) -> None:
    collected = Collected()
    async with running(make_engine().engine, collected) as thread:
        await thread.call(lambda engine: engine.add(spec(200)))
        for _ in range(10):
            await asyncio.sleep(0.003)
            frozen = await thread.call(lambda engine: engine.freeze(KEY))
            assert collected.tokens == frozen
            await thread.call(lambda engine: engine.thaw(KEY))
        assert collected.tokens


async def test_a_release_queued_after_an_add_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    loaded = make_engine()
    async with running(loaded.engine, Collected()) as thread:
        added = thread.call(lambda engine: engine.add(spec(200)))
        released = thread.call(lambda engine: engine.release(KEY))
        await asyncio.gather(added, released)
        status = thread.status()
        assert (status.running, status.waiting) == (0, 0)
        assert status.free_blocks == status.total_blocks


async def test_an_idle_engine_sleeps_until_it_is_given_work(make_engine: MakeEngine) -> None:
    collected = Collected()
    async with running(make_engine().engine, collected) as thread:
        await thread.call(lambda engine: None)
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert thread.status().steps == 0
        await thread.call(lambda engine: engine.add(spec()))
        await collected.finished.wait()


async def test_blocks_freed_on_the_event_loop_wake_a_waiting_sequence(make_engine: MakeEngine) -> None:
    collected = Collected()
    loaded = make_engine(pool_tokens=32)
    reserved = loaded.engine.cache.allocate(4)
    async with running(loaded.engine, collected) as thread:
        await thread.call(lambda engine: engine.add(spec()))
        await asyncio.sleep(0.05)
        assert thread.status().waiting == 1
        loaded.engine.cache.release(reserved)
        await collected.finished.wait()


async def test_the_step_loop_waits_for_a_loop_that_has_fallen_behind(make_engine: MakeEngine) -> None:
    loaded = make_engine()
    collected = Collected()
    async with running(loaded.engine, collected) as thread:
        await thread.call(lambda engine: engine.add(spec(200)))
        time.sleep(0.7)  # noqa: ASYNC251 (the point: the event loop is blocked)
        steps, delivered = thread.status().steps, len(collected.results)
        assert 0 < steps - delivered <= MAX_UNDELIVERED + 1
        await collected.finished.wait()
    assert len(collected.tokens) == 200


async def test_a_paced_step_takes_its_time_and_stop_does_not_wait_for_it(make_engine: MakeEngine) -> None:
    collected = Collected()
    thread = EngineThread(make_engine(step_tokens=32).engine, pace=Pace(step_s=0.03, token_s=0.005))
    thread.start(collected)
    started = time.monotonic()
    await thread.call(lambda engine: engine.add(spec(3)))
    await asyncio.wait_for(collected.finished.wait(), 10)
    elapsed = time.monotonic() - started
    assert elapsed >= 3 * 0.03 + (21 + 1 + 1) * 0.005
    assert all(result.duration_s < 0.1 for result in collected.results)
    await thread.stop()
    assert thread.pace_overruns == 0

    slow = EngineThread(make_engine().engine, pace=Pace(step_s=60.0))
    slow.start(collected)
    await slow.call(lambda engine: engine.add(spec()))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await slow.stop()
    assert time.monotonic() - started < 2


async def test_a_pace_that_cannot_be_kept_is_counted(make_engine: MakeEngine) -> None:
    collected = Collected()
    async with running(make_engine().engine, collected, Pace(step_s=1e-6)) as thread:
        await thread.call(lambda engine: engine.add(spec()))
        await collected.finished.wait()
    assert thread.pace_overruns == len(collected.results)


async def test_a_step_that_raises_is_reported_and_everything_asked_for_afterwards_fails(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = make_engine()

    def broken(plan: object) -> None:
        raise RuntimeError("no memory left")

    async with running(loaded.engine, Collected()) as thread:
        await thread.call(lambda engine: engine.add(spec(200)))
        monkeypatch.setattr(loaded.engine, "_compute", broken)
        with pytest.raises(RuntimeError, match="no memory left"):
            await thread.failed
        with pytest.raises(PddError):
            await thread.call(lambda engine: engine.status())


async def test_a_result_that_cannot_be_handled_is_a_failure_too(make_engine: MakeEngine) -> None:
    def on_step(result: StepResult) -> None:
        raise KeyError("lost")

    async with running(make_engine().engine, on_step) as thread:
        thread.call(lambda engine: engine.add(spec(200)))
        with pytest.raises(KeyError, match="lost"):
            await thread.failed


async def test_stop_ends_the_thread_and_fails_what_did_not_run(make_engine: MakeEngine) -> None:
    thread = EngineThread(make_engine().engine)
    thread.start(Collected())
    entered, go_on = threading.Event(), threading.Event()
    blocking = thread.call(lambda engine: (entered.set(), go_on.wait(10)))
    await asyncio.to_thread(entered.wait, 10)
    queued = thread.call(lambda engine: engine.status())
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0.05)
    go_on.set()
    await stopping
    await blocking
    with pytest.raises(PddError, match="stopped"):
        await queued
    with pytest.raises(PddError, match="stopped"):
        await thread.call(lambda engine: engine.status())
    assert "engine" not in {t.name for t in threading.enumerate()}
    assert not thread.failed.done()
    await thread.stop()
