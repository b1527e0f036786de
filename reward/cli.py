"""Command line: `python -m reward check FILE.jsonl` and `python -m reward explain --gold GOLD < output.txt`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from reward import boxes
from reward.batch import verify_many
from reward.compare import gold_problem, reduce_gold, rungs
from reward.extract import find, option_letter, visible
from reward.score import verify
from reward.verdict import STATUSES, TASKS, Verdict


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reward", description="Verify answers of mathematical problems.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="verdicts for a JSON Lines file with the fields output and gold")
    check.add_argument("file", help="path, or - for standard input")
    check.add_argument("--task", choices=TASKS, default="math", help="how answers are read (default: math)")
    check.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    check.add_argument("--timeout-s", type=float, default=5.0, help="seconds per item (default: 5)")
    check.add_argument("--out", help="write one verdict per line to this JSON Lines file")
    explain = commands.add_parser("explain", help="show each rung tried for one output on standard input")
    explain.add_argument("--gold", required=True, action="append", help="right answer; repeat it for several")
    explain.add_argument("--task", choices=TASKS, default="math")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if every line could be judged, 1 if a gold was bad or an item ended in an error, 2 for unusable input.
    """
    options = _parser().parse_args(arguments)
    return _explain(options) if options.command == "explain" else _check(options)


def _rows(name: str) -> list[tuple[str, str | list[str]]]:
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    rows: list[tuple[str, str | list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            gold = row["gold"]
            rows.append((row["output"], gold if isinstance(gold, str) else [str(g) for g in gold]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"check: {name} line {number} is no object with the fields output and gold: {error!r}"
            ) from error
    return rows


def _check(options: argparse.Namespace) -> int:
    try:
        rows = _rows(options.file)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    verdicts = verify_many(
        rows, workers=options.workers, timeout_s=options.timeout_s, progress=sys.stderr.isatty(), task=options.task
    )
    if options.out:
        lines = (json.dumps(asdict(verdict), ensure_ascii=False) for verdict in verdicts)
        Path(options.out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(summary(verdicts))
    return int(any(verdict.status in ("bad_gold", "error") for verdict in verdicts))


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return a table of counts by status, and by rule below each status."""
    total = max(1, len(verdicts))
    lines = [
        f"{len(verdicts)} outputs, {sum(v.correct for v in verdicts) / total:.1%} correct",
        f"{'status':<12} {'count':>7} {'share':>7}",
    ]
    for status in STATUSES:
        chosen = [v for v in verdicts if v.status == status]
        if not chosen:
            continue
        lines.append(f"{status:<12} {len(chosen):>7} {len(chosen) / total:>7.1%}")
        rules = Counter(v.rule.split(": ")[0] for v in chosen)
        lines += [f"  {rule[:40]:<40} {count:>7}" for rule, count in rules.most_common(8)]
    return "\n".join(lines)


def _explain(options: argparse.Namespace) -> int:
    output = sys.stdin.read()
    wants_option = any(option_letter(gold) is not None for gold in options.gold)
    text = visible(output)
    found = find(output, options.task, wants_option=wants_option)
    print(f"visible text  {len(text)} of {len(output)} characters")
    print(f"boxes         {[box.content[:60] for box in boxes.complete_boxes(text)][-5:]}")
    print(f"extracted     {found.answer!r} by {found.rule}")
    if found.beside:
        print(f"beside it     {list(found.beside)}")
    for gold in options.gold:
        problem = gold_problem(reduce_gold(gold), options.task)
        print(f"gold          {gold!r}" + (f": {problem}" if problem else ""))
        if found.answer is not None and not problem:
            for name, result in rungs(found.answer, gold):
                print(f"  {name:<16} {result}")
    verdict = verify(output, options.gold, task=options.task)
    print(f"verdict       {verdict.status} by {verdict.rule} in {verdict.elapsed_s * 1e3:.2f} ms")
    return 0
