"""Spelling: Unicode, LaTeX layout and word forms reduced to one way of writing, without changing any value."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()", strict=True))
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "∗": "*", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ", "≧": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset ", "∖": r"\setminus ", "°": r"^\circ ",
    "º": r"^\circ ", "∘": r"\circ ", "√": r"\surd ", "⁄": "/", "∕": "/", "…": r"\ldots ", "⋯": r"\ldots ", "′": "'",
    "’": "'", "‘": "'", "“": '"', "”": '"', "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "，": ",",
    "、": ",", "。": ".", "；": ";", "：": ":", "→": r"\to ",
    "∠": r"\angle ", "∣": "|", "≅": r"\cong ", "∧": r"\wedge ",
    "％": "%", "∀": r"\forall ", "∃": r"\exists ", "￥": "¥", "＄": r"\$",
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho"
_GREEK_TAIL = "sigma tau upsilon phi chi psi omega"
_UPPER_GREEK = {"Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma",
                "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega"}  # fmt: skip
# Marks that show nothing or only turn the display order: they carry no value.
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u202a\u202b\u202c\u202d\u202e"
_INVISIBLE += "\u2066\u2067\u2068\u2069\u200e\u200f\u00ad\u2061\u2062\u2063"
_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t"


def _table() -> dict[int, str]:
    table = {ord(k): v for k, v in _SYMBOLS.items()}
    for start, names in ((0x3B1, _GREEK), (0x3C3, _GREEK_TAIL)):
        table.update({start + i: f"\\{name} " for i, name in enumerate(names.split())})
    table.update({ord("ς"): r"\sigma ", ord("ϕ"): r"\phi ", ord("ϵ"): r"\epsilon ", ord("µ"): r"\mu "})
    table.update({ord(k): f"\\{v} " for k, v in _UPPER_GREEK.items()})
    table.update({ord(c): "" for c in _INVISIBLE})
    table.update({ord(c): " " for c in _SPACES})
    for code in [*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800)]:
        plain = unicodedata.normalize("NFKC", chr(code))
        table.setdefault(code, table.get(ord(plain), plain) if len(plain) == 1 else plain)
    return table


@lru_cache(maxsize=1)
def _translation() -> dict[int, str]:
    return _table()


_SUP_RUN = re.compile("[" + re.escape("".join(_SUPERSCRIPTS)) + "]+")
_SUB_RUN = re.compile("[" + re.escape("".join(_SUBSCRIPTS)) + "]+")
_VULGAR_AFTER_DIGIT = re.compile("([0-9]?)([" + "".join(_VULGAR) + "])")
_SURD = re.compile(r"\\surd ([0-9]+(?:\.[0-9]+)?|[A-Za-z])")


def plain_unicode(text: str) -> str:
    """Rewrite mathematical and full-width characters as ASCII or LaTeX; other scripts stay as they are."""
    if text.isascii():
        return text.replace("\t", " ")
    text = _SUP_RUN.sub(lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    text = _VULGAR_AFTER_DIGIT.sub(lambda m: f"{m[1]} \\frac{{{_VULGAR[m[2]].replace('/', '}{')}}}", text)
    text = text.translate(_translation())
    text = text.replace("\\surd \\surd", "\\sqrt\\surd")
    return _SURD.sub(r"\\sqrt{\1}", text).replace("\\surd ", "\\sqrt ")


_HTML_SUP = re.compile(r"<(sup|sub)>([^<>]{0,60})</\1>")
_STYLE = re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|Biggl?"
                    r"|Biggr|left|right|mathstrut|strut|relax|normalfont|bf|rm|it|boldmath)(?![A-Za-z])")  # fmt: skip
_NULL_DELIMITER = re.compile(r"\\(?:left|right)\s*\.")
_ROW_SPACE = re.compile(r"\\\\\s*\[-?[0-9.]{1,6}\s*(?:pt|em|ex|mm|cm|in)\]")
_THIN = re.compile(r"(?<!\\)\\(?:[,;:! >]|thinspace|medspace|thickspace|negthinspace|enspace|hspace\{[^{}]{0,20}\})|~")
_SYNONYMS = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\(?:leqslant|leqq|leq)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geqq|geq)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:textdegree|degree)(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}"), r"^\\circ "),
    (re.compile(r"\\(?:dots|cdots|dotsc|dotsb|hdots)(?![A-Za-z])"), r"\\ldots "),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:vert|lvert|rvert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:text)?color\s*\{[A-Za-z0-9!]{1,20}\}|\\underline(?![A-Za-z])"), " "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:textbar|mid)(?![A-Za-z])"), "|"),
    (re.compile(r"\\ang\{(-?[0-9.]{1,20})\}"), r"\1^\\circ "),
    (re.compile(r"\\(?:text|mathrm|mbox)\{\s*\\?\$\s*\}"), r"\\$"),
)
_MATH_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]](?![A-Za-z])|(?<!\\)\$+")


def tidy(text: str) -> str:
    """Drop layout commands and math delimiters and choose one spelling among synonyms.

    Thin spaces become a blank except inside a thousands group, which the lexer reads.
    """
    text = plain_unicode(text)
    if "<" in text:
        text = _HTML_SUP.sub(lambda m: ("^{" if m[1] == "sup" else "_{") + m[2] + "}", text)
    text = text.replace("\r", " ").replace("\n", " ")
    if "\\" in text:
        text = text.replace(r"{,}", ",").replace(r",\!", ",").replace(r"\!", "")
        text = _ROW_SPACE.sub(r"\\\\ ", text)
        text = _NULL_DELIMITER.sub("", text)
        text = _STYLE.sub(" ", text)
        text = _MATH_DELIMITER.sub(" ", text)
        text = _THIN.sub(" ", text)
        for pattern, plain in _SYNONYMS:
            text = pattern.sub(plain, text)
    else:
        text = text.replace("{,}", ",").replace("$", " ").replace("~", " ")
    return text.strip()


_TRAILING = " .,;:!。，；、"


def trim(text: str) -> str:
    """Remove blanks, markdown emphasis, outer math delimiters and trailing sentence marks."""
    previous = None
    while previous != text:
        previous = text
        text = text.strip().strip("`").strip()
        for mark in ("**", "__", "$$", "$"):
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)].strip()
        for left, right in ((r"\(", r"\)"), (r"\[", r"\]")):
            if text.startswith(left) and text.endswith(right):
                text = text[2:-2].strip()
        text = _trim_end(text)
    return text


def _trim_end(text: str) -> str:
    stripped = text.rstrip(_TRAILING)
    if stripped == text:
        return text
    tail = text[len(stripped) :]
    if tail.lstrip().startswith("..") or stripped.endswith("\\"):
        return text  # an ellipsis or an escaped mark belongs to the answer
    if tail.strip() == "!" and stripped[-1:].isalnum() | (stripped[-1:] in ")}"):
        return text  # a factorial
    if "!" in tail:
        return text
    return stripped


_WRAPPER = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|textrm|mathbf|mathit|mathsf|texttt|emph|boldsymbol|bm|"
                      r"mathnormal"
                      r"|operatorname|textsf|hbox)\s*\{([^{}]*)\}")  # fmt: skip
_SPACE_AT_MARK = re.compile(r"\s+(?![A-Za-z0-9\\])|(?<![A-Za-z0-9\s])\s+(?![0-9])")
_BRACED_ATOM = re.compile(r"(?<=[\^_])\{([A-Za-z0-9])\}")


def canonical(tidied: str) -> str:
    """Return the form compared by the first rung: same string here means same answer.

    Blanks between two digits or two words stay, so that "1 2" never becomes "12".
    """
    text = _WRAPPER.sub(r"\1", tidied)
    text = re.sub(r"\s+", " ", text).strip(" ,;").rstrip(" .,;")
    text = _SPACE_AT_MARK.sub("", text)
    return _BRACED_ATOM.sub(r"\1", text)


_WORD_NOISE = re.compile(r"[\s\"'`*_~.,;:!?{}()\[\]\\-]+")


def word_key(text: str) -> str:
    """Return a word answer in lower case without punctuation, commands and leading articles."""
    text = _WRAPPER.sub(r" \1 ", text)
    key = _WORD_NOISE.sub(" ", text).strip().lower()
    for article in ("the ", "a ", "an "):
        if key.startswith(article):
            key = key[len(article) :]
    return key
