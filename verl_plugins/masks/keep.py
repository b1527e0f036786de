# Axes in this file: N tokens; every argument and result may have any number of leading axes instead.
"""Which tokens may move the policy. A mask is bool and true means keep; a weight is float."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keep_mask(divergence_N: Tensor, slope_N: Tensor, advantage_N: Tensor, delta: float) -> Tensor:
    """Drop a token only if it is too far from the anchor and its own update would take it farther.

    A token is dropped iff D > delta and A * slope > 0. Both are strict, so A = 0, slope = 0 (for the ratio direction
    that is q_a = p_a) and D = delta keep.

    Args:
        divergence_N: D per token; +inf counts as above every threshold.
        slope_N: predicted change of D per unit of advantage; only its sign is used.
        advantage_N: advantage A per token; only its sign is used.
        delta: threshold on D, in nats for a KL and in [0, 1] for a total variation; at least 0. `math.inf` keeps all.

    Returns:
        keep_N, bool, true = keep, no gradient.

    Raises:
        ValueError: `delta` is negative or NaN, or the shapes differ.

    Source: Qi et al. 2026, arXiv:2602.04879 (ratio direction); arXiv:2607.10848 (predicted direction).
    """
    if not delta >= 0.0:
        raise ValueError(
            f"delta must be at least 0, got {delta}; type e.g. actor_rollout_ref.actor.policy_loss.delta=0.05"
        )
    if not divergence_N.shape == slope_N.shape == advantage_N.shape:
        raise ValueError(
            "divergence, slope and advantage must have one shape, got "
            f"{tuple(divergence_N.shape)}, {tuple(slope_N.shape)} and {tuple(advantage_N.shape)}"
        )
    # Signs are multiplied, not values: a product of two small numbers would underflow to 0 and keep.
    farther_N = torch.sign(advantage_N.detach()) * torch.sign(slope_N.detach()) > 0
    return ~((divergence_N.detach() > delta) & farther_N)


def clip_band_mask(log_ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The mask hidden in PPO's min(rA, clip(r)A): where that objective has a gradient.

    A token is dropped iff A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low.

    Args:
        log_ratio_N: log of r, current over anchor probability of the sampled token, in nats.
        advantage_N: advantage A per token.
        clip_low: width of the band below 1, in [0, 1].
        clip_high: width of the band above 1, at least 0; larger than `clip_low` is clip-higher.

    Returns:
        keep_N, bool, true = keep, no gradient.

    Raises:
        ValueError: a width outside its range, or the shapes differ.

    Source: Schulman et al. 2017, arXiv:1707.06347; clip-higher: Yu et al. 2025, arXiv:2503.14476.
    """
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(
            f"clip_low must lie in [0, 1], got {clip_low}; type e.g. actor_rollout_ref.actor.clip_ratio_low=0.2"
        )
    if not clip_high >= 0.0:
        raise ValueError(
            f"clip_high must be at least 0, got {clip_high}; type e.g. actor_rollout_ref.actor.clip_ratio_high=0.28"
        )
    if log_ratio_N.shape != advantage_N.shape:
        raise ValueError(
            "log_ratio and advantage must have one shape, got "
            f"{tuple(log_ratio_N.shape)} and {tuple(advantage_N.shape)}"
        )
    ratio_N, advantage_N = log_ratio_N.detach().float().exp(), advantage_N.detach()
    too_high_N = (advantage_N > 0) & (ratio_N > 1.0 + clip_high)
    too_low_N = (advantage_N < 0) & (ratio_N < 1.0 - clip_low)
    return ~(too_high_N | too_low_N)


def truncated_weight(log_ratio_N: Tensor, cap: float) -> Tensor:
    """The importance weight min(r, cap) that multiplies A * log q_a in the REINFORCE form of the loss.

    Args:
        log_ratio_N: log of r, current over anchor probability of the sampled token, in nats; any size is safe.
        cap: the truncation C, finite and above 0.

    Returns:
        weight_N in [0, cap], float32, detached.

    Raises:
        ValueError: `cap` is not finite or not above 0.

    Source: Qi et al. 2026, arXiv:2602.04879, section 5.4.
    """
    if not 0.0 < cap < math.inf:
        raise ValueError(
            f"cap must be finite and above 0, got {cap}; type e.g. actor_rollout_ref.actor.policy_loss.truncation=10"
        )
    # exp may overflow to inf, which the clamp turns into the cap; there is no gradient for it to spoil.
    return log_ratio_N.detach().float().exp().clamp(max=cap)
