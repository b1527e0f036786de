# Axes in this file: N tokens, K listed vocabulary entries (the sampled token is one of them).
# p is the anchor policy, q the policy being trained, a the sampled token, A its advantage.
"""Whether a token's own update would raise or lower its divergence from the anchor.

A policy-gradient step moves the logits of a token's position along A * (e_a - q). To first order the divergence then
changes by A * s with

    u_b = q_b * (d_b - sum_c q_c d_c),   d_b = dD/dq_b,   s = u_a - sum_b q_b u_b.

The unlisted entries share one derivative d_T, so they enter s only through Q2, the sum of their q_b squared:
sum_b q_b u_b = sum over the list of q_b^2 (d_b - dbar) + Q2 * (d_T - dbar). What is assumed about the tail is
therefore one number per token, and `tail_square` gives it for every tail.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl_plugins.masks.divergence import LOG_CLAMP, aligned

TopKDivergence = Literal["topk_forward_kl", "topk_reverse_kl", "topk_tv"]
Tail = Literal["aggregated", "uniform", "exact"]


def tail_square(tail: Tail, log_tail_q_N: Tensor, num_unlisted: int, exact_N: Tensor | None = None) -> Tensor:
    """Q2, the sum of q_b squared over the unlisted entries, under one assumption about the tail.

    By Cauchy-Schwarz q_T^2 / num_unlisted <= Q2 <= q_T^2: `uniform` and `aggregated` are the two ends of the interval
    the true value lies in.

    Args:
        tail: `aggregated` (one pseudo-token, q_T^2), `uniform` (spread evenly, q_T^2 / num_unlisted) or `exact`
            (`exact_N`, which makes `slope` the true derivative of the top-K divergence).
        log_tail_q_N: log of the current policy's mass outside the list, in nats.
        num_unlisted: real vocabulary size minus K, without rows that pad the vocabulary. At 0 or less nothing is
            unlisted, and all tails give 0.
        exact_N: the true sum; required by `exact`, refused by the others.

    Returns:
        tail_square_N in [0, 1], float32, detached.

    Raises:
        ValueError: unknown tail, or `exact_N` missing or superfluous, or of another shape.

    Source: aggregated and uniform tails of arXiv:2607.10848; the exact one is the derivative of the aggregated D.
    """
    if tail not in get_args(Tail):
        raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, got {tail!r}")
    if (exact_N is not None) != (tail == "exact"):
        raise ValueError(f"exact_N goes with tail='exact' and with no other, got tail={tail!r} and {exact_N!r:.60}")
    log_tail_q_N = log_tail_q_N.detach().float()
    if exact_N is not None:
        if exact_N.shape != log_tail_q_N.shape:
            raise ValueError(f"exact_N must have shape {tuple(log_tail_q_N.shape)}, got {tuple(exact_N.shape)}")
        return exact_N.detach().float()
    if num_unlisted <= 0:
        return torch.zeros_like(log_tail_q_N)
    square_N = (2.0 * log_tail_q_N).exp()
    return square_N if tail == "aggregated" else square_N / num_unlisted


def slope(
    divergence: TopKDivergence,
    logp_NK: Tensor,
    logq_NK: Tensor,
    log_tail_p_N: Tensor,
    log_tail_q_N: Tensor,
    tail_square_N: Tensor,
    sampled_index_N: Tensor,
) -> Tensor:
    """Predicted change of the divergence per unit of advantage along the token's own logit step e_a - q.

    A * slope > 0 means that the token's own update would raise D. For K=1 its sign is the ratio test's, whatever the
    divergence and the tail, so prediction needs K >= 2 to differ from DPPO.

    Args:
        divergence: which of the divergences in `verl_plugins.masks.divergence` to differentiate.
        logp_NK: anchor log-probabilities in nats.
        logq_NK: current log-probabilities of the same entries.
        log_tail_p_N: log of the anchor mass outside the list; -inf for an empty tail.
        log_tail_q_N: the same for the current policy; the tail's term is dropped where it is -inf (its limit is 0).
        tail_square_N: sum of q_b squared over the unlisted entries, from `tail_square`.
        sampled_index_N: place of the sampled token in the list, integer in [0, K).

    Returns:
        slope_N, float32, finite, detached.

    Raises:
        ValueError: unknown divergence, or shapes that do not match.

    Source: arXiv:2607.10848. Departure: published accounts print a squared gap as the local term and add the global
    one; the derivative has the gap itself and subtracts it.
    """
    logp_NK, logq_NK, log_tail_p_N, log_tail_q_N = aligned(logp_NK, logq_NK, log_tail_p_N, log_tail_q_N)
    for name, value_N in (("tail_square", tail_square_N), ("sampled_index", sampled_index_N)):
        if value_N.shape != log_tail_q_N.shape:
            raise ValueError(f"{name} must have shape {tuple(log_tail_q_N.shape)}, got {tuple(value_N.shape)}")
    laws = logp_NK, logq_NK, log_tail_p_N, log_tail_q_N
    if divergence == "topk_forward_kl":
        step_NK, tail_N = _forward_kl_steps(*laws, tail_square_N.detach().float())
    else:
        step_NK, tail_N = _steps_from_rates(divergence, *laws, tail_square_N.detach().float())
    local_N = step_NK.gather(-1, sampled_index_N.long().unsqueeze(-1)).squeeze(-1)
    return local_N - (logq_NK.exp() * step_NK).sum(-1) - tail_N


def _forward_kl_steps(
    logp_NK: Tensor, logq_NK: Tensor, log_tail_p_N: Tensor, log_tail_q_N: Tensor, tail_square_N: Tensor
) -> tuple[Tensor, Tensor]:
    """u_b of the listed entries and the sum of q_b u_b over the tail, for KL(p || q).

    d_b = -p_b/q_b and dbar = -1, so that q_b (d_b - dbar) is q_b - p_b without any division.
    """
    tail_p_N, tail_q_N = log_tail_p_N.exp(), log_tail_q_N.exp()
    per_mass_N = torch.where(tail_q_N > 0, tail_square_N / tail_q_N, 0.0)
    return logq_NK.exp() - logp_NK.exp(), (tail_q_N - tail_p_N) * per_mass_N


def _steps_from_rates(
    divergence: str,
    logp_NK: Tensor,
    logq_NK: Tensor,
    log_tail_p_N: Tensor,
    log_tail_q_N: Tensor,
    tail_square_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same two for a divergence given by its rates d_b = dD/dq_b, each up to one constant for all b."""
    q_NK, tail_q_N = logq_NK.exp(), log_tail_q_N.exp()
    if divergence == "topk_tv":
        # sign(0) = 0 at the kink q_b = p_b.
        rate_NK = 0.5 * torch.sign(q_NK - logp_NK.exp())
        rate_tail_N = 0.5 * torch.sign(tail_q_N - log_tail_p_N.exp())
    elif divergence == "topk_reverse_kl":
        # q log q -> 0: an entry without mass moves nothing.
        rate_NK = torch.where(q_NK > 0, logq_NK - logp_NK.clamp_min(LOG_CLAMP), 0.0)
        rate_tail_N = log_tail_q_N.clamp_min(LOG_CLAMP) - log_tail_p_N.clamp_min(LOG_CLAMP)
    else:
        raise ValueError(
            f"divergence must be one of {', '.join(get_args(TopKDivergence))}, got {divergence!r}; "
            "for a binary divergence the direction is ratio_slope"
        )
    mean_rate_N = (q_NK * rate_NK).sum(-1) + tail_q_N * rate_tail_N
    return q_NK * (rate_NK - mean_rate_N.unsqueeze(-1)), tail_square_N * (rate_tail_N - mean_rate_N)


def ratio_slope(logp_N: Tensor, logq_N: Tensor) -> Tensor:
    """DPPO's direction test: the sign of q_a - p_a, +1, 0 or -1.

    It is the predicted direction itself for the binary divergences: there dq_a/dstep = A q_a (1 - 2 q_a + |q|^2), so
    D rises exactly when A and q_a - p_a have the same sign.

    Args:
        logp_N: anchor log-probability of the sampled token, in nats.
        logq_N: current log-probability of the same token.

    Returns:
        slope_N in {-1, 0, 1}, float32, detached.

    Raises:
        ValueError: shapes do not match.

    Source: Qi et al. 2026, arXiv:2602.04879.
    """
    if logp_N.shape != logq_N.shape:
        raise ValueError(f"logp and logq must have one shape, got {tuple(logp_N.shape)} and {tuple(logq_N.shape)}")
    # Compared, not subtracted: -inf minus -inf is NaN.
    p_N, q_N = logp_N.detach().float(), logq_N.detach().float()
    return (q_N > p_N).float() - (q_N < p_N).float()
