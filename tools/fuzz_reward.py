"""Fuzz the verifier: mutated and generated outputs against plain golds.

Looks for verdicts with status "error", items slower than their limit, memory growth and left-over processes.
An hour in development, a minute in CI:  python tools/fuzz_reward.py --seconds 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from reward import verify
from reward.verdict import TASKS

ATOMS = (
    r"\frac{ \frac \sqrt{ \sqrt[3]{ \boxed{ \fbox{ \boxed { } ( ) [ ] \{ \} | ^ ^{ _ _{ + - * / = < > \le \ne , ; : "
    r"! ' % \% $ \$ & \\ "
    r"\left \right \text{ \mathrm{ \mathbf{ \pi \infty \pm \mp \cup \cap \setminus \in \mathbb{R} \emptyset \sin "
    r"\cos \tan \log \ln "
    r"\log_2 \exp \binom{ \sum_{k=1}^{ \prod_{k=1}^{ \int_0^1 \lim_{x\to0} dx \overline{ \dot \circ ^\circ \angle "
    r"\langle \rangle \lfloor "
    r"\rfloor \begin{pmatrix} \end{pmatrix} \begin{cases} \pmod \bmod \approx \equiv \to \ldots \quad \, \! ~ or "
    r"and not 或 i e x y n k f "
    r"0 1 2 3 7 10 12 42 100 999 0.5 .5 1e9 1e999 10^{10^{10}} 9! 1,000 12,34 3\frac12 cm dollars is Answer: "
    r"answer\ is #### </think> "
    r"<think> <answer> </answer> **  ` ½ ² √ π ≤ ∞ （ ） ， 。 答案： 是 \phantom{ <!-- --> \u200b é 🙂"
).split()
GOLDS = ("42", r"\frac{1}{2}", "x^2+1", r"\sqrt{2}", "(1,2)", r"\{1,2\}", "[0,1)", "B", r"\text{even}", "x=5", "2:3",
"x>3",
         "101_2", r"50\%", r"\pi", "1,2", r"\begin{pmatrix}1\\2\end{pmatrix}", "2x-y+3=0", "3+4i",
         r"\infty")  # fmt: skip


def generated(rng: random.Random) -> str:
    """Return a random sequence of atoms, often in a box."""
    body = "".join(rng.choice(ATOMS) + rng.choice(("", "", " ")) for _ in range(rng.choice((1, 3, 6, 12, 30, 120))))
    if rng.random() < 0.1:
        body = rng.choice(ATOMS) * rng.choice((5, 50, 500, 5000))
    return f"The answer is $\\boxed{{{body}}}$." if rng.random() < 0.7 else body


def mutated(rng: random.Random, corpus: list[str]) -> str:
    """Return a corpus output with cuts, insertions, repetitions and swaps."""
    text = rng.choice(corpus)[-3000:]
    for _ in range(rng.randint(1, 6)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        action = rng.randrange(5)
        if action == 0:
            text = text[:a] + text[b:]
        elif action == 1:
            text = text[:a] + rng.choice(ATOMS) + text[a:]
        elif action == 2:
            text = text[:a] + text[a:b][:40] * rng.randint(2, 60) + text[b:]
        elif action == 3:
            text = (
                text[:a] + chr(rng.choice((0, 9, 92, 123, 125, 0x200B, 0xFF11, 0x1D7D8, 0xD7FF, 0x10FFFF))) + text[a:]
            )
        else:
            other = rng.choice(corpus)
            text = text[:a] + other[-200:] + text[a:]
    return text


def children() -> int:
    """Return the number of child processes of this one."""
    shown = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True, text=True, check=False
    )
    return sum(1 for line in shown.stdout.split("\n") if line and line != "ps")


def main() -> int:
    """Fuzz for the given time and report; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--corpus", action="append", default=[], help="JSON Lines files with the fields output and gold"
    )
    parser.add_argument("--limit-s", type=float, default=1.2, help="slowest item allowed without the sympy rung")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    corpus, golds = [r"The answer is \boxed{\frac{1}{2}}.", "Answer: 42"], list(GOLDS)
    for name in options.corpus:
        rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
        corpus += [row["output"] for row in rows]
        golds += [row["gold"] for row in rows]
    statuses: Counter[str] = Counter()
    found: list[str] = []
    slowest, count, end = 0.0, 0, time.monotonic() + options.seconds
    verify(r"\boxed{\sin 1}", "2")  # the import of mpmath is not an item's time
    start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while time.monotonic() < end and len(found) < 20:
        output = generated(rng) if rng.random() < 0.6 else mutated(rng, corpus)
        gold, task = rng.choice(golds), rng.choice((*TASKS, "math", "math", "math"))
        cpu = time.thread_time()
        try:
            verdict = verify(output, gold, task=task, timeout_s=2.0)
        except Exception as error:
            found.append(f"exception {error!r}: {output[-300:]!r} gold {gold!r}")
            continue
        spent = time.thread_time() - cpu
        count += 1
        statuses[verdict.status] += 1
        slowest = max(slowest, spent)
        if verdict.status == "error" or spent > options.limit_s:
            found.append(f"{verdict.status} {verdict.rule} {spent:.2f}s: {output[-300:]!r} gold {gold!r} task {task}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kb) / 1024
    print(
        f"{count} items in {options.seconds:.0f} s, slowest {slowest * 1e3:.0f} ms CPU, memory grew {grown:.0f} "
        f"MiB, {children()} workers"
    )
    print(dict(statuses))
    print("\n".join(found))
    return int(bool(found) or grown > 500)


if __name__ == "__main__":
    sys.exit(main())
