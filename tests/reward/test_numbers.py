"""Exact arithmetic, zero tests and real sets: hand values, exact limits and refused sizes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from reward import exact, limits, numeric, sets
from reward.equal import scalar_equal
from reward.grammar import read
from reward.lex import Unparsable
from reward.text import canonical, plain_unicode, tidy


def tree(text: str):
    return read(tidy(text))


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        (r"3\frac{1}{2}", Fraction(7, 2)), ("-1 3/4", Fraction(-7, 4)), ("1,234.5", Fraction(2469, 2)), ("0.1(6)",
        Fraction(1, 6)),
        (r"0.\overline{27}", Fraction(3, 11)), ("1.2e-3", Fraction(3, 2500)), ("2^{-3}", Fraction(1, 8)), (r"8^{1/3}",
        2),
        (r"\sqrt[3]{-27}", -3), (r"\binom{10}{3}", 120), ("5!", 120), (r"\log_2 \frac{1}{8}", -3),
        (r"\lfloor -1.5 \rfloor", -2),
        (r"\sum_{k=1}^{10} k^2", 385), (r"\gcd(12, 18)", 6), (r"17 \bmod 5", 2), ("6/2*3", 9), ("2^{3^2}", 512),
    ],
)  # fmt: skip
def test_exact_values_by_hand(formula, value):
    assert exact.rational(tree(formula)) == value


@pytest.mark.parametrize("formula", [r"\frac{1}{0}", "0^{-1}", r"\frac{1}{2-2}", "(-1)!"])
def test_undefined_is_no_value(formula):
    with pytest.raises(exact.Undefined):
        exact.rational(tree(formula))


@pytest.mark.parametrize("formula", ["10^{10^{10}}", "(10^9)!", r"\sum_{k=1}^{10^6} k", "2^{3^{4^5}}"])
def test_sizes_are_refused_before_the_work(formula):
    with pytest.raises(limits.BoundError):
        exact.rational(tree(formula))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}", True), (r"\sqrt{2}+10^{-400}", r"\sqrt{2}", False),
        (r"\frac{1}{31!}", r"\frac{1}{29!}", False), (r"e^{i\pi}+1", "0", True), (r"\cos(10^{-200})", "1", False),
        (r"\arctan 1", r"\frac{\pi}{4}", True), ("(x+y)^{60}", "(y+x)^{60}", True), ("(x+y)^{60}", "(x+y)^{60}+1",
        False),
        (r"\ln x^2", r"2\ln x", True), (r"\sqrt{x^2}", "x", False),
        ("(-1)^{2n}", "1", True), ("n!", "n(n-1)!", True), (r"\sin(\pi n)", "0", False), ("9007199254740993",
        "9007199254740992", False),
    ],
)  # fmt: skip
def test_equality_by_hand(left, right, same):
    assert scalar_equal(tree(left), tree(right)).same is same
    assert scalar_equal(tree(right), tree(left)).same is same


def test_an_algebraic_equality_is_a_proof():
    assert scalar_equal(tree(r"\sqrt{8}"), tree(r"2\sqrt{2}")).rule == "algebraic number"
    assert scalar_equal(tree(r"\pi"), tree(r"\frac{355}{113}")).rule == "high precision"


def test_a_difference_below_every_fixed_precision_is_seen():
    assert numeric.vanishes(tree(r"\pi+10^{-900}"), tree(r"\pi"), {}) is False


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("(-1,2]", r"-1<x\le 2", True), (r"[1,2]\cup[2,3]", "[1,3]", True), (r"\mathbb{R}\setminus\{3\}", r"x\ne 3",
        True),
        (r"(0,1)\cup(1,2)", "(0,2)", False), (r"[0,2]\cap[1,3]", "[1,2]", True), (r"\{1,2\}\cup\{3\}", r"\{3,2,1\}",
        True),
        (r"[0,\sqrt{2})", r"[0,2^{1/2})", True), (r"[0,2]\setminus(0,1)", r"\{0\}\cup[1,2]", True),
    ],
)  # fmt: skip
def test_real_sets_by_hand(left, right, same):
    assert sets.same_pieces(sets.pieces(tree(left))[0], sets.pieces(tree(right))[0]) is same


@pytest.mark.parametrize(
    "text", ["4 2", r"\frac{1}{}", "x(x+1", "[0,1", "4..2", r"\unknown{3}", "4'2", r"3^{1}2", "5 5/", ")(", "a\\"]
)
def test_what_the_grammar_refuses(text):
    with pytest.raises(Unparsable):
        tree(text)


def test_digits_are_never_glued():
    assert canonical("4 2") != canonical("42") and canonical(r"4\text{ 2}") != canonical("42")


def test_unicode_spelling():
    assert plain_unicode("２⁵ ½ √2 −π") == r"2^{5}  \frac{1}{2} \sqrt{2} -\pi "
    assert plain_unicode("А") == "А"  # Cyrillic stays what it is
