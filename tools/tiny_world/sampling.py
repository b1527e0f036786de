# Axes in this file: B responses, P prompt tokens (padded on the left), T response tokens, V vocabulary.
"""Batched sampling with a key-value cache, and accuracy by it. Plain torch: no engine, no verl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .tokenizer import encode_prompt

_BOXED = re.compile(r"\\boxed\{(-?\d{1,9})\}")


class Asked(Protocol):
    """Anything that has a question and a right answer."""

    @property
    def question(self) -> str:
        """The text the user asks."""

    @property
    def answer(self) -> int:
        """The right answer."""


@dataclass(frozen=True)
class Responses:
    """What a batch of prompts was answered: ids, and which positions are the response's own.

    `prompt_ids_BP` and `prompt_mask_BP` are padded on the left, `response_ids_BT` on the right; `response_mask_BT` is
    true up to and including the end of the turn.
    """

    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    response_ids_BT: Tensor
    response_mask_BT: Tensor


def is_correct(text: str, answer: int) -> bool:
    """Whether the last boxed integer of a text is the answer."""
    found = _BOXED.findall(text)
    return bool(found) and int(found[-1]) == answer


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Stack prompts of unequal length; returns ids_BP and a mask_BP that is true on real tokens."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def positions(mask: Tensor) -> Tensor:
    """Position ids that count real tokens only."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Responses:
    """Answer each prompt once.

    Args:
        model: a causal language model of transformers.
        tokenizer: gives the padding and end-of-turn ids.
        prompts: token ids of each prompt.
        max_tokens: most tokens of a response; a longer one is cut.
        temperature: 0 is greedy.
        generator: source of randomness when sampling.
    """
    prompt_ids_BP, prompt_mask_BP = pad_left(prompts, tokenizer.pad_token_id)
    mask, ids, position = prompt_mask_BP, prompt_ids_BP, positions(prompt_mask_BP)
    alive_B = torch.ones(len(prompts), dtype=torch.bool)
    cache, tokens, lives = None, [], []
    for _ in range(max_tokens):
        output = model(
            ids,
            attention_mask=mask.long(),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits_BV = output.past_key_values, output.logits[:, -1].float()
        if temperature > 0:
            next_B = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            next_B = logits_BV.argmax(-1)
        next_B = torch.where(alive_B, next_B, tokenizer.pad_token_id)
        tokens.append(next_B)
        lives.append(alive_B)
        alive_B = alive_B & (next_B != tokenizer.eos_token_id)
        if not alive_B.any():
            break
        ids, position = next_B[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return Responses(prompt_ids_BP, prompt_mask_BP, torch.stack(tokens, 1), torch.stack(lives, 1))


def grade(tokenizer: PreTrainedTokenizerFast, responses: Responses, problems: Sequence[Asked]) -> Tensor:
    """1.0 for each response whose boxed answer is right, else 0.0; shape B."""
    texts = tokenizer.batch_decode(
        [row[mask].tolist() for row, mask in zip(responses.response_ids_BT, responses.response_mask_BT, strict=True)],
        skip_special_tokens=True,
    )
    return torch.tensor([float(is_correct(text, p.answer)) for text, p in zip(texts, problems, strict=True)])


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Asked],
    *,
    max_tokens: int,
    temperature: float,
    samples: int = 1,
    seed: int = 0,
) -> float:
    """Share of right answers over `samples` responses to each problem."""
    repeated = [problem for problem in problems for _ in range(samples)]
    prompts = [encode_prompt(tokenizer, problem.question) for problem in repeated]
    responses = generate(
        model,
        tokenizer,
        prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    return float(grade(tokenizer, responses, repeated).mean())
