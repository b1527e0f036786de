"""Compare the verifier with math-verify and verl's scorers on real labelled outputs: errors, latency, throughput.

    python tools/bench_reward.py --cases DIR [--quick] [--json]

DIR holds verifier_handed.jsonl and data/labelled_*.jsonl (fields output, gold, expected). A scorer that is not
installed is named and left out. Anchors are called as their own documentation or verl calls them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Scorer = Callable[[str, str], float]
SETS = {
    "GSM8K": "data/labelled_gsm8k_half.jsonl",
    "MATH": "data/labelled_math800_half.jsonl",
    "HardVerify": "data/labelled_hardverify_half.jsonl",
}


def ours(output: str, gold: str) -> float:
    from reward import score

    return score(output, gold)


def math_verify(output: str, gold: str) -> float:
    from math_verify import parse, verify  # SIGALRM inside: main thread only

    return float(verify(parse(f"${gold}$"), parse(output)))


def prime_math(output: str, gold: str) -> float:
    from verl.utils.reward_score import prime_math as scorer

    return float(scorer.compute_score(output, gold)[0])


def math_reward(output: str, gold: str) -> float:
    from verl.utils.reward_score import math_reward as scorer

    return float(scorer.compute_score(output, gold))


def math_dapo(output: str, gold: str) -> float:
    from verl.utils.reward_score import math_dapo as scorer

    return float(scorer.compute_score(output, gold)["acc"])


def gsm8k(output: str, gold: str) -> float:
    from verl.utils.reward_score import gsm8k as scorer

    return float(scorer.compute_score(output, gold.replace(",", "")) or 0.0)


SCORERS: dict[str, Scorer] = {
    "reward": ours,
    "math-verify": math_verify,
    "verl prime_math": prime_math,
    "verl math_reward": math_reward,
    "verl math_dapo": math_dapo,
    "verl gsm8k": gsm8k,
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def measure(scorer: Scorer, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return error counts and latency in milliseconds of one scorer, one process, one thread.

    Wall time includes what other programs take of a busy machine; CPU time (of this thread) does not, and misses what
    a scorer spends in processes of its own.
    """
    for row in rows[:3]:
        scorer(row["output"], row["gold"])
    scorer(r"\boxed{\sqrt{2}}", r"\sqrt{3}")
    wall, cpu, false_positives, false_negatives, exceptions = [], [], 0, 0, 0
    for row in rows:
        start, start_cpu = time.perf_counter(), time.thread_time()
        try:
            accepted = scorer(row["output"], row["gold"]) > 0.5
        except Exception:
            accepted, exceptions = False, exceptions + 1
        cpu.append((time.thread_time() - start_cpu) * 1e3)
        wall.append((time.perf_counter() - start) * 1e3)
        false_positives += accepted and not row["expected"]
        false_negatives += not accepted and row["expected"]
    wall.sort()
    cpu.sort()
    last = min(len(wall) - 1, int(0.99 * len(wall)))
    return {
        "n": len(rows),
        "fp": false_positives,
        "fn": false_negatives,
        "fn_rate": false_negatives / max(1, sum(row["expected"] for row in rows)),
        "exceptions": exceptions,
        "median_ms": statistics.median(wall),
        "p99_ms": wall[last],
        "max_ms": wall[-1],
        "cpu_median_ms": statistics.median(cpu),
        "cpu_p99_ms": cpu[last],
    }


def _math_verify_chunk(pairs: list[tuple[str, str]]) -> int:
    return sum(math_verify(output, gold) > 0.5 for output, gold in pairs)


def timed(run: Callable[[], Any], count: int) -> tuple[Any, float, float]:
    """Return the result, items per wall second and items per CPU second (worker processes included)."""
    start, start_cpu = time.perf_counter(), cpu_s()
    result = run()
    return result, count / (time.perf_counter() - start), count / max(1e-9, cpu_s() - start_cpu)


def math_verify_pool(pairs: list[tuple[str, str]]) -> None:
    """Score pairs by math-verify in two processes."""
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(_math_verify_chunk, [pairs[i : i + 25] for i in range(0, len(pairs), 25)]))


