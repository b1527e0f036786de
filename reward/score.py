"""Verdicts and scores in the signatures that trainers call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from reward import limits
from reward.compare import Decision, compare, gold_problem, reduce_gold, restates, sympy_texts, unreadable
from reward.extract import Found, find, option_letter
from reward.isolate import shared_pool
from reward.verdict import TASKS, Task, Verdict

Deep = Callable[[str, str], Decision]  # (answer, gold) -> what sympy says; only worker processes run it in place


def verify(output: str, gold: str | Sequence[str], *, task: Task = "math", timeout_s: float = 5.0) -> Verdict:
    """Check one output against one gold answer, or against several of which any is right.

    Never raises on any `output`. Everything but the sympy rung runs in this process in bounded time; formulas with
    limits, integrals, derivatives or infinite series cross to a worker process, where `timeout_s` holds.

    Args:
        output: the whole reply of a model.
        gold: the right answer, or several acceptable ones.
        task: "math", "aime", "gsm8k" or "choice".
        timeout_s: wall seconds a worker may spend on this item, counted from taking it.

    Raises:
        ValueError: `task` is unknown or `timeout_s` is not positive.
    """
    check_arguments("verify", task, timeout_s)

    def deep(answer: str, wanted: str) -> Decision:
        return _decision(_ask_sympy(answer, wanted, timeout_s).result())

    return judge(output, gold, task, deep)


async def verify_async(
    output: str, gold: str | Sequence[str], *, task: Task = "math", timeout_s: float = 5.0
) -> Verdict:
    """Do what `verify` does without holding a thread while a worker process decides.

    Everything else runs on the event loop's thread: a tenth of a millisecond for most items, bounded for all.

    Args:
        output: as for `verify`.
        gold: as for `verify`.
        task: as for `verify`.
        timeout_s: as for `verify`.

    Raises:
        ValueError: as for `verify`.
    """
    check_arguments("verify_async", task, timeout_s)
    known: dict[tuple[str, str], Decision] = {}

    def deep(answer: str, wanted: str) -> Decision:
        if (answer, wanted) not in known:
            raise _NeedsSympy(answer, wanted)
        return known[answer, wanted]

    while True:
        try:
            return judge(output, gold, task, deep)
        except _NeedsSympy as need:
            reply = await asyncio.wrap_future(_ask_sympy(*need.texts, timeout_s))
            known[need.texts] = _decision(reply)


class _NeedsSympy(BaseException):
    """Leaves `judge` to await a worker. Not an Exception: `judge` turns those into verdicts."""

    def __init__(self, answer: str, wanted: str) -> None:
        self.texts = (answer, wanted)


def _ask_sympy(answer: str, wanted: str, timeout_s: float) -> Future[dict[str, Any]]:
    item = {"kind": "sympy", "answer": answer, "gold": wanted}
    return shared_pool().submit(item, timeout_s)


def _decision(reply: dict[str, Any]) -> Decision:
    return Decision(reply["status"], reply["rule"])


def check_arguments(name: str, task: str, timeout_s: float) -> None:
    """Refuse an unknown task or a time that is not positive.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if task not in TASKS:
        raise ValueError(f"{name}: task={task!r} is unknown; use one of {', '.join(TASKS)}")
    if not timeout_s > 0:
        raise ValueError(f"{name}: timeout_s={timeout_s!r} must be positive, in seconds")


def judge(output: str, gold: str | Sequence[str], task: str, deep: Deep) -> Verdict:
    """Extract, compare and report; `deep` decides what only sympy can."""
    start = time.perf_counter()
    golds = [gold] if isinstance(gold, str) else [str(one) for one in gold]
    if not golds:
        return Verdict(False, "bad_gold", "no gold given", None, "", time.perf_counter() - start)
    text = output if isinstance(output, str) else ""
    answer: str | None = None
    used = golds[0]
    try:
        limits.start_clock()
        found = find(text, task, wants_option=any(option_letter(one) is not None for one in golds))
        answer = found.answer
        decision, used = _best(found, golds, task, deep)
    except limits.BoundError as error:
        decision = Decision("timeout" if isinstance(error, limits.OutOfTime) else "unparsable", f"bounds: {error}")
    except Exception as error:  # a fault of ours costs one verdict with a name, never a training run
        decision = Decision("error", f"{type(error).__name__}: {error}"[:200])
    return Verdict(
        decision.status == "correct", decision.status, decision.rule, answer, used, time.perf_counter() - start
    )


def _best(found: Found, golds: list[str], task: str, deep: Deep) -> tuple[Decision, str]:
    """Return the first correct decision, else the first that is not about a bad gold."""
    first: tuple[Decision, str] | None = None
    for gold in golds:
        limits.start_clock()
        decision = _one(found, gold, task, deep)
        if decision.status == "correct":
            return decision, gold
        if first is None or first[0].status == "bad_gold":
            first = (decision, gold)
    assert first is not None
    return first


def _one(found: Found, gold: str, task: str, deep: Deep) -> Decision:
    problem = gold_problem(reduce_gold(gold), task)
    if problem:
        return Decision("bad_gold", problem)
    if found.answer is None:
        return Decision("no_answer", found.rule)
    decision = _compared(found.answer, gold, task, deep)
    if decision.status == "correct" and any(
        _compared(other, gold, task, deep).status != "correct" for other in found.beside
    ):
        return Decision("wrong", "hedge: different boxes side by side")
    return decision


def _compared(answer: str, gold: str, task: str, deep: Deep) -> Decision:
    decision = compare(answer, gold, task)
    if decision.status == "correct" and decision.rule != "text" and restates(answer, gold):
        return Decision("wrong", "unevaluated: the operator of the problem, not its value")
    undecided = decision.status not in ("correct", "wrong") or decision.rule.endswith("undefined")
    if undecided and task == "math":
        texts = sympy_texts(answer, gold)
        if texts is not None and restates(answer, gold):
            return Decision("wrong", "unevaluated: the operator of the problem, not its value")
        if texts is not None:
            return deep(*texts)
    return decision


def check_gold(gold: str, task: Task = "math") -> None:
    """Refuse a gold answer that no output could ever match; data preparation calls this.

    Raises:
        ValueError: the gold is empty, a placeholder, or of the wrong kind for the task.
    """
    check_arguments("check_gold", task, 1.0)
    problem = gold_problem(reduce_gold(gold), task)
    if problem is None and task == "math":
        problem = unreadable(gold)
    if problem:
        raise ValueError(f"check_gold: gold={gold[:80]!r} is unusable for task={task!r}: {problem}")


def score(output: str, gold: str | Sequence[str], **kwargs: Any) -> float:
    """Return 1.0 when the output is right, else 0.0; keywords as for `verify`."""
    return float(verify(output, gold, **kwargs).correct)
