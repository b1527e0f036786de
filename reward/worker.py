"""The worker process: reads one JSON item per line, answers one JSON line, under CPU and memory limits."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from reward import deep
from reward.compare import Decision

MEMORY_BYTES = 2 << 30
REPLY_ANSWER_CHARS = 2_000  # a longer answer is extracted again by the parent: replies must fit a pipe


class _Late(BaseException):
    """The item's time is over. Not an Exception, so that no handler below swallows it."""


def _on_alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _Late


def _limit(timeout_s: float, cpu_s: float) -> None:
    """Arm a wall and a CPU alarm, and the kernel's CPU limit behind them for code that never returns."""
    used = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + cpu_s * 1.1) + 2, hard))
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _disarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _watch_parent() -> None:
    parent = os.getppid()
    while True:
        time.sleep(0.5)
        if os.getppid() != parent:
            os._exit(0)


def sympy_decision(answer: str, gold: str) -> Decision:
    """Decide by sympy; a fault of its parser is an unparsable answer."""
    try:
        same = deep.same(answer, gold)
    except MemoryError:
        raise
    except Exception as error:
        return Decision("unparsable", f"sympy: {type(error).__name__}")
    if same is None:
        return Decision("unparsable", "sympy: undecided")
    return Decision("correct" if same else "wrong", "sympy")


def _answer(item: dict[str, Any]) -> dict[str, Any]:
    if item["kind"] == "warm":
        deep.warm_up()
        return {"status": "ready"}
    if item["kind"] == "sympy":
        decision = sympy_decision(item["answer"], item["gold"])
        return {"status": decision.status, "rule": decision.rule}
    from reward.score import judge

    verdict = judge(item["output"], item["gold"], item["task"], sympy_decision)
    answer = verdict.answer
    long = answer is not None and len(answer) > REPLY_ANSWER_CHARS
    return {
        "status": verdict.status,
        "rule": verdict.rule,
        "answer": None if long else answer,
        "long": long,
        "gold": verdict.gold,
    }


def _reply(item: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        _limit(item["timeout_s"], item.get("cpu_s", item["timeout_s"]))
        try:
            reply = _answer(item)
        finally:
            _disarm()
    except _Late:
        reply = {"status": "timeout", "rule": "time limit", "answer": None, "gold": ""}
    except MemoryError:
        reply = {"status": "error", "rule": "memory limit", "answer": None, "gold": ""}
    except Exception as error:
        reply = {"status": "error", "rule": f"{type(error).__name__}: {error}"[:200], "answer": None, "gold": ""}
    return {**reply, "elapsed_s": time.perf_counter() - start}


def main() -> None:
    """Serve items from stdin until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing a library prints may reach the protocol
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.signal(signal.SIGPROF, _on_alarm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, daemon=True).start()
    for line in sys.stdin.buffer:
        replies.write(json.dumps(_reply(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
