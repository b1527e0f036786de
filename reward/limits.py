"""Bounds that hold before anything is computed. One place, so that they can be reviewed together."""

from __future__ import annotations

import threading
import time

MAX_OUTPUT_CHARS = 2_000_000  # longer outputs keep only their end: an answer is given last
MAX_ANSWER_CHARS = 20_000  # a longer box is compared as text only
MAX_FORMULA_CHARS = 4_000  # a longer formula is not parsed
MAX_TOKENS = 1_500
MAX_DEPTH = 90  # nesting of groups, fractions and functions
MAX_ITEMS = 200  # elements of a list, set or matrix
MAX_LITERAL_DIGITS = 4_000  # digits of one number that takes part in arithmetic
MAX_BITS = 120_000  # size of any exact intermediate integer
MAX_FACTORIAL = 5_000
MAX_SUM_TERMS = 400
MAX_OPERATIONS = 20_000  # evaluation steps of one expression at one point
MAX_PRECISION_BITS = 16_000  # of a numeric zero test
MAX_PLUS_MINUS = 4  # independent signs in one expression
MAX_SYMBOLS = 12  # free symbols of one comparison
MAX_GAMMA_BITS = 1_500  # precision where factorials of non-integers occur
SYMPY_CPU_S = 2.0  # CPU seconds of the sympy rung: what sympy can tell, it tells sooner; timeout_s bounds the wall
IN_PROCESS_CPU_S = 0.5  # CPU seconds of this thread for one comparison: waiting for other threads does not count


class BoundError(Exception):
    """An answer would cost more than its bounds allow; it is refused, never computed."""


class OutOfTime(BoundError):
    """The comparison used up its CPU time in this process."""


class _Clock(threading.local):
    end: float = float("inf")


_CLOCK = _Clock()


def start_clock(seconds: float = IN_PROCESS_CPU_S) -> None:
    """Give the current thread this much CPU time until the next start."""
    _CLOCK.end = time.thread_time() + seconds


def check_time() -> None:
    """Stop a comparison that used up its CPU time.

    Raises:
        OutOfTime: the time since `start_clock` is spent.
    """
    if time.thread_time() > _CLOCK.end:
        raise OutOfTime("CPU time in process")
