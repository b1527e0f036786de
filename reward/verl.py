"""The verifier in the signature of verl's custom reward function. Imports nothing of verl."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from reward.score import verify, verify_async
from reward.verdict import TASKS, Task, Verdict

_LOG = logging.getLogger(__name__)
# Fragments of data_source names in lower case, first match wins; read in prepare_data and doctor as well.
SOURCES: tuple[tuple[str, Task], ...] = (
    ("aime", "aime"),
    ("gsm8k", "gsm8k"),
    ("dapo", "math"),
    ("math", "math"),  # MATH, MATH-500, MATH-lighteval, minerva_math, collegemath
    ("amc", "math"),
    ("minerva", "math"),
    ("college", "math"),
    ("olympiad", "math"),
)


@lru_cache(maxsize=1024)
def task_of(data_source: str) -> tuple[Task, bool]:
    """Return the task of a data source, and whether the source is known; unknown ones are read as "math"."""
    name = data_source.lower().replace("-", "").replace("_", "")
    for fragment, task in SOURCES:
        if fragment in name:
            return task, True
    _LOG.warning("reward: data_source=%r is unknown and is scored as task 'math'; pass task=... to choose", data_source)
    return "math", False


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Return DAPO's soft overlong penalty: 0 up to max_length - buffer, then linear down to -factor.

    Args:
        length: response length in tokens.
        max_length: longest allowed response in tokens.
        buffer: tokens before `max_length` over which the penalty grows.
        factor: penalty at `max_length`.

    Raises:
        ValueError: `buffer` is not in 1..max_length.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong_penalty: buffer={buffer!r} must lie in 1..max_length={max_length!r}")
    return max(-factor, min(0.0, -(length - (max_length - buffer)) / buffer * factor))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[str],
    extra_info: Mapping[str, Any] | None = None,
    *,
    task: Task | None = None,
    timeout_s: float = 5.0,
    negative: bool = False,
    overlong: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Score one solution in verl's custom reward function signature.

    Use it as `reward.custom_reward_function.path=pkg://reward` with `name=compute_score`; the keyword options go under
    `reward_kwargs`. It is a plain function: verl runs it in the threads of its reward workers.

    Args:
        data_source: chooses the task; an unknown source is scored as "math", logged once and marked in `rule`.
        solution_str: decoded response.
        ground_truth: gold answer, or several.
        extra_info: read for `response_length` (tokens) when `overlong` is set; otherwise unused.
        task: overrides the choice by `data_source`.
        timeout_s: as for `verify`.
        negative: DAPO's reward, -1 instead of 0 for everything that is not correct.
        overlong: DAPO's length shaping, {"max_length": tokens, "buffer": tokens, "factor": 1.0}.

    Returns:
        `score` (with shaping), `acc` (0.0 or 1.0, without), `pred`, `status` and `rule`.

    Raises:
        ValueError: `task` or `overlong` is invalid, or `overlong` is set and no response length is given.
    """
    chosen, known = _chosen_task(data_source, task)
    verdict = verify(solution_str, ground_truth, task=chosen, timeout_s=timeout_s)
    return _result(verdict, known, extra_info, negative, overlong)


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[str],
    extra_info: Mapping[str, Any] | None = None,
    *,
    task: Task | None = None,
    timeout_s: float = 5.0,
    negative: bool = False,
    overlong: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Do what `compute_score` does as a coroutine, which verl awaits instead of giving it a thread.

    Items that wait for a worker process then hold none of the few threads of the reward worker's executor.

    Args:
        data_source: as for `compute_score`, like all that follow.
        solution_str: decoded response.
        ground_truth: gold answer, or several.
        extra_info: read for `response_length` when `overlong` is set.
        task: overrides the choice by `data_source`.
        timeout_s: as for `verify`.
        negative: -1 instead of 0.
        overlong: DAPO's length shaping.

    Raises:
        ValueError: as for `compute_score`.
    """
    chosen, known = _chosen_task(data_source, task)
    verdict = await verify_async(solution_str, ground_truth, task=chosen, timeout_s=timeout_s)
    return _result(verdict, known, extra_info, negative, overlong)


def _chosen_task(data_source: str, task: Task | None) -> tuple[Task, bool]:
    if task is None:
        return task_of(str(data_source))
    if task not in TASKS:
        raise ValueError(f"compute_score: task={task!r} is unknown; use one of {', '.join(TASKS)}")
    return task, True


def _result(
    verdict: Verdict,
    known: bool,
    extra_info: Mapping[str, Any] | None,
    negative: bool,
    overlong: Mapping[str, Any] | None,
) -> dict[str, Any]:
    accuracy = float(verdict.correct)
    value = accuracy - (1.0 if negative and not verdict.correct else 0.0)
    if overlong:
        value += _overlong(extra_info, overlong)
    return {
        "score": value,
        "acc": accuracy,
        "pred": verdict.answer or "",
        "status": verdict.status,
        "rule": verdict.rule if known else f"{verdict.rule} (unknown data_source, read as math)",
    }


def _overlong(extra_info: Mapping[str, Any] | None, overlong: Mapping[str, Any]) -> float:
    length = (extra_info or {}).get("response_length")
    if length is None:
        raise ValueError(
            "compute_score: overlong needs extra_info['response_length'] in tokens; without it use verl's own shaping: "
            "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True"
        )
    unknown = set(overlong) - {"max_length", "buffer", "factor"}
    if unknown or not {"max_length", "buffer"} <= set(overlong):
        raise ValueError(f"compute_score: overlong={dict(overlong)!r} needs max_length and buffer, and may have factor")
    return overlong_penalty(
        int(length), int(overlong["max_length"]), int(overlong["buffer"]), float(overlong.get("factor", 1.0))
    )
