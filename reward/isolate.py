"""Worker processes that are killed and replaced: no signals, no fork and no shared state in the caller."""

from __future__ import annotations

import atexit
import heapq
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward import limits

_START_S = 120.0  # a cold machine may take long to import sympy; this is not counted against an item
_FIRST_CPU_S = 0.4
_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from reward.worker import main; main()"


class WorkerDied(RuntimeError):
    """The worker ended without an answer: killed by its memory or CPU limit."""


class WorkerLate(TimeoutError):
    """The worker did not answer in time and was killed."""


class Worker:
    """One child process with line-based JSON over pipes. Not thread-safe: one owner at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.buffer = b""
        self.warm = False

    def start(self) -> None:
        """Start the process if it is not running."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _PACKAGE_ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            )

    def stop(self) -> None:
        """Kill the process and reap it."""
        process, self.process, self.buffer, self.warm = self.process, None, b"", False
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # unsent bytes of an item that died with the worker

    def send(self, item: dict[str, Any]) -> None:
        """Write one item.

        Raises:
            WorkerDied: the process is gone.
        """
        self.start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(item).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            self.stop()
            raise WorkerDied from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            WorkerLate: nothing came within `timeout_s`; the process was killed.
            WorkerDied: the process ended by itself.
        """
        assert self.process is not None and self.process.stdout is not None
        descriptor, end = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self.stop()
                raise WorkerLate
            data = os.read(descriptor, 1 << 16)
            if not data:
                late = self.process.wait() == -signal.SIGXCPU
                self.stop()
                raise WorkerLate if late else WorkerDied
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, item: dict[str, Any]) -> dict[str, Any]:
        """Send one item and wait for its answer, a fifth longer than its own limit at most."""
        if item["kind"] == "sympy" and not (self.warm and self.process is not None and self.process.poll() is None):
            self.send({"kind": "warm", "timeout_s": _START_S})
            self.receive(_START_S)
            self.warm = True
        self.send(item)
        return self.receive(item["timeout_s"] * 1.15)


@dataclass(order=True)
class _Job:
    priority: int
    number: int
    item: dict[str, Any] = field(compare=False)
    timeout_s: float = field(compare=False)
    future: Future[dict[str, Any]] = field(compare=False)


class Pool:
    """Warm workers behind a priority queue: fresh items first, items that already used a slice behind them."""

    def __init__(self, workers: int) -> None:
        self.process_id = os.getpid()
        self._jobs: list[_Job] = []
        self._ready = threading.Condition()
        self._under_way: dict[str, Future[dict[str, Any]]] = {}
        self._count = 0
        self._closed = False
        self._workers = [Worker() for _ in range(workers)]
        for worker in self._workers:
            threading.Thread(target=self._serve, args=(worker,), daemon=True, name="reward-pool").start()

    def submit(self, item: dict[str, Any], timeout_s: float) -> Future[dict[str, Any]]:
        """Queue one item; its time counts from a worker taking it.

        Equal items under way share one computation: the rollouts of a group often give the same answer.
        """
        key = json.dumps(item, sort_keys=True)
        with self._ready:
            future = self._under_way.get(key)
            if future is not None:
                return future
            future = self._under_way[key] = Future()
        future.add_done_callback(lambda _: self._under_way.pop(key, None))
        self._push(0, item, timeout_s, future)
        return future

    def _push(self, priority: int, item: dict[str, Any], timeout_s: float, future: Future[dict[str, Any]]) -> None:
        with self._ready:
            self._count += 1
            heapq.heappush(self._jobs, _Job(priority, self._count, item, timeout_s, future))
            self._ready.notify()

    def _serve(self, worker: Worker) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._closed:
                    self._ready.wait()
                if self._closed:
                    worker.stop()
                    return
                job = heapq.heappop(self._jobs)
            self._run(worker, job)

    def _run(self, worker: Worker, job: _Job) -> None:
        cpu_s = _FIRST_CPU_S if job.priority == 0 else limits.SYMPY_CPU_S
        start = time.monotonic()
        try:
            answer = worker.ask({**job.item, "timeout_s": job.timeout_s, "cpu_s": min(cpu_s, job.timeout_s)})
        except WorkerLate:
            answer = {"status": "timeout", "rule": "time limit"}
        except WorkerDied:
            answer = {"status": "error", "rule": "worker died at its memory or CPU limit"}
        except OSError as error:
            answer = {"status": "error", "rule": f"no worker: {error}"}
        rest = job.timeout_s - float(answer.get("elapsed_s", time.monotonic() - start))
        if answer["status"] == "timeout" and job.priority == 0 and rest > 0.05:
            self._push(1, job.item, rest, job.future)
        else:
            if not job.future.cancelled():
                job.future.set_result(answer)

    def close(self) -> None:
        """Stop all workers; queued items are cancelled."""
        with self._ready:
            self._closed = True
            for job in self._jobs:
                job.future.cancel()
            self._jobs.clear()
            self._ready.notify_all()
        for worker in self._workers:
            process = worker.process
            if process is not None:
                process.kill()


_POOL: Pool | None = None
_POOL_LOCK = threading.Lock()


def shared_pool() -> Pool:
    """Return this process's pool, started on first use; a forked child gets its own."""
    global _POOL
    with _POOL_LOCK:
        if _POOL is None or _POOL.process_id != os.getpid():
            _POOL = Pool(max(1, min(4, os.cpu_count() or 1)))
            atexit.register(_POOL.close)
        return _POOL
