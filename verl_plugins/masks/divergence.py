# Axes in this file: N tokens, K listed vocabulary entries (the sampled token is one of them).
# p is the anchor policy (the rollout, or the recomputed old policy), q the policy being trained.
"""How far the policy being trained is from its anchor, token by token, seen through K listed entries and a tail.

The tail is one pseudo-token that carries the mass of all unlisted entries. Merging entries can hide a difference but
never invent one, so each divergence here is at most its full-vocabulary value and equals it when K covers the
vocabulary. All results are float32 and detached: they decide a mask and are never a loss term.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PROBABILITY_CLAMP = 1e-12
"""Smallest probability whose logarithm is taken, for tails and for an anchor probability that divides.

One value for all divergences. An entry listed with p > 0 and q = 0 is left at its true forward KL, +inf, which is
above every threshold.
"""

LOG_CLAMP = math.log(PROBABILITY_CLAMP)


def topk_forward_kl(logp_NK: Tensor, logq_NK: Tensor, log_tail_p_N: Tensor, log_tail_q_N: Tensor) -> Tensor:
    """KL(anchor || current) over K listed entries and the tail.

    Args:
        logp_NK: anchor log-probabilities in nats; -inf is allowed and adds nothing.
        logq_NK: current log-probabilities of the same entries; -inf where p > 0 gives +inf, never NaN.
        log_tail_p_N: log of the anchor mass outside the list, in nats; -inf for an empty tail.
        log_tail_q_N: the same for the current policy.

    Returns:
        D_N in nats, float32, at least 0, detached.

    Raises:
        ValueError: shapes do not match.

    Source: Qi et al. 2026, arXiv:2602.04879, top-K KL. Departure: the sampled token's log-ratio and the listed ones
    are unclamped, only the tails are clamped at `PROBABILITY_CLAMP`.
    """
    logp_NK, logq_NK, log_tail_p_N, log_tail_q_N = aligned(logp_NK, logq_NK, log_tail_p_N, log_tail_q_N)
    p_NK = logp_NK.exp()
    terms_NK = torch.where(p_NK > 0, p_NK * (logp_NK - logq_NK), 0.0)
    tail_N = log_tail_p_N.exp() * (log_tail_p_N.clamp_min(LOG_CLAMP) - log_tail_q_N.clamp_min(LOG_CLAMP))
    # Rounding can leave a zero divergence a few 1e-8 below zero.
    return (terms_NK.sum(-1) + tail_N).clamp_min(0.0)


def topk_reverse_kl(logp_NK: Tensor, logq_NK: Tensor, log_tail_p_N: Tensor, log_tail_q_N: Tensor) -> Tensor:
    """KL(current || anchor) over K listed entries and the tail.

    An anchor probability of zero would make it infinite for every current policy, so p is clamped at
    `PROBABILITY_CLAMP`. It reads log p_T, so it is more sensitive than the other two to the resolution of
    `anchor_log_tail`: with q_T = 0.01, reading p_T = 1e-9 as 0 adds 0.07 nats.

    Args:
        logp_NK: anchor log-probabilities in nats.
        logq_NK: current log-probabilities of the same entries; -inf adds nothing.
        log_tail_p_N: log of the anchor mass outside the list, in nats; -inf for an empty tail.
        log_tail_q_N: the same for the current policy.

    Returns:
        D_N in nats, float32, at least 0, detached.

    Raises:
        ValueError: shapes do not match.

    Source: the reverse form of arXiv:2602.04879, top-K KL.
    """
    logp_NK, logq_NK, log_tail_p_N, log_tail_q_N = aligned(logp_NK, logq_NK, log_tail_p_N, log_tail_q_N)
    q_NK = logq_NK.exp()
    terms_NK = torch.where(q_NK > 0, q_NK * (logq_NK - logp_NK.clamp_min(LOG_CLAMP)), 0.0)
    tail_N = log_tail_q_N.exp() * (log_tail_q_N.clamp_min(LOG_CLAMP) - log_tail_p_N.clamp_min(LOG_CLAMP))
    return (terms_NK.sum(-1) + tail_N).clamp_min(0.0)


def topk_tv(logp_NK: Tensor, logq_NK: Tensor, log_tail_p_N: Tensor, log_tail_q_N: Tensor) -> Tensor:
    """Total variation between anchor and current policy over K listed entries and the tail.

    Args:
        logp_NK: anchor log-probabilities in nats.
        logq_NK: current log-probabilities of the same entries.
        log_tail_p_N: log of the anchor mass outside the list, in nats; -inf for an empty tail.
        log_tail_q_N: the same for the current policy.

    Returns:
        D_N in [0, 1], float32, detached.

    Raises:
        ValueError: shapes do not match.

    Source: Qi et al. 2026, arXiv:2602.04879, top-K TV.
    """
    logp_NK, logq_NK, log_tail_p_N, log_tail_q_N = aligned(logp_NK, logq_NK, log_tail_p_N, log_tail_q_N)
    listed_N = (logp_NK.exp() - logq_NK.exp()).abs().sum(-1)
    return 0.5 * (listed_N + (log_tail_p_N.exp() - log_tail_q_N.exp()).abs())


def binary_kl(logp_N: Tensor, logq_N: Tensor) -> Tensor:
    """KL between "the sampled token" and "any other": p_a log(p_a/q_a) + (1-p_a) log((1-p_a)/(1-q_a)).

    It is `topk_forward_kl` with the sampled token as the whole list, bit for bit.

    Args:
        logp_N: anchor log-probability of the sampled token, in nats.
        logq_N: current log-probability of the same token.

    Returns:
        D_N in nats, float32, at least 0, detached.

    Raises:
        ValueError: shapes do not match.

    Source: Qi et al. 2026, arXiv:2602.04879, binary KL. Departure: 1-p and 1-q are clamped at `PROBABILITY_CLAMP`
    instead of having 1e-8 added.
    """
    logp_N1, logq_N1 = logp_N.unsqueeze(-1), logq_N.unsqueeze(-1)
    return topk_forward_kl(logp_N1, logq_N1, anchor_log_tail(logp_N1), anchor_log_tail(logq_N1))


def binary_tv(logp_N: Tensor, logq_N: Tensor) -> Tensor:
    """Total variation between "the sampled token" and "any other": |q_a - p_a|.

    It is `topk_tv` with the sampled token as the whole list, bit for bit.

    Args:
        logp_N: anchor log-probability of the sampled token, in nats.
        logq_N: current log-probability of the same token.

    Returns:
        D_N in [0, 1], float32, detached.

    Raises:
        ValueError: shapes do not match.

    Source: Qi et al. 2026, arXiv:2602.04879, binary TV.
    """
    logp_N1, logq_N1 = logp_N.unsqueeze(-1), logq_N.unsqueeze(-1)
    return topk_tv(logp_N1, logq_N1, anchor_log_tail(logp_N1), anchor_log_tail(logq_N1))


def anchor_log_tail(logp_NK: Tensor) -> Tensor:
    """Log of the mass outside the list, 1 - sum p, where only the K log-probabilities are known.

    Its resolution is about 1e-7: rounding the log-probabilities to float32 moves their sum by that much, whatever the
    arithmetic after it. A smaller tail is noise and may come out as zero. The forward KL and the TV hardly see it (an
    error of 1e-7 in p_T moves them by at most 3e-6); see `topk_reverse_kl` for the one that does. For the policy being
    trained take the tail from the logits instead.

    Args:
        logp_NK: log-probabilities in nats of K distinct entries.

    Returns:
        log_tail_N in nats, float32, at most 0, -inf where the list sums to 1 or more, detached.
    """
    # In float64 the subtraction itself costs nothing: the float32 inputs are then the only source of error.
    log_listed_N = torch.logsumexp(logp_NK.detach().double(), dim=-1)
    return (-torch.expm1(log_listed_N.clamp_max(0.0))).log().float()


def aligned(logp_NK: Tensor, logq_NK: Tensor, log_tail_p_N: Tensor, log_tail_q_N: Tensor) -> tuple[Tensor, ...]:
    """The four inputs of a top-K divergence, detached and in float32, with their shapes checked.

    Args:
        logp_NK: anchor log-probabilities of the listed entries; leading axes of any number.
        logq_NK: current log-probabilities, same shape.
        log_tail_p_N: log of the anchor tail, the shape of `logp_NK` without its last axis.
        log_tail_q_N: log of the current tail, same shape.

    Returns:
        The four tensors in the order given.

    Raises:
        ValueError: shapes do not match.
    """
    if logp_NK.ndim == 0 or logp_NK.shape != logq_NK.shape:
        raise ValueError(
            f"logp and logq must list the same entries, got shapes {tuple(logp_NK.shape)} and {tuple(logq_NK.shape)}"
        )
    for name, log_tail_N in (("log_tail_p", log_tail_p_N), ("log_tail_q", log_tail_q_N)):
        if log_tail_N.shape != logp_NK.shape[:-1]:
            raise ValueError(
                f"{name} must have one value per token, {tuple(logp_NK.shape[:-1])}, got {tuple(log_tail_N.shape)}"
            )
    return tuple(x.detach().float() for x in (logp_NK, logq_NK, log_tail_p_N, log_tail_q_N))
