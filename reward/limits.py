"""Bounds that hold before anything is computed. One place, so that they can be reviewed together."""

from __future__ import annotations

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


class BoundError(Exception):
    """An answer would cost more than its bounds allow; it is refused, never computed."""
