"""The choice of a trust region: which tokens may move the policy, as a product of four choices.

Pure Python: the CLI and the configuration read this without importing torch or verl.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DIVERGENCES = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "topk_reverse_kl", "ratio", "none")
DIRECTIONS = ("ratio", "predicted")
TAILS = ("aggregated", "uniform", "exact")
ANCHORS = ("rollout", "old")

_DELTA_DEFAULT = {
    "binary_tv": 0.15,  # DPPO's public Qwen3-30B-A3B script
    "binary_kl": 0.05,  # the same script
    "topk_tv": 0.15,  # ours: the binary bound, which the top-K distance is never below
    "topk_kl": 0.5,  # PDM, main setting
    "topk_reverse_kl": 0.5,  # ours: as the forward divergence
}


@dataclass(frozen=True, kw_only=True)
class KeyDoc:
    """Default, range and one sentence of a configuration key."""

    default: str
    allowed: str
    sentence: str


KEYS: Mapping[str, KeyDoc] = {
    "loss_mode": KeyDoc(
        default="pdm_topk_kl",
        allowed="a name of `verl-plugins list`, or any of verl's own",
        sentence="Names a usual point of the product below and so sets the defaults of the other keys.",
    ),
    "divergence": KeyDoc(
        default="that of loss_mode",
        allowed=", ".join(DIVERGENCES),
        sentence="Measures how far the policy has moved from the anchor at a token; topk_* see K tokens and a rest.",
    ),
    "direction": KeyDoc(
        default="that of loss_mode",
        allowed=", ".join(DIRECTIONS),
        sentence="Says whether the update moves further away: sign of the probability ratio (DPPO) or of the "
        "predicted change of the divergence (PDM).",
    ),
    "tail": KeyDoc(
        default="aggregated",
        allowed=", ".join(TAILS),
        sentence="How the predicted direction treats unlisted tokens: as one token, as equals, or exactly.",
    ),
    "anchor": KeyDoc(
        default="rollout",
        allowed=", ".join(ANCHORS),
        sentence="The policy the divergence and the importance ratio are measured against.",
    ),
    "delta": KeyDoc(
        default="0.5 topk_kl and topk_reverse_kl, 0.15 topk_tv and binary_tv, 0.05 binary_kl",
        allowed="> 0 nats for KL, in (0, 1] for TV",
        sentence="A token whose divergence exceeds delta is masked if the update would increase it.",
    ),
    "truncation": KeyDoc(
        default="10.0",
        allowed=">= 1",
        sentence="Upper bound C of the importance weight min(r, C); it never changes the sign of a gradient.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named point of the product."""

    divergence: str
    direction: str
    paper: str
    anchor: str = "rollout"


_PDM, _DPPO = "Predictive Divergence Masks, arXiv:2607.10848", "DPPO, arXiv:2602.04879"
PRESETS: Mapping[str, Preset] = {
    "pdm_topk_kl": Preset(divergence="topk_kl", direction="predicted", paper=_PDM),
    "pdm_topk_tv": Preset(divergence="topk_tv", direction="predicted", paper=_PDM),
    "pdm_topk_reverse_kl": Preset(divergence="topk_reverse_kl", direction="predicted", paper=_PDM),
    "dppo_topk_kl": Preset(divergence="topk_kl", direction="ratio", paper=_DPPO),
    "dppo_topk_tv": Preset(divergence="topk_tv", direction="ratio", paper=_DPPO),
    "dppo_binary_kl": Preset(divergence="binary_kl", direction="ratio", paper=_DPPO),
    "dppo_binary_tv": Preset(divergence="binary_tv", direction="ratio", paper=_DPPO),
    "dppo_binary_kl_old": Preset(divergence="binary_kl", direction="ratio", paper=_DPPO, anchor="old"),
    "dppo_binary_tv_old": Preset(divergence="binary_tv", direction="ratio", paper=_DPPO, anchor="old"),
    "ppo_ratio_mask": Preset(divergence="ratio", direction="ratio", paper="PPO, arXiv:1707.06347, as a mask"),
    "no_mask": Preset(divergence="none", direction="ratio", paper="CISPO-like, arXiv:2506.13585"),
}


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """A point of the product, resolved and valid. Build it with `resolve`."""

    name: str
    divergence: str
    direction: str
    tail: str
    anchor: str
    delta: float
    truncation: float

    @property
    def needs_topk(self) -> bool:
        """Whether the engine must see K probabilities of the anchor per token."""
        return self.divergence.startswith("topk_")

    @property
    def needs_vocabulary_pass(self) -> bool:
        """Whether the direction asks for a sum over all unlisted tokens (Σ q_b²)."""
        return self.needs_topk and self.direction == "predicted" and self.tail == "exact"

    def sentence(self, num_listed: int | None = None) -> str:
        """Say in words which loss is in force."""
        against = "the rollout policy" if self.anchor == "rollout" else "the policy recomputed before the update"
        weight = f"minus advantage x min(r, {self.truncation:g}) x log-probability, r = current over {against}"
        if self.divergence == "none":
            return f"{weight}; no token is masked."
        if self.divergence == "ratio":
            return f"{weight}; a token is masked if r has left [1 - clip_ratio_low, 1 + clip_ratio_high] and moves on."
        listed = f" over K={num_listed} tokens and a rest" if self.needs_topk and num_listed else ""
        when = (
            "the token's own update would increase it"
            if self.direction == "predicted"
            else "the update pushes the ratio further from 1"
        )
        tail = f" (tail: {self.tail})" if self.needs_topk and self.direction == "predicted" else ""
        return f"{weight}; a token is masked if {self.divergence}{listed} exceeds {self.delta:g} and {when}{tail}."


