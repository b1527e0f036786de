"""Verdicts and scores in the signatures that trainers call."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from reward.extract import extract
from reward.verdict import Status, Verdict

_NUMBER = re.compile(r"-?\d{1,1000}(?:\.\d{1,1000})?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d{1,1000})\}\{(-?\d{1,1000})\}|(-?\d{1,1000})/(\d{1,1000})")


def _rational(text: str) -> Fraction | None:
    text = text.strip().strip("$").strip()
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom, plain_top, plain_bottom = match.groups()
    numerator, denominator = int(top or plain_top), int(bottom or plain_bottom)
    if denominator == 0:
        return None
    return Fraction(-numerator if sign else numerator, denominator)


def verify(output: str, gold: str | Sequence[str], *, task: str = "math", timeout_s: float = 5.0) -> Verdict:
    """Check one output against one gold answer or several acceptable ones."""
    start = time.perf_counter()
    golds = [gold] if isinstance(gold, str) else list(gold)
    answer = extract(output, task)

    def verdict(status: Status, rule: str, used: str) -> Verdict:
        return Verdict(status == "correct", status, rule, answer, used, time.perf_counter() - start)

    if answer is None:
        return verdict("no_answer", "extract", golds[0])
    value = _rational(answer)
    for one in golds:
        if answer == one.strip():
            return verdict("correct", "text", one)
        if value is not None and value == _rational(one):
            return verdict("correct", "rational", one)
    return verdict("wrong" if value is not None else "unparsable", "rational", golds[0])


def score(output: str, gold: str | Sequence[str], **kwargs: Any) -> float:
    """Return 1.0 when the output is right, else 0.0."""
    return float(verify(output, gold, **kwargs).correct)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[str],
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one solution in verl's custom reward function signature."""
    verdict = verify(solution_str, ground_truth)
    value = float(verdict.correct)
    return {
        "score": value,
        "acc": value,
        "pred": verdict.answer or "",
        "status": verdict.status,
        "rule": verdict.rule,
    }
