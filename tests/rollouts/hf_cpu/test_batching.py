"""Batches, their failures, and abort, pause and resume, with a `run` that needs no model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_plugins.rollouts.hf_cpu.batching import Batcher

Run = Callable[[Sequence[int], Collection[int]], Sequence[str]]


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def batcher(worker: ThreadPoolExecutor, run: Run, *, max_batch: int = 4, window_s: float = 0.01) -> Batcher[int, str]:
    return Batcher(run, max_batch=max_batch, window_s=window_s, worker=worker)


def echo(jobs: Sequence[int], cancelled: Collection[int]) -> list[str]:
    return [f"job {job}" for job in jobs]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


async def within(seconds: float, awaitable: Awaitable[object]) -> object:
    async with asyncio.timeout(seconds):
        return await awaitable


def test_concurrent_jobs_share_batches_and_keep_their_answers(worker: ThreadPoolExecutor):
    sizes: list[int] = []

    def run(jobs: Sequence[int], cancelled: Collection[int]) -> list[str]:
        sizes.append(len(jobs))
        return echo(jobs, cancelled)

    async def scenario() -> list[str | None]:
        batches = batcher(worker, run)
        return await asyncio.gather(*(batches.submit(str(job), job) for job in range(10)))

    assert asyncio.run(scenario()) == [f"job {job}" for job in range(10)]
    assert sizes == [4, 4, 2]


def test_a_failing_batch_fails_its_own_jobs_only(worker: ThreadPoolExecutor):
    def run(jobs: Sequence[int], cancelled: Collection[int]) -> list[str]:
        if 5 in jobs:
            raise ArithmeticError("job 5 is bad")
        return echo(jobs, cancelled)

    async def scenario() -> list[str | BaseException | None]:
        batches = batcher(worker, run)
        jobs = (batches.submit(str(job), job) for job in range(10))
        first = await asyncio.gather(*jobs, return_exceptions=True)
        return [*first, await batches.submit("again", 11)]

    answers = asyncio.run(scenario())
    assert answers[:4] == ["job 0", "job 1", "job 2", "job 3"] and answers[8:] == ["job 8", "job 9", "job 11"]
    for failure in answers[4:8]:
        assert isinstance(failure, RuntimeError) and isinstance(failure.__cause__, ArithmeticError)
        assert "a batch of 4 requests failed: ArithmeticError: job 5 is bad" in str(failure)


def test_a_run_that_answers_too_few_is_a_failure(worker: ThreadPoolExecutor):
    async def scenario() -> None:
        await batcher(worker, lambda jobs, cancelled: ["only one"] * (len(jobs) - 1)).submit("0", 0)

    with pytest.raises(RuntimeError, match="requests failed: ValueError"):
        asyncio.run(scenario())


def test_held_batches_wait_for_release(worker: ThreadPoolExecutor):
    async def scenario() -> str | None:
        batches = batcher(worker, echo)
        batches.hold()
        answer = asyncio.create_task(batches.submit("0", 0))
        await asyncio.sleep(0.1)
        assert not answer.done()
        batches.release()
        return await answer

    assert asyncio.run(scenario()) == "job 0"


class Slow:
    """Runs until every job is cancelled or the test lets it end."""

    def __init__(self) -> None:
        self.started, self.proceed = threading.Event(), threading.Event()

    def __call__(self, jobs: Sequence[int], cancelled: Collection[int]) -> list[str]:
        self.started.set()
        while not self.proceed.wait(0.005) and len(cancelled) < len(jobs):
            pass
        return [f"part of {job}" if n in cancelled else f"job {job}" for n, job in enumerate(jobs)]


def test_abort_answers_running_and_queued_jobs_and_pauses(worker: ThreadPoolExecutor):
    async def scenario() -> None:
        slow = Slow()
        batches = batcher(worker, slow, max_batch=2)
        jobs = [asyncio.create_task(batches.submit(str(job), job)) for job in range(3)]
        await eventually(slow.started.is_set)
        given_up = await within(10, batches.abort(pause=True))
        assert sorted(given_up) == ["0", "1", "2"]
        assert [await job for job in jobs] == ["part of 0", "part of 1", None]
        late = asyncio.create_task(batches.submit("late", 7))
        await asyncio.sleep(0.05)
        assert not late.done()
        slow.proceed.set()
        batches.resume()
        assert await within(10, late) == "job 7"

    asyncio.run(scenario())


def test_rejecting_pause_answers_late_jobs_at_once_until_resume(worker: ThreadPoolExecutor):
    async def scenario() -> None:
        batches = batcher(worker, echo)
        assert await batches.abort(pause=True, reject=True) == []
        assert await within(5, batches.submit("0", 0)) is None
        batches.resume()
        assert await within(5, batches.submit("1", 1)) == "job 1"

    asyncio.run(scenario())


def test_one_job_can_be_aborted(worker: ThreadPoolExecutor):
    async def scenario() -> None:
        slow = Slow()
        batches = batcher(worker, slow)
        jobs = [asyncio.create_task(batches.submit(str(job), job)) for job in range(2)]
        await eventually(slow.started.is_set)
        aborting = asyncio.create_task(batches.abort(request_id="1"))
        await asyncio.sleep(0.05)
        slow.proceed.set()
        assert await within(10, aborting) == ["1"]
        assert [await job for job in jobs] == ["job 0", "part of 1"]
        assert await batches.abort(request_id="1") == []

    asyncio.run(scenario())


def test_a_caller_that_goes_away_disturbs_nobody(worker: ThreadPoolExecutor):
    async def scenario() -> str | None:
        batches = batcher(worker, echo, window_s=0.1)
        gone = asyncio.create_task(batches.submit("0", 0))
        stays = asyncio.create_task(batches.submit("1", 1))
        await asyncio.sleep(0.01)
        gone.cancel()
        return await stays

    assert asyncio.run(scenario()) == "job 1"


def test_wait_idle_returns_when_all_is_answered(worker: ThreadPoolExecutor):
    async def scenario() -> list[bool]:
        batches = batcher(worker, echo, max_batch=1, window_s=0.0)
        jobs = [asyncio.create_task(batches.submit(str(job), job)) for job in range(5)]
        await asyncio.sleep(0)
        await within(10, batches.wait_idle())
        return [job.done() for job in jobs]

    assert asyncio.run(scenario()) == [True] * 5
