"""Expressions of the whitelist grammar: recursive descent with a depth bound, no evaluation.

Scalar nodes: num, sym, const (pi, e, i), inf, add, mul, div, pow, neg, fact, root, func, abs, binom, pm, mp, sum,
prod, deg, percent, deferred. A juxtaposed number is never a factor ("4 2" is refused), so digits cannot be glued.
"""

from __future__ import annotations

from fractions import Fraction

from reward import limits, words
from reward.lex import Token, Unparsable
from reward.nodes import Node, num

ZERO, ONE = num(0), num(1)
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_POSTFIX = 12
_OPAQUE_FUNCTIONS = frozenset("fghFGH")


def literal(text: str) -> Node:
    """Return the exact value of a decimal or scientific literal.

    Raises:
        BoundError: too many digits, or an exponent out of bounds.
    """
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > limits.MAX_LITERAL_DIGITS:
        raise limits.BoundError("a literal with too many digits")
    whole, _, fraction = mantissa.partition(".")
    value = Fraction(int((whole or "0") + fraction), 10 ** len(fraction))
    if exponent:
        if abs(int(exponent)) > limits.MAX_LITERAL_DIGITS:
            raise limits.BoundError("a literal with a huge exponent")
        value *= Fraction(10) ** int(exponent)
    return Node("num", value=value, name="." if fraction else "")


def repeating(text: str) -> Node:
    """Return the rational number of "whole.fixed.block" where the block repeats for ever."""
    whole, fixed, block = text.split(".")
    if len(text) > limits.MAX_LITERAL_DIGITS:
        raise limits.BoundError("a literal with too many digits")
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(block), scale * (10 ** len(block) - 1))
    return Node("num", value=value, name=".")


def _product(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))


