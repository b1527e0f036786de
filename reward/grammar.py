"""Whole answers: lists, tuples, sets, intervals, matrices, relations, units and words around expressions.

Structure nodes: list (name: "," or "or"), tuple (name: its two brackets), set, builder, union, intersect, minus,
named, rel (name: relations joined by blanks), member, text, matrix, unit, base, ratio, mod, ldots.
"""

from __future__ import annotations

from functools import lru_cache

from reward import limits, words
from reward.lex import Lexer, Token, Unparsable
from reward.nodes import Node, num, walk
from reward.parse import ExpressionParser

_RELATIONS = {"le": "<=", "ge": ">=", "ne": "!=", "approx": "~", "sim": "~", "simeq": "~"}
_SET_OPERATORS = {"cup": "union", "cap": "intersect", "setminus": "minus", "backslash": "minus", "bigcup": "union"}
_MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "array", "Bmatrix", "smallmatrix"))
_ACCENTS = frozenset("overline vec hat bar overrightarrow widehat tilde overleftrightarrow".split())
_CONDITION_WORDS = frozenset(("for", "where", "with", "if", "when", "for all", "for any", "for every", "for some"))
_PAIR_CLOSERS = {"(": (")", "]"), "[": ("]", ")", "[")}


class AnswerParser(ExpressionParser):
    """Reads a complete answer."""

    in_set = False  # inside braces a colon means "such that"

    def answer(self) -> Node:
        """Return the node of the whole text; anything left over is refused."""
        items, joined = [self.item()], ","
        while self._separator():
            joined = "or" if self._skip_separators() == "or" else joined
            if self.token.kind == "end":
                break
            if self._condition():
                self._skip_condition()
                continue
            items.append(self.item())
            if len(items) > limits.MAX_ITEMS:
                raise limits.BoundError("too many items")
        if self._condition():
            self._skip_condition()
        if self.token.kind != "end":
            raise Unparsable(f"left over from {self.token.text!r}")
        return items[0] if len(items) == 1 else Node("list", tuple(items), joined)

    def _separator(self) -> bool:
        return self.token.kind == "sep" or self.is_op(",", ";") or self.is_cmd("quad", "lor", "vee", "land", "wedge")

    def _skip_separators(self) -> str:
        seen = ","
        while self._separator():
            token = self.take()
            if token.text in ("or", "lor", "vee"):
                seen = "or"
        return seen

    def _condition(self) -> bool:
        token = self.token
        if token.kind in ("text", "word"):
            return any(
                token.text.lower().split()[:n] and " ".join(token.text.lower().split()[:n]) in _CONDITION_WORDS
                for n in (1, 2)
            )
        if self.is_cmd("forall"):
            return True
        # "n \in Z" after a comma says where the variable lives
        return (
            token.kind == "sym"
            and self.tokens[self.index + 1].kind == "cmd"
            and self.tokens[self.index + 1].text == "in"
        )

    def _skip_condition(self) -> None:
        """A domain remark at the end adds no value; a hedge or a second value in it is refused."""
        rest = self.tokens[self.index : -1]
        text = " ".join(t.text.lower() for t in rest)
        if any(t.kind == "sep" and t.text == "or" for t in rest) or any(
            w in text.split() for w in ("is", "not", "maybe", "wrong")
        ):
            raise Unparsable("a remark that may change the answer")
        if not any(t.kind == "cmd" and t.text == "in" for t in rest):
            raise Unparsable("a condition that is not a domain")
        self.index = len(self.tokens) - 1

    def item(self) -> Node:
        """Read one element of a top-level list: words, or a chain of relations with an optional unit."""
        if self.token.kind in ("text", "word"):
            label = self._words()
            if self.token.kind == "num" and label.name.lower().strip(" .") in words.CURRENCY_WORDS:
                return Node("unit", (self.power(),), words.unit_key([label.name.strip(" .")]) or "")
            if not self._relation_next():
                return label
            return self._relations(label)
        if self.is_cmd("approx"):
            self.take()
            return self.item()
        if self.is_op("=") and self.index == 0:
            self.take()
        return self._relations(self.side())

    def _words(self) -> Node:
        parts = []
        while self.token.kind in ("text", "word"):
            parts.append(self.take().text)
        return Node("text", name=" ".join(parts))

    def _relation_next(self) -> bool:
        if self.is_op(":"):
            return not self.in_set
        return self.is_op("=", "<", ">") or self.is_cmd(*_RELATIONS, "in", "equiv")

    def _relations(self, first: Node) -> Node:
        sides = [first]
        names: list[str] = []
        while self._relation_next():
            token = self.take()
            if token.text in ("in", "equiv", ":"):
                return self._special_relation(token.text, sides, names)
            names.append(_RELATIONS.get(token.text, token.text))
            sides.append(self._words() if self.token.kind in ("text", "word") else self.side())
        return first if not names else Node("rel", tuple(sides), " ".join(names))

    def _special_relation(self, text: str, sides: list[Node], names: list[str]) -> Node:
        if names:
            raise Unparsable("mixed relations")
        right = self.side()
        if text == "in":
            return Node("member", (sides[0], right))
        if text == ":":
            if self.is_op(":"):
                self.take()
                return Node("ratio", (sides[0], right, self.side()))
            if sides[0].op == "text":
                return Node("rel", (sides[0], right), "=")
            digits = self.tokens[self.index - 1]
            clock = digits.kind == "num" and len(digits.text) == 2 and right.op == "num"
            return Node("ratio", (sides[0], right), "clock" if clock else "")
        if self.is_cmd("pmod", "mod", "bmod"):
            self.take()
            return Node("mod", (right, self.atom()), "equiv")
        if right.op == "mod":
            return Node("mod", right.args, "equiv")
        raise Unparsable("a congruence without a modulus")

    def side(self) -> Node:
        """Read set operations between expressions, then a unit."""
        node = self._with_unit(self.additive())
        while self.is_cmd(*_SET_OPERATORS) or (self.is_op("-") and node.op in ("set", "builder", "named")):
            operator = _SET_OPERATORS.get(self.take().text, "minus")
            node = Node(operator, (node, self.additive()))
        return node

    def _with_unit(self, node: Node) -> Node:
        if self.is_cmd("pmod", "mod", "bmod"):
            name = "value" if self.take().text == "bmod" else "residue"
            return Node("mod", (node, self.atom()), name)
        start, parts = self.index, []
        while True:
            if self.token.kind in ("text", "word"):
                parts += (
                    self.take()
                    .text.replace("/", " / ")
                    .replace("²", " ^2")
                    .replace("^", " ^")
                    .replace(".", " ")
                    .split()
                )
            elif self.is_cmd("currencydollar") and not parts:
                self.take()
                parts.append("dollar")
            elif self.is_op("/") and parts:
                parts.append(self.take().text)
            elif self.is_op("^") and parts and self._unit_exponent():
                parts.append(self._take_unit_exponent())
            elif self.is_cmd("cdot") and parts:
                self.take()
            else:
                break
        if not parts:
            return node
        return self._unit(node, parts, start)

    def _unit_exponent(self) -> bool:
        following = self.tokens[self.index + 1 : self.index + 4]
        text = "".join(t.text for t in following)
        return text.lstrip("{")[:1] in "23" or text.startswith(("{-1", "{-2"))

    def _take_unit_exponent(self) -> str:
        self.take()
        exponent = self.argument()
        sign, inner = ("-", exponent.args[0]) if exponent.op == "neg" else ("", exponent)
        return f"^{sign}{inner.value}"

    def _unit(self, node: Node, parts: list[str], start: int) -> Node:
        if " ".join(parts).lower() in _CONDITION_WORDS or self._starts_condition(parts):
            self.index = start
            return node
        factor = words.MULTIPLIERS.get(parts[0].lower())
        if factor is not None and not any(part.op == "sym" for part in walk(node)):
            node, parts = Node("mul", (node, num(factor))), parts[1:]
            if not parts:
                return node
        key = words.unit_key(parts)
        if key is None or node.op not in _UNIT_BEARERS:
            raise Unparsable(f"words after a value: {' '.join(parts)!r}")
        return Node("unit", (node,), key)

    def _starts_condition(self, parts: list[str]) -> bool:
        return parts[0].lower() in ("for", "where", "with")

    def other_atom(self, token: Token) -> Node:
        """Read sets, matrices and outward brackets."""
        if token.kind == "op" and token.text == "]":
            return self._pair("]")
        if token.kind == "env" and token.text.startswith("begin "):
            return self._matrix(token.text.removeprefix("begin "))
        raise Unparsable(f"unexpected {token.text!r}")

    def other_command(self, name: str) -> Node:
        """Read commands that build structures."""
        if name == "{":
            return self._set()
        if name == "langle":
            items = self._items()
            if not self.is_cmd("rangle"):
                raise Unparsable("an unclosed angle bracket")
            self.take()
            return Node("tuple", tuple(items), "()")
        if name == "emptyset":
            return Node("set")
        if name == "mathbb":
            return Node("named", name=self._blackboard())
        if name == "ldots":
            return Node("ldots")
        if name in ("angle", "triangle"):
            letters = ""
            while self.token.kind == "sym":
                letters += self.take().text
            return Node("sym", name=f"\\{name} {letters}") if letters else self._refuse("a figure without letters")
        if name in _ACCENTS:
            letters = self._subscript()
            return (
                Node("sym", name=f"\\{name} {letters}") if letters.isalpha() else self._refuse("an accent on a value")
            )
        raise Unparsable(f"command \\{name}")

    def _blackboard(self) -> str:
        braced = self.is_op("{")
        if braced:
            self.take()
        letter = self.take().text
        if braced:
            self.expect("}")
        if letter not in "RZNQC":
            raise Unparsable("an unknown set name")
        for sign in ("+", "-"):
            if self.is_op("^") and self.tokens[self.index + 1].text in (sign, "{"):
                text = "".join(t.text for t in self.tokens[self.index + 1 : self.index + 4])
                if text.startswith((sign, "{" + sign + "}")):
                    self.index += 2 if text.startswith(sign) else 4
                    return letter + sign
        return letter

    def _items(self) -> list[Node]:
        bars, self.bars = self.bars, 0
        items = [self._element()]
        while self.is_op(",", ";") or (self.token.kind == "sep" and self.token.text == "and"):
            self.take()
            items.append(self._element())
            if len(items) > limits.MAX_ITEMS:
                raise limits.BoundError("too many elements")
        self.bars = bars
        return items

    def _element(self) -> Node:
        if self.token.kind in ("text", "word"):
            return self._words()
        return self._relations(self.side())

    def _set(self) -> Node:
        if self.is_cmd("}"):
            self.take()
            return Node("set")
        outer, self.in_set = self.in_set, True
        items = self._items()
        self.in_set = outer
        if self.is_op("|") or self.is_op(":"):
            self.take()
            condition = self._condition_list()
            items = [Node("builder", (items[0], condition))] if len(items) == 1 else items
            if not self.is_cmd("}"):
                raise Unparsable("an unclosed set")
            self.take()
            return items[0]
        if not self.is_cmd("}"):
            raise Unparsable("an unclosed set")
        self.take()
        return Node("set", tuple(items[0].args if len(items) == 1 and items[0].op == "list" else items))

    def _condition_list(self) -> Node:
        items, joined = [self._element()], ","
        while self._separator():
            joined = "or" if self._skip_separators() == "or" else joined
            items.append(self._element())
        return items[0] if len(items) == 1 else Node("list", tuple(items), joined)

    def bracket(self, opener: str) -> Node:
        """Read a parenthesised group, a tuple or an interval."""
        return self._pair(opener)

    def _pair(self, opener: str) -> Node:
        outward, self.outward = self.outward, int(opener == "]")
        items = self._items()
        self.outward = outward
        closers = _PAIR_CLOSERS.get(opener, ("[", "]", ")"))
        if not self.is_op(*closers):
            raise Unparsable(f"{opener!r} is not closed")
        closer = self.take().text
        if len(items) == 1:
            if (opener, closer) not in (("(", ")"), ("[", "]")):
                raise Unparsable("mismatched brackets")
            if self.is_op("_") and items[0].op == "num" and items[0].value is not None and opener == "(":
                return self.based(items[0], str(items[0].value))
            return items[0]
        left = "[" if opener == "[" else "("
        right = "]" if (closer == "]" and opener != "]") or (closer == "]" and opener == "]") else ")"
        return Node("tuple", tuple(items), left + right)

    def braced(self) -> Node:
        """Read a TeX group; a list in plain braces is a set as models without LaTeX write it."""
        items = self._items()
        if self.is_cmd("choose") and len(items) == 1:
            self.take()
            items = [Node("binom", (items[0], self.additive()))]
        self.expect("}")
        return items[0] if len(items) == 1 else Node("list", tuple(items), ",")

    def _matrix(self, name: str) -> Node:
        if name not in _MATRICES:
            raise Unparsable(f"environment {name}")
        rows: list[list[Node]] = [[]]
        while True:
            rows[-1].append(self._relations(self.side()))
            if self.is_op("&"):
                self.take()
            elif self.is_cmd("\\"):
                self.take()
                if self.token.kind == "env":
                    break
                rows.append([])
            else:
                break
            if sum(map(len, rows)) > limits.MAX_ITEMS:
                raise limits.BoundError("a matrix with too many entries")
        if self.token.kind != "env" or self.token.text != f"end {name}" or len({len(r) for r in rows}) != 1:
            raise Unparsable("a malformed matrix")
        self.take()
        return Node("matrix", tuple(x for row in rows for x in row), f"{len(rows)}x{len(rows[0])}")


_UNIT_BEARERS = frozenset(
    "num add mul div neg pow root pm percent deg fact sym const func abs unit base repeat".split()
)


@lru_cache(maxsize=4096)
def read(tidied: str, *, grouped: bool = True) -> Node:
    """Parse a tidied answer.

    Args:
        tidied: output of `reward.text.tidy`.
        grouped: whether "1,234" at the top level is one number.

    Raises:
        Unparsable: outside the grammar.
        BoundError: too long, too deep or too many parts.
    """
    parser = AnswerParser(Lexer(tidied, grouped=grouped).run())
    try:
        return parser.answer()
    except RecursionError as error:
        raise limits.BoundError("nested too deeply") from error
