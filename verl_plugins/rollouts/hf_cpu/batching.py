"""Turns concurrent requests into batches: a short window to gather, one batch at a time, abort, pause and resume.

Knows nothing of models: `run` does the work, in a thread of its own, so that the event loop stays free to accept and to
abort. The thread is one, which is what keeps weights from changing in the middle of a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting(Generic[Job, Result]):
    request_id: str
    job: Job
    answer: asyncio.Future[Result | None]


class Batcher(Generic[Job, Result]):
    """Runs jobs in batches, in order of arrival.

    Args:
        run: answers a batch of jobs. Its second argument is a set of indices, to which an abort adds those that need no
            further work; they are still answered.
        max_batch: most jobs in a batch.
        window_s: how long to wait, in seconds, for more jobs to join a batch that is not full.
        worker: the one thread the model belongs to.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job], Collection[int]], Sequence[Result]],
        *,
        max_batch: int,
        window_s: float,
        worker: ThreadPoolExecutor,
    ) -> None:
        self._run, self._max_batch, self._window_s, self._worker = run, max_batch, window_s, worker
        self._queue: list[_Waiting[Job, Result]] = []
        self._running: list[_Waiting[Job, Result]] = []
        self._cancelled: set[int] = set()
        self._drain_task: asyncio.Task[None] | None = None
        self._admitting, self._may_start = asyncio.Event(), asyncio.Event()
        self._admitting.set()
        self._may_start.set()
        self._rejecting = False

    async def submit(self, request_id: str, job: Job) -> Result | None:
        """Run a job in some batch.

        Returns:
            its result, or None if it was aborted or rejected before it ran.

        Raises:
            RuntimeError: the batch failed; the reason is its cause.
        """
        while not self._admitting.is_set():
            if self._rejecting:
                return None
            await self._admitting.wait()
        answer: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(request_id, job, answer))
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.create_task(self._drain())
        return await answer

    def hold(self) -> None:
        """Start no further batch until `release`; the running one ends, and jobs may still queue."""
        self._may_start.clear()

    def release(self) -> None:
        """Start batches again."""
        self._may_start.set()

    async def abort(self, *, pause: bool = False, reject: bool = False, request_id: str | None = None) -> list[str]:
        """Give up jobs, and wait until they have been answered.

        Args:
            pause: admit nothing until `resume`.
            reject: while paused answer new jobs with None instead of keeping them waiting.
            request_id: only this job; all by default.

        Returns:
            the request ids given up.
        """
        if pause:
            self._admitting.clear()
            self._rejecting = reject
        given_up = [w for w in self._queue if request_id in (None, w.request_id)]
        self._queue = [w for w in self._queue if w not in given_up]
        for waiting in given_up:
            _answer(waiting, None)
        for index, waiting in enumerate(self._running):
            if request_id in (None, waiting.request_id):
                self._cancelled.add(index)
                given_up.append(waiting)
        await asyncio.gather(*(w.answer for w in given_up), return_exceptions=True)
        return [waiting.request_id for waiting in given_up]

    def resume(self) -> None:
        """Admit jobs again after a pause."""
        self._rejecting = False
        self._admitting.set()

    async def wait_idle(self) -> None:
        """Wait until no job is queued or running."""
        while self._queue or self._running:
            await asyncio.gather(*(w.answer for w in [*self._queue, *self._running]), return_exceptions=True)
            await asyncio.sleep(0)

    async def _drain(self) -> None:
        while self._queue:
            if len(self._queue) < self._max_batch:
                await asyncio.sleep(self._window_s)
            await self._may_start.wait()
            self._running, self._queue = self._queue[: self._max_batch], self._queue[self._max_batch :]
            self._cancelled = set()
            if self._running:
                await self._run_batch(self._running)
            self._running = []

    async def _run_batch(self, batch: Sequence[_Waiting[Job, Result]]) -> None:
        jobs = [waiting.job for waiting in batch]
        try:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._worker, self._run, jobs, self._cancelled)
            pairs = list(zip(batch, results, strict=True))
        except Exception as error:
            # Whatever went wrong belongs to these callers; the next batch starts afresh.
            for waiting in batch:
                failure = RuntimeError(f"a batch of {len(batch)} requests failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                if not waiting.answer.done():
                    waiting.answer.set_exception(failure)
            return
        for waiting, result in pairs:
            _answer(waiting, result)


def _answer(waiting: _Waiting[Job, Result], result: Result | None) -> None:
    if not waiting.answer.done():  # a caller that went away has cancelled it
        waiting.answer.set_result(result)
