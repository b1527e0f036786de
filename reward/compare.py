"""The ladder: cheap rungs first, the first decisive one wins, and every verdict names its rung."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from reward import boxes, limits
from reward.deep import plain_formula, wants_sympy
from reward.exact import Undefined, rational
from reward.extract import option_letter
from reward.grammar import read
from reward.lex import Unparsable
from reward.nodes import Node
from reward.prepare import prepare
from reward.structure import same_answer
from reward.text import canonical, tidy, trim, word_key
from reward.verdict import Status


class Decision(NamedTuple):
    """The outcome of comparing one answer with one gold."""

    status: Status
    rule: str


_DECIMAL = re.compile(r"(?P<sign>[-+]?)\s*(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.(?P<fraction>[0-9]*))?")
_SINGLE_OPTION = re.compile(r"[A-J]")
_PREFIXED_OPTION = re.compile(r"\(?(?P<letter>[A-J])\)\s*(?P<rest>.+)", re.DOTALL)
_PLAIN_WORDS = re.compile(r"[A-Za-z]{2,40}(?: [A-Za-z]{1,40}){0,20}")
# JSON and TeX damage seen in public data: "\f", "\t" and "\r" were read as control characters.
_DAMAGED = ((re.compile(r"(?:\x0c|(?<![\\A-Za-z]))rac\{"), r"\\frac{"), (re.compile(r"\t(?=ext\{|imes\b)"), r"\\t"),
            (re.compile(r"\x08(?=inom\{|egin\{)"), r"\\b"))  # fmt: skip
_ABOUT_TAIL = re.compile(r"\s*(?:\\approx|≈|\\simeq)\s*[-0-9., ]+$")


def reduce_gold(gold: str) -> str:
    """Return the answer part of a gold: its last box, or what follows ####, without an approximate tail."""
    for pattern, repaired in _DAMAGED:
        gold = pattern.sub(repaired, gold)
    found = boxes.complete_boxes(gold)
    if found:
        gold = boxes.unwrap(found[-1].content)
    elif "####" in gold:
        gold = gold.rpartition("####")[2]
    shorter = _ABOUT_TAIL.sub("", gold)
    return shorter if shorter.strip() else gold


@lru_cache(maxsize=4096)
def _spelled(text: str) -> str:
    return tidy(trim(text))


def _read(text: str, *, grouped: bool = True) -> Node | Exception:
    try:
        return read(text, grouped=grouped)
    except (Unparsable, limits.BoundError) as error:
        return error


def compare(answer: str, gold: str, task: str = "math") -> Decision:
    """Decide whether an extracted answer equals a gold.

    Args:
        answer: extracted answer as written.
        gold: gold answer as stored with the problem.
        task: "math", "aime", "gsm8k" or "choice"; see docs/reward.md.

    Raises:
        Exception: never for any `answer`; callers still isolate unexpected faults.
    """
    wanted = reduce_gold(gold)
    problem = gold_problem(wanted, task)
    if problem:
        return Decision("bad_gold", problem)
    if task == "choice" or _SINGLE_OPTION.fullmatch(canonical(_spelled(wanted)).strip("() ")):
        return _options(answer, wanted, task)
    if len(answer) > limits.MAX_ANSWER_CHARS:
        return _too_long(answer, wanted)
    if task == "aime":
        return _aime(answer, wanted)
    return _math(answer, wanted)


def _too_long(answer: str, wanted: str) -> Decision:
    if answer.strip() == wanted.strip():
        return Decision("correct", "text")
    return Decision("unparsable", f"bounds: an answer of {len(answer)} characters")


def _options(answer: str, wanted: str, task: str) -> Decision:
    letter, target = option_letter(answer), option_letter(wanted)
    if task == "choice" and letter is None and re.fullmatch(r"\s*[a-j]\s*", answer):
        letter = answer.strip().upper()
    if letter is not None:
        return Decision("correct" if letter == target else "wrong", "option")
    if task == "choice":
        return Decision("unparsable", "option")
    return _math(answer, wanted)


