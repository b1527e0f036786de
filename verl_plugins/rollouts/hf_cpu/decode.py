"""Batched generation with a causal language model of transformers: prompts in, tokens with their law out. Pure torch.

All requests of a batch start together: prompts are padded on the left, keys and values are cached, and a request that
ends leaves the batch and the cache at once. Per step everything stays in tensors; lists are made once, at the end.

Shapes in this file: N requests, B of them still running, L prompt columns, T response tokens, V vocabulary entries,
K listed entries, S stop tokens, F tokens of all requests, flat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_plugins.rollouts.hf_cpu.sampling import Law, SamplingParams, draw, processed_logits
from verl_plugins.topk.rows import Ids, Logps, select_rows

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    `seed` starts the request's own random numbers: the sample depends on it, the prompt and the weights only.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one request.

    `logps` are float32 log-probabilities in nats of the tokens under the law they were drawn from; `topk_ids` and
    `topk_logps` are the K-list of each token, None if the request asked for none. A stop token is part of the answer.
    """

    token_ids: list[int]
    logps: list[float]
    finish_reason: FinishReason
    topk_ids: Ids | None = None
    topk_logps: Logps | None = None


class Cache(Protocol):
    """What is needed of transformers' `DynamicCache`."""

    def batch_select_indices(self, indices: Tensor) -> object:
        """Keep some rows of the batch."""


class ModelOutput(Protocol):
    """What is needed of transformers' `CausalLMOutputWithPast`."""

    logits: Tensor
    past_key_values: Cache


class CausalLM(Protocol):
    """What is needed of a transformers causal language model."""

    def __call__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
        use_cache: bool,
        logits_to_keep: int,
    ) -> ModelOutput:
        """Return the logits of the last position, and the cache grown by the input."""


@torch.inference_mode()
def generate(
    model: CausalLM,
    requests: Sequence[Request],
    *,
    vocabulary: int,
    eos_ids: Collection[int],
    cancelled: Collection[int] = (),
) -> list[Completion]:
    """Continue every prompt until a stop token or its limit.

    Args:
        model: in evaluation mode, on the CPU.
        requests: at least one; their prompts are not empty.
        vocabulary: number of logits of the model.
        eos_ids: tokens that end a response unless the request ignores them.
        cancelled: indices of requests to abandon. Another thread may add to it while this runs; what those requests
            have so far is returned with finish reason "abort".

    Returns:
        one completion for each request, in order.

    Raises:
        FloatingPointError: the model gave a logit that is not a number.
    """
    batch = _Batch.start(requests, vocabulary, eos_ids)
    trace = _Trace(max((request.params.topk or 0) for request in requests))
    while len(batch.rows_B):
        if cancelled:
            dropped_B = torch.isin(batch.rows_B, torch.tensor(sorted(cancelled)))
            trace.finish(batch.rows_B[dropped_B], "abort")
            batch.keep(~dropped_B)
            if not len(batch.rows_B):
                break
        token_B = batch.step(model, trace)
        stopped_B = (token_B[:, None] == batch.stops_BS).any(-1)
        full_B = ~stopped_B & (batch.num_tokens >= batch.max_tokens_B)
        trace.finish(batch.rows_B[stopped_B], "stop")
        trace.finish(batch.rows_B[full_B], "length")
        batch.keep(~(stopped_B | full_B))
    return trace.completions(requests)


_PER_REQUEST = (
    "rows_B",
    "input_BL",
    "position_BL",
    "mask_BL",
    "uniform_BT",
    "max_tokens_B",
    "stops_BS",
    "seen_BV",
    "barred_BV",
)


