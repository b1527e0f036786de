"""`python -m reward check` and `explain`."""

from __future__ import annotations

import io
import json

from reward.cli import main


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_check_writes_verdicts_and_a_table(tmp_path, capsys):
    rows = [
        {"output": r"\boxed{5}", "gold": "5"},
        {"output": "?", "gold": "5"},
        {"output": r"\boxed{6}", "gold": ["5", "7"]},
    ]
    out = tmp_path / "verdicts.jsonl"
    assert main(["check", write(tmp_path / "in.jsonl", rows), "--out", str(out), "--workers", "1"]) == 0
    verdicts = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [v["status"] for v in verdicts] == ["correct", "no_answer", "wrong"]
    shown = capsys.readouterr().out
    assert "3 outputs, 33.3% correct" in shown and "no box or answer label" in shown


def test_a_bad_gold_sets_the_exit_code(tmp_path):
    assert main(["check", write(tmp_path / "in.jsonl", [{"output": r"\boxed{5}", "gold": ""}])]) == 1


def test_an_unusable_line_is_named(tmp_path, capsys):
    assert main(["check", write(tmp_path / "in.jsonl", [{"output": "a", "gold": "b"}, {"output": "a"}])]) == 2
    assert "line 2" in capsys.readouterr().err


def test_explain_shows_each_rung(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(r"<think>3</think> The answer is \boxed{\frac{2}{4}}"))
    assert main(["explain", "--gold", "0.5"]) == 0
    shown = capsys.readouterr().out
    for part in ("last box", "decimal number", "div(2, 4)", "rational number", "verdict       correct"):
        assert part in shown
