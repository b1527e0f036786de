"""Commands of the grammar: fractions, roots, named functions, sums, floors and constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward import words
from reward.lex import Unparsable
from reward.nodes import Node, num

if TYPE_CHECKING:
    from reward.parse import ExpressionParser

_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_SEVERAL = frozenset(("min", "max", "gcd", "lcm"))
_CLOSING = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}


def read_command(parser: ExpressionParser, name: str) -> Node:
    """Read what follows the named command and return its node.

    Raises:
        Unparsable: the command is not on the whitelist, or its arguments are malformed.
    """
    if name in ("pi", "imath"):
        return Node("const", name="pi" if name == "pi" else "i")
    if name in ("inf", "infty"):
        return Node("inf")
    if name == "frac":
        return Node("div", (_filled(parser), _filled(parser)))
    if name == "binom":
        return Node("binom", (_filled(parser), _filled(parser)))
    if name in ("sqrt", "surd"):
        return _root(parser)
    if name in words.FUNCTIONS:
        return _function(parser, name)
    if name in words.GREEK:
        return _greek(parser, name)
    if name in ("sum", "prod"):
        return _series(parser, name)
    if name in _CLOSING:
        closer, function = _CLOSING[name]
        inner = parser.additive()
        if not parser.is_cmd(closer):
            raise Unparsable(f"{name} is not closed")
        parser.take()
        return Node("func", (inner,), function)
    if name.startswith("currency"):
        return _currency(parser, name.removeprefix("currency"))
    return parser.other_command(name)


def _filled(parser: ExpressionParser) -> Node:
    if parser.is_op("}") or parser.token.kind == "end":
        raise Unparsable("an empty argument")
    return parser.argument()


def _greek(parser: ExpressionParser, name: str) -> Node:
    plain = {"varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi", "varrho": "rho", "varsigma": "sigma"}.get(
        name, name
    )
    return parser.symbol(f"\\{plain}")


def _currency(parser: ExpressionParser, unit: str) -> Node:
    """Read an amount after a currency mark; the mark becomes the unit."""
    negative = parser.is_op("-")
    if negative:
        parser.take()
    if parser.token.kind != "num":
        raise Unparsable("a currency mark without an amount")
    value = parser.power()
    return Node("unit", (Node("neg", (value,)) if negative else value,), unit)


def _root(parser: ExpressionParser) -> Node:
    degree = num(2)
    if parser.is_op("["):
        parser.take()
        degree = parser.additive()
        parser.expect("]")
    return Node("root", (_filled(parser), degree))


def _function(parser: ExpressionParser, name: str) -> Node:
    base: Node | None = None
    exponent: Node | None = None
    if parser.is_op("_"):
        parser.take()
        base = parser.argument()
    if parser.is_op("^"):
        parser.take()
        exponent = _function_exponent(parser)
    if parser.is_op("_") and base is None:
        parser.take()
        base = parser.argument()
    if name in _SEVERAL:
        return _several(parser, name)
    if exponent is not None and exponent.op == "neg" and exponent.args[0].value == 1 and name in _INVERSE:
        name, exponent = _INVERSE[name], None
    argument = _function_argument(parser)
    if name == "log" and base is not None:
        node = Node("func", (argument, base), "log_base")
    elif base is not None:
        raise Unparsable(f"a subscript on {name}")
    elif name == "lg":
        node = Node("func", (argument, num(10)), "log_base")
    else:
        node = Node("func", (argument,), name)
    return node if exponent is None else Node("pow", (node, exponent))


def _function_exponent(parser: ExpressionParser) -> Node:
    if parser.is_op("-"):
        parser.take()
        return Node("neg", (parser.argument(),))
    return parser.argument()


def _function_argument(parser: ExpressionParser) -> Node:
    """Read "(x)" as a whole, else the product of factors up to the next operator or function."""
    if parser.token.kind == "end":
        raise Unparsable("a function without an argument")
    if parser.is_op("(", "[", "{"):
        group = parser.atom()
        if group.op in ("tuple", "list"):
            raise Unparsable("several arguments")
        return group
    if parser.is_op("-"):
        parser.take()
        return Node("neg", (parser.power(),))
    node = parser.power()
    while parser.starts_factor() and not parser.is_cmd(*words.FUNCTIONS) and not parser.is_op("(", "[", "{"):
        node = Node("mul", (node, parser.power()))
    return node


def _several(parser: ExpressionParser, name: str) -> Node:
    opener = "(" if parser.is_op("(") else None
    if opener is None:
        group = parser.atom()
        arguments = group.args if group.op in ("set", "list") else (group,)
        return Node("func", arguments, name)
    parser.take()
    items = [parser.additive()]
    while parser.is_op(","):
        parser.take()
        items.append(parser.additive())
    parser.expect(")")
    return Node("func", tuple(items), name)


def _series(parser: ExpressionParser, name: str) -> Node:
    """Read a sum or product with an explicit index and both bounds."""
    if not parser.is_op("_"):
        raise Unparsable(f"{name} without bounds")
    parser.take()
    parser.expect("{")
    if parser.token.kind != "sym":
        raise Unparsable(f"{name} without an index")
    index = parser.take().text
    parser.expect("=")
    low = parser.additive()
    parser.expect("}")
    parser.expect("^")
    high = parser.argument()
    body = parser.term()
    if index == "i":
        body = _free_index(body)
    return Node("prod" if name == "prod" else "sum", (low, high, body), index)


def _free_index(node: Node) -> Node:
    """Inside a sum over i, the letter i is the index and not the imaginary unit."""
    if node.op == "const" and node.name == "i":
        return Node("sym", name="i")
    return Node(node.op, tuple(_free_index(arg) for arg in node.args), node.name, node.value)
