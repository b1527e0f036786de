"""Tokens of the whitelist grammar. One linear pass; anything unknown is refused."""

from __future__ import annotations

import re
from typing import NamedTuple

from reward import limits, words


class Token(NamedTuple):
    """One token.

    kind: num, repeat, base, sym, cmd, text, word, sep, env, end or op.
    """

    kind: str
    text: str
    spaced: bool  # a blank stood before it


class Unparsable(ValueError):
    """The text is outside the whitelist grammar; the message says where."""


_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])"
_GROUPED_BLANK = r"[0-9]{1,3}(?: [0-9]{3})+(?![0-9])"
_PLAIN = r"[0-9]+"
_EXPONENT = r"(?:[eE][+-]?[0-9]{1,12}(?![0-9A-Za-z.]))?"
_REPEAT = re.compile(
    r"(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)(?:\\(?:overline|bar|dot)\s*\{?\s*(?P<block>[0-9]+)\s*\}?"
    r"(?:(?P<middle>[0-9]*)\\dot\s*\{?\s*(?P<last>[0-9])\s*\}?)?|\((?P<paren>[0-9]+)\))(?!\.|[0-9])"
)
_BASE = re.compile(
    r"(?P<digits>[0-9A-Z]*(?:[0-9][A-Z]|[A-Z][0-9])[0-9A-Z]*|[A-Z]{2,})_\{?\s*(?P<base>[0-9]{1,2})\s*\}?"
)
_TEXT_COMMANDS = frozenset("text textbf textit textrm mbox hbox emph textsf texttt".split())
_STYLE_COMMANDS = frozenset("mathrm mathbf mathit mathsf boldsymbol bm mathnormal operatorname rm".split())
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_LETTERS = re.compile(r"[A-Za-z]+")
_NUMBER_TEXT = re.compile(r"\s*\(?[-+]?\\?\$?\s*[0-9][0-9,. /]*%?\)?\s*")
_CONNECTIVE_TEXT = re.compile(r"[\s,;]*(or|and)[\s,;]*", re.IGNORECASE)
_UPRIGHT_UNIT = re.compile(
    r"[A-Za-z]{2,}[. ]*|[A-Za-z]|[A-Za-z]+ ?/ ?[A-Za-z]+(?:\^\{?-?[1-3]\}?)?|[A-Za-z]+\^\{?-?[1-3]\}?"
)
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{([a-z]+)\*?\}(?:\{[lcr| ]{0,40}\})?")
_OPS = frozenset("+-*/^_!()[]{}|,;:=<>'&%.?\"@#")


def number_pattern(*, grouped: bool) -> re.Pattern[str]:
    """Return the pattern of a number literal, with or without thousands commas."""
    whole = f"(?:{_GROUPED}|{_GROUPED_BLANK}|{_PLAIN})" if grouped else f"(?:{_GROUPED_BLANK}|{_PLAIN})"
    return re.compile(rf"(?:{whole}(?:\.(?![.])[0-9]*)?|\.[0-9]+){_EXPONENT}")


_NUMBER_GROUPED = number_pattern(grouped=True)
_NUMBER_SPLIT = number_pattern(grouped=False)


