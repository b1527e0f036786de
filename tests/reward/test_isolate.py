"""Worker processes: hard kill, memory limit, order, more stuck items than workers, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reward import isolate, verify, verify_many
from reward.isolate import Worker, WorkerDied, WorkerLate

SLEEPER = "import sys, time, json\nfor line in sys.stdin:\n    time.sleep(60)"
EATER = (
    "import sys, resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\n"
    "for line in sys.stdin:\n    block = bytearray(1 << 30)"
)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_stuck_worker_is_killed_and_replaced(monkeypatch):
    worker = Worker()
    with monkeypatch.context() as patch:
        patch.setattr(isolate, "_BOOT", SLEEPER)
        worker.send({"kind": "verify"})
        pid = worker.process.pid
        start = time.monotonic()
        with pytest.raises(WorkerLate):
            worker.receive(0.3)
        assert time.monotonic() - start < 0.3 * 1.2 + 0.5 and not running(pid)
    worker.send({"kind": "verify", "output": r"\boxed{2}", "gold": "2", "task": "math", "timeout_s": 5})
    assert worker.receive(60)["status"] == "correct"
    worker.stop()


def test_a_worker_out_of_memory_is_reported(monkeypatch):
    monkeypatch.setattr(isolate, "_BOOT", EATER)
    worker = Worker()
    worker.send({"kind": "verify"})
    with pytest.raises(WorkerDied):
        worker.receive(30)
    assert worker.process is None


def test_more_stuck_items_than_workers_do_not_block_the_pool(monkeypatch):
    boot = (
        "import sys, time, json\nfor line in sys.stdin:\n    item = json.loads(line)\n"
        "    time.sleep(60 if item.get('answer') == 'stuck' else 0)\n"
        "    print(json.dumps({'status': 'correct', 'rule': 'sympy'}), flush=True)"
    )
    monkeypatch.setattr(isolate, "_BOOT", boot)
    pool = isolate.Pool(2)
    stuck = [pool.submit({"kind": "sympy", "answer": "stuck", "gold": str(i)}, 0.6) for i in range(6)]
    plain = [pool.submit({"kind": "sympy", "answer": "fine", "gold": str(i)}, 5) for i in range(20)]
    assert {f.result(60)["status"] for f in plain} == {"correct"}
    assert {f.result(60)["status"] for f in stuck} == {"timeout"}
    processes = [w.process.pid for w in pool._workers if w.process is not None]
    pool.close()
    time.sleep(0.5)
    assert not any(running(pid) for pid in processes)


def test_a_worker_ends_when_its_parent_dies():
    code = (
        "import os, sys\nfrom reward.isolate import Worker\nw = Worker()\n"
        "w.send({'kind': 'verify', 'output': '', 'gold': '1', 'task': 'math', 'timeout_s': 5})\nw.receive(60)\n"
        "print(w.process.pid, flush=True)\nos._exit(0)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, end = int(shown.stdout), time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not running(pid)


def test_verify_many_keeps_order_and_agrees_with_verify():
    pairs = [(rf"\boxed{{{i}}}", str(i if i % 3 else i + 1)) for i in range(200)]
    pairs += [("no answer", "5"), (r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{7}", ["6", "7"]), ("x" * 300_000, "1")]
    verdicts = verify_many(pairs, workers=2, timeout_s=10)
    single = [verify(output, gold) for output, gold in pairs]
    assert [(v.status, v.rule, v.answer, v.gold) for v in verdicts] == [
        (v.status, v.rule, v.answer, v.gold) for v in single
    ]


def test_verify_many_returns_long_answers_whole():
    long = "1" * 15_000
    assert verify_many([(rf"\boxed{{{long}}}", long)] * 40, workers=1, timeout_s=10)[-1].answer == long


def test_verify_many_marks_a_stuck_item_and_goes_on(monkeypatch):
    boot = (
        "import sys, time, json\nfor line in sys.stdin:\n    item = json.loads(line)\n"
        "    time.sleep(60 if item['output'] == 'stuck' else 0)\n"
        "    print(json.dumps({'status': 'correct', 'rule': 'text', 'answer': 'a', 'elapsed_s': 0.0}), flush=True)"
    )
    monkeypatch.setattr(isolate, "_BOOT", boot)
    pairs = [("fine", "a")] * 20 + [("stuck", "a")] + [("fine", "a")] * 20
    statuses = [v.status for v in verify_many(pairs, workers=1, timeout_s=0.5)]
    assert statuses == ["correct"] * 20 + ["timeout"] + ["correct"] * 20


def test_invalid_arguments_are_named():
    with pytest.raises(ValueError, match="workers=0"):
        verify_many([("a", "b")], workers=0, timeout_s=1)
    with pytest.raises(ValueError, match="timeout_s=0"):
        verify("a", "b", timeout_s=0)
    with pytest.raises(ValueError, match="use one of math, aime"):
        verify("a", "b", task="maths")  # type: ignore[arg-type]
    assert verify_many([], workers=2, timeout_s=1) == []


BOMBS = [
    r"\boxed{10^{10^{10}}}",
    r"\boxed{\sum_{k=1}^{400}\sum_{j=1}^{400} \sqrt{k+j}}",
    r"\boxed{((9!)!)!}",
    r"\boxed{\frac{(x+y)^{200}-(x-y)^{200}}{(x^2+y^2)^{100}}}",
    "Answer: 9**9**9**9",
]


def test_five_hundred_calls_at_once_from_threads():
    items = [(rf"\boxed{{{i}}}", str(i), True) for i in range(250)]
    items += [(rf"\boxed{{\sqrt{{{4 * i}}}}}", rf"2\sqrt{{{i}}}", True) for i in range(1, 101)]
    items += [(rf"\boxed{{x^2+{i}x}}", f"x(x+{i})", True) for i in range(1, 101)]
    items = [x for i, item in enumerate(items) for x in ([item, (BOMBS[i % 5], "7", False)] if i % 9 == 0 else [item])]
    start = time.monotonic()
    with ThreadPoolExecutor(len(items)) as executor:
        verdicts = list(executor.map(lambda item: verify(item[0], item[1]), items))
    assert time.monotonic() - start < 30
    assert [v.correct for v in verdicts] == [expected for _, _, expected in items]
    assert len(items) == 500 and threading.active_count() < 600