def nearest(word: str, valid: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    """A hint naming the closest valid spelling, or an empty string."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _refuse(key: str, got: object, allowed: str, hint: str = "") -> ValueError:
    path = f"actor_rollout_ref.actor.policy_loss.{key}"
    return ValueError(f"{path}={got!r}: allowed are {allowed}.{hint} Set {path}=<value> in the recipe or command line.")


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _refuse(key, value, ", ".join(allowed), nearest(str(value), allowed))
    return str(value)


def _number(key: str, value: Any, low: float, high: float, *, open_low: bool) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        upper = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise _refuse(key, value, f"numbers in {bracket}{low:g}, {upper}")
    return float(value)


def resolve(
    loss_mode: str,
    *,
    divergence: str | None = None,
    direction: str | None = None,
    tail: str | None = None,
    anchor: str | None = None,
    delta: float | None = None,
    truncation: float = 10.0,
) -> TrustRegion | None:
    """Resolve a named loss and the keys that override it into one point of the product.

    A key that is None takes the value of the named loss; a key that is set wins. The name is then only the
    starting point, and `TrustRegion.sentence` says what is in force.

    Returns:
        the trust region, or None if `loss_mode` is not one of ours.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """
    preset = PRESETS.get(loss_mode)
    if preset is None:
        return None
    chosen = _one_of("divergence", divergence or preset.divergence, DIVERGENCES)
    towards = _one_of("direction", direction or preset.direction, DIRECTIONS)
    if chosen in ("ratio", "none") and towards == "predicted":
        raise _refuse("direction", towards, f"ratio with divergence={chosen}", " There is no divergence to predict.")
    if chosen in ("ratio", "none") and delta is not None:
        raise _refuse(
            "delta", delta, f"null with divergence={chosen}", " That band is actor.clip_ratio_low and clip_ratio_high."
        )
    if tail is not None and not chosen.startswith("topk_"):
        raise _refuse("tail", tail, f"null with divergence={chosen}", " Only top-K divergences have a tail.")
    if tail not in (None, "aggregated") and towards == "ratio":
        raise _refuse("tail", tail, "null with direction=ratio", " Only the predicted direction looks at the tail.")
    limit = 1.0 if chosen.endswith("_tv") else math.inf
    bound = math.inf
    if chosen in _DELTA_DEFAULT:
        bound = _number("delta", _DELTA_DEFAULT[chosen] if delta is None else delta, 0.0, limit, open_low=True)
    return TrustRegion(
        name=loss_mode,
        divergence=chosen,
        direction=towards,
        tail=_one_of("tail", tail or "aggregated", TAILS),
        anchor=_one_of("anchor", anchor or preset.anchor, ANCHORS),
        delta=bound,
        truncation=_number("truncation", truncation, 1.0, math.inf, open_low=False),
    )
