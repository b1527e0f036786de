"""The one policy loss behind all our names: mask x truncated weight x log-probability, in verl's signature.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss

from verl_plugins.losses.signals import TokenSignals, current
from verl_plugins.losses.trust_region import PRESETS, TrustRegion
from verl_plugins.masks.direction import ratio_slope
from verl_plugins.masks.divergence import binary_kl, binary_tv
from verl_plugins.masks.keep import clip_band_mask, keep_mask, truncated_weight
from verl_plugins.registrations import check_signature, completed


def trust_region_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """REINFORCE with a truncated importance weight, masked where the token would leave the trust region.

    loss = -agg( A · sg(min(r, C)) · M · log q_a ), with r = q_a / p_a against the anchor and M of the region in force.
    Masked tokens stay in the denominator, as in DPPO's code: masking must not raise the step size of the others.

    Args:
        old_log_prob: (B, T) log-probabilities verl calls old (the rollout's own in bypass mode). Not read: the engine
            delivers the anchor's.
        log_prob: (B, T) log-probabilities being trained.
        advantages: (B, T).
        response_mask: (B, T) bool, true for tokens the policy generated.
        loss_agg_mode: one of verl's aggregation modes.
        config: verl's actor config, whose `policy_loss` is `verl_plugins.config.PolicyLoss`.
        rollout_is_weights: (B, T) importance weights of verl's rollout correction, only with anchor=old.

    Returns:
        the loss, a scalar with gradient, and an empty dict: the engine reports the metrics, once per mini-batch.

    Raises:
        TypeError: `policy_loss` is verl's own dataclass, so that our keys were never read.
        ValueError: importance weights arrived although the ratio to the rollout is the correction.
        RuntimeError: no engine of ours measured the tokens.

    Source: METHODS 3.1 (DPPO, arXiv:2602.04879) and 4.1 (PDM, arXiv:2607.10848).
    """
    region = _region_of(config)
    signals = current(region.name)
    if region.anchor == "rollout" and rollout_is_weights is not None:
        raise ValueError(
            f"{region.name}: anchor=rollout and algorithm.rollout_correction.rollout_is would correct twice. "
            "Set algorithm.rollout_correction.rollout_is=null."
        )
    logp_BT = log_prob.detach().float()
    log_ratio_BT = logp_BT - signals.anchor_logp_BT
    divergence_BT = _divergence(region, signals, logp_BT)
    kept_BT = _kept(region, signals, divergence_BT, log_ratio_BT, logp_BT, advantages, config)
    weight_BT = truncated_weight(log_ratio_BT, region.truncation) * kept_BT
    if rollout_is_weights is not None:
        weight_BT = weight_BT * rollout_is_weights
    loss = agg_loss(
        loss_mat=-advantages * weight_BT * log_prob,
        loss_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )
    _observe(region, signals, divergence_BT, kept_BT, log_ratio_BT, logp_BT, advantages, response_mask)
    return loss, {}


def _region_of(config: Any) -> TrustRegion:
    build = getattr(config.policy_loss, "trust_region", None)
    region = build() if build is not None else None
    if not isinstance(region, TrustRegion):
        raise TypeError(
            f"policy loss {config.policy_loss.loss_mode!r} needs "
            "actor_rollout_ref.actor.policy_loss._target_=verl_plugins.config.PolicyLoss, "
            f"got {type(config.policy_loss).__name__}"
        )
    return region


def _divergence(region: TrustRegion, signals: TokenSignals, logp_BT: Tensor) -> Tensor:
    """Divergence per token; where the region has none, the binary KL, for the metrics alone."""
    if region.needs_topk:
        if signals.divergence_BT is None:
            raise RuntimeError(f"{region.name}: the engine measured no top-K divergence")
        return signals.divergence_BT
    if region.divergence == "binary_tv":
        return binary_tv(signals.anchor_logp_BT, logp_BT)
    return binary_kl(signals.anchor_logp_BT, logp_BT)


def _kept(
    region: TrustRegion,
    signals: TokenSignals,
    divergence_BT: Tensor,
    log_ratio_BT: Tensor,
    logp_BT: Tensor,
    advantages: Tensor,
    config: Any,
) -> Tensor:
    if region.divergence == "none":
        return torch.ones_like(log_ratio_BT, dtype=torch.bool)
    if region.divergence == "ratio":
        return clip_band_mask(log_ratio_BT, advantages, config.clip_ratio_low, config.clip_ratio_high)
    return keep_mask(divergence_BT, _slope(region, signals, logp_BT), advantages, region.delta)


def _slope(region: TrustRegion, signals: TokenSignals, logp_BT: Tensor) -> Tensor:
    # A binary divergence moves with q_a alone, so its predicted direction is the ratio's (METHODS 4.2).
    if region.direction == "predicted" and signals.slope_BT is not None:
        return signals.slope_BT
    return ratio_slope(signals.anchor_logp_BT, logp_BT)


def _observe(
    region: TrustRegion,
    signals: TokenSignals,
    divergence_BT: Tensor,
    kept_BT: Tensor,
    log_ratio_BT: Tensor,
    logp_BT: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> None:
    """Leave what the metrics need, flat over response tokens and on the device."""
    seen = response_mask.bool()
    signals.observed = {
        "divergence": divergence_BT[seen],
        "masked": ~kept_BT[seen],
        "advantage": advantages.detach().float()[seen],
        "ratio": log_ratio_BT[seen].clamp(max=20.0).exp(),
        "truncated": log_ratio_BT[seen].exp() > region.truncation,
    }
    if signals.slope_BT is not None:
        ratio_BT = ratio_slope(signals.anchor_logp_BT, logp_BT)
        by_ratio_BT = ~keep_mask(divergence_BT, ratio_BT, advantages, region.delta)
        by_prediction_BT = ~keep_mask(divergence_BT, signals.slope_BT, advantages, region.delta)
        other_BT = by_ratio_BT if region.direction == "predicted" else by_prediction_BT
        signals.observed["masked_here_only"] = (~kept_BT & ~other_BT)[seen]
        signals.observed["directions_disagree"] = (by_ratio_BT ^ by_prediction_BT)[seen]
    if signals.carried_logp_BT is not None:
        signals.observed["list_mismatch"] = (signals.anchor_logp_BT - signals.carried_logp_BT).abs()[seen]
    if signals.tail_mass_BT is not None:
        signals.observed["tail_mass"] = signals.tail_mass_BT[seen]


def register() -> None:
    """Put the loss under each of our names into verl's registry, refusing a clash.

    Raises:
        ValueError: another package registered one of the names.
        TypeError: verl would call the loss with an argument it does not take.
    """
    verl_passes = (
        "old_log_prob",
        "log_prob",
        "advantages",
        "response_mask",
        "loss_agg_mode",
        "config",
        "rollout_is_weights",
    )
    check_signature(trust_region_loss, verl_passes, "policy loss")
    for name in PRESETS:
        taken = POLICY_LOSS_REGISTRY.get(name)
        if taken is not None and taken is not trust_region_loss:
            raise ValueError(f"policy loss {name!r} is registered already, by {taken.__module__}")
        register_policy_loss(name)(trust_region_loss)


completed(__name__)
