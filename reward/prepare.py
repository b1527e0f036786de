"""Bring a parsed answer into the form that is compared: units outside, signs expanded, words that name values read."""

from __future__ import annotations

from collections.abc import Callable

from reward import limits, words
from reward.equal import SCALAR_OPS
from reward.nodes import Node, num, walk
from reward.text import word_key


def prepare(node: Node) -> Node:
    """Move units, percent and degree marks to the outside, expand plus-minus and read words that name values."""
    rule = _PREPARATIONS.get(node.op)
    if rule is not None:
        node = rule(node)
    if node.op in SCALAR_OPS and any(part.op in ("pm", "mp") for part in walk(node)):
        return Node("list", tuple(expand_signs(node)), "pm")
    return node


def _prepare_negative(node: Node) -> Node:
    inner = prepare(node.args[0])
    return Node("unit", (Node("neg", inner.args),), inner.name) if inner.op == "unit" else node


def _prepare_sum(node: Node) -> Node:
    """Read "S - {a}" as a difference of sets."""
    left, right = node.args[0], node.args[-1]
    if len(node.args) == 2 and right.op == "neg" and left.op in ("set", "builder", "named"):
        return Node("minus", (left, right.args[0]))
    return node


def _prepare_words(node: Node) -> Node:
    key = node.name.lower()
    if words.CONSTANT_WORDS.get(key) == "inf":
        return Node("inf")
    if len(node.name) == 1:
        return Node("sym", name=node.name)
    if word_key(key) in words.ALL_REALS:
        return Node("named", name="R")
    return Node("set") if "empty set" in key and len(key) < 16 else node


def _prepare_point(node: Node) -> Node:
    """Read a named point, A(1, 2), as the point."""
    left, right = node.args[0], node.args[-1]
    return right if len(node.args) == 2 and left.op == "sym" and left.name.isupper() and right.op == "tuple" else node


def _prepare_base(node: Node) -> Node:
    digits, _, base = node.name.rpartition("_")
    if len(digits) > limits.MAX_LITERAL_DIGITS:
        raise limits.BoundError("too many digits")
    return num(int(digits)) if base == "10" and digits.isdigit() else node


def _prepare_member(node: Node) -> Node:
    """Read "x in {2, 3}" as the set."""
    return node.args[1] if node.args[0].op == "sym" and node.args[1].op == "set" else node


def _prepare_tuple(node: Node) -> Node:
    """Read (plus-minus 3, 0) as a list of points."""
    choices: list[tuple[Node, ...]] = [()]
    for arg in node.args:
        ready = prepare(arg)
        options = ready.args if ready.op == "list" and ready.name == "pm" else (arg,)
        choices = [(*head, option) for head in choices for option in options]
        if len(choices) > limits.MAX_ITEMS:
            raise limits.BoundError("too many elements")
    if len(choices) == 1:
        return node
    return Node("list", tuple(Node("tuple", choice, node.name) for choice in choices), "pm")


def _prepare_unit(node: Node) -> Node:
    return prepare(node.args[0]) if node.args[0].op in ("percent", "deg") else node


_PREPARATIONS: dict[str, Callable[[Node], Node]] = {
    "neg": _prepare_negative,
    "percent": lambda node: Node("unit", node.args, "percent"),
    "deg": lambda node: Node("unit", node.args, "degree"),
    "add": _prepare_sum,
    "text": _prepare_words,
    "mul": _prepare_point,
    "base": _prepare_base,
    "member": _prepare_member,
    "tuple": _prepare_tuple,
    "unit": _prepare_unit,
}


def expand_signs(node: Node) -> list[Node]:
    """Return the values of an expression with plus-minus signs; a minus-plus is tied to the plus-minus.

    Raises:
        BoundError: too many signs.
    """
    signs = [part for part in walk(node) if part.op in ("pm", "mp")]
    if len(signs) > limits.MAX_PLUS_MINUS:
        raise limits.BoundError("too many plus-minus signs")
    tied = any(part.op == "mp" for part in signs)
    count = 1 if tied else len(signs)
    return [_with_signs(node, [bool(code >> k & 1) for k in range(count)], tied, [0]) for code in range(2**count)]


def _with_signs(node: Node, minus: list[bool], tied: bool, seen: list[int]) -> Node:
    if node.op in ("pm", "mp"):
        flip = minus[0 if tied else seen[0]] != (node.op == "mp")
        seen[0] += 1
        inner = _with_signs(node.args[0], minus, tied, seen)
        return Node("neg", (inner,)) if flip else inner
    return Node(node.op, tuple(_with_signs(arg, minus, tied, seen) for arg in node.args), node.name, node.value)
