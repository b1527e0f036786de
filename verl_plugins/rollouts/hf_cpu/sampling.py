"""The law a token is drawn from: vLLM's sampling parameters, its order of operations and its definitions. Pure torch.

In order, as in vLLM 0.30 (`v1/sample/sampler.py`): logits to float32; stop tokens barred before `min_tokens`;
repetition penalty; (greedy choice); temperature; min_p; top_k; top_p; log-softmax, which is what vLLM calls
`processed_logprobs` and what a trainer that divides its logits by the temperature computes again.

Departures: a temperature in (0, 0.01) is refused, not raised to 0.01; a parameter this rollout does not have is
refused; filters touch only the requests that ask for them, so a sample does not depend on the batch it landed in.

Shapes in this file: B requests in the batch, V vocabulary entries, S stop tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl_plugins.topk.rows import REQUEST_TOPK, check_k

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "max_new_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "extra_args",
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for, checked.

    `top_k` 0 keeps the whole vocabulary; `temperature` 0 is greedy, its log-probabilities those of temperature 1;
    `topk` is the length of the K-list to return for each token, None for no list.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    topk: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE,
            f"temperature must be 0 (greedy) or in [{_MIN_TEMPERATURE}, {_MAX_TEMPERATURE}]",
            self.temperature,
        )
        _require(0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "top_k must be -1 or 0 (all tokens) or at least 1", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p)
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty must be positive",
            self.repetition_penalty,
        )
        _require(self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens)
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be in [0, {self.max_tokens}] (max_tokens)",
            self.min_tokens,
        )
        if self.topk is not None:
            self._check_whole_law()

    def _check_whole_law(self) -> None:
        cut = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "min_tokens": self.min_tokens > 0,
        }
        if any(cut.values()):
            names = ", ".join(name for name, is_cut in cut.items() if is_cut)
            raise ValueError(
                f"{REQUEST_TOPK}={self.topk} needs the softmax of the whole vocabulary, which the trainer can compute "
                f"again, but {names} changes it; sample with top_p=1.0, top_k=-1, min_p=0, repetition_penalty=1.0, "
                f"min_tokens=0 (actor_rollout_ref.rollout.*) or without {REQUEST_TOPK}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without a draw."""
        return self.temperature == 0


