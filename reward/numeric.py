"""Zero tests by high-precision evaluation, with a precision that follows the sizes that occur."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from reward import limits
from reward.exact import Budget, Undefined, rational
from reward.nodes import Node, walk

_LOCK = threading.RLock()  # mpmath's caches of constants are shared and not thread-safe
_GUARD_BITS = 60
_MAX_EXPONENT = 2_000_000  # log2 of the largest intermediate value


@lru_cache(maxsize=1)
def _context() -> Any:
    import mpmath

    return mpmath.MPContext()


class Evaluator:
    """Evaluates one expression at one point and remembers the largest magnitude it met."""

    def __init__(self, bits: int, values: dict[str, Fraction], log_base: int | None = None) -> None:
        self.mp = _context()
        self.mp.prec = bits
        self.values = values
        self.log_base = log_base  # what an unlabelled log means: None is natural
        self.budget = Budget()
        self.top = 1  # max(log2 |value|, 1) over intermediate values
        self.spread = 1  # max |log2 |value||

    def number(self, value: Fraction) -> Any:
        """Return a rational number at working precision."""
        return self.mp.mpf(value.numerator) / value.denominator

    def run(self, node: Node) -> Any:
        """Return the value, real or complex.

        Raises:
            Undefined: no finite value.
            BoundError: too large or too many steps.
        """
        self.budget.spend()
        if self.mp.prec > 600:
            limits.check_time()
        try:
            value = self._value(node)
        except (ZeroDivisionError, ValueError, OverflowError, ArithmeticError) as error:
            if isinstance(error, Undefined):
                raise
            raise Undefined(str(error)) from error
        if not self.mp.isfinite(value):
            raise Undefined("no finite value")
        if value:
            size = int(self.mp.mag(value))
            if abs(size) > _MAX_EXPONENT:
                raise limits.BoundError("a value out of range")
            self.top, self.spread = max(self.top, size), max(self.spread, abs(size))
        return value

    def _value(self, node: Node) -> Any:
        mp = self.mp
        if node.op == "num":
            assert node.value is not None
            return self.number(node.value)
        if node.op == "sym":
            return self.number(self.values[node.name])
        if node.op == "const":
            return mp.mpc(0, 1) if node.name == "i" else +(mp.pi if node.name == "pi" else mp.e)
        if node.op in ("sum", "prod"):
            return self._series(node)
        args = [self.run(arg) for arg in node.args]
        if node.op == "func":
            return self._function(node.name, args)
        if node.op == "call":
            return self._opaque(node.name, args)
        operation = _ARITHMETIC.get(node.op)
        if operation is None:
            raise Undefined(f"{node.op} has no numeric value")
        return operation(self, args)

    def power(self, base: Any, exponent: Any) -> Any:
        """Return base**exponent after a check of the size of the result."""
        if not base:
            if not exponent:
                return self.mp.mpf(1)
            if self.mp.re(exponent) <= 0:
                raise Undefined("division by zero")
            return self.mp.mpf(0)
        if abs(exponent) * max(1, abs(self.mp.mag(base))) > _MAX_EXPONENT:
            raise limits.BoundError("a power that is too large")
        if self.mp.isint(exponent):
            return base ** int(self.mp.re(exponent))
        return self.mp.power(base, exponent)

    def root(self, radicand: Any, degree: Any) -> Any:
        """Return the real root of a negative radicand for odd degree, else the principal root."""
        if not self.mp.isint(degree) or not 1 <= degree <= 1000:
            raise Undefined("a root of no natural degree")
        degree = int(degree)
        if degree == 2:
            return self.mp.sqrt(radicand)
        if not self.mp.im(radicand) and self.mp.re(radicand) < 0 and degree % 2:
            return -self.mp.root(-self.mp.re(radicand), degree)
        return self.mp.root(radicand, degree)

    def factorial(self, value: Any) -> Any:
        """Return gamma(value + 1)."""
        if abs(value) > limits.MAX_FACTORIAL * 4:
            raise limits.BoundError("a factorial that is too large")
        return self.mp.gamma(value + 1)

    def _function(self, name: str, args: list[Any]) -> Any:
        mp, x = self.mp, args[0]
        if name in _ELEMENTARY:
            if (name in ("exp", "sinh", "cosh") and abs(x) > _MAX_EXPONENT) or abs(x) > 2 ** min(200, mp.prec // 2):
                raise limits.BoundError("an argument that is too large")
            return getattr(mp, _ELEMENTARY[name])(x)
        if name in ("ln", "log"):
            natural = mp.log(x)
            return natural if name == "ln" or self.log_base is None else natural / mp.log(self.log_base)
        if name == "log_base":
            return mp.log(x) / mp.log(args[1])
        if any(mp.im(arg) for arg in args):
            raise Undefined(f"{name} of a complex number")
        args = [mp.re(arg) for arg in args]
        if name in ("floor", "ceil"):
            nearest = mp.nint(args[0])
            if abs(args[0] - nearest) < mp.mpf(2) ** (-mp.prec // 2):
                return nearest
            return mp.floor(args[0]) if name == "floor" else mp.ceil(args[0])
        if name in ("min", "max"):
            return min(args) if name == "min" else max(args)
        raise Undefined(f"{name} has no numeric value")

    def _opaque(self, name: str, args: list[Any]) -> Any:
        """Stand in for an unknown function: equal arguments give equal values, others give others."""
        seed = random.Random(f"{name}/{len(args)}")
        phase = sum((arg * seed.uniform(0.3, 0.9) for arg in args), self.mp.mpf(seed.uniform(0, 1)))
        return self.mp.cos(phase) + 2

    def _series(self, node: Node) -> Any:
        low, high = (rational(arg, self.values) for arg in node.args[:2])
        if low is None or high is None or low.denominator != 1 or high.denominator != 1:
            raise Undefined("a sum without integer bounds")
        if high - low > limits.MAX_SUM_TERMS:
            raise limits.BoundError("a sum with too many terms")
        total, outer = self.mp.mpf(node.op == "prod"), self.values
        for index in range(int(low), int(high) + 1):
            self.values = {**outer, node.name: Fraction(index)}
            term = self.run(node.args[2])
            total = total * term if node.op == "prod" else total + term
        self.values = outer
        return total


_ELEMENTARY = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "arccot": "acot", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
    "coth": "coth", "exp": "exp",
}  # fmt: skip


def _sum(e: Evaluator, args: list[Any]) -> Any:
    """Add up; what is left after a full cancellation is noise and counts as zero at this precision."""
    total = sum(args[1:], args[0])
    largest = max((int(e.mp.mag(arg)) for arg in args if arg), default=0)
    if total and int(e.mp.mag(total)) < largest + _GUARD_BITS - e.mp.prec:
        return e.mp.mpf(0)
    return total


def _quotient(_: Evaluator, args: list[Any]) -> Any:
    if not args[1]:
        raise Undefined("division by zero")
    return args[0] / args[1]


def _product(_: Evaluator, args: list[Any]) -> Any:
    result = args[0]
    for arg in args[1:]:
        result = result * arg
    return result


def _binomial(e: Evaluator, args: list[Any]) -> Any:
    n, k = args
    return e.factorial(n) / (e.factorial(k) * e.factorial(n - k))


_ARITHMETIC: dict[str, Callable[[Evaluator, list[Any]], Any]] = {
    "add": _sum,
    "mul": _product,
    "div": _quotient,
    "neg": lambda _, args: -args[0],
    "pow": lambda e, args: e.power(*args),
    "root": lambda e, args: e.root(*args),
    "abs": lambda _, args: abs(args[0]),
    "fact": lambda e, args: e.factorial(args[0]),
    "binom": _binomial,
    "deg": lambda e, args: args[0] * e.mp.pi / 180,
    "percent": lambda _, args: args[0] / 100,
}


def vanishes(
    left: Node, right: Node, values: dict[str, Fraction], log_base: int | None = None, floor_bits: int = 1000
) -> bool | None:
    """Return whether left - right is zero at a point, judged at a precision above all sizes that occur.

    Returns:
        None where only one side is real: the point lies outside the common domain.

    Raises:
        Undefined, BoundError: as `Evaluator.run`.
    """
    with _LOCK:
        bits = 200
        while True:
            evaluator = Evaluator(bits, values, log_base)
            a, b = evaluator.run(left), evaluator.run(right)
            mp = evaluator.mp
            if values and bool(mp.im(a)) != bool(mp.im(b)):
                small = mp.mpf(2) ** (evaluator.top + _GUARD_BITS - bits)
                if abs(mp.im(a)) > small or abs(mp.im(b)) > small:
                    return None
            if abs(a - b) > mp.mpf(2) ** (evaluator.top + _GUARD_BITS - bits):
                return False
            needed = max(floor_bits, 400 + 4 * evaluator.spread)
            if bits >= needed:
                return True
            if needed > (limits.MAX_GAMMA_BITS if _uses_gamma(left, right) else limits.MAX_PRECISION_BITS):
                raise limits.BoundError("a precision that is too high")
            bits = needed


def _uses_gamma(*nodes: Node) -> bool:
    return any(part.op in ("fact", "binom") for node in nodes for part in walk(node))


def approximate(node: Node) -> float | None:
    """Return a float for ordering and plausibility, never for equality; None if there is no real value."""
    with _LOCK:
        evaluator = Evaluator(120, {})
        try:
            value = evaluator.run(node)
        except (Undefined, KeyError):
            return None
        return None if evaluator.mp.im(value) else float(evaluator.mp.re(value))


_INTEGER_CONTEXT = frozenset(("fact", "binom", "sum", "prod"))


def integer_symbols(*nodes: Node) -> frozenset[str]:
    """Return the symbols that stand for integers: in factorials, binomials, series bounds, powers of -1."""
    found: set[str] = set()
    for node in nodes:
        for part in walk(node):
            inner: tuple[Node, ...] = ()
            if part.op in _INTEGER_CONTEXT:
                inner = part.args
            elif part.op == "pow" and rational_or_none(part.args[0]) == -1:
                inner = part.args[1:]
            found.update(x.name for child in inner for x in walk(child) if x.op == "sym")
    return frozenset(found)


def rational_or_none(node: Node) -> Fraction | None:
    """Return the exact value, or None where there is none."""
    try:
        return rational(node)
    except Undefined:
        return None


def same_at_random_points(left: Node, right: Node, symbols: list[str], log_base: int | None = None) -> bool | None:
    """Compare two expressions at seeded random points of their common domain.

    Half of the points are positive, half have both signs; at least four must be usable. One difference decides.

    Returns:
        None if too few points lie in the common domain.
    """
    seed = random.Random(f"{symbols}")
    integers = integer_symbols(left, right)
    usable = 0
    for attempt in range(24):
        values = {}
        for name in symbols:
            if name in integers:
                values[name] = Fraction(seed.randint(1, 12))
            else:
                size = Fraction(seed.randint(1 << 10, 1 << 14), (1 << 12) + 1 + 2 * seed.randint(0, 500))
                values[name] = -size if attempt % 2 and seed.random() < 0.5 else size
        try:
            outcome = vanishes(left, right, values, log_base, floor_bits=400)
        except Undefined:
            continue
        if outcome is False:
            return False
        usable += outcome is True
        if usable >= 8:
            break
    return True if usable >= 4 else None
