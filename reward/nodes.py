"""The one tree type that the grammar produces and every later rung reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the whitelist grammar.

    Attributes:
        op: what it is ("num", "sym", "add", "tuple", ...); the parser documents the full set.
        args: operands.
        name: symbol, function, unit, relation or bracket spelling.
        value: the number, for op "num".
    """

    op: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction | None = None


def num(value: int | Fraction) -> Node:
    """Return an exact number."""
    return Node("num", value=Fraction(value))


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and all below it, without recursion."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(top.args)


def free_symbols(node: Node) -> frozenset[str]:
    """Return the names of all symbols, bound summation indices excepted."""
    names: set[str] = set()
    bound: set[str] = set()
    for part in walk(node):
        if part.op == "sym":
            names.add(part.name)
        elif part.op in ("sum", "prod"):
            bound.add(part.name)
    return frozenset(names - bound)


def replace_symbols(node: Node, table: dict[str, Node]) -> Node:
    """Return the tree with every named symbol replaced."""
    if node.op == "sym":
        return table.get(node.name, node)
    if not node.args:
        return node
    return Node(node.op, tuple(replace_symbols(arg, table) for arg in node.args), node.name, node.value)
