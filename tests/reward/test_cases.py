"""Labelled cases: public bug reports rebuilt as small outputs, hostile outputs, and our own variants of each kind."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from reward import verify

DATA = Path(__file__).parent / "data"


def load() -> dict[str, list[dict]]:
    groups = defaultdict(list)
    for name in ("handed.jsonl", "more.jsonl"):
        for line in (DATA / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            groups[row["category"]].append(row)
    return dict(groups)


GROUPS = load()


def misjudged(rows: list[dict]) -> list[str]:
    wrong = []
    for row in rows:
        verdict = verify(row["output"], row["gold"])
        if verdict.correct != row["expected"] or verdict.status == "error":
            wrong.append(f"{row['id']}: {verdict.status} by {verdict.rule}, expected {row['expected']}")
    return wrong


@pytest.mark.parametrize("category", sorted(GROUPS))
def test_every_case_of_a_kind(category, tmp_path):
    if category == "calculus":
        pytest.importorskip("latex2sympy2_extended")
    rows = [{**row, "output": row["output"].replace("CANARY_DIR", str(tmp_path))} for row in GROUPS[category]]
    assert misjudged(rows) == []
    assert list(tmp_path.iterdir()) == []  # no payload ran


def test_verdicts_do_not_depend_on_the_thread():
    found: list[str] = []
    rows = GROUPS["fraction"] + GROUPS["percent"] + GROUPS["tuples"]
    thread = threading.Thread(target=lambda: found.extend(misjudged(rows)))
    thread.start()
    thread.join()
    assert found == []


def test_unit_and_word_rules_are_reported():
    assert verify(r"\boxed{5\text{ m}}", r"5\text{ cm}").rule == "unit"
    assert verify(r"\boxed{0.5}", r"\frac{1}{2}").rule == "rational number"
    assert verify(r"\boxed{\sqrt{8}}", r"2\sqrt{2}").rule == "algebraic number"
    assert verify(r"\boxed{x(x+1)}", "x^2+x").rule == "polynomial identity"
    assert verify(r"\boxed{2\sin x\cos x}", r"\sin 2x").rule == "random points"
    assert verify("nothing", "5").status == "no_answer"
    assert verify(r"\boxed{\frac{1}{}}", "5").status == "unparsable"
    assert verify(r"\boxed{5}", " ").status == "bad_gold"


def test_several_golds_mean_any_is_right():
    verdict = verify(r"\boxed{7}", ["6", "7"])
    assert verdict.correct and verdict.gold == "7"
    assert not verify(r"\boxed{8}", ["6", "7"]).correct
    assert verify(r"\boxed{8}", []).status == "bad_gold"