def throughput(pairs: list[tuple[str, str]], anchor_pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Compare `verify_many` with math-verify, two processes each, process start included."""
    from reward import verify_many

    verdicts, wall, cpu = timed(lambda: verify_many(pairs, workers=2, timeout_s=5.0), len(pairs))
    half = pairs[: len(pairs) // 2]
    _, single, _ = timed(lambda: verify_many(half, workers=1, timeout_s=5.0), len(half))
    result = {"reward_2_workers": wall, "reward_1_worker": single, "reward_per_cpu_s": cpu}
    result["slowest_s"] = max(verdict.elapsed_s for verdict in verdicts)
    if available("math-verify"):
        _, wall, cpu = timed(lambda: math_verify_pool(anchor_pairs), len(anchor_pairs))
        result |= {"math_verify_2_processes": wall, "math_verify_per_cpu_s": cpu}
        result["ratio"] = result["reward_2_workers"] / wall
        result["cpu_ratio"] = result["reward_per_cpu_s"] / cpu
    return result


def available(name: str) -> bool:
    try:
        SCORERS[name](r"\boxed{1}", "1")
    except ImportError:
        return False
    return True


def limits(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the slowest hostile item at timeout_s = 2, wall seconds (bar: below 2.4)."""
    from reward import verify

    hostile = [row for row in rows if row["category"] in ("bomb", "long", "malformed", "code_exec", "adversarial")]
    return {
        "n": len(hostile),
        "slowest_s": max(verify(r["output"], r["gold"], timeout_s=2.0).elapsed_s for r in hostile),
    }


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    load = f"{os.getloadavg()[0]:.1f}"
    return {"cpu": cpu, "cores": str(os.cpu_count()), "load": load, "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=Path("../shared/cases"))
    parser.add_argument("--quick", action="store_true", help="an eighth of each set, 1,000 outputs for throughput")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "sets": {}}
    print(" | ".join(f"{k}: {v}" for k, v in report["machine"].items()))
    scorers = {name: scorer for name, scorer in SCORERS.items() if available(name)}
    missing = sorted(set(SCORERS) - set(scorers))
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    print(
        "\n| set | scorer | n | FP | FN | FN % | exceptions | median ms | p99 ms | max ms | CPU median | CPU p99 |\n|"
        + " --- |" * 12
    )
    mixed: list[tuple[str, str]] = []
    for label, name in SETS.items():
        rows = rows_of(options.cases / name)
        random.Random(0).shuffle(rows)
        mixed += [(row["output"], row["gold"]) for row in rows]
        rows = rows[: len(rows) // 8] if options.quick else rows
        for scorer_name, scorer in scorers.items():
            m = measure(scorer, rows)
            report["sets"].setdefault(label, {})[scorer_name] = m
            print(
                f"| {label} | {scorer_name} | {m['n']} | {m['fp']} | {m['fn']} | {100 * m['fn_rate']:.1f} "
                f"| {m['exceptions']} | {m['median_ms']:.3f} | {m['p99_ms']:.2f} | {m['max_ms']:.0f} "
                f"| {m['cpu_median_ms']:.3f} | {m['cpu_p99_ms']:.2f} |",
                flush=True,
            )
    handed = rows_of(options.cases / "verifier_handed.jsonl")
    mixed += [(row["output"], row["gold"]) for row in handed if row["category"] not in ("bomb", "long")]
    rng = random.Random(0)
    pairs = [rng.choice(mixed) for _ in range(1_000 if options.quick else 10_000)]
    report["throughput"] = throughput(pairs, pairs[: 200 if options.quick else 1_000])
    report["limits"] = limits(handed)
    print("\nverify_many, items per second: " + ", ".join(f"{k} {v:.2f}" for k, v in report["throughput"].items()))
    print(f"hostile items at timeout_s=2: {report['limits']['n']}, slowest {report['limits']['slowest_s']:.2f} s")
    for label, found in report["sets"].items():
        if "math-verify" in found:
            ratio = {
                key: found["math-verify"][key] / found["reward"][key] for key in found["reward"] if key.endswith("_ms")
            }
            print(
                f"{label}, times faster than math-verify: " + ", ".join(f"{k[:-3]} {v:.1f}" for k, v in ratio.items())
            )
    if options.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
