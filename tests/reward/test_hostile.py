"""Outputs made to cost time, memory or a wrong reward."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from reward import extract, verify

TOWERS = [
    r"10^{10^{10}}", r"9^{9^{9^{9}}}", "9**9**9**9", r"((9!)!)!", r"\binom{10^9}{5\cdot 10^8}",
    r"\sum_{k=1}^{10^{12}} k", "1e999999999",
    r"(1+10^{-9})^{10^{12}}", r"\sum_{k=1}^{400}\sum_{j=1}^{400}\sum_{i=1}^{400} \sqrt{k+j+i}",
    r"\prod_{k=1}^{400} (k!)^{k}",
    r"\sqrt{2}^{\sqrt{2}^{\sqrt{2}^{100000}}}", r"e^{e^{e^{e^{e}}}}", r"\sin(10^{10^{6}})", r"(a+b+c+d+e+f+g)^{100000}",
    r"\{1,\{2,\{3,\{4\}\}\}\}", r"\pm 1 \pm 2 \pm 3 \pm 4 \pm 5 \pm 6", r"\log_2(\log_2(2^{2^{2^{40}}}))",
    r"\gamma!^{\pi!}!",
    "x^{2305843009213693950}", r"1000000!-999999!",
]  # fmt: skip


def seconds(output: str, gold: str = "7") -> tuple[float, object]:
    # The better of two: a collection of the whole test run's garbage may fall into one.
    spent = []
    for _ in range(2):
        start = time.thread_time()
        verdict = verify(output, gold, timeout_s=2.0)
        spent.append(time.thread_time() - start)
    return min(spent), verdict


@pytest.mark.parametrize("formula", TOWERS)
def test_bombs_are_refused_quickly(formula):
    verify(r"\boxed{\sqrt2}", r"\sqrt{3}")  # imports
    spent, verdict = seconds(rf"The answer is $\boxed{{{formula}}}$.")
    assert not verdict.correct and verdict.status in ("wrong", "unparsable", "timeout")
    assert spent < 0.8


REPEATED = [
    r"\boxed{", "{", "}", r"\frac", "Answer: ", "Answer: 41\n", "(", "[", r"\{", r"\left(", "answer is ", "#### ",
    "**", "<think>", "</think>",
    "<answer>", "<!--", "%", r"\phantom{", "$", r"\boxed{1}", r"\boxed{1} or ", '"', "答案", "a", " ", "\n", "1,",
    r"\\", "<answer>1</answer>",
    "√", "²", "½", r"\text{", "!", "'", "^", "_", "1/", "-", r"\sqrt", r"\boxed 1 ", "final answer\n", "|",
]  # fmt: skip


@pytest.mark.parametrize("piece", REPEATED)
def test_two_hundred_kilobytes_of_anything_take_milliseconds(piece):
    spent, verdict = seconds(piece * (200_000 // len(piece)))
    assert verdict.status != "error" and spent < 0.6
    spent, verdict = seconds(rf"\boxed{{{piece * (3_900 // len(piece))}}}")
    assert not verdict.correct and verdict.status != "error" and spent < 0.8


def test_long_integers_compare_by_digits():
    digits = "1" * 100_000
    assert verify(rf"\boxed{{{digits[:19_000]}}}", digits[:19_000]).correct
    assert not verify(rf"\boxed{{{digits[:18_999]}2}}", digits[:19_000]).correct
    assert not verify(rf"\boxed{{{digits}}}", "1").correct


def test_long_outputs_keep_their_answer():
    prose = "We consider the next case and find that a+b=c still holds for k={}. " * 3000
    assert verify(r"\boxed{42} " + prose, "42").correct
    assert verify(prose + "\n\nAnswer: 42", "42").correct
    assert verify("Answer: 41\n" * 10_000 + "Answer: 42", "42").correct


def test_redundant_braces_are_read():
    assert verify(r"\boxed{" + "{" * 40 + "42" + "}" * 40 + "}", "42").correct
    assert extract("{" * 100_000 + r"\boxed{7}") == "7"


def test_nothing_is_imported_that_is_heavy():
    heavy = ("torch", "verl", "ray", "sympy", "numpy", "mpmath")
    code = f"import sys, reward; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_non_text_output_is_no_answer():
    assert verify(None, "5").status == "no_answer"  # type: ignore[arg-type]
    assert verify("\ud800 \\boxed{5}", "5").correct
