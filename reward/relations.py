"""Equations and labelled values: what is a name for the answer, and what is the answer."""

from __future__ import annotations

from typing import NamedTuple

from reward import exact, numeric
from reward.equal import SCALAR_OPS, Outcome, scalar_equal
from reward.nodes import Node, free_symbols, num, replace_symbols, walk

_LABEL_OPS = frozenset("sym call text add mul div neg tuple abs".split())
_APPROXIMATION = 0.01  # a stated "a is about b" must hold to one per cent, else the relation is false


class Solved(NamedTuple):
    """A chain of equalities read as labels and one value."""

    labels: tuple[Node, ...]
    value: Node


class FalseRelation(ValueError):
    """The answer states an equality between numbers that does not hold, or one that says nothing."""


def is_label(node: Node) -> bool:
    """Return whether a side only names a quantity: letters, f(x), words, m+n, never a number."""
    if node.op == "const":
        return False
    if node.op == "add" and len(free_symbols(node)) > 1 and all(_is_term(arg) for arg in node.args):
        return True  # 100m + n
    return node.op in _LABEL_OPS and all(part.op in _LABEL_OPS for part in walk(node)) and _is_flat(node)


def _is_term(node: Node) -> bool:
    """Return whether a summand is a letter, or a power of ten times letters as answer formats ask for."""
    parts = node.args if node.op == "mul" else (node,)
    rest = parts[1:] if len(parts) > 1 and parts[0].value in (10, 100, 1000, 10_000) else parts
    return all(part.op == "sym" for part in rest)


def names_one_quantity(solved: Solved) -> bool:
    """Return whether all labels are single names; "x + y = 5" as a gold is an equation, not the number 5."""
    return all(label.op in ("sym", "call", "text", "tuple", "abs") for label in solved.labels)


def _is_flat(node: Node) -> bool:
    if node.op == "abs":  # |AB| names a length; |x| = 5 is an equation
        return all(part.name[:1].isupper() for part in walk(node) if part.op == "sym")
    return node.op != "call" or all(arg.op in ("sym", "num") for arg in node.args)


def solve(node: Node) -> Solved | None:
    """Read "label = ... = value" (with an optional "~ decimal" tail), or return None for other relations.

    Raises:
        FalseRelation: two constants of the chain differ.
    """
    names, sides = node.name.split(), list(node.args)
    if not names or any(name not in ("=", "~") for name in names):
        return None
    if "~" in names:
        cut = names.index("~") + 1
        exact_part, about = sides[:cut], sides[cut:]
        if not is_label(exact_part[-1]):
            _check_about(exact_part[-1], about)
            sides = exact_part
    if len(sides) > 1 and all(side == sides[0] for side in sides):
        raise FalseRelation  # a tautology says nothing
    labels = tuple(side for side in sides if is_label(side))
    values = [side for side in sides if not is_label(side)]
    if not values:
        return Solved(tuple(sides[:-1]), sides[-1])  # x = y: the last side is the value
    for other in values[:-1]:
        if not _comparable(other, values[-1]) or scalar_equal(other, values[-1]).same is not True:
            if free_symbols(other) or free_symbols(values[-1]):
                return None
            raise FalseRelation
    value = values[-1]
    named = {name for label in labels if label.op != "call" for name in free_symbols(label)}
    if named & free_symbols(value):
        return None
    return Solved(labels, value)


def _comparable(left: Node, right: Node) -> bool:
    return left.op in SCALAR_OPS and right.op in SCALAR_OPS


def _check_about(value: Node, about: list[Node]) -> None:
    first = numeric.approximate(value)
    for other in about:
        second = numeric.approximate(other)
        if first is None or second is None or abs(first - second) > _APPROXIMATION * max(abs(first), abs(second)):
            raise FalseRelation


def same_labels(left: Solved, right: Solved) -> bool:
    """Return whether two solved relations speak of the same quantity, f(x) and y being two names of a function."""
    if not left.labels or not right.labels:
        return True
    if set(left.labels) & set(right.labels):
        return True
    first, second = left.labels[0], right.labels[0]
    if first.op == second.op == "text":
        return first.name.lower() == second.name.lower()
    names = {first.op, second.op}
    return names == {"call", "sym"} and bool(free_symbols(left.value) or free_symbols(right.value))


def renamed(solved: Solved) -> Solved:
    """Give the parameters of a defined function standard names, so that f(x) = x and f(z) = z agree."""
    for label in solved.labels:
        if label.op == "call" and all(arg.op == "sym" for arg in label.args):
            table = {arg.name: Node("sym", name=f"#{i}") for i, arg in enumerate(label.args)}
            return Solved(tuple(replace_symbols(x, table) for x in solved.labels), replace_symbols(solved.value, table))
    return solved


def difference(node: Node) -> Node:
    """Return left - right of a two-sided relation."""
    return Node("add", (node.args[0], Node("neg", (node.args[1],))))


def same_equation(left: Node, right: Node) -> Outcome:
    """Compare two equations without a solved form: equal up to a constant factor, or side by side."""
    if len(left.args) != 2 or len(right.args) != 2:
        return Outcome(False, "equation")
    first, second = difference(left), difference(right)
    if exact.is_rational_function(first) and exact.is_rational_function(second):
        symbols = sorted(free_symbols(first) | free_symbols(second))
        return Outcome(bool(symbols) and exact.proportional(first, second, symbols), "equation")
    return _side_by_side(left, right)


def _side_by_side(left: Node, right: Node) -> Outcome:
    for sides in (right.args, right.args[::-1]):
        pairs = list(zip(left.args, sides, strict=True))
        if all(_comparable(a, b) and scalar_equal(a, b).same for a, b in pairs):
            return Outcome(True, "equation")
    return Outcome(False, "equation")


_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


def same_inequality(left: Node, right: Node) -> Outcome:
    """Compare two relations in several symbols: same direction, sides equal up to a positive factor."""
    if len(left.args) != len(right.args):
        return Outcome(False, "inequality")
    names, sides = right.name.split(), list(right.args)
    mirrored = [_MIRROR.get(name, name) for name in reversed(names)]
    for kind, ordered in ((names, sides), (mirrored, sides[::-1])):
        if kind != left.name.split():
            continue
        pairs = list(zip(left.args, ordered, strict=True))
        if all(a == b or (_comparable(a, b) and scalar_equal(a, b).same) for a, b in pairs):
            return Outcome(True, "inequality")
        if len(pairs) == 2 and _positive_multiple(
            difference(left), Node("add", (ordered[0], Node("neg", (ordered[1],))))
        ):
            return Outcome(True, "inequality")
    return Outcome(False, "inequality")


def _positive_multiple(first: Node, second: Node) -> bool:
    if not (exact.is_rational_function(first) and exact.is_rational_function(second)):
        return False
    symbols = sorted(free_symbols(first) | free_symbols(second))
    if not symbols or not exact.proportional(first, second, symbols):
        return False
    for shift in range(1, 9):
        point = {name: num(7 * shift + 3 * i + 1) for i, name in enumerate(symbols)}
        try:
            a, b = exact.rational(replace_symbols(first, point)), exact.rational(replace_symbols(second, point))
        except exact.Undefined:
            continue
        if a and b:
            return (a > 0) == (b > 0)
    return False
