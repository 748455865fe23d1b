"""Owned tasks: none outlives its owner, none fails in silence."""

from __future__ import annotations

import asyncio
import warnings

from structlog.testing import capture_logs

from pdd.tasks import Tasks


async def test_a_failure_is_logged_under_the_tasks_name() -> None:
    async def fail() -> None:
        raise ValueError("why")

    tasks = Tasks()
    with capture_logs() as logs:
        tasks.spawn(fail(), "some work")
        await tasks.join(1.0)
    assert [(entry["event"], entry["task"], entry["log_level"]) for entry in logs] == [
        ("task_failed", "some work", "error")
    ]


async def test_close_ends_all_and_waits_for_their_cleanup() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    tasks = Tasks()
    running = [tasks.spawn(work(number), f"{number}") for number in range(3)]
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(ended) == [0, 1, 2]
    assert all(task.cancelled() for task in running)


async def test_a_task_that_closes_its_owner_is_left_alone() -> None:
    async def close_all() -> None:
        await tasks.close()
        closed.set()

    tasks, closed = Tasks(), asyncio.Event()
    tasks.spawn(close_all(), "close")
    async with asyncio.timeout(1):
        await closed.wait()


async def test_work_cancelled_before_it_began_leaves_no_coroutine_behind() -> None:
    async def work() -> None:
        raise AssertionError("it was cancelled before")

    tasks = Tasks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coroutine = work()
        tasks.spawn(coroutine, "never begun").cancel()
        await tasks.close()
        await asyncio.sleep(0)
        assert coroutine.cr_frame is None, "still waiting to be awaited"
