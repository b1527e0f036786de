# Axes in this file: B examples, L tokens of prompt and response together.
"""The supervised warm start: first right solutions, to learn the arithmetic; then solutions that slip.

The second phase teaches a habit of slipping without unlearning the skill, so that greedy decoding stays far above
sampling, and reinforcement learning has something to raise that carries over to problems never seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .problems import Problem, draw_solution
from .tokenizer import encode_prompt, encode_response

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """How long and on what to train.

    `skill_steps` see right solutions only; then `slip_steps` see right ones with probability `correct_share`. The skill
    phase trains on excerpts, more often on short ones: copying and adding are learned faster there.
    """

    skill_steps: int
    slip_steps: int
    correct_share: float
    batch_size: int = 64
    learning_rate: float = 4e-3
    slip_learning_rate: float = 1e-3


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    settings: WarmStart,
    seed: int,
    held_out: frozenset[object],
    report: Callable[[int, int, float], None],
) -> None:
    """Train the model in place.

    Args:
        model: freshly initialised, float32.
        tokenizer: the tiny world's.
        problems: the supervised split.
        settings: lengths, batch and learning rates.
        seed: order of the problems and choice of the slips.
        held_out: keys of the problems that must never be trained on.
        report: called now and then with step, number of steps and loss in nats per token.
    """
    rng = random.Random(f"warm start {seed}")
    prompts = cache(partial(encode_prompt, tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    total = settings.skill_steps + settings.slip_steps
    model.train()
    for step in range(total):
        slipping = step >= settings.skill_steps
        share = settings.correct_share if slipping else 1.0
        batch = rng.choices(problems, k=settings.batch_size)
        if not slipping:
            batch = [p for p in _excerpts(batch, rng) if p.key not in held_out]
        pairs = [(prompts(p.question), encode_response(tokenizer, draw_solution(p, share, rng))) for p in batch]
        loss = response_loss(model, *stack(pairs, tokenizer.pad_token_id))
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == total:
            report(step + 1, total, loss.item())
    model.eval()


def _excerpts(problems: Sequence[Problem], rng: random.Random) -> list[Problem]:
    """The beginning of each problem, all of one length, which is drawn with probability proportional to 1/length.

    One length for the whole batch leaves no padding.
    """
    most = max(len(problem.deltas) for problem in problems)
    if most == 1:
        return list(problems)
    length = rng.choices(range(1, most + 1), weights=[1 / n for n in range(1, most + 1)])[0]
    return [problem.prefix(length) for problem in problems]


def _learning_rate(step: int, settings: WarmStart) -> float:
    """Linear warm-up, then cosine decay to a tenth over the skill phase; cosine decay to nothing over the slip phase.

    The slips are noise: without the second decay they would leave the skill itself noisy.
    """
    if step < settings.skill_steps:
        cosine = 0.5 * (1 + math.cos(math.pi * step / settings.skill_steps))
        return settings.learning_rate * min(1.0, (step + 1) / 50) * (0.1 + 0.9 * cosine)
    done = (step - settings.skill_steps) / settings.slip_steps
    return settings.slip_learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def stack(pairs: Sequence[tuple[list[int], list[int]]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompt-response pairs on the right; labels cover the response only."""
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    ids, labels = [], []
    for prompt, response in pairs:
        padding = width - len(prompt) - len(response)
        ids.append(prompt + response + [pad_token_id] * padding)
        labels.append([_IGNORED] * len(prompt) + response + [_IGNORED] * padding)
    return torch.tensor(ids), torch.tensor(labels)


def response_loss(model: PreTrainedModel, ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean cross-entropy of the response tokens, in nats; logits are computed at those positions only."""
    hidden = model.model(ids_BL).last_hidden_state[:, :-1]
    targets = labels_BL[:, 1:]
    counted = targets != _IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[counted]), targets[counted])
