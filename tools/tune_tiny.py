# Axes in this file: B responses, P prompt tokens, T response tokens, K listed entries, V vocabulary.
"""Reinforcement learning on the tiny world in a plain loop: to choose settings before verl spends minutes on them.

    python tools/tune_tiny.py --world outputs/tiny_world --seeds 0 1 2

The loss is the one the recipes use, REINFORCE with a truncated weight under a trust-region mask, with the masks of
`verl_plugins`; sampling, advantages and the loop are written out here. No verl, no Ray, no engine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from tiny_world.models import MODEL_KINDS
from tiny_world.parquet import Question, read_questions
from tiny_world.problems import TASKS
from tiny_world.sampling import Responses, accuracy, generate, grade, positions
from tiny_world.tokenizer import encode_prompt
from tiny_world.world import TASK_SETTINGS, model_part, task_part
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from verl_plugins.losses.trust_region import TrustRegion, resolve
from verl_plugins.masks import (
    anchor_log_tail,
    keep_mask,
    ratio_slope,
    slope,
    tail_square,
    topk_forward_kl,
    truncated_weight,
)

LOSS_MODES = ("pdm_topk_kl", "dppo_topk_kl", "no_mask")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One choice of what a recipe sets; the names are verl's where verl has one."""

    steps: int = 60
    prompts: int = 16
    samples: int = 8
    mini_batches: int = 4
    lr: float = 2e-4
    loss_mode: str = "pdm_topk_kl"
    delta: float = 0.05
    topk: int = 20
    loss_agg_mode: str = "token-mean"
    norm_adv_by_std: bool = True
    max_tokens: int = 8


@dataclass(frozen=True)
class Anchor:
    """The rollout policy at each response position: K listed entries, of which the sampled token is one."""

    ids_BTK: Tensor
    logp_BTK: Tensor
    sampled_index_BT: Tensor


def response_logp(model: PreTrainedModel, batch: Responses) -> Tensor:
    """Log-probabilities over the vocabulary at each response position, in nats: logp_BTV."""
    ids = torch.cat([batch.prompt_ids_BP, batch.response_ids_BT], 1)
    mask = torch.cat([batch.prompt_mask_BP, batch.response_mask_BT], 1)
    width = batch.response_ids_BT.shape[1]
    output = model(ids, attention_mask=mask.long(), position_ids=positions(mask), logits_to_keep=width + 1)
    return torch.log_softmax(output.logits[:, :-1].float(), -1)


def listed(logp_BTV: Tensor, sampled_BT: Tensor, num_listed: int) -> Anchor:
    """The K likeliest entries; a sampled token outside them replaces the last."""
    ids_BTK = logp_BTV.topk(num_listed, dim=-1).indices
    outside_BT = (ids_BTK != sampled_BT[..., None]).all(-1)
    ids_BTK[..., -1] = torch.where(outside_BT, sampled_BT, ids_BTK[..., -1])
    return Anchor(ids_BTK, logp_BTV.gather(-1, ids_BTK), (ids_BTK == sampled_BT[..., None]).int().argmax(-1))


def group_advantages(reward_B: Tensor, samples: int, by_std: bool) -> Tensor:
    """GRPO advantages: reward minus the mean of its prompt's group, over the group's standard deviation or not."""
    reward_GS = reward_B.view(-1, samples)
    centred_GS = reward_GS - reward_GS.mean(1, keepdim=True)
    return (centred_GS / (reward_GS.std(1, keepdim=True) + 1e-6) if by_std else centred_GS).flatten()


def aggregate(loss_BT: Tensor, mask_BT: Tensor, mode: str) -> Tensor:
    """Mean loss of a mini-batch, as verl's `agg_loss` does it; the norm is the padded width."""
    loss_B = (loss_BT * mask_BT).sum(1)
    if mode == "token-mean":
        return loss_B.sum() / mask_BT.sum()
    if mode == "seq-mean-token-sum-norm":
        return loss_B.mean() / mask_BT.shape[1]
    return (loss_B / mask_BT.sum(1).clamp_min(1)).mean()


