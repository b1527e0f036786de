"""Time and memory of the policy loss, from logits to backward: the predicted mask against verl's vanilla loss.

    python tools/bench_losses.py            20 rounds, two types of logits, about three minutes on two idle cores
    python tools/bench_losses.py --quick    5 rounds on fewer tokens, under a minute; too few to judge a bar by

Each round runs every variant once, in shuffled order, so that a slow spell of the machine falls on all of them. A
variant's ratio is its median time over vanilla's; the interval is a bootstrap over rounds, and its lower end is held
against the bar. Peak memory is that of a process of its own per variant, above what it held before the logits, so
that the logits and their gradient are part of it. The exit code is 1 if a bar is missed.

Axes: N tokens (B sequences of T), K listed entries, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import ActorConfig

from verl_plugins.config import PolicyLoss
from verl_plugins.losses.metrics import mini_batch_metrics
from verl_plugins.losses.policy import trust_region_loss
from verl_plugins.losses.signals import TokenSignals, token_signals
from verl_plugins.topk.measure import current_law, measure

BASELINE = "vanilla"
TAILS = ("aggregated", "uniform", "exact")
VARIANTS = (BASELINE, *TAILS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_SEQUENCES = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """What one run of the loss is given."""

    tokens: int
    vocab: int
    topk: int
    device: str
    clock: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Logits of one micro-batch and what came with its response tokens."""

    logits_NV: Tensor
    labels_N: Tensor
    ids_NK: Tensor
    anchor_logp_NK: Tensor
    rows_N: Tensor
    old_logp_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


def make_batch(size: Size, dtype: torch.dtype) -> Batch:
    """Seeded logits, K distinct ids per token, and an anchor that differs from the current policy by a little.

    Every row is one random row rotated, which costs no more than writing it: neither time nor memory of the loss
    depends on the values.
    """
    generator = torch.Generator().manual_seed(0)
    first_V = 2.5 * torch.randn(size.vocab, generator=generator)
    logits_NV = torch.empty(size.tokens, size.vocab, dtype=dtype, device=size.device)
    for row, values_V in enumerate(logits_NV):
        values_V.copy_(first_V.roll(row))
    best_K = first_V.topk(size.topk)
    ids_NK = (best_K.indices + torch.arange(size.tokens)[:, None]).remainder(size.vocab).to(size.device)
    noise_NK = 0.1 * torch.randn(ids_NK.shape, generator=generator)
    anchor_NK = (best_K.values - first_V.logsumexp(0) + noise_NK - 0.1).to(size.device)
    place_N1 = torch.randint(size.topk, (size.tokens, 1), generator=generator).to(size.device)
    shape = NUM_SEQUENCES, size.tokens // NUM_SEQUENCES
    return Batch(
        logits_NV=logits_NV.requires_grad_(True),
        labels_N=ids_NK.gather(1, place_N1)[:, 0],
        ids_NK=ids_NK,
        anchor_logp_NK=anchor_NK,
        rows_N=torch.arange(size.tokens, device=size.device),
        old_logp_BT=anchor_NK.gather(1, place_N1).view(shape),
        advantages_BT=torch.randn(shape, generator=generator).to(size.device),
        mask_BT=torch.ones(shape, device=size.device),
    )


def make_config(variant: str) -> Any:
    """verl's actor configuration with the loss of one variant."""
    chosen: dict[str, Any] = (
        {} if variant == BASELINE else {"policy_loss": PolicyLoss(loss_mode="pdm_topk_kl", tail=variant)}
    )
    return ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **chosen)


def run_loss(variant: str, batch: Batch, config: Any) -> None:
    """From logits to backward, with the functions that a training step calls."""
    batch.logits_NV.grad = None
    logp_N = logprobs_from_logits(batch.logits_NV, batch.labels_N)
    arguments: dict[str, Any] = {
        "old_log_prob": batch.old_logp_BT,
        "log_prob": logp_N.view(batch.old_logp_BT.shape),
        "advantages": batch.advantages_BT,
        "response_mask": batch.mask_BT,
        "config": config,
    }
    if variant == BASELINE:
        loss, _ = compute_policy_loss_vanilla(**arguments)
    else:
        with token_signals(measured(batch, logp_N.detach(), config)) as signals:
            loss, _ = trust_region_loss(**arguments)
        mini_batch_metrics([signals.observed], first=True)
    loss.backward()
    if batch.logits_NV.is_cuda:
        torch.cuda.synchronize()


def measured(batch: Batch, logp_N: Tensor, config: Any) -> TokenSignals:
    """What the engine leaves for the loss: divergence, slope and tail of every token."""
    region = config.policy_loss.trust_region()
    tokens: dict[str, Any] = {"ids_NK": batch.ids_NK, "sampled_N": batch.labels_N}
    law = current_law(
        region,
        logits_MV=batch.logits_NV,
        row_N=batch.rows_N,
        temperature_N=None,  # as the engine passes it at a temperature of 1
        logp_sampled_N=logp_N,
        **tokens,
    )
    vocab_size = batch.logits_NV.shape[-1]
    values = measure(region, law, anchor_logp_NK=batch.anchor_logp_NK, vocab_size=vocab_size, **tokens)
    shape = batch.old_logp_BT.shape
    signals: dict[str, Any] = {f"{name}_BT": value_N.view(shape) for name, value_N in values.named()}
    return TokenSignals(**signals)