class Lexer:
    """Turns tidied text into tokens; `grouped` says whether 1,234 may be one number at the top level."""

    def __init__(self, text: str, *, grouped: bool = True) -> None:
        if len(text) > limits.MAX_FORMULA_CHARS:
            raise limits.BoundError(f"formula of {len(text)} characters")
        self.text = text
        self.grouped = grouped
        self.tokens: list[Token] = []
        self.position = 0
        self.brackets = 0
        self.spaced = False

    def run(self) -> list[Token]:
        """Return all tokens, closed by an end token.

        Raises:
            Unparsable: a character or command outside the grammar.
            BoundError: too many tokens.
        """
        while self.position < len(self.text):
            self._step()
            if len(self.tokens) > limits.MAX_TOKENS:
                raise limits.BoundError("too many tokens")
        self._emit("end", "")
        return self.tokens

    def _emit(self, kind: str, text: str) -> None:
        self.tokens.append(Token(kind, text, self.spaced))
        self.spaced = False

    def _step(self) -> None:
        char = self.text[self.position]
        if char == " ":
            self.spaced = True
            self.position += 1
        elif char in "0123456789." or ("A" <= char <= "Z"):
            if not self._number_like(char):
                self._other(char)
        elif char == "\\":
            self._command()
        else:
            self._other(char)

    def _number_like(self, char: str) -> bool:
        base = _BASE.match(self.text, self.position)
        if base and not ("A" <= char <= "Z" and base["digits"].isalpha() and int(base["base"]) < 11):
            self._emit("base", f"{base['digits']}_{base['base']}")
            self.position = base.end()
            return True
        if "A" <= char <= "Z":
            return False
        repeat = _REPEAT.match(self.text, self.position)
        if repeat and (repeat["paren"] is None or not repeat["fixed"] or repeat["whole"].strip("0") == ""):
            block = repeat["paren"] or repeat["block"] + (repeat["middle"] or "") + (repeat["last"] or "")
            self._emit("repeat", f"{repeat['whole'] or '0'}.{repeat['fixed']}.{block}")
            self.position = repeat.end()
            return True
        pattern = _NUMBER_GROUPED if self.grouped and self.brackets == 0 else _NUMBER_SPLIT
        match = pattern.match(self.text, self.position)
        if match is None:
            return False
        self._emit("num", match[0].replace(",", "").replace(" ", ""))
        self.position = match.end()
        return True

    def _other(self, char: str) -> None:
        if "a" <= char <= "z" or "A" <= char <= "Z":
            run = _LETTERS.match(self.text, self.position)
            assert run is not None
            self.position = run.end()
            self._letters(run[0])
        elif self.text.startswith("**", self.position):
            self._emit("op", "^")
            self.position += 2
        elif char in _OPS:
            self._operator(char)
            self.position += 1
        elif char in words.CONNECTIVES:
            self._emit("sep", words.CONNECTIVES[char])
            self.position += 1
        elif char in "€£¥":
            self._emit("cmd", "currency" + {"€": "euro", "£": "pound", "¥": "yuan"}[char])
            self.position += 1
        elif char.isalpha():
            start = self.position
            while (
                self.position < len(self.text)
                and ord(self.text[self.position]) > 127
                and self.text[self.position].isalpha()
            ):
                self.position += 1
            self._emit("word", self.text[start : self.position])
        else:
            raise Unparsable(f"character {char!r}")

    def _operator(self, char: str) -> None:
        follows = self.text[self.position + 1 : self.position + 2]
        if char in "<>!" and follows == "=":
            self._emit("cmd", {"<": "le", ">": "ge", "!": "ne"}[char])
            self.position += 1
            return
        if char in "([":
            self.brackets += 1
        elif char in ")]":
            self.brackets = max(0, self.brackets - 1)
        self._emit("op", char)

    def _letters(self, run: str) -> None:
        lower = run.lower()
        if lower in words.CONNECTIVES and len(run) > 1:
            self._emit("sep", words.CONNECTIVES[lower])
        elif len(run) == 1:
            self._emit("sym", run)
        elif run in words.FUNCTIONS:
            self._emit("cmd", run)
        elif run.isupper() and run not in words.UNITS:
            self._emit("sym", run)  # points, segments and sequences: the order of the letters matters
        elif run in words.CONSTANT_WORDS or lower in ("infinity", "infty"):
            self._emit("cmd", words.CONSTANT_WORDS.get(run, "inf"))
        elif run in words.GREEK:
            self._emit("cmd", run)
        elif run in words.UNITS or len(run) > 4 or lower in words.STOP_WORDS or (len(run) == 4 and _has_vowel(run)):
            self._emit("word", run)
        else:
            for letter in run:
                self._emit("sym", letter)

    def _command(self) -> None:
        environment = _ENVIRONMENT.match(self.text, self.position)
        if environment:
            self._emit("env", f"{environment[1]} {environment[2]}")
            self.position = environment.end()
            self.brackets += 1 if environment[1] == "begin" else -1
            return
        match = _COMMAND.match(self.text, self.position)
        if match is None:
            raise Unparsable("a lone backslash")
        name = match[1]
        self.position = match.end()
        if name in _TEXT_COMMANDS or name in _STYLE_COMMANDS:
            self._wrapped(upright_text=name in _TEXT_COMMANDS)
            return
        if name in ("{", "}"):
            self.brackets += 1 if name == "{" else -1
        if name in ("quad", "qquad"):
            self._quad()
            return
        self._emit("cmd", {"$": "currencydollar", "%": "percent"}.get(name, name))

    def _quad(self) -> None:
        """A wide space separates; beside a comma or at an end it says nothing new."""
        rest = self.text[self.position :].lstrip()
        at_edge = not self.tokens or not rest or rest[0] in ",;" or self.tokens[-1].text in (",", ";")
        if not at_edge and not rest.startswith(("\\quad", "\\qquad", "\\text")) and self.tokens[-1].kind != "sep":
            self._emit("cmd", "quad")
        self.spaced = True

    def _wrapped(self, *, upright_text: bool) -> None:
        """Read the argument of a text or font command: connective, number, letter or words."""
        while self.position < len(self.text) and self.text[self.position] == " ":
            self.position += 1
        if self.position >= len(self.text) or self.text[self.position] != "{":
            if upright_text:
                raise Unparsable("a text command without an argument")
            return
        end = _closing_brace(self.text, self.position)
        content = self.text[self.position + 1 : end]
        plain = _plain_argument(content)
        if plain is not None:
            self._emit(*plain)
        elif not content.strip():
            self.spaced = True
        elif base := _based_text(content, self.text, end):
            self._emit("base", f"{base['digits']}_{base['base']}")
            self.position = end + 1 + _subscript_length(self.text, end + 1)
            return
        elif _NUMBER_TEXT.fullmatch(content):
            self.tokens.extend(Lexer(content.strip(), grouped=self.grouped and self.brackets == 0).run()[:-1])
        elif not upright_text and not _UPRIGHT_UNIT.fullmatch(content.strip()):
            return  # a font changes nothing: the braces that follow are read as a group
        elif not upright_text and len(content.strip()) == 1 and not self._unit_letter(content.strip()):
            self._emit("sym", content.strip())
        else:
            self._emit("text", " ".join(content.split()))
        self.position = end + 1

    def _unit_letter(self, letter: str) -> bool:
        """An upright letter after a number is a unit such as metres; i and e are not units."""
        if letter not in words.UNITS or not self.tokens:
            return False
        return self.tokens[-1].kind == "num" or (
            self.tokens[-1].text == "/" and self.tokens[-2:-1] != [] and self.tokens[-2].kind == "text"
        )