def parse_sampling_params(asked: Mapping[str, Any], *, max_tokens: int, vocabulary: int) -> SamplingParams:
    """Check a request's sampling parameters and bring them into one form.

    Args:
        asked: parameters by vLLM's names; None stands for the default.
        max_tokens: the limit in tokens, which the caller derives from the request and the room in the context.
        vocabulary: number of logits of the model.

    Raises:
        ValueError: an unknown parameter, or a value out of range; says what is allowed.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    if given.pop("stop", None):
        raise ValueError("stop strings need detokenisation, which hf_cpu does not do; use stop_token_ids")
    unknown = sorted(given.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"hf_cpu has no sampling parameter {', '.join(unknown)}; allowed: {', '.join(_KEYS)}")
    logprobs = given.get("logprobs", False)
    if logprobs not in (False, True):
        raise ValueError(
            f"logprobs must be true or false, got {logprobs!r}; for the K best of each token send "
            f'extra_args={{"{REQUEST_TOPK}": K}}'
        )
    seed = given.get("seed")
    top_k = int(given.get("top_k", 0))
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=0 if top_k == -1 or top_k >= vocabulary else top_k,
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
        seed=None if seed in (None, -1) else int(seed),  # -1 is "no seed" in vLLM too
        min_tokens=int(given.get("min_tokens", 0)),
        stop_token_ids=_stop_ids(given.get("stop_token_ids", ()), vocabulary),
        ignore_eos=bool(given.get("ignore_eos", False)),
        logprobs=bool(logprobs),
        topk=_asked_topk(given.get("extra_args", {}), vocabulary),
    )
    # vLLM: a greedy request has nothing to filter
    return replace(params, top_p=1.0, top_k=0, min_p=0.0) if params.greedy else params


def _stop_ids(ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"stop_token_ids must be integers from 0 to {vocabulary - 1}, got {token!r}")
    return tuple(dict.fromkeys(ids))


def _asked_topk(extra_args: Mapping[str, Any], vocabulary: int) -> int | None:
    unknown = sorted(extra_args.keys() - {REQUEST_TOPK})
    if unknown:
        raise ValueError(f"hf_cpu knows extra_args {REQUEST_TOPK} only, got {', '.join(unknown)}")
    k = extra_args.get(REQUEST_TOPK)
    if k is not None:
        check_k(k, vocabulary)
    return k


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{rule}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Law:
    """The sampling parameters of a batch as tensors; a filter that no request asks for is None."""

    greedy_B: Tensor
    temperature_B1: Tensor
    min_tokens_B: Tensor | None
    repetition_penalty_B1: Tensor | None
    min_p_B1: Tensor | None
    top_k_B: Tensor | None
    top_p_B: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Law:
        """Stack the parameters of a batch."""

        def stack(values: Sequence[float], neutral: float) -> Tensor | None:
            return torch.tensor(values) if any(value != neutral for value in values) else None

        def column(values: Sequence[float], neutral: float) -> Tensor | None:
            stacked = stack(values, neutral)
            return None if stacked is None else stacked[:, None]

        return cls(
            greedy_B=torch.tensor([p.greedy for p in params]),
            temperature_B1=torch.tensor([1.0 if p.greedy else p.temperature for p in params])[:, None],
            min_tokens_B=stack([p.min_tokens for p in params], 0),
            repetition_penalty_B1=column([p.repetition_penalty for p in params], 1.0),
            min_p_B1=column([p.min_p for p in params], 0.0),
            top_k_B=stack([p.top_k for p in params], 0),
            top_p_B=stack([p.top_p for p in params], 1.0),
        )

    def select(self, rows: Tensor) -> Law:
        """Keep some requests of the batch, by index."""
        kept: dict[str, Any] = {name: None if value is None else value[rows] for name, value in vars(self).items()}
        return Law(**kept)


def processed_logits(
    logits_BV: Tensor, law: Law, *, step: int, seen_BV: Tensor | None = None, barred_BV: Tensor | None = None
) -> Tensor:
    """Apply penalties, temperature and filters; a log-softmax of the result is the law of the next token.

    Args:
        logits_BV: last position of the model's output, any float type; not modified.
        law: the parameters of the same requests.
        step: how many tokens each request has so far.
        seen_BV: tokens of prompt and response so far; needed with a repetition penalty.
        barred_BV: the stop tokens; needed with min_tokens.

    Returns:
        float32 [B, V], -inf where a token cannot be drawn.
    """
    logits = logits_BV.float()
    if law.min_tokens_B is not None and barred_BV is not None:
        logits = logits.masked_fill(barred_BV & (step < law.min_tokens_B)[:, None], -math.inf)
    if law.repetition_penalty_B1 is not None and seen_BV is not None:
        penalty = torch.where(seen_BV, law.repetition_penalty_B1, 1.0)
        logits = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = logits / law.temperature_B1
    if law.min_p_B1 is not None:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < law.min_p_B1 * probs.amax(-1, keepdim=True), -math.inf)
    if law.top_k_B is not None:
        logits = _keep_top_k(logits, law.top_k_B)
    if law.top_p_B is not None:
        rows = (law.top_p_B < 1).nonzero()[:, 0]
        logits = logits.index_copy(0, rows, _keep_top_p(logits[rows], law.top_p_B[rows]))
    return logits


def _keep_top_k(logits_BV: Tensor, top_k_B: Tensor) -> Tensor:
    most = max(int(top_k_B.max()), 1)
    kth_B1 = logits_BV.topk(most, -1).values.gather(-1, (top_k_B.clamp(min=1) - 1)[:, None])
    # Ties with the K-th are kept, as vLLM does.
    return logits_BV.masked_fill((top_k_B > 0)[:, None] & (logits_BV < kth_B1), -math.inf)


def _keep_top_p(logits_BV: Tensor, top_p_B: Tensor) -> Tensor:
    ascending_BV, order_BV = logits_BV.sort(-1)
    mass_BV = ascending_BV.softmax(-1).cumsum(-1)
    drop_BV = mass_BV <= 1 - top_p_B[:, None]
    drop_BV[:, -1] = False
    return logits_BV.scatter(-1, order_BV, ascending_BV.masked_fill(drop_BV, -math.inf))


def draw(logits_BV: Tensor, logp_BV: Tensor, greedy_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Choose a token for each request: the best one if greedy, else by inverting the distribution function.

    One uniform number decides one token, so that a request's draws are its own whatever its batch. The sums are
    float64: in float32 the tail of a large vocabulary would vanish in rounding.

    Args:
        logits_BV: processed logits, for the greedy choice (a log-softmax may round two logits into a tie).
        logp_BV: their log-softmax.
        greedy_B: which requests are greedy.
        uniform_B: float64 in [0, 1).

    Returns:
        int64 [B] token ids; a token of probability zero is never chosen.
    """
    if greedy_B.all():
        return logits_BV.argmax(-1)
    mass_BV = logp_BV.double().exp().cumsum(-1)
    drawn_B = torch.searchsorted(mass_BV, (uniform_B * mass_BV[:, -1])[:, None], right=True)[:, 0]
    if greedy_B.any():
        return torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    return drawn_B
