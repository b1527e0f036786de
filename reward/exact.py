"""Exact evaluation: rational numbers, and rational functions by identity testing in a prime field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from reward import limits
from reward.nodes import Node, walk

MAX_DEGREE = 100_000


class Undefined(ArithmeticError):
    """The expression has no value (division by zero, 0/0)."""


class _Field(ArithmeticError):
    """A denominator vanished at this random point."""


class Budget:
    """Counts evaluation steps so that nested sums stay bounded."""

    def __init__(self, steps: int = limits.MAX_OPERATIONS) -> None:
        self.steps = steps

    def spend(self) -> None:
        """Count one step.

        Raises:
            BoundError: the budget is spent.
        """
        self.steps -= 1
        if self.steps < 0:
            raise limits.BoundError("too many operations")
        if self.steps % 32 == 0:
            limits.check_time()


def rational(node: Node, values: dict[str, Fraction] | None = None, budget: Budget | None = None) -> Fraction | None:
    """Return the exact value, or None where it is not a rational number that this module can prove.

    Raises:
        Undefined: division by zero.
        BoundError: an intermediate result would be too large.
    """
    budget = budget or Budget()
    budget.spend()
    if node.op == "num":
        return node.value
    if node.op == "sym":
        return (values or {}).get(node.name)
    if node.op in ("sum", "prod"):
        return _series(node, values or {}, budget)
    if node.op not in _OPERATIONS:
        return None
    args: list[Fraction] = []
    for arg in node.args:
        value = rational(arg, values, budget)
        if value is None:
            return None
        args.append(value)
    result = _OPERATIONS[node.op](node, args)
    if result is not None:
        _check_size(result)
    return result


def _check_size(value: Fraction) -> None:
    if value.numerator.bit_length() + value.denominator.bit_length() > limits.MAX_BITS:
        raise limits.BoundError("an exact value with too many digits")


def _add(_: Node, args: list[Fraction]) -> Fraction:
    return sum(args, Fraction(0))


def _mul(_: Node, args: list[Fraction]) -> Fraction:
    product = Fraction(1)
    for arg in args:
        product *= arg
        _check_size(product)
    return product


def _div(_: Node, args: list[Fraction]) -> Fraction:
    if args[1] == 0:
        raise Undefined("division by zero")
    return args[0] / args[1]


def _pow(_: Node, args: list[Fraction]) -> Fraction | None:
    base, exponent = args
    if exponent.denominator != 1:
        root = perfect_root(base, exponent.denominator)
        return None if root is None else _pow(_, [root, Fraction(exponent.numerator)])
    power = exponent.numerator
    if base in (0, 1, -1):
        if base == 0 and power <= 0:
            if power < 0:
                raise Undefined("division by zero")
            return Fraction(1)
        return base ** (power % 2) if base == -1 else base
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(power) > limits.MAX_BITS:
        raise limits.BoundError("a power that is too large")
    return base**power


def perfect_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the exact non-negative root of a non-negative number, or None if it is irrational."""
    if value < 0 or degree < 1 or degree > 64:
        return None
    parts = []
    for part in (value.numerator, value.denominator):
        root = _integer_root(part, degree)
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, degree: int) -> int:
    if degree == 1 or value < 2:
        return value
    if degree == 2:
        return math.isqrt(value)
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def _root(_: Node, args: list[Fraction]) -> Fraction | None:
    radicand, degree = args
    if degree.denominator != 1 or not 1 <= degree <= 64:
        return None
    if radicand < 0 and degree % 2 == 1:
        positive = perfect_root(-radicand, int(degree))
        return None if positive is None else -positive
    return perfect_root(radicand, int(degree))


def _factorial(_: Node, args: list[Fraction]) -> Fraction:
    n = args[0]
    if n.denominator != 1 or n < 0:
        raise Undefined("a factorial of no natural number")
    if n > limits.MAX_FACTORIAL:
        raise limits.BoundError("a factorial that is too large")
    return Fraction(math.factorial(int(n)))


def _binom(_: Node, args: list[Fraction]) -> Fraction:
    n, k = args
    if n.denominator != 1 or k.denominator != 1 or n < 0:
        raise Undefined("a binomial of no natural number")
    if n > limits.MAX_FACTORIAL:
        raise limits.BoundError("a binomial that is too large")
    return Fraction(math.comb(int(n), int(k))) if k >= 0 else Fraction(0)


def _function(node: Node, args: list[Fraction]) -> Fraction | None:
    name, first = node.name, args[0]
    if name == "floor":
        return Fraction(math.floor(first))
    if name == "ceil":
        return Fraction(math.ceil(first))
    if name in ("min", "max"):
        return min(args) if name == "min" else max(args)
    if name in ("gcd", "lcm") and all(a.denominator == 1 for a in args):
        return Fraction(math.gcd(*map(int, args)) if name == "gcd" else math.lcm(*map(int, args)))
    if name == "log_base":
        return _exact_log(first, args[1])
    return None


