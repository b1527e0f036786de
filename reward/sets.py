"""Real sets: inequalities, intervals, unions and differences in one normal form with exact endpoints."""

from __future__ import annotations

from functools import cmp_to_key
from typing import NamedTuple

from reward import numeric
from reward.equal import SCALAR_OPS, scalar_equal
from reward.nodes import Node, free_symbols, num

_INF, _NEG_INF = Node("inf"), Node("neg", (Node("inf"),))


class Piece(NamedTuple):
    """One interval; a point is a closed piece with equal ends."""

    low: Node
    high: Node
    low_closed: bool
    high_closed: bool


class NotReal(ValueError):
    """The node is not a set of real numbers in one variable with comparable ends."""


def order(left: Node, right: Node) -> int:
    """Return -1, 0 or 1; ties are settled exactly, not by floats.

    Raises:
        NotReal: an end is not a real constant.
    """
    a, b = _position(left), _position(right)
    if a == b or abs(a - b) <= 1e-9 * max(abs(a), abs(b)):
        if left == right or scalar_equal(left, right).same:
            return 0
    return -1 if a < b else 1


def _position(node: Node) -> float:
    if node == _INF:
        return float("inf")
    if node == _NEG_INF:
        return float("-inf")
    value = numeric.approximate(node) if node.op in SCALAR_OPS and not free_symbols(node) else None
    if value is None:
        raise NotReal("an end that is not a real constant")
    return value


def pieces(node: Node) -> tuple[list[Piece], str | None]:
    """Return the sorted disjoint pieces of a real set and the variable it was written in, if any.

    Raises:
        NotReal: the node is no such set.
    """
    if node.op == "tuple" and len(node.args) == 2:
        low, high = (_end(arg) for arg in node.args)
        if order(low, high) >= 0:
            raise NotReal("an interval with its ends reversed")
        return [Piece(low, high, node.name[0] == "[", node.name[1] == "]")], None
    if node.op == "set":
        return _merge([Piece(x, x, True, True) for x in node.args]), None
    if node.op == "named" and node.name in ("R", "R+", "R-"):
        low = _NEG_INF if node.name != "R+" else num(0)
        return [Piece(low, _INF if node.name != "R-" else num(0), False, False)], None
    if node.op in ("union", "intersect", "minus"):
        return _combine(node)
    if node.op == "builder":
        variable = node.args[0].args[0] if node.args[0].op == "member" else node.args[0]
        found, name = pieces(node.args[1])
        if variable.op != "sym" or variable.name != name:
            raise NotReal("a condition on another variable")
        return found, None
    if node.op == "member" and node.args[0].op == "sym":
        return pieces(node.args[1])[0], node.args[0].name
    if node.op == "rel":
        return _relation(node)
    if node.op == "list":
        return _conditions(node)
    raise NotReal(node.op)


def _end(node: Node) -> Node:
    return _INF if node == Node("add", (_INF,)) else node


def _relation(node: Node) -> tuple[list[Piece], str | None]:
    names = node.name.split()
    sides = list(node.args)
    if len(names) == 2 and sides[1].op == "sym":
        if all(n in (">", ">=") for n in names):
            names, sides = [{">": "<", ">=": "<="}[n] for n in reversed(names)], sides[::-1]
        if not all(n in ("<", "<=") for n in names):
            raise NotReal("a mixed chain")
        if order(sides[0], sides[2]) >= 0:
            raise NotReal("an empty chain")
        return [Piece(sides[0], sides[2], names[0] == "<=", names[1] == "<=")], sides[1].name
    if len(names) != 1:
        raise NotReal("a long chain")
    left, right = sides
    relation = names[0]
    if left.op not in ("sym", "abs"):
        left, right = right, left
        relation = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(relation, relation)
    if left.op == "abs" and left.args[0].op == "sym":
        return _absolute(left.args[0].name, relation, right)
    if left.op != "sym":
        raise NotReal("not solved for a variable")
    _position(right)
    table = {
        "<": [Piece(_NEG_INF, right, False, False)],
        "<=": [Piece(_NEG_INF, right, False, True)],
        ">": [Piece(right, _INF, False, False)],
        ">=": [Piece(right, _INF, True, False)],
        "!=": [Piece(_NEG_INF, right, False, False), Piece(right, _INF, False, False)],
    }
    if relation not in table:
        raise NotReal(relation)
    return table[relation], left.name


