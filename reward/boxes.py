"""Complete boxes of an output, in one linear pass, with the reasons why some of them are no answers."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_PIECES = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<value>[-+]?[0-9](?:[0-9.,/]*[0-9])?%?|[A-Za-z](?![A-Za-z])"
    r"|\\(?:pi|infty)(?![A-Za-z])|\\[dt]?frac\s*(?:[0-9]\s*[0-9]|\{[^{}]{1,40}\}\{[^{}]{1,40}\}))"
)
_PLACEHOLDERS = frozenset(
    ("", "...", "…", r"\ldots", r"\dots", r"\cdots", "answer", "your answer", "final answer", "your final answer", "?",
     "the answer", "your_answer", r"your\_answer", "ans", r"\square", r"\cdot", r"\,", r"\quad", "_", "__", "___",
     "result", "value", "number", "solution", "expression", "n/a", "letter", "答案")
)  # fmt: skip
_NEGATED = re.compile(r"(?:\bnot|n't|\bnever|\\ne|\\neq|≠|\bnot equal to|\brather than|\binstead of|不是|并非|"
                      r"不等于)\s*(?:\bequal to\s*)?"
                      r"(?:\$+|\\\(|\\\[)?\s*$")  # fmt: skip
_EXAMPLE = re.compile(
    r"(?:\be\.g\.,?|\bfor example,?|\bfor instance,?|\bin the form(?: of)?|\bof the form|\bsuch as|\bin the "
    r"format(?: of)?"
    r"|\bformatted as|\binstructions? (?:say|said|says)[^.\n]{0,40}|例如|比如|格式为|形如)"
    r"\s*:?\s*(?:`|\"|'|\$+|\\\(|\\\[)?\s*$",
    re.IGNORECASE,
)
_BETWEEN = re.compile(
    r"(?:\\[hv]space\*?\{[^{}]*\}|\\(?:text)?color\{[^{}]*\}|[\s$.,;:&/|()\[\]{}~*]|\\[()\[\],;! ]|\\q?quad|"
    r"\\(?:text|mathrm|lor|vee)(?![A-Za-z])|\bor\b|\band\b|\bmaybe\b|\bperhaps\b"
    r"|\bpossibly\b|\beither\b|\balternatively\b|\balso\b|\bbut\b|或者?|和)*",
    re.IGNORECASE,
)


_INSTRUCTION = re.compile(
    r"\b(?:please|your)\b[^.\n]{0,60}\b(?:within|in|inside|as|using)\s*(?:\$|\\\()?\s*$", re.IGNORECASE
)
_DENIED_AFTER = re.compile(
    r"[\s$)\]\\\"'`]*(?:(?:is|was)\s+(?:not\s+(?:the|a|an|correct|right|valid|my)\b|wrong|incorrect|invalid|false|"
    r"excluded|impossible)"
    r"|isn't\s+(?:the|correct|right|valid)\b|(?:cannot|can't|can not)\s+be\b|(?:as|is) an example|不对|不是答案|是错)",
    re.IGNORECASE,
)


class Box(NamedTuple):
    """One complete box: its content as written and where it stands."""

    content: str
    start: int
    end: int


def complete_boxes(text: str) -> list[Box]:
    """Return all complete outermost boxes in order; a box that is never closed is none."""
    first = _BOX_COMMAND.search(text)
    if first is None:
        return []
    found: list[Box] = []
    stack: list[tuple[int, int] | None] = []
    for piece in _PIECES.finditer(text, max(0, first.start() - 1)):
        mark = piece[0]
        if mark == "{":
            stack.append(None)
        elif mark == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                start, inside = opened
                while found and found[-1].start > start:
                    found.pop()
                content = text[inside : piece.start()]
                found.append(
                    Box(
                        content.replace("\\\\", "\\") if text[start : start + 2] == "\\\\" else content,
                        start,
                        piece.end(),
                    )
                )
        elif mark.endswith("{") and len(mark) > 2:
            stack.append((piece.start(), piece.end()))
    bare = [Box(m["value"], m.start(), m.end()) for m in _BARE.finditer(text, first.start())]
    if not bare:
        return found
    inside_found = [b for b in bare if not any(f.start <= b.start < f.end for f in found[-50:])]
    return sorted(found + inside_found, key=lambda box: box.end)


def unwrap(content: str) -> str:
    """Return the innermost content of boxes that wrap nothing but a box."""
    for _ in range(20):
        inner = complete_boxes(content)
        if len(inner) != 1 or content[: inner[0].start].strip(" $") or content[inner[0].end :].strip(" $."):
            return content
        content = inner[0].content
    return content


def is_placeholder(content: str) -> bool:
    """Return whether a box shows a format and no answer."""
    bare = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", content).strip(" $.<>[]*").lower()
    return bare in _PLACEHOLDERS or content.strip(" $").lower() in _PLACEHOLDERS


def commits(text: str, box: Box) -> bool:
    """Return whether the words before a box present it as the answer: no negation, example or quotation."""
    before = text[max(0, box.start - 80) : box.start]
    if is_placeholder(box.content) or any(p.search(before) for p in (_NEGATED, _EXAMPLE, _INSTRUCTION)):
        return False
    if _DENIED_AFTER.match(text, box.end, box.end + 80):
        return False
    return not _quoted(text, box)


def _quoted(text: str, box: Box) -> bool:
    """A box inside a quotation that holds other words is quoted speech, such as an instruction."""
    line_start = max(text.rfind("\n", 0, box.start) + 1, box.start - 400)
    before = text[line_start : box.start].replace("“", '"').replace("”", '"')
    if before.count('"') % 2 == 0:
        return False
    after = text[box.end : box.end + 400].split("\n", 1)[0].replace("“", '"').replace("”", '"')
    if '"' not in after:
        return False
    quoted = before.rpartition('"')[2] + " " + after.partition('"')[0]
    return re.search(r"[A-Za-z]{2,}", quoted) is not None


def neighbours(text: str, boxes: list[Box]) -> list[str]:
    """Return other boxes that stand beside the last one with no words between: one hedge, not one answer."""
    beside: list[str] = []
    for index in range(len(boxes) - 1, 0, -1):
        between = text[boxes[index - 1].end : boxes[index].start]
        if len(between) > 60 or _BETWEEN.fullmatch(between) is None:
            break
        beside.append(boxes[index - 1].content)
        if len(beside) >= 8:
            break
    return beside