def masked_loss(
    logp_BTV: Tensor, anchor: Anchor, advantage_BT: Tensor, mask_BT: Tensor, region: TrustRegion, mode: str
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a mini-batch and what was masked in it."""
    logq_BTK = logp_BTV.gather(-1, anchor.ids_BTK)
    at = anchor.sampled_index_BT[..., None]
    log_new_BT, log_anchor_BT = logq_BTK.gather(-1, at)[..., 0], anchor.logp_BTK.gather(-1, at)[..., 0]
    laws = anchor.logp_BTK, logq_BTK.detach(), anchor_log_tail(anchor.logp_BTK), anchor_log_tail(logq_BTK)
    divergence_BT = topk_forward_kl(*laws)
    if region.direction == "predicted":
        square_BT = tail_square("aggregated", laws[3], logp_BTV.shape[-1] - anchor.ids_BTK.shape[-1])
        slope_BT = slope("topk_forward_kl", *laws, square_BT, anchor.sampled_index_BT)
    else:
        slope_BT = ratio_slope(log_anchor_BT, log_new_BT)
    keep_BT = keep_mask(divergence_BT, slope_BT, advantage_BT, region.delta)
    weight_BT = truncated_weight(log_new_BT - log_anchor_BT, region.truncation) * keep_BT
    loss = aggregate(-advantage_BT * weight_BT * log_new_BT, mask_BT, mode)
    masked_BT, count = (~keep_BT & mask_BT).float(), mask_BT.sum()
    return loss, {
        "masked_share": float(masked_BT.sum() / count),
        "masked_share_positive": float((masked_BT * (advantage_BT > 0)).sum() / count),
        "divergence_mean": float((divergence_BT * mask_BT).sum() / count),
        "divergence_p95": float(divergence_BT[mask_BT].quantile(0.95)),
    }


def train_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    questions: list[Question],
    settings: Settings,
    generator: torch.Generator,
) -> dict[str, float]:
    """One batch: sample, grade, then one update per mini-batch."""
    region = resolve(settings.loss_mode, delta=settings.delta if settings.loss_mode != "no_mask" else None)
    repeated = [question for question in questions for _ in range(settings.samples)]
    prompts = [encode_prompt(tokenizer, question.question) for question in repeated]
    batch = generate(model, tokenizer, prompts, max_tokens=settings.max_tokens, generator=generator)
    reward_B = grade(tokenizer, batch, repeated)
    advantage_B = group_advantages(reward_B, settings.samples, settings.norm_adv_by_std)
    with torch.no_grad():
        anchor = listed(response_logp(model, batch), batch.response_ids_BT, settings.topk)
    rows: list[dict[str, float]] = []
    for part in torch.arange(len(repeated)).chunk(settings.mini_batches):
        inputs = Responses(*(getattr(batch, name)[part] for name in Responses.__dataclass_fields__))
        loss, row = masked_loss(
            response_logp(model, inputs),
            Anchor(anchor.ids_BTK[part], anchor.logp_BTK[part], anchor.sampled_index_BT[part]),
            advantage_B[part, None].expand_as(inputs.response_mask_BT),
            inputs.response_mask_BT,
            region,
            settings.loss_agg_mode,
        )
        optimizer.zero_grad()
        loss.backward()
        row["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        rows.append(row)
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return {"reward": float(reward_B.mean()), **means}


def _batches(questions: list[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """Endless batches without repetition within an epoch; an incomplete last one is dropped, as verl does."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(questions, len(questions))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def run(world: Path, model_name: str, task: str, settings: Settings, seed: int, every: int) -> dict[str, Any]:
    """Train one seed from the warm start; returns the settings, a row per step and accuracies on held-out problems."""
    tokenizer = AutoTokenizer.from_pretrained(world / model_name)
    model = AutoModelForCausalLM.from_pretrained(world / model_name, dtype=torch.float32)
    held_out = read_questions(world / task_part(task) / "test.parquet")[:128]
    batches = _batches(read_questions(world / task_part(task) / "train.parquet"), settings.prompts, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, float]] = []
    accuracies: dict[int, float] = {}
    started = time.process_time()

    def validate(step: int) -> None:
        accuracies[step] = accuracy(
            model, tokenizer, held_out, max_tokens=settings.max_tokens, temperature=1.0, samples=4, seed=seed
        )
        recent = rows[-every:]
        means = {name: sum(row[name] for row in recent) / len(recent) for name in rows[0]} if rows else {}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        print(f"seed {seed}  step {step:>3}/{settings.steps}  held out {accuracies[step]:.3f}  {shown}", flush=True)

    validate(0)
    for step in range(1, settings.steps + 1):
        rows.append(train_step(model, tokenizer, optimizer, next(batches), settings, generator))
        if step % every == 0 or step == settings.steps:
            validate(step)
    greedy = accuracy(model, tokenizer, held_out, max_tokens=settings.max_tokens, temperature=0.0)
    cpu_s = time.process_time() - started
    return {
        "model": model_name,
        "seed": seed,
        "settings": asdict(settings),
        "accuracy": accuracies,
        "greedy_after": greedy,
        "cpu_s": cpu_s,
        "rows": rows,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, default=Path("outputs/tiny_world"), help="folder made by make_tiny.py")
    parser.add_argument("--task", choices=TASKS, default="sum")
    parser.add_argument("--model", choices=MODEL_KINDS, default="qwen3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="order of the problems and the samples")
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements on held-out problems")
    parser.add_argument("--quick", action="store_true", help="2 steps of 4 prompts: does it run?")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    defaults = Settings()
    for field in fields(Settings):
        value = getattr(defaults, field.name)
        choices = {"loss_mode": LOSS_MODES, "loss_agg_mode": AGGREGATIONS}.get(field.name)
        name = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=value)
        elif field.name != "max_tokens":
            parser.add_argument(name, type=type(value), default=value, choices=choices, help=f"default {value}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each seed and print what it gained."""
    options = _parse(arguments)
    chosen = {field.name: getattr(options, field.name) for field in fields(Settings) if field.name != "max_tokens"}
    settings = Settings(**chosen, max_tokens=TASK_SETTINGS[options.task].max_tokens)
    if options.quick:
        settings = replace(settings, steps=2, prompts=4)
    model_name = model_part(options.model, options.task)
    if not (options.world / model_name).is_dir():
        print(
            f"tune_tiny: no {model_name} in {options.world}; make it: "
            f"python tools/make_tiny.py --out {options.world} --task {options.task}",
            file=sys.stderr,
        )
        return 1
    torch.set_num_threads(1)
    disable_progress_bar()
    runs = [run(options.world, model_name, options.task, settings, seed, options.every) for seed in options.seeds]
    for result in runs:
        first, *_, last = result["accuracy"].values()
        masked = sum(row["masked_share"] for row in result["rows"]) / len(result["rows"])
        print(
            f"seed {result['seed']}: {first:.3f} -> {last:.3f} ({100 * (last - first):+.1f} points), greedy "
            f"{result['greedy_after']:.3f}, masked {100 * masked:.2f} %, {result['cpu_s']:.0f} s CPU"
        )
    if options.json:
        print(json.dumps({"runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
