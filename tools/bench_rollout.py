"""Time of generation with K probabilities per token, against K=1, on a tiny model through the hf_cpu rollout.

    python tools/bench_rollout.py            20 rounds, about a minute on two idle cores
    python tools/bench_rollout.py --quick    5 rounds

Each round runs every K once, in shuffled order. A ratio is the median process time over that of K=1; the interval is a
bootstrap over rounds, and its lower end is held against the bar. The exit code is 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import sys
import time

import torch
from bench_losses import ratio_interval
from tiny_world.models import build_model

from verl_plugins.rollouts.hf_cpu.decode import Request, generate
from verl_plugins.rollouts.hf_cpu.sampling import parse_sampling_params
from verl_plugins.topk.rows import REQUEST_TOPK

BAR_K, BAR = 20, 1.15
KS = (1, 20, 128)


def requests(num_listed: int, *, count: int, tokens: int, vocabulary: int) -> list[Request]:
    """`count` prompts of eight tokens, each answered with `tokens` tokens and K-lists."""
    asked = {"temperature": 1.0, "ignore_eos": True, "extra_args": {REQUEST_TOPK: num_listed}}
    params = parse_sampling_params(asked, max_tokens=tokens, vocabulary=vocabulary)
    rng = random.Random(0)
    return [
        Request(prompt_ids=[rng.randrange(10, vocabulary) for _ in range(8)], params=params, seed=i)
        for i in range(count)
    ]


def measure(rounds: int, count: int, tokens: int) -> dict[int, list[float]]:
    """Process seconds of each K in each round."""
    torch.set_num_threads(1)
    model = build_model("qwen3", 0, pad_token_id=0, eos_token_id=1).eval()
    vocabulary = model.config.vocab_size
    batches = {k: requests(k, count=count, tokens=tokens, vocabulary=vocabulary) for k in KS}
    seconds: dict[int, list[float]] = {k: [] for k in KS}
    order = random.Random(0)
    for round_ in range(rounds + 1):
        for k in order.sample(KS, len(KS)):
            start = time.process_time()
            generate(model, batches[k], vocabulary=vocabulary, eos_ids=())
            if round_:  # the first round warms up
                seconds[k].append(time.process_time() - start)
        print(f"\rround {round_}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    seconds = measure(5 if args.quick else 20, count=64, tokens=16 if args.quick else 64)
    rows = []
    for k in KS:
        ratio, low, high = ratio_interval(seconds[k], seconds[1])
        rows.append({"k": k, "seconds": sorted(seconds[k])[len(seconds[k]) // 2], "ratio": ratio, "ci95": [low, high]})
    print(f"{'K':>4}  {'median s':>8}  {'ratio to K=1':>12}  95 % interval   bytes per token")
    for row in rows:
        low, high = row["ci95"]
        print(
            f"{row['k']:>4}  {row['seconds']:>8.3f}  {row['ratio']:>12.3f}  {low:.3f} to {high:.3f}  {8 * row['k']:>6}"
        )
    holds = next(row for row in rows if row["k"] == BAR_K)["ci95"][0] <= BAR
    print(f"K={BAR_K} at most {BAR} x K=1: {'holds' if holds else 'MISSED'}")
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "date": str(datetime.date.today())}
        print(json.dumps({"rows": rows, "bar": BAR, "holds": holds, **machine}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