def _absolute(name: str, relation: str, bound: Node) -> tuple[list[Piece], str | None]:
    """Solve |x| < a and its kin for a positive a."""
    if _position(bound) <= 0 or relation not in ("<", "<=", ">", ">="):
        raise NotReal("an absolute value against no positive bound")
    closed, negative = relation.endswith("="), Node("neg", (bound,))
    if relation[0] == "<":
        return [Piece(negative, bound, closed, closed)], name
    return [Piece(_NEG_INF, negative, False, closed), Piece(bound, _INF, closed, False)], name


def _conditions(node: Node) -> tuple[list[Piece], str | None]:
    """Several relations in one variable: "or" unites them; a comma cuts with a "not equal" only."""
    parts = [pieces(arg) for arg in node.args]
    names = {name for _, name in parts}
    if len(names) != 1 or None in names:
        raise NotReal("conditions on several variables")
    if node.name == "or":
        return _merge([piece for found, _ in parts for piece in found]), names.pop()
    excluded = [arg.op == "rel" and arg.name == "!=" for arg in node.args]
    if excluded.count(False) > 1:
        raise NotReal("a list of conditions without a connective")
    result = parts[0][0]
    for found, _ in parts[1:]:
        result = _intersect(result, found)
    return result, names.pop()


def _combine(node: Node) -> tuple[list[Piece], str | None]:
    left, right = pieces(node.args[0])[0], pieces(node.args[1])[0]
    if node.op == "union":
        return _merge(left + right), None
    if node.op == "minus":
        right = _complement(right)
    return _intersect(left, right), None


def _complement(found: list[Piece]) -> list[Piece]:
    result: list[Piece] = []
    low, closed = _NEG_INF, False
    for piece in found:
        if low != piece.low or (closed and not piece.low_closed):
            result.append(Piece(low, piece.low, closed, not piece.low_closed and piece.low != _NEG_INF))
        low, closed = piece.high, not piece.high_closed
    if low != _INF:
        result.append(Piece(low, _INF, closed, False))
    return [p for p in result if p.low != p.high or (p.low_closed and p.high_closed)]


def _intersect(left: list[Piece], right: list[Piece]) -> list[Piece]:
    result = []
    for a in left:
        for b in right:
            low_side = order(a.low, b.low)
            low = a.low if low_side >= 0 else b.low
            low_closed = (
                a.low_closed if low_side > 0 else b.low_closed if low_side < 0 else a.low_closed and b.low_closed
            )
            high_side = order(a.high, b.high)
            high = a.high if high_side <= 0 else b.high
            high_closed = (
                a.high_closed if high_side < 0 else b.high_closed if high_side > 0 else a.high_closed and b.high_closed
            )
            place = order(low, high)
            if place < 0 or (place == 0 and low_closed and high_closed):
                result.append(Piece(low, high, low_closed, high_closed))
    return _merge(result)


def _by_low_end(a: Piece, b: Piece) -> int:
    return order(a.low, b.low) or int(b.low_closed) - int(a.low_closed)


def _merge(found: list[Piece]) -> list[Piece]:
    """Sort and join pieces that overlap or touch."""
    ordered = sorted(found, key=cmp_to_key(_by_low_end))
    result: list[Piece] = []
    for piece in ordered:
        if result:
            last = result[-1]
            gap = order(last.high, piece.low)
            if gap > 0 or (gap == 0 and (last.high_closed or piece.low_closed)):
                end = order(last.high, piece.high)
                high = last.high if end >= 0 else piece.high
                closed = (
                    last.high_closed
                    if end > 0
                    else piece.high_closed
                    if end < 0
                    else last.high_closed or piece.high_closed
                )
                result[-1] = Piece(last.low, high, last.low_closed, closed)
                continue
        result.append(piece)
    return result


def same_pieces(left: list[Piece], right: list[Piece]) -> bool:
    """Return whether two normal forms are the same set."""
    return len(left) == len(right) and all(
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and order(a.low, b.low) == order(a.high, b.high) == 0
        for a, b in zip(left, right, strict=True)
    )
