"""Many verdicts at once: a warm pool of worker processes, order kept, stuck workers killed and replaced."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from reward.extract import extract
from reward.isolate import Worker, WorkerDied, WorkerLate
from reward.score import check_arguments
from reward.verdict import Task, Verdict

_WINDOW_ITEMS = 16  # items under way per worker
_WINDOW_CHARS = 40_000  # together below a pipe's buffer, so that neither side blocks on the other
Pair = tuple[str, str | Sequence[str]]


class _Batch:
    """Shared state of one `verify_many` call."""

    def __init__(self, pairs: list[Pair], task: Task, timeout_s: float, *, progress: bool) -> None:
        self.pairs = pairs
        self.task = task
        self.timeout_s = timeout_s
        self.progress = progress
        self.verdicts: list[Verdict | None] = [None] * len(pairs)
        self.waiting = deque(range(len(pairs)))
        self.lock = threading.Lock()
        self.done = 0
        self.shown = time.monotonic()
        self.failure: BaseException | None = None

    def take(self) -> int | None:
        """Return the next index, or None when nothing waits."""
        with self.lock:
            return self.waiting.popleft() if self.waiting else None

    def give_back(self, indices: Iterable[int]) -> None:
        """Queue again what a killed worker had not begun."""
        with self.lock:
            self.waiting.extendleft(reversed(list(indices)))

    def finish(self, index: int, reply: dict[str, Any]) -> None:
        """Store one verdict and report progress once a second."""
        output, gold = self.pairs[index]
        first = gold if isinstance(gold, str) else (list(gold) or [""])[0]
        answer = reply.get("answer")
        if reply.get("long"):
            answer = extract(output, self.task)
        self.verdicts[index] = Verdict(
            reply["status"] == "correct",
            reply["status"],
            reply["rule"],
            answer,
            reply.get("gold") or first,
            reply["elapsed_s"],
        )
        with self.lock:
            self.done += 1
            now = time.monotonic()
            if self.progress and (now - self.shown > 1 or self.done == len(self.pairs)):
                self.shown = now
                print(f"\r{self.done}/{len(self.pairs)} verified", end="", file=sys.stderr, flush=True)


def verify_many(
    pairs: Iterable[Pair], *, workers: int = 2, timeout_s: float = 5.0, progress: bool = False, task: Task = "math"
) -> list[Verdict]:
    """Verify many (output, gold) pairs in worker processes.

    Args:
        pairs: outputs with their golds.
        workers: number of processes; throughput grows with it up to the number of cores.
        timeout_s: wall seconds per item, from a worker taking it; a worker that overruns is killed and replaced.
        progress: print a counter to stderr.
        task: as for `verify`.

    Returns:
        One verdict per pair, in order.

    Raises:
        ValueError: `workers` is below 1, `timeout_s` is not positive or `task` is unknown.
    """
    check_arguments("verify_many", task, timeout_s)
    if workers < 1:
        raise ValueError(f"verify_many: workers={workers!r} must be at least 1")
    batch = _Batch([(output, gold) for output, gold in pairs], task, timeout_s, progress=progress)
    threads = [threading.Thread(target=_serve, args=(batch,)) for _ in range(min(workers, len(batch.pairs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if progress and batch.pairs:
        print(file=sys.stderr)
    if batch.failure is not None:
        raise batch.failure
    return [verdict for verdict in batch.verdicts if verdict is not None]


def _serve(batch: _Batch) -> None:
    worker = Worker()
    try:
        while batch.failure is None and _fill_and_drain(batch, worker):
            continue
    except BaseException as error:  # carried to the caller's thread, which raises it
        batch.failure = error
    finally:
        worker.stop()


def _fill_and_drain(batch: _Batch, worker: Worker) -> bool:
    """Keep a window of items under way until nothing waits or the worker is lost; return whether to go on."""
    under_way: deque[tuple[int, int]] = deque()
    chars = 0
    while True:
        while len(under_way) < _WINDOW_ITEMS and (chars < _WINDOW_CHARS or not under_way):
            index = batch.take()
            if index is None:
                break
            size = _size(batch.pairs[index])
            if under_way and chars + size > _WINDOW_CHARS:
                batch.give_back([index])
                break
            under_way.append((index, size))
            chars += size
            if not _send(batch, worker, index):
                batch.give_back(i for i, _ in under_way)
                return True
        if not under_way:
            return False
        index, size = under_way[0]
        reply = _receive(batch, worker)
        batch.finish(index, reply)
        under_way.popleft()
        chars -= size
        if worker.process is None:
            batch.give_back(i for i, _ in under_way)
            return True


def _size(pair: Pair) -> int:
    return 4 * len(pair[0]) if not str(pair[0]).isascii() else len(str(pair[0]))


def _send(batch: _Batch, worker: Worker, index: int) -> bool:
    output, gold = batch.pairs[index]
    wanted = gold if isinstance(gold, str) else list(gold)
    try:
        worker.send(
            {"kind": "verify", "output": output, "gold": wanted, "task": batch.task, "timeout_s": batch.timeout_s}
        )
    except WorkerDied:
        return False
    return True


def _receive(batch: _Batch, worker: Worker) -> dict[str, Any]:
    start = time.perf_counter()
    grace = 0.0 if worker.warm else 60.0  # the first answer of a process includes its start
    try:
        reply = worker.receive(batch.timeout_s * 1.15 + grace)
        worker.warm = True
        return reply
    except WorkerLate:
        return {"status": "timeout", "rule": "time limit", "elapsed_s": time.perf_counter() - start}
    except WorkerDied:
        return {
            "status": "error",
            "rule": "worker died at its memory or CPU limit",
            "elapsed_s": time.perf_counter() - start,
        }