_SUBSCRIPT = re.compile(r"\s*_\s*\{?\s*([0-9]{1,2})\s*\}?")


def _subscript_length(text: str, start: int) -> int:
    match = _SUBSCRIPT.match(text, start)
    return match.end() - start if match else 0


def _based_text(content: str, text: str, end: int) -> re.Match[str] | None:
    """Match \\text{A1}_{16}: digits in the argument, base after it."""
    subscript = _SUBSCRIPT.match(text, end + 1)
    if subscript is None:
        return None
    return _BASE.fullmatch(f"{content.strip()}_{{{subscript[1]}}}")


def _plain_argument(content: str) -> tuple[str, str] | None:
    """Return the token of an argument that is a connective, a mark or a function name."""
    connective, bare = _CONNECTIVE_TEXT.fullmatch(content), content.strip()
    if connective:
        return "sep", connective[1].lower()
    if bare in ("%", "\\%"):
        return "cmd", "percent"
    if bare in (",", ";"):
        return "op", bare
    return ("cmd", bare) if bare in words.FUNCTIONS else None


def _has_vowel(run: str) -> bool:
    return any(letter in "aeiouyAEIOUY" for letter in run)


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{" and text[index - 1] != "\\":
            depth += 1
        elif text[index] == "}" and text[index - 1] != "\\":
            depth -= 1
            if depth == 0:
                return index
    raise Unparsable("an unclosed brace")