def _exact_log(value: Fraction, base: Fraction) -> Fraction | None:
    """Return the integer exponent k with base**k = value, if there is one."""
    if base <= 1 or value <= 0 or base.denominator != 1:
        return None
    inverse = value < 1
    rest = 1 / value if inverse else value
    exponent = 0
    while rest >= base and exponent < 10_000:
        rest /= base
        exponent += 1
    return None if rest != 1 else Fraction(-exponent if inverse else exponent)


def _mod(node: Node, args: list[Fraction]) -> Fraction | None:
    if node.name != "value" or args[1] <= 0:
        return None
    return args[0] % args[1]


_Operation = Callable[[Node, list[Fraction]], Fraction | None]
_OPERATIONS: dict[str, _Operation] = {
    "add": _add, "mul": _mul, "div": _div, "pow": _pow, "root": _root, "fact": _factorial, "binom": _binom,
    "func": _function, "mod": _mod,
    "neg": lambda _, args: -args[0], "abs": lambda _, args: abs(args[0]), "percent": lambda _, args: args[0] / 100,
}  # fmt: skip


def _series(node: Node, values: dict[str, Fraction], budget: Budget) -> Fraction | None:
    low, high = (rational(arg, values, budget) for arg in node.args[:2])
    if low is None or high is None or low.denominator != 1 or high.denominator != 1:
        return None
    if high - low > limits.MAX_SUM_TERMS:
        raise limits.BoundError("a sum with too many terms")
    total = Fraction(node.op == "prod")
    for index in range(int(low), int(high) + 1):
        term = rational(node.args[2], {**values, node.name: Fraction(index)}, budget)
        if term is None:
            return None
        total = total * term if node.op == "prod" else total + term
        _check_size(total)
    return total


_RING = frozenset(("num", "sym", "add", "mul", "div", "neg", "pow", "percent"))


def is_rational_function(node: Node) -> bool:
    """Return whether only field operations and constant integer exponents occur."""
    for part in walk(node):
        if part.op not in _RING:
            return False
        if part.op == "pow":
            exponent = rational(part.args[1])
            if exponent is None or exponent.denominator != 1 or abs(exponent) > MAX_DEGREE:
                return False
    return True


def same_rational_function(left: Node, right: Node, symbols: list[str], rounds: int = 3) -> bool:
    """Test a polynomial identity in a random prime field (Schwartz-Zippel).

    The prime has 127 bits and is drawn anew by each process: a false "equal" has probability below 2**-90, and
    nobody can prepare constants for it. A false "different" is impossible.

    Raises:
        Undefined: a denominator is identically zero.
        BoundError: too many operations.
    """
    prime = _prime()
    for _ in range(rounds):
        for _attempt in range(4):
            point = {name: secrets.randbelow(prime - 2) + 1 for name in symbols}
            try:
                if (_modular(left, point, prime, Budget()) - _modular(right, point, prime, Budget())) % prime:
                    return False
                break
            except _Field:
                continue
        else:
            raise Undefined("a denominator is zero everywhere")
    return True


def proportional(left: Node, right: Node, symbols: list[str], rounds: int = 4) -> bool:
    """Return whether two rational functions differ only by a non-zero constant factor."""
    prime = _prime()
    ratio = None
    for _ in range(rounds):
        point = {name: secrets.randbelow(prime - 2) + 1 for name in symbols}
        try:
            a, b = _modular(left, point, prime, Budget()), _modular(right, point, prime, Budget())
        except _Field:
            return False
        if a % prime == 0 or b % prime == 0:
            return False
        this = a * pow(b, -1, prime) % prime
        if ratio is not None and this != ratio:
            return False
        ratio = this
    return True


def _modular(node: Node, point: dict[str, int], prime: int, budget: Budget) -> int:
    budget.spend()
    if node.op == "num":
        assert node.value is not None
        return node.value.numerator * pow(node.value.denominator, -1, prime) % prime
    if node.op == "sym":
        return point[node.name]
    if node.op == "pow":
        exponent = rational(node.args[1])
        assert exponent is not None
        base = _modular(node.args[0], point, prime, budget)
        if base == 0 and exponent < 0:
            raise _Field
        return pow(base, int(exponent), prime)
    values = [_modular(arg, point, prime, budget) for arg in node.args]
    if node.op == "add":
        return sum(values) % prime
    if node.op == "mul":
        product = 1
        for value in values:
            product = product * value % prime
        return product
    if node.op == "neg":
        return -values[0] % prime
    divisor = 100 if node.op == "percent" else values[1]
    if divisor == 0:
        raise _Field
    return values[0] * pow(divisor, -1, prime) % prime


@lru_cache(maxsize=1)
def _prime() -> int:
    while True:
        candidate = secrets.randbits(127) | (1 << 126) | 1
        if all(candidate % small for small in (3, 5, 7, 11, 13, 17, 19, 23)) and _probable_prime(candidate):
            return candidate


def _probable_prime(n: int) -> bool:
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(secrets.randbelow(n - 3) + 2, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
