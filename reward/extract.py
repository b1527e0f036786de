"""Find the answer an output commits to: visible text, then box, answer label, #### mark, answer tag, bold last line."""

from __future__ import annotations

import re
from typing import NamedTuple

from reward import boxes, limits
from reward.text import plain_unicode


class Found(NamedTuple):
    """The extracted answer as written, how it was found, and boxes that hedge beside it."""

    answer: str | None
    rule: str
    beside: tuple[str, ...] = ()


_THINK = re.compile(
    r"<(?P<close>/?)(?:think|thinking|thought|reasoning|scratchpad|reflection)>|<\|(?P<begin>begin|"
    r"end)_of_thought\|>|\[(?P<slash>/?)THINK\]"
    r"|◁(?P<tri>/?)think▷",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_COMMENT_LINE = re.compile(r"^[ \t]*%.*$", re.MULTILINE)
_TEX_HIDDEN = re.compile(
    r"\\iffalse(?![A-Za-z]).*?(?:\\fi(?![A-Za-z])|\Z)|\\begin\{comment\}.*?(?:\\end\{comment\}|\Z)", re.DOTALL
)
_PHANTOM = re.compile(r"\\[hv]?phantom\s*\{")
_ENGLISH_LABEL = (
    r"\b(?:answer|ans|(?:correct|right) (?:option|choice))\b[ \t]*"
    r"(?:\([^()\n]{0,30}\)|(?:to|for) (?:the|this) (?:question|problem))?[*_`\"' \t]{0,6}"
    r"(?:(?:is|are|was|equals|(?:would|will|must|should) be|(?:comes|works) out to(?: be)?|turns out to be)\b"
    r"(?:\s+(?:therefore|thus|simply|just|exactly|indeed|now|hence|then)\b)?[*_ \t]{0,4}[:=]?|[:=：])"
)
_CHINESE_LABEL = (
    r"(?:故选|所以选|因此选|应选|答案选)择?[*_ ]{0,4}[:：]?|(?:^|\n)[ *]{0,4}答[*]{0,2}[:：]"
    r"|答案(?:[是为]|应为|应该是|应是|等于)?[*_ ]{0,4}[:：]?"
)
_LABEL_HEADING = r"(?:^|\n)[#* \t]{0,8}final answer[#*: \t]{0,8}(?=\n)"
_LABEL = re.compile(f"(?:{_ENGLISH_LABEL}|{_CHINESE_LABEL}|{_LABEL_HEADING})", re.IGNORECASE)
_SUPPOSED = re.compile(
    r"\b(?:suppose|assume|assuming|if|say|says|said|claims?|whether|imagine|guess|hypothes\w+|were|"
    r"think)\s+(?:that\s+)?"
    r"(?:the\s+|my\s+|your\s+)?(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
_HASH = re.compile(r"#{4}(?!#)[ \t]*(?P<value>[^\n]{0,200})")
_HASH_VALUE = re.compile(
    r"[*\s]*(?:\\?\$|\\\(|[€£¥])?\s*[-+]?\s*(?:\\?\$|[€£¥])?\s*(?:[0-9][0-9,./ ]*|\.[0-9]+)\\?%?[ $]*[A-Za-z%°/.² "
    r"]{0,40}(?:\\\))?[*.\s]*"
)
_HASH_FORMULA = re.compile(r"\s*(?:\$[^$]{1,150}\$|[A-Za-z]\s*=\s*[-+]?[0-9.,/]{1,30})[.\s]*")
_NUMBERED_HEADING = re.compile(r"\s*[0-9]+[.):]\s+[A-Za-z]|\s*[0-9]+\s*[:)-]\s*[A-Za-z]")
_TAG = re.compile(r"<answer>((?:(?!</?answer>).){0,20000}?)</answer>", re.DOTALL | re.IGNORECASE)
_BOLD_LINE = re.compile(r"\s*(?:\*\*|__)(?P<value>[^*_\n]{1,120})(?:\*\*|__)[.。\s]*")
_NEGATION = re.compile(
    r"[\s*_$:]*(?:(?:definitely|certainly|surely|clearly|probably|likely|almost|most|obviously|simply|of course)\s+)*"
    r"(?:not\b|never\b|neither\b|unknown\b|unclear\b|n't\b|不是|并非)", re.IGNORECASE
)  # fmt: skip
_REMARKS = frozenset(
    "correct right wrong incorrect unique verified clear obvious consistent confirmed reasonable valid simple as "
    "follows below "
    "positive negative invalid unknown".split()
)
_ADVERB = re.compile(r"(?:approximately|about|roughly|exactly|simply|just|equal to|found to be)\s+", re.IGNORECASE)
_REMARK_IN_BRACKETS = re.compile(r"\s+\((?!or\b|not\b|and\b|maybe\b)[A-Za-z][A-Za-z' -]{2,40}\)$", re.IGNORECASE)
_SPECIAL_TOKENS = re.compile(r"<\|[a-z_]{2,30}\|>|</s>|<eos>|<pad>", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?:[.。]|[?？])(?=[\s*]*(?:\s[A-Z#]|\s*$|\s*\n|[一-鿿]))|[。？]|!(?=\s+[A-Z]|\s*$)")
_CLAUSE = re.compile(
    r",?\s+(?:which|because|since|where|so that|thus|hence|therefore|I hope|as (?:required|desired|expected|needed|"
    r"requested|shown|above))\b"
    r"|,\s*(?:so|as|i\.e\.|altogether|in total|overall|respectively|assuming)\b|\s+(?:altogether|in total)\b|，",
    re.IGNORECASE,
)


def visible(output: str) -> str:
    """Return what a reader takes as the reply: no thinking blocks, comments or phantom content.

    A thinking block that is never closed hides everything after its start; a closing tag without a start hides
    everything before it.
    """
    text = output[-limits.MAX_OUTPUT_CHARS :]
    if "<" in text or "[" in text or "◁" in text:
        text = _SPECIAL_TOKENS.sub(" ", _without_thinking(text))
        if "<!--" in text:
            text = _COMMENT.sub(" ", text)
    if "\\iffalse" in text or "{comment}" in text:
        text = _TEX_HIDDEN.sub(" ", text)
    if "%" in text and "\\" in text:
        text = _COMMENT_LINE.sub("", text)
    if "phantom" in text:
        text = _without_phantoms(text)
    return text


def _without_thinking(text: str) -> str:
    kept: list[str] = []
    position, thinking = 0, False
    for tag in _THINK.finditer(text):
        closes = "/" in (tag["close"] or tag["slash"] or tag["tri"] or "") or (tag["begin"] or "").lower() == "end"
        if closes:
            if not thinking:
                kept.clear()  # the block began in the prompt
            thinking = False
        elif not thinking:
            kept.append(text[position : tag.start()])
            thinking = True
        position = tag.end()
    if not thinking:
        kept.append(text[position:])
    return " ".join(kept)


def _without_phantoms(text: str) -> str:
    parts, position = [], 0
    for match in _PHANTOM.finditer(text):
        if match.start() < position:
            continue
        parts.append(text[position : match.start()])
        position = _group_end(text, match.end())
    return "".join([*parts, text[position:]])


def _group_end(text: str, start: int) -> int:
    depth = 1
    for piece in re.finditer(r"\\.|[{}]", text[start : start + limits.MAX_ANSWER_CHARS], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(piece[0], 0)
        if depth == 0:
            return start + piece.end()
    return len(text)


def find(output: str, task: str = "math", *, wants_option: bool = False) -> Found:
    """Return the answer an output commits to, and why.

    Args:
        output: the whole reply.
        task: "gsm8k" reads the #### mark before boxes; "choice" prefers an option letter.
        wants_option: the gold is an option letter, so an explicit "Answer: X" outranks a box that is no option.
    """
    text = visible(output)
    if task == "gsm8k":
        mark = _last_mark(text)
        if mark is not None:
            return Found(mark[1], "#### mark")
    boxed = _boxed(text)
    if wants_option or task == "choice":
        if boxed is None or option_letter(boxed.answer or "") is None:
            labelled = _labelled(text)
            if labelled is not None and labelled.answer and option_letter(labelled.answer):
                return labelled
    if boxed is not None:
        return boxed
    return _labelled(text) or _bold_last_line(text) or Found(None, "no box or answer label")


def extract(output: str, task: str = "math") -> str | None:
    """Return the answer an output commits to, as written, or None.

    Args:
        output: the whole reply of a model.
        task: one of "math", "aime", "gsm8k", "choice".
    """
    return find(output, task).answer


def _boxed(text: str) -> Found | None:
    found = boxes.complete_boxes(text)
    while found and not boxes.commits(text, found[-1]):
        found.pop()
    if not found:
        return None
    beside = tuple(boxes.unwrap(content).strip() for content in boxes.neighbours(text, found))
    return Found(boxes.unwrap(found[-1].content).strip(), "last box", beside)


def _last_mark(text: str) -> tuple[int, str] | None:
    last = None
    for match in _HASH.finditer(text):
        value = plain_unicode(match["value"])
        number = _HASH_VALUE.fullmatch(value) and not _NUMBERED_HEADING.match(value)
        word = 0 < len(value.strip()) <= 40 and " " not in value.strip() and re.search(r"[0-9\\$]", value)
        if number or word or _HASH_FORMULA.fullmatch(value):
            last = (match.start(), match["value"].strip())
    return last


def _labelled(text: str) -> Found | None:
    """Return the last of all labels, #### marks and answer tags; a denial there is no answer."""
    candidates: list[tuple[int, str, str]] = []
    mark = _last_mark(text) if "####" in text else None
    if mark is not None:
        candidates.append((mark[0], mark[1], "#### mark"))
    tags = list(_TAG.finditer(text)) if "</" in text else []
    if tags:
        candidates.append((tags[-1].start(), tags[-1][1].strip(), "answer tag"))
    for label in reversed(list(_LABEL.finditer(text))):
        if label[0].endswith("答案") or (
            candidates and label.start() < candidates[-1][0] and candidates[-1][2] != "#### mark"
        ):
            if label[0].endswith("答案"):
                continue
            break
        if _SUPPOSED.search(text, max(0, label.start() - 60), label.start()):
            continue
        value = _label_value(text, label.end())
        if value is None:
            continue
        candidates.append((label.start(), value, "answer label"))
        break
    if not candidates:
        return None
    _, value, rule = max(candidates)
    if _NEGATION.match(value):
        return Found(None, "denied answer")
    return Found(value, rule) if value else Found(None, "empty answer")


def _label_value(text: str, start: int) -> str | None:
    """Return what follows a label, up to the end of its sentence; None if it is only a remark."""
    rest = text[start : start + limits.MAX_ANSWER_CHARS]
    lead = re.match(r"[\s*_:：`]{0,12}", rest)
    rest = rest[lead.end() if lead else 0 :]
    if "\n" in (lead[0] if lead else "") and len(lead[0].split("\n")) > 4:  # type: ignore[index]
        return None
    display = re.match(r"(?:\\\[|\$\$)(.*?)(?:\\\]|\$\$)", rest, re.DOTALL)
    if display:
        return display[1].strip()
    line = rest.split("\n", 1)[0].split("</answer", 1)[0]
    end = _SENTENCE_END.search(_masked(line))
    if end:
        line = line[: end.start()]
    clause = _CLAUSE.search(_masked(line))
    if clause and clause.start() > 0:
        line = line[: clause.start()]
    value = _ADVERB.sub("", _REMARK_IN_BRACKETS.sub("", line.strip().strip("*_`").strip()))
    if len(value) > 2 and value[0] == value[-1] == '"':
        value = value[1:-1]
    if len(value) > 1000 or value.lower().strip(" .!*") in _REMARKS:
        return None
    nested = _LABEL.match(value) or re.match(r"(?:the |my )?(?:final |correct )?", value, re.IGNORECASE)
    inner = _LABEL.match(value, nested.end()) if nested else None
    if inner:
        value = value[inner.end() :].strip(" *_:")
    return value or None


def _masked(line: str) -> str:
    """Hide formulas from the sentence rules, keeping all positions."""
    return re.sub(r"\$[^$]*\$|\\\(.*?\\\)", lambda m: "m" * len(m[0]), line)


def _bold_last_line(text: str) -> Found | None:
    last = text.rstrip()[-200:].rpartition("\n")[2]
    match = _BOLD_LINE.fullmatch(last)
    if match is None or re.search(r"[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}", match["value"]):
        return None
    return Found(match["value"].strip(" :"), "bold last line")


_OPTION = re.compile(
    r"(?:the |option |choice |answer )*(?:(?P<bracketed>[(\[]\s*(?P<a>[A-Ja-j])\s*[)\]])[.:]?|"
    r"(?P<b>[A-J])(?P<mark>[).:])?)"
    r"(?:\s*(?P<rest>\S.*))?",
    re.IGNORECASE | re.DOTALL,
)
_HEDGE_START = re.compile(r"(?:or|and|nor|but|if|maybe|to|is|isn|not)\b|[,/;&|+=^_<>*-]|\\", re.IGNORECASE)
_SECOND_OPTION = re.compile(r"[(\[]\s*[A-Ja-j]\s*[)\]]|(?:^|[\s,;/])[A-J](?:[).:,;/]|$)|\b(?:or|nor)\b")
_OPTION_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|mbox|mathit|textit|boxed)\s*\{([^{}]*)\}")


def option_letter(answer: str) -> str | None:
    """Return the option (upper case) that "B", "(b)", "B. text" or "\\textbf{(B)} 42" chooses, or None."""
    if len(answer) > 500:
        return None
    plain = _OPTION_STYLE.sub(r" \1 ", plain_unicode(answer))
    plain = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[ ,;!]|[$*{}`]|~", " ", plain).strip(" .")
    match = _OPTION.fullmatch(plain)
    if match is None:
        return None
    rest = match["rest"]
    letter: str = match["a"] or match["b"]
    if match["b"] and not letter.isupper():
        return None
    if rest and (not (match["bracketed"] or match["mark"]) or _HEDGE_START.match(rest) or _names_other(rest, letter)):
        return None
    return letter.upper()


def _names_other(rest: str, letter: str) -> bool:
    """Return whether the text after an option names a second option: a hedge, not a choice."""
    found = _SECOND_OPTION.findall(rest)
    return any(re.sub(r"[^A-Za-z]", "", mark).upper() != letter.upper() for mark in found)
