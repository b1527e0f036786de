"""Equality of two scalar expressions: the cheap exact tests first, then proof by bound, then random points."""

from __future__ import annotations

import math
from typing import NamedTuple

from reward import exact, limits, numeric
from reward.exact import Undefined
from reward.nodes import Node, free_symbols, walk


class Outcome(NamedTuple):
    """Whether two answers are equal, and the rung that decided. `same` is None where no rung could."""

    same: bool | None
    rule: str


SCALAR_OPS = frozenset(
    "num sym const inf add mul div pow neg fact root func abs binom pm mp sum prod deg percent call base mod".split()
)


def scalar_equal(left: Node, right: Node) -> Outcome:
    """Compare two scalar expressions.

    Raises:
        BoundError: a bound was met before the comparison could be decided.
    """
    if left == right:
        return Outcome(not _undefined(left), "same expression")
    try:
        return _ladder(left, right)
    except Undefined:
        return Outcome(False, "undefined")


def _undefined(node: Node) -> bool:
    try:
        exact.rational(node)
    except Undefined:
        return True
    except limits.BoundError:
        return False
    return False


def _ladder(left: Node, right: Node) -> Outcome:
    infinite = [_infinity(side) for side in (left, right)]
    if any(infinite):
        return Outcome(infinite[0] == infinite[1], "infinity")
    if any(part.op == "inf" for side in (left, right) for part in walk(side)):
        return Outcome(False, "undefined")
    symbols = sorted(free_symbols(left) | free_symbols(right))
    if len(symbols) > limits.MAX_SYMBOLS:
        raise limits.BoundError("too many symbols")
    if not symbols:
        return _constants(left, right)
    if exact.is_rational_function(left) and exact.is_rational_function(right):
        return Outcome(exact.same_rational_function(left, right, symbols), "polynomial identity")
    if not _depends(left, symbols) and not _depends(right, symbols):
        return _constants(left, right)
    for base in _log_bases(left, right):
        same = numeric.same_at_random_points(left, right, symbols, base)
        if same is not False:
            return Outcome(same, "random points")
    return Outcome(False, "random points")


def _depends(node: Node, symbols: list[str]) -> bool:
    return bool(free_symbols(node) & set(symbols))


def _infinity(node: Node) -> int:
    """Return the sign of a signed infinity, 0 for anything else."""
    sign = 1
    while node.op == "neg":
        sign, node = -sign, node.args[0]
    return sign if node.op == "inf" else 0


def _log_bases(left: Node, right: Node) -> list[int | None]:
    """A log without a base is natural in college texts and decimal at school: either reading may hold."""
    unlabelled = any(part.op == "func" and part.name == "log" for side in (left, right) for part in walk(side))
    return [None, 10] if unlabelled else [None]


def _constants(left: Node, right: Node) -> Outcome:
    try:
        first, second = exact.rational(left), exact.rational(right)
    except limits.BoundError:
        first = second = None
    if first is not None and second is not None:
        return Outcome(first == second, "rational number")
    bits = _separation_bits(left, right)
    rule = "algebraic number" if bits is not None else "high precision"
    for base in _log_bases(left, right):
        if numeric.vanishes(left, right, {}, base, floor_bits=max(1000, bits or 0)):
            return Outcome(True, rule)
    return Outcome(False, rule)


class _Bound(NamedTuple):
    """BFMSS bound of a value u/l: log2 of both parts and the product of root degrees."""

    upper: float
    lower: float
    degree: int


def _separation_bits(left: Node, right: Node) -> int | None:
    """Return the precision that proves left = right for algebraic numbers, or None if it is not known or too high.

    Source: Burnikel, Funke, Mehlhorn, Schirra, Schmitt 2001: a non-zero E satisfies
    |E| >= 1 / (l(E) u(E)**(D-1)), with D the product of all root degrees.
    """
    try:
        bound = _bfmss(Node("add", (left, Node("neg", (right,)))))
    except (_NoBound, OverflowError):
        return None
    bits = bound.lower + (bound.degree - 1) * bound.upper
    return int(bits) + 200 if bits < limits.MAX_PRECISION_BITS - 200 else None


class _NoBound(Exception):
    """The expression is not built from integers, field operations and roots."""


def _bfmss(node: Node) -> _Bound:
    if node.op == "num":
        assert node.value is not None
        return _Bound(_log2(abs(node.value.numerator)), _log2(node.value.denominator), 1)
    if node.op == "neg":
        return _bfmss(node.args[0])
    if node.op in ("add", "mul"):
        total = _bfmss(node.args[0])
        for arg in node.args[1:]:
            other = _bfmss(arg)
            upper, lower = total.upper + other.upper, total.lower + other.lower
            if node.op == "add":
                upper = 1 + max(total.upper + other.lower, total.lower + other.upper)
            total = _Bound(upper, lower, total.degree * other.degree)
        return total
    if node.op == "div":
        top, bottom = _bfmss(node.args[0]), _bfmss(node.args[1])
        return _Bound(top.upper + bottom.lower, top.lower + bottom.upper, top.degree * bottom.degree)
    if node.op == "root" and node.args[1].value in (2, 3, 4, 5, 6):
        inner, degree = _bfmss(node.args[0]), int(node.args[1].value)
        if inner.degree == 1 and node.args[0].op == "num" and node.args[0].value is not None and node.args[0].value < 0:
            raise _NoBound
        return _Bound(inner.upper / degree + 1, inner.lower / degree + 1, inner.degree * degree)
    if node.op == "pow":
        exponent = exact.rational(node.args[1])
        if exponent is not None and exponent.denominator == 1 and 0 < exponent <= 64:
            inner = _bfmss(node.args[0])
            return _Bound(inner.upper * int(exponent), inner.lower * int(exponent), inner.degree)
    raise _NoBound


def _log2(value: int) -> float:
    return math.log2(value) if value > 1 else 0.0