def time_variants(size: Size, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    batch, order = make_batch(size, dtype), random.Random(0)
    now = time.perf_counter if size.clock == "wall" else time.process_time
    configs = {variant: make_config(variant) for variant in VARIANTS}
    for variant in VARIANTS:
        run_loss(variant, batch, configs[variant])  # warm-up
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for done in range(rounds):
        progress(f"{dtype}: round {done + 1} of {rounds}")
        for variant in order.sample(VARIANTS, len(VARIANTS)):
            start = now()
            run_loss(variant, batch, configs[variant])
            seconds[variant].append(now() - start)
    return seconds


def progress(text: str) -> None:
    """Say on the terminal what is being measured."""
    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def ratio_interval(seconds: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % bootstrap interval over rounds."""
    pairs = np.array([seconds, baseline])
    rounds = pairs.shape[1]
    draws = np.random.default_rng(0).integers(rounds, size=(4000, rounds))
    medians = np.median(pairs[:, draws], axis=-1)
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    ratio = np.median(pairs[0]) / np.median(pairs[1])
    return float(ratio), float(low), float(high)


def peak_bytes(variant: str, size: Size, dtype_name: str) -> int:
    """Peak memory of two runs of one variant above what the process held before; to be called in a fresh process."""
    run = _host_peak if size.device == "cpu" else _device_peak
    return run(lambda: _two_runs(variant, size, DTYPES[dtype_name]))


def _two_runs(variant: str, size: Size, dtype: torch.dtype) -> None:
    batch, config = make_batch(size, dtype), make_config(variant)
    for _ in range(2):
        run_loss(variant, batch, config)


def _host_peak(work: Callable[[], None]) -> int:
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _device_peak(work: Callable[[], None]) -> int:
    work()
    return torch.cuda.max_memory_allocated()


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def bar(variant: str, dtype_name: str) -> float:
    """Largest ratio to vanilla that is acceptable, in time and in memory."""
    return 1.05 if dtype_name == "float32" and variant in ("aggregated", "uniform") else 1.35


def measure_dtype(size: Size, dtype_name: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table for one type of logits."""
    context = multiprocessing.get_context("forkserver")
    peaks = {}
    for variant in VARIANTS:
        progress(f"{dtype_name}: peak memory of {variant}")
        with context.Pool(1) as pool:
            peaks[variant] = pool.apply(peak_bytes, (variant, size, dtype_name))
    seconds = time_variants(size, DTYPES[dtype_name], rounds)
    rows = []
    for variant in VARIANTS:
        ratio, low, high = ratio_interval(seconds[variant], seconds[BASELINE])
        rows.append(
            {
                "logits": dtype_name,
                "loss": variant if variant == BASELINE else f"pdm_topk_kl {variant}",
                "median_ms": 1e3 * float(np.median(seconds[variant])),
                "time_ratio": ratio,
                "time_ratio_95": [low, high],
                "peak_mib": peaks[variant] / 2**20,
                "memory_ratio": peaks[variant] / peaks[BASELINE],
                "bar": None if variant == BASELINE else bar(variant, dtype_name),
                "rounds": rounds,
                "clock": size.clock,
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def holds(row: dict[str, Any]) -> bool:
    """Whether a row meets its bar in time, at the lower end of its interval, and in memory."""
    return row["bar"] is None or (row["time_ratio_95"][0] <= row["bar"] and row["memory_ratio"] <= row["bar"])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| logits | loss | ms | time / vanilla [95 %] | peak MiB | memory / vanilla | bar | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["time_ratio_95"]
        compared = f"{row['time_ratio']:.3f} [{low:.3f}, {high:.3f}]" if row["bar"] else "1"
        verdict = ("holds" if holds(row) else "MISSED") if row["bar"] else ""
        lines.append(
            f"| {row['logits']} | {row['loss']} | {row['median_ms']:.0f} | {compared} | {row['peak_mib']:.0f} "
            f"| {row['memory_ratio']:.3f} | {row['bar'] or ''} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="response tokens, a multiple of 4")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary size")
    parser.add_argument("--topk", type=int, default=20, help="listed entries K")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, each with every variant once")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a machine that is shared"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=sorted(DTYPES), action="append", help="type of the logits; default: both")
    parser.add_argument("--quick", action="store_true", help="256 tokens, 5 rounds, float32 logits")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    if options.tokens % NUM_SEQUENCES:
        parser.error(f"--tokens must be a multiple of {NUM_SEQUENCES}, got {options.tokens}")
    if options.threads:
        torch.set_num_threads(options.threads)
    tokens, rounds = (256, 5) if options.quick else (options.tokens, options.rounds)
    dtypes = options.dtype or (["float32"] if options.quick else ["float32", "bfloat16"])
    size = Size(tokens=tokens, vocab=options.vocab, topk=options.topk, device=options.device, clock=options.clock)
    print(f"{size}, {torch.get_num_threads()} threads, {rounds} rounds", flush=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["verl.trainer.ppo.core_algos"])
    rows: list[dict[str, Any]] = []
    for dtype_name in dtypes:
        rows += measure_dtype(size, dtype_name, rounds)
        progress("")
        print("\r" + table(rows[-len(VARIANTS) :]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "tokens": tokens, "vocab": options.vocab, "topk": options.topk}))
    return 0 if all(holds(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
