"""Reformatting an answer keeps its verdict, perturbing its value flips it, and equality is symmetric."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from reward import extract, verify
from reward.verdict import STATUSES

INTEGERS = st.integers(-(10**30), 10**30)
SMALL = st.integers(-999, 999)
FRACTIONS = st.builds(Fraction, st.integers(-999, 999), st.integers(1, 999))
FORMULAS = st.recursive(
    st.one_of(st.integers(0, 30).map(str), st.sampled_from(["x", "y", r"\pi", r"\sqrt{2}", r"\frac{1}{3}", "0.25"])),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", r"\cdot "]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        inner.map(lambda t: rf"\sqrt{{{t}}}"),
        st.tuples(inner, inner).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}+7}}"),
        st.tuples(inner, st.integers(2, 4)).map(lambda t: f"{{({t[0]})}}^{{{t[1]}}}"),
    ),
    max_leaves=6,
)
WRAPPERS = st.sampled_from(
    [
        r"The answer is $\boxed{%s}$.",
        "<think>\nmaybe 7\n</think>\n\n\\[\\boxed{ %s }\\]",
        r"**Answer:** $%s$",
        "so\n#### $%s$",
        r"\fbox{%s}",
        "最终答案是 $%s$。",
        r"\boxed{3} is too small. Finally \boxed{{%s}}",
        r"\boxed{\displaystyle %s\,}",
        r"\boxed{\boxed{%s}}",
    ]
)
DECORATIONS = st.sampled_from(
    ["%s", "(%s)", r"\left(%s\right)", r"\mathbf{%s}", "x = %s", r"%s\text{ cm}", r"\,%s\;", "%s."]
)


def right(output: str, gold: str) -> bool:
    verdict = verify(output, gold)
    assert verdict.status in STATUSES and verdict.status != "error", verdict
    return verdict.correct


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


@settings(deadline=None, max_examples=150)
@given(value=INTEGERS, wrapper=WRAPPERS, decoration=DECORATIONS, step=st.integers(1, 10**6))
def test_integers(value, wrapper, decoration, step):
    output = wrapper.replace("%s", decoration.replace("%s", str(value)))
    assert right(output, str(value))
    assert not right(output, str(value + step)) and not right(output, str(value - step))
    if value:
        assert not right(output, str(-value))


@settings(deadline=None, max_examples=150)
@given(value=st.integers(0, 10**18), separator=st.sampled_from([",", "{,}", r"\,", r",\!", " "]))
def test_thousands_separators(value, separator):
    grouped = f"{value:,}".replace(",", separator)
    assert right(rf"\boxed{{{grouped}}}", str(value)) and right(rf"\boxed{{{value}}}", grouped)
    assert not right(rf"\boxed{{{grouped}}}", str(value + 1))


@settings(deadline=None, max_examples=150)
@given(value=FRACTIONS, factor=st.integers(1, 50), wrapper=WRAPPERS)
def test_fractions(value, factor, wrapper):
    spellings = [latex(value), str(value), rf"\dfrac{{{factor * value.numerator}}}{{{factor * value.denominator}}}"]
    if value > 1 and value.denominator > 1:
        whole, rest = divmod(value.numerator, value.denominator)
        spellings.append(rf"{whole}\frac{{{rest}}}{{{value.denominator}}}")
    for spelling in spellings:
        assert right(wrapper.replace("%s", spelling), latex(value)), spelling
        assert not right(wrapper.replace("%s", spelling), latex(value + Fraction(1, 10**6))), spelling
    if value not in (0, 1, -1):
        assert not right(rf"\boxed{{{latex(1 / value)}}}", latex(value))


@settings(deadline=None, max_examples=100)
@given(block=st.integers(0, 9999), fixed=st.text("0123456789", max_size=3), width=st.integers(4, 6))
def test_repeating_decimals(block, fixed, width):
    digits = f"{block:0{width}d}"
    value = Fraction(int(fixed or 0), 10 ** len(fixed)) + Fraction(block, (10**width - 1) * 10 ** len(fixed))
    written = rf"0.{fixed}\overline{{{digits}}}"
    assert right(rf"\boxed{{{written}}}", latex(value))
    assert not right(rf"\boxed{{{written}}}", latex(value + Fraction(1, 10**12)))


@settings(deadline=None, max_examples=120)
@given(values=st.lists(SMALL, min_size=2, max_size=6, unique=True), seed=st.randoms(use_true_random=False))
def test_lists_sets_and_tuples(values, seed):
    shuffled = list(values)
    seed.shuffle(shuffled)
    inner, other = ", ".join(map(str, values)), ", ".join(map(str, shuffled))
    assert right(rf"\boxed{{{other}}}", inner) and right(rf"\boxed{{\{{{other}\}}}}", rf"\{{{inner}\}}")
    assert right(rf"\boxed{{({other})}}", f"({inner})") == (values == shuffled)
    for hedge in (inner, rf"\{{{inner}\}}", inner.replace(", ", r" \text{ or } ")):
        assert not right(rf"\boxed{{{hedge}}}", str(values[0]))
    assert not right(rf"\boxed{{{inner}}}", ", ".join(map(str, [*values[:-1], 1000])))


@settings(deadline=None, max_examples=100)
@given(formula=FORMULAS, other=FORMULAS)
def test_formulas(formula, other):
    assert right(rf"\boxed{{{formula}}}", formula) or "undefined" in verify(rf"\boxed{{{formula}}}", formula).rule
    assert not right(rf"\boxed{{{formula}+10^{{-30}}}}", formula)
    forth, back = right(rf"\boxed{{{formula}}}", other), right(rf"\boxed{{{other}}}", formula)
    assert forth == back
    assert right(rf"\boxed{{{formula}+{other}}}", f"{other}+{formula}")


@settings(deadline=None, max_examples=100)
@given(low=SMALL, width=st.integers(1, 50), left=st.booleans(), right_closed=st.booleans())
def test_intervals_and_inequalities(low, width, left, right_closed):
    high = low + width
    interval = f"{'[' if left else '('}{low},{high}{']' if right_closed else ')'}"
    signs = {True: r"\le", False: "<"}
    chain = f"{low} {signs[left]} x {signs[right_closed]} {high}"
    assert right(rf"\boxed{{{chain}}}", interval) and right(rf"\boxed{{{interval}}}", chain)
    flipped = f"{'(' if left else '['}{low},{high}{']' if right_closed else ')'}"
    assert not right(rf"\boxed{{{flipped}}}", interval)
    assert not right(rf"\boxed{{{interval}}}", str(low)) and not right(rf"\boxed{{{chain}}}", str(low + 1))


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(
        alphabet=st.sampled_from(list("0123456789xyei+-*/^_!()[]{}|,;:.%$&\\ \n\"'<>=√²½π，（答案是")), max_size=200
    )
)
def test_no_text_raises_or_scores_as_an_error(text):
    for output in (text, rf"\boxed{{{text}}}", f"Answer: {text}"):
        assert verify(output, "42").status != "error"
        assert verify(r"\boxed{42}", text or "0").status != "error"
        assert extract(output) is None or isinstance(extract(output), str)
