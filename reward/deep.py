"""The last rung: sympy on limits, integrals, derivatives and infinite series. Runs in worker processes only.

The text is first checked token by token against a whitelist, so latex2sympy2 never sees anything else.
"""

from __future__ import annotations

import random
import re
from typing import Any

_TOKEN = re.compile(r"\\[A-Za-z]+|\\[,;:! ]|[0-9]+(?:\.[0-9]+)?|[A-Za-z]|[-+*/^_(){}\[\]=!|' ]|\.")
_COMMANDS = frozenset(
    "frac sqrt int lim sum prod infty to rightarrow pi sin cos tan cot sec csc arcsin arccos arctan ln log exp cdot "
    "times left right "
    "alpha beta gamma theta lambda mu phi omega sinh cosh tanh , ; : ! ".split()
)
_TRIGGERS = re.compile(
    r"\\(?:int|lim)(?![A-Za-z])|\\(?:sum|prod)(?![A-Za-z])[^=]{0,40}=[^\\]{0,20}\^\s*\{?\s*\\infty|"
    r"\\frac\s*\{\s*d\s*\}\s*\{\s*d[a-z]\s*\}"
)
_MAX_CHARS = 400
_TOWER = re.compile(r"\^\s*\{?[^{}]{0,20}\^[^{}]{0,20}\^")
_BOUNDS = re.compile(r"_\s*\{[^{}]{0,40}\}")
_RELATION = re.compile(r"[=<>]")
_BIG_NUMBER = re.compile(r"[0-9]{7}")


def wants_sympy(text: str) -> bool:
    """Return whether a formula needs this rung and is on its whitelist."""
    return _TRIGGERS.search(text) is not None and plain_formula(text)


def plain_formula(text: str) -> bool:
    """Return whether a formula is short and made of whitelisted tokens with balanced brackets only."""
    if (
        len(text) > _MAX_CHARS
        or _BIG_NUMBER.search(text)
        or _TOWER.search(text)
        or _RELATION.search(_BOUNDS.sub("", text))
    ):
        return False
    position, depth = 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return False
        token = match[0]
        if token.startswith("\\") and token[1:].strip() not in _COMMANDS:
            return False
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
        position = match.end()
    return depth == 0 and text.count("(") == text.count(")") and text.count("[") == text.count("]")


def warm_up() -> None:
    """Import and exercise the parser, so that the first item pays nothing."""
    same(r"\sum_{n=1}^{\infty}\frac{1}{n^2}", r"\frac{\pi^2}{6}")
    same(r"\int_{0}^{1} x^2 dx", r"\frac{1}{3}")


def _expression(text: str) -> Any:
    """Return the evaluated expression, with i and e as the constants they name."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    expression = latex2sympy(_braced(text))
    if not isinstance(expression, sympy.Expr):
        raise ValueError("no expression")
    constants = {sympy.Symbol("e"): sympy.E, sympy.Symbol("i"): sympy.I, sympy.Symbol("i", real=True): sympy.I}
    two_sided = expression.replace(
        lambda part: isinstance(part, sympy.Limit),
        lambda part: sympy.Limit(*part.args[:3], "+-") if part.args[2].is_finite else part,
    )
    return two_sided.subs(constants).doit()


def _braced(text: str) -> str:
    """Write \\frac12 and \\sqrt2 with braces: the parser knows no other spelling."""
    text = re.sub(r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9])\s*(?=\{)", r"\\frac{\1}", text)
    return re.sub(r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}", text)


def same(answer: str, gold: str) -> bool | None:
    """Return whether two formulas are equal by sympy, or None where it cannot tell.

    Equal means a difference that simplifies to zero and also vanishes at random points at 60 digits.

    Raises:
        Exception: whatever sympy and its parser raise; the worker turns it into a verdict.
    """
    import sympy

    left, right = _expression(answer), _expression(gold)
    if left.has(sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product, sympy.nan, sympy.zoo):
        return None
    if left == right:
        return True
    if left.has(sympy.oo, -sympy.oo) or right.has(sympy.oo, -sympy.oo):
        return False
    difference = left - right
    if not _vanishes(difference):
        return False
    return True if sympy.simplify(difference) == 0 or difference.equals(0) else None


def _vanishes(difference: Any) -> bool:
    """Return whether the difference is zero to 60 digits at up to six random points."""
    seed = random.Random(7)
    symbols = sorted(difference.free_symbols, key=str)
    seen = 0
    for _ in range(12 if symbols else 1):
        point = {s: f"{seed.randint(1, 3)}.{seed.randint(10**6, 10**7)}" for s in symbols}
        value = difference.evalf(60, subs=point, maxn=400)
        if not value.is_number or value.is_finite is False:
            continue
        if abs(value) > 10**-40:
            return False
        seen += 1
    return seen > 0