def _aime(answer: str, wanted: str) -> Decision:
    """Accept an integer from 0 to 999, leading zeros and a zero fraction allowed, nothing else."""
    node = _read(canonical(_spelled(answer)))
    if isinstance(node, Node) and node.op == "rel" and node.name == "=" and node.args[0].op != "num":
        node = node.args[1]
    if isinstance(node, Node) and node.op == "deg":
        node = node.args[0]  # the problem asked for degrees
    if not isinstance(node, Node) or node.op != "num" or node.value is None:
        return Decision("unparsable", "AIME: not an integer from 0 to 999")
    if node.value.denominator != 1 or not 0 <= node.value <= 999:
        return Decision("wrong", "AIME: not an integer from 0 to 999")
    return Decision("correct" if node.value == int(_aime_digits(wanted)) else "wrong", "AIME integer")


def _aime_digits(gold: str) -> str:
    return _spelled(gold).removesuffix("^\\circ").strip()


def _math(answer: str, wanted: str) -> Decision:
    spelled, gold = _spelled(answer), _spelled(wanted)
    form, gold_form = canonical(spelled), canonical(gold)
    if not form:
        return Decision("no_answer", "empty answer")
    if form == gold_form:
        return Decision("correct", "text")
    quick = same_decimal(form, gold_form)
    if quick is not None:
        return Decision("correct" if quick else "wrong", "decimal number")
    if _PLAIN_WORDS.fullmatch(gold_form) and _PLAIN_WORDS.fullmatch(form) and form.lower() == gold_form.lower():
        return Decision("correct", "words")
    decision = _trees(spelled, gold)
    if decision.status != "correct":
        prefixed = _PREFIXED_OPTION.fullmatch(form)
        if prefixed and prefixed["letter"] not in gold:
            other = _math(prefixed["rest"], wanted)
            if other.status == "correct":
                return Decision("correct", f"option letter, then {other.rule}")
    return decision


def same_decimal(left: str, right: str) -> bool | None:
    """Compare two decimal literals of any length by their digits; None if one is no literal."""
    first, second = _digits(left), _digits(right)
    if first is None or second is None:
        return None
    return first == second


def _digits(text: str) -> tuple[bool, str, str] | None:
    match = _DECIMAL.fullmatch(text)
    if match is None or not (match["whole"] or match["fraction"]):
        return None
    whole = match["whole"].replace(",", "").lstrip("0")
    fraction = (match["fraction"] or "").rstrip("0")
    return (match["sign"] == "-" and bool(whole or fraction)), whole, fraction


def _trees(spelled: str, gold: str) -> Decision:
    wanted = _read(gold)
    if isinstance(wanted, Exception):
        if word_key(spelled) == word_key(gold) and word_key(gold) and not re.search(r"[0-9^_+=<>]", gold):
            return Decision("correct", "words")
        return Decision("bad_gold", f"gold: {wanted}") if "\\" in gold else Decision("wrong", "words")
    node = _read(spelled)
    if isinstance(node, Exception):
        return _unread(spelled, wanted, node)
    if wanted.op == "list" and node.op != "list":
        split = _read(spelled, grouped=False)
        if isinstance(split, Node) and split.op == "list":
            node = split
    try:
        outcome = same_answer(node, wanted)
    except limits.BoundError as error:
        return Decision("unparsable", f"bounds: {error}")
    if outcome.same is None:
        return Decision("unparsable", f"undecided: {outcome.rule}")
    return Decision("correct" if outcome.same else "wrong", outcome.rule)


_OPERATORS = re.compile(r"\\(?:int|lim|sum|prod)(?![A-Za-z])|\\frac\s*\{\s*d\s*\}\s*\{\s*d[a-z]\s*\}|∫|∑|∏")
_CONSTANT_BOUNDS = re.compile(r"\\(?:sum|prod)\s*_\s*\{\s*[a-z]\s*=\s*-?[0-9]+\s*\}\s*\^\s*(?:\{\s*[0-9]+\s*\}|[0-9])")


def restates(answer: str, gold: str) -> bool:
    """Return whether an answer leaves an integral, limit, derivative or series standing that the gold does not have.

    Copying the problem's own operator would otherwise earn the reward of evaluating it. A finite sum with constant
    bounds counts as arithmetic.
    """
    left = _CONSTANT_BOUNDS.sub("", tidy(answer))
    return _OPERATORS.search(left) is not None and _OPERATORS.search(tidy(gold)) is None


