"""The result of checking one output against its gold answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["correct", "wrong", "no_answer", "unparsable", "timeout", "bad_gold", "error"]
Task = Literal["math", "aime", "gsm8k", "choice"]
STATUSES: tuple[str, ...] = get_args(Status)
TASKS: tuple[str, ...] = get_args(Task)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided, by which rung of the ladder, on which extracted answer.

    Attributes:
        correct: True only for status "correct".
        status: outcome; see `STATUSES`.
        rule: name of the rung or rule that decided.
        answer: the extracted answer as the model wrote it, or None.
        gold: the gold answer compared with (the matching one when several were given).
        elapsed_s: wall time of the check in seconds.
    """

    correct: bool
    status: Status
    rule: str
    answer: str | None
    gold: str
    elapsed_s: float