class ExpressionParser:
    """Reads one arithmetic or algebraic expression from a token list."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.index = 0
        self.depth = 0
        self.outward = 0  # open intervals of the form ]a, b[: the next bracket closes one
        self.bars = 0  # open absolute values: the next bar closes one

    @property
    def token(self) -> Token:
        """The token to be read next."""
        return self.tokens[self.index]

    def take(self) -> Token:
        """Read one token."""
        token = self.tokens[self.index]
        if token.kind == "end":
            raise Unparsable("unexpected end")
        self.index += 1
        return token

    def is_op(self, *texts: str) -> bool:
        """Return whether the next token is one of these operators."""
        return self.token.kind == "op" and self.token.text in texts

    def is_cmd(self, *texts: str) -> bool:
        """Return whether the next token is one of these commands."""
        return self.token.kind == "cmd" and self.token.text in texts

    def expect(self, text: str) -> None:
        """Read the named operator or refuse the text."""
        if not self.is_op(text):
            raise Unparsable(f"expected {text!r}, found {self.token.text!r}")
        self.index += 1

    def enter(self) -> None:
        """Count one level of nesting."""
        self.depth += 1
        if self.depth > limits.MAX_DEPTH:
            raise limits.BoundError("nested too deeply")

    def additive(self) -> Node:
        """Read terms joined by plus, minus or plus-minus."""
        self.enter()
        parts: list[Node] = []
        while True:
            sign = "+"
            if self.is_op("+", "-"):
                sign = self.take().text
            elif self.is_cmd("pm", "mp"):
                sign = self.take().text
            elif parts:
                break
            if sign in "+-" and self.is_op("+", "-"):
                raise Unparsable("two signs in a row")
            term = self.term()
            if sign == "-":
                term = Node("neg", (term,))
            elif sign in ("pm", "mp"):
                term = Node(sign, (term,))
            parts.append(term)
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Node("add", tuple(parts))

    def term(self) -> Node:
        """Read factors joined by explicit or implicit multiplication and division."""
        left = self.power()
        if self._simple_fraction_follows() and self._whole_number(left):
            part = self.power()
            whole_percent = part.op == "percent"
            left = Node("add", (left, part.args[0] if whole_percent else part))
            left = Node("percent", (left,)) if whole_percent else left
        elif self._whole_number(left) and self._slash_fraction_follows():
            top, _, bottom = self.take(), self.take(), self.take()
            left = self._percent(Node("add", (left, Node("div", (literal(top.text), literal(bottom.text))))))
        factors, divisions = [left], 0
        while True:
            if self.is_op("*") or self.is_cmd("times", "cdot", "ast"):
                self.take()
                factors.append(self.signed_power())
            elif self.is_op("/") or self.is_cmd("div"):
                self.take()
                divisions += 1
                if divisions > 30:
                    raise limits.BoundError("too many divisions in a row")
                factors = [Node("div", (_product(factors), self.signed_power()))]
            elif self.starts_factor():
                factors.append(self.power())
            else:
                return _product(factors)

    def signed_power(self) -> Node:
        """Read a factor after an operator, where one sign is allowed."""
        if self.is_op("-"):
            self.take()
            return Node("neg", (self.power(),))
        if self.is_op("+"):
            self.take()
        return self.power()

    def _whole_number(self, node: Node) -> bool:
        return node.op == "num" and not node.name and self.tokens[self.index - 1].kind == "num"

    def _simple_fraction_follows(self) -> bool:
        """A fraction of two positive integer literals after a whole number makes a mixed number."""
        if not self.is_cmd("frac"):
            return False
        shape = "".join(
            "0"
            if t.kind == "num" and t.text.isdigit() and t.text.strip("0")
            else t.text
            if t.text in ("{", "}")
            else "x"
            for t in self.tokens[self.index + 1 : self.index + 7]
        )
        if shape.startswith("0") and len(self.tokens[self.index + 1].text) == 2:
            return True
        return shape.startswith(("{0}{0}", "{0}0", "0{0}", "00"))

    def _slash_fraction_follows(self) -> bool:
        top, slash, bottom = [*self.tokens[self.index : self.index + 3], self.tokens[-1], self.tokens[-1]][:3]
        plain = top.kind == bottom.kind == "num" and top.text.isdigit() and bottom.text.isdigit()
        return plain and top.spaced and slash.text == "/"

    def _percent(self, node: Node) -> Node:
        if self.is_op("%") or self.is_cmd("percent"):
            self.take()
            return Node("percent", (node,))
        return node

    def starts_factor(self) -> bool:
        """Return whether the next token begins an implicit factor (a number never does)."""
        token = self.token
        if token.kind == "sym":
            return True
        if token.kind == "num":  # 3!4! is a product; digits are never glued otherwise
            return self.tokens[self.index - 1].text == "!" and self.tokens[self.index - 1].kind == "op"
        if token.kind == "op":
            if token.text == "[" and self.outward:
                return False
            return token.text in "([{" or (token.text == "|" and self.bars == 0 and self._bar_opens())
        if token.kind == "cmd":
            return token.text in words.FUNCTIONS or token.text in words.GREEK or token.text in (
                "frac", "binom", "pi", "inf", "infty", "sum", "prod", "lfloor", "lceil", "imath", "surd", "angle",
                "triangle", "vec",
            )  # fmt: skip
        return token.kind == "env" and token.text.startswith("begin")

    def _bar_opens(self) -> bool:
        """A bar that has a partner later in the tokens opens an absolute value."""
        return any(t.kind == "op" and t.text == "|" for t in self.tokens[self.index + 1 : self.index + 200])

    def power(self) -> Node:
        """Read an atom with factorials, degree and percent marks and exponents."""
        node = self.atom()
        for _ in range(_MAX_POSTFIX):
            if self.is_op("!"):
                self.take()
                if self.is_op("!"):
                    raise Unparsable("a double factorial")
                node = Node("fact", (node,))
            elif self.is_op("'"):
                self.take()
                if node.op != "sym":
                    raise Unparsable("a prime after a value")
                node = Node("sym", name=node.name + "'")
            elif self.is_op("%") or self.is_cmd("percent"):
                self.take()
                node = Node("percent", (node,))
            elif self.is_op("^"):
                self.take()
                node = self._exponent(node)
            else:
                return node
        raise limits.BoundError("too many marks after one value")

    def _exponent(self, base: Node) -> Node:
        if self.is_cmd("circ"):
            self.take()
            return Node("deg", (base,))
        if self.is_cmd("prime"):
            self.take()
            return Node("sym", name=base.name + "'") if base.op == "sym" else self._refuse("a prime after a value")
        if self._skips_ordinal():
            return base
        if self.is_op("-", "+"):
            sign = self.take().text
            exponent = self.power()
            return Node("pow", (base, Node("neg", (exponent,)) if sign == "-" else exponent))
        self.enter()
        if self.is_op("{"):
            exponent = self.atom()  # x^{a}^b is not TeX; the second sign is refused below
            if self.is_op("^"):
                raise Unparsable("a double exponent")
        else:
            exponent = self.power()
        self.depth -= 1
        return Node("pow", (base, exponent))

    def _skips_ordinal(self) -> bool:
        """Skip the raised ending of 13th, braced or not."""
        braced = self.is_op("{")
        token = self.tokens[self.index + 1] if braced else self.token
        if token.kind != "text" or token.text not in ("st", "nd", "rd", "th"):
            return False
        self.index += 3 if braced else 1
        return True

    def _refuse(self, reason: str) -> Node:
        raise Unparsable(reason)

    def atom(self) -> Node:
        """Read a number, symbol, group, fraction, root, function or bracketed structure."""
        self.enter()
        try:
            return self._atom()
        finally:
            self.depth -= 1

    def _atom(self) -> Node:
        token = self.take()
        if token.kind == "num":
            return self.based(literal(token.text), token.text)
        if token.kind == "repeat":
            return repeating(token.text)
        if token.kind == "base":
            return Node("base", name=token.text)
        if token.kind == "sym":
            return self.symbol(token.text)
        if token.kind == "op" and token.text == "|":
            self.bars += 1
            inner = self.additive()
            self.bars -= 1
            self.expect("|")
            return Node("abs", (inner,))
        if token.kind == "op" and token.text == "{":
            return self.braced()
        if token.kind == "op" and token.text in "([":
            return self.bracket(token.text)
        if token.kind == "cmd":
            return self._command(token.text)
        return self.other_atom(token)

    def other_atom(self, token: Token) -> Node:
        """Read an atom that only whole answers know; the answer grammar extends this."""
        raise Unparsable(f"unexpected {token.text!r}")

    def other_command(self, name: str) -> Node:
        """Read a command that only whole answers know; the answer grammar extends this."""
        raise Unparsable(f"command \\{name}")

    def bracket(self, opener: str) -> Node:
        """Read a parenthesised expression; the answer grammar extends this to pairs and intervals."""
        inner = self.additive()
        self.expect(_CLOSERS[opener])
        return inner

    def braced(self) -> Node:
        """Read a TeX group that was opened."""
        bars, self.bars = self.bars, 0
        inner = self.additive()
        if self.is_cmd("choose"):
            self.take()
            inner = Node("binom", (inner, self.additive()))
        self.bars = bars
        self.expect("}")
        return inner

    def argument(self) -> Node:
        """Read one TeX argument: a group, or a single digit, letter or command."""
        token = self.token
        if token.kind == "num" and len(token.text) > 1:
            if not token.text.isdigit():
                raise Unparsable("a decimal as a bare argument")
            self.tokens[self.index] = Token("num", token.text[1:], False)
            return literal(token.text[0])
        return self.atom()

    def based(self, value: Node, digits: str) -> Node:
        """Read a subscript on a number as its base."""
        if not self.is_op("_"):
            return value
        self.take()
        base = self._base_argument()
        if not digits.isdigit() or base.op != "num" or base.value is None or not 2 <= base.value <= 36:
            raise Unparsable("a subscript on a number that is not a base")
        return Node("base", name=f"{digits}_{base.value}")

    def _base_argument(self) -> Node:
        """Read the base of a number: a numeral, or its English name in a text command."""
        following = [self.token, self.tokens[min(self.index + 1, len(self.tokens) - 1)]]
        named = following[1] if self.is_op("{") else following[0]
        if named.kind in ("text", "word") and named.text.strip().lower() in words.BASE_WORDS:
            self.index += 3 if self.is_op("{") else 1
            return num(words.BASE_WORDS[named.text.strip().lower()])
        return self.argument()

    def symbol(self, name: str) -> Node:
        """Read a letter with its subscript: constant, unknown function or symbol."""
        if self.is_op("_"):
            self.take()
            return Node("sym", name=f"{name}_{self._subscript()}")
        if name in ("e", "i") and not self.is_op("'"):
            return Node("const", name=name)
        if name in _OPAQUE_FUNCTIONS and [t.text for t in self.tokens[self.index : self.index + 6]] == list("^{-1}("):
            self.index += 5
            return self._opaque(name + "^-1")
        if self.is_op("(") and (name in _OPAQUE_FUNCTIONS or self._defines_function()):
            return self._opaque(name)
        return Node("sym", name=name)

    def _defines_function(self) -> bool:
        """Return whether "(t) =" follows: then even an ordinary letter such as x names a function."""
        following = self.tokens[self.index + 1 : self.index + 4]
        return [t.kind for t in following[:1]] == ["sym"] and [t.text for t in following[1:]] == [")", "="]

    def _opaque(self, name: str) -> Node:
        self.take()
        arguments = [self.additive()]
        while self.is_op(","):
            self.take()
            arguments.append(self.additive())
        self.expect(")")
        return Node("call", tuple(arguments), name)

    def _subscript(self) -> str:
        if not self.is_op("{"):
            return self.take().text
        depth = 0
        parts: list[str] = []
        while True:
            token = self.take()
            if token.kind == "end":
                raise Unparsable("an unclosed subscript")
            depth += {"{": 1, "}": -1}.get(token.text if token.kind == "op" else "", 0)
            if depth == 0:
                return "".join(parts)
            if token.text != "{":
                parts.append(token.text)

    def _command(self, name: str) -> Node:
        from reward.functions import read_command  # the table of commands; imported here to break the cycle

        return read_command(self, name)