def sympy_texts(answer: str, gold: str) -> tuple[str, str] | None:
    """Return the two formulas if the sympy rung may see them: one needs it, and both are on its whitelist.

    A gold that names a value ("x = ...") or an answer that does is not taken apart here.
    """
    left, right = _spelled(answer), _spelled(reduce_gold(gold))
    if not ((wants_sympy(left) and plain_formula(right)) or (wants_sympy(right) and plain_formula(left))):
        return None
    return left, right


def _unread(spelled: str, wanted: Node, error: Exception) -> Decision:
    if wanted.op == "text" and word_key(spelled) == word_key(wanted.name):
        return Decision("correct", "words")
    kind = "bounds" if isinstance(error, limits.BoundError) else "grammar"
    return Decision("unparsable", f"{kind}: {error}")


@lru_cache(maxsize=8192)
def gold_problem(gold: str, task: str) -> str | None:
    """Return what makes a gold unusable for a task, or None."""
    spelled = _spelled(gold)
    if not canonical(spelled):
        return "the gold is empty"
    if task == "choice":
        return None if option_letter(gold) else "the gold is no option letter"
    if task == "aime":
        ok = re.fullmatch(r"[0-9]{1,3}", _aime_digits(gold))
        return None if ok else "the gold is no integer from 0 to 999"
    if boxes.is_placeholder(gold):
        return "the gold is a placeholder"
    if task == "gsm8k":
        node = _read(spelled)
        value = _number(node)
        return None if value is not None else "the gold is no number"
    return None


def unreadable(gold: str) -> str | None:
    """Return why a formula gold could only ever match its own spelling, or None. Words are no formulas."""
    spelled = _spelled(reduce_gold(gold))
    node = _read(spelled)
    if isinstance(node, Node):
        try:
            return None if same_answer(node, node).same else "the gold has no defined value"
        except limits.BoundError:
            return None  # too large to compute, but its spelling can be matched
    return str(node) if re.search(r"[\\^_={}]", spelled) and not wants_sympy(spelled) else None


def _number(node: Node | Exception) -> Fraction | None:
    if isinstance(node, Exception):
        return None
    ready = prepare(node)
    try:
        return rational(ready.args[0] if ready.op == "unit" else ready)
    except (Undefined, limits.BoundError):
        return None


def rungs(answer: str, gold: str) -> list[tuple[str, str]]:
    """Return what each rung of the ladder sees and says, for `python -m reward explain`."""
    spelled, wanted = _spelled(answer), _spelled(reduce_gold(gold))
    form, gold_form = canonical(spelled), canonical(wanted)
    left, right = _read(spelled), _read(wanted)
    lines = [
        ("text", f"{form!r} against {gold_form!r}: {'same' if form == gold_form else 'different'}"),
        (
            "decimal number",
            {None: "not both literals", True: "equal", False: "different"}[same_decimal(form, gold_form)],
        ),
        ("option", f"{option_letter(answer)} against {option_letter(gold)}"),
        ("answer tree", outline(left)),
        ("gold tree", outline(right)),
    ]
    if isinstance(left, Node) and isinstance(right, Node):
        try:
            outcome = same_answer(left, right)
            lines.append(
                ("trees", f"{ {True: 'equal', False: 'different', None: 'undecided'}[outcome.same] } by {outcome.rule}")
            )
        except limits.BoundError as error:
            lines.append(("trees", f"refused: {error}"))
    texts = sympy_texts(answer, gold)
    lines.append(("sympy", "may be asked" if texts else "not needed or not on its whitelist"))
    return lines


def outline(node: Node | Exception) -> str:
    """Return a tree in one line, cut after 300 characters."""
    if isinstance(node, Exception):
        return f"none ({node})"

    def draw(part: Node) -> str:
        if part.op == "num":
            return str(part.value)
        inside = ", ".join(draw(arg) for arg in part.args)
        return f"{part.op}{':' + part.name if part.name else ''}" + (f"({inside})" if part.args else "")

    return draw(node)[:300]