@dataclass
class _Batch:
    """The running requests: their input for the next step and what decides their next token."""

    rows_B: Tensor  # index of each running request among all
    input_BL: Tensor
    position_BL: Tensor
    mask_BL: Tensor | None  # None if no prompt was padded
    law: Law
    uniform_BT: Tensor
    max_tokens_B: Tensor
    stops_BS: Tensor  # padded with -1
    seen_BV: Tensor | None
    barred_BV: Tensor | None
    cache: Cache | None = None
    num_tokens: int = 0

    @classmethod
    def start(cls, requests: Sequence[Request], vocabulary: int, eos_ids: Collection[int]) -> _Batch:
        prompts = [torch.as_tensor(request.prompt_ids, dtype=torch.int64) for request in requests]
        lengths_B = torch.tensor([len(prompt) for prompt in prompts])
        input_BL = pad_sequence(prompts, batch_first=True, padding_side="left")
        mask_BL = torch.arange(input_BL.shape[1]) >= input_BL.shape[1] - lengths_B[:, None]
        params = [request.params for request in requests]
        law = Law.of(params)
        stops = [[*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)] for p in params]
        # vLLM bars the end-of-sequence tokens before min_tokens even where they would not end the response.
        barred = [[*p.stop_token_ids, *eos_ids] for p in params]
        return cls(
            rows_B=torch.arange(len(requests)),
            input_BL=input_BL,
            position_BL=(mask_BL.cumsum(-1) - 1).clamp(min=0),
            mask_BL=None if mask_BL.all() else mask_BL.long(),
            law=law,
            uniform_BT=_uniforms(requests),
            max_tokens_B=torch.tensor([p.max_tokens for p in params]),
            stops_BS=pad_sequence([torch.tensor(s, dtype=torch.int64) for s in stops], True, -1),
            seen_BV=None if law.repetition_penalty_B1 is None else _token_mask(prompts, vocabulary),
            barred_BV=None if law.min_tokens_B is None else _token_mask(barred, vocabulary),
        )

    def step(self, model: CausalLM, trace: _Trace) -> Tensor:
        """Draw the next token of every running request, and record it with its law."""
        output = model(
            input_ids=self.input_BL,
            attention_mask=self.mask_BL,
            position_ids=self.position_BL,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = output.past_key_values
        logits_BV = processed_logits(
            output.logits[:, -1], self.law, step=self.num_tokens, seen_BV=self.seen_BV, barred_BV=self.barred_BV
        )
        logp_BV = logits_BV.log_softmax(-1)
        if logp_BV[:, 0].isnan().any():  # a softmax spreads one to its whole row
            raise FloatingPointError(
                "the model's logits are not numbers: its weights have diverged (lower "
                "actor_rollout_ref.actor.optim.lr), or min_tokens barred every token"
            )
        token_B = draw(logits_BV, logp_BV, self.law.greedy_B, self.uniform_BT[:, self.num_tokens])
        trace.add(self.rows_B, token_B, logp_BV)
        self._advance(token_B)
        return token_B

    def keep(self, kept_B: Tensor) -> None:
        """Drop the other requests from every tensor and from the cache."""
        if kept_B.all():
            return
        rows = kept_B.nonzero()[:, 0]
        if self.cache is not None and len(rows):
            self.cache.batch_select_indices(rows)
        self.law = self.law.select(rows)
        for name in _PER_REQUEST:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor[rows])

    def _advance(self, token_B: Tensor) -> None:
        self.num_tokens += 1
        self.input_BL, self.position_BL = token_B[:, None], self.position_BL[:, -1:] + 1
        if self.mask_BL is not None:
            self.mask_BL = torch.cat([self.mask_BL, torch.ones_like(self.input_BL)], -1)
        if self.seen_BV is not None:
            self.seen_BV.scatter_(-1, token_B[:, None], True)


def _uniforms(requests: Sequence[Request]) -> Tensor:
    """Draw each request's numbers from its own generator: float64 [N, T] in [0, 1), T the longest limit."""
    drawn = [
        torch.rand(r.params.max_tokens, generator=torch.Generator().manual_seed(r.seed), dtype=torch.float64)
        for r in requests
    ]
    return pad_sequence(drawn, batch_first=True)


def _token_mask(tokens: Sequence[Sequence[int] | Tensor], vocabulary: int) -> Tensor:
    mask = torch.zeros(len(tokens), vocabulary, dtype=torch.bool)
    for row, ids in enumerate(tokens):
        mask[row, torch.as_tensor(ids, dtype=torch.int64)] = True
    return mask


class _Trace:
    """What each step produced, until all requests have ended."""

    def __init__(self, k: int) -> None:
        self._k = k
        # Empty first parts, for a batch cancelled before its first step.
        self._rows = [torch.empty(0, dtype=torch.int64)]
        self._tokens = [torch.empty(0, dtype=torch.int64)]
        self._logps = [torch.empty(0)]
        self._topk_ids = [torch.empty(0, k, dtype=torch.int32)]
        self._topk_logps = [torch.empty(0, k)]
        self._reasons: dict[int, FinishReason] = {}

    def add(self, rows_B: Tensor, token_B: Tensor, logp_BV: Tensor) -> None:
        self._rows.append(rows_B)
        self._tokens.append(token_B)
        self._logps.append(logp_BV.gather(-1, token_B[:, None])[:, 0])
        if self._k:
            logps_BK, ids_BK = logp_BV.topk(self._k, -1)
            self._topk_ids.append(ids_BK.int())
            self._topk_logps.append(logps_BK)

    def finish(self, rows: Tensor, reason: FinishReason) -> None:
        if len(rows):
            self._reasons.update(dict.fromkeys(rows.tolist(), reason))

    def completions(self, requests: Sequence[Request]) -> list[Completion]:
        rows_F = torch.cat(self._rows)
        order_F = rows_F.argsort(stable=True)  # a request's tokens together, in the order they were drawn
        lengths = rows_F.bincount(minlength=len(requests)).tolist()
        tokens = torch.split(torch.cat(self._tokens)[order_F], lengths)
        logps = torch.split(torch.cat(self._logps)[order_F], lengths)
        if not self._k:
            return [self._completion(n, tokens[n], logps[n]) for n in range(len(requests))]
        topk_ids = torch.split(torch.cat(self._topk_ids)[order_F], lengths)
        topk_logps = torch.split(torch.cat(self._topk_logps)[order_F], lengths)
        return [
            self._completion(n, tokens[n], logps[n], request.params.topk, topk_ids[n], topk_logps[n])
            for n, request in enumerate(requests)
        ]

    def _completion(
        self,
        n: int,
        token_T: Tensor,
        logp_T: Tensor,
        k: int | None = None,
        ids_TK: Tensor | None = None,
        logp_TK: Tensor | None = None,
    ) -> Completion:
        topk_ids, topk_logps = None, None
        if k is not None and ids_TK is not None and logp_TK is not None:
            topk_ids, topk_logps = select_rows(ids_TK.numpy(), logp_TK.numpy(), token_T.numpy(), logp_T.numpy(), k)
        return Completion(
            token_ids=token_T.tolist(),
            logps=logp_T.tolist(),
            finish_reason=self._reasons[n],
            topk_ids=topk_ids,
            topk_logps=topk_logps,
        )
