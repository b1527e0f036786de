"""Which tokens may move the policy: a divergence, a direction, and the mask made of both. Pure torch."""

from verl_plugins.masks.direction import Tail, TopKDivergence, ratio_slope, slope, tail_square
from verl_plugins.masks.divergence import (
    PROBABILITY_CLAMP,
    anchor_log_tail,
    binary_kl,
    binary_tv,
    topk_forward_kl,
    topk_reverse_kl,
    topk_tv,
)
from verl_plugins.masks.keep import clip_band_mask, keep_mask, truncated_weight

__all__ = [
    "PROBABILITY_CLAMP",
    "Tail",
    "TopKDivergence",
    "anchor_log_tail",
    "binary_kl",
    "binary_tv",
    "clip_band_mask",
    "keep_mask",
    "ratio_slope",
    "slope",
    "tail_square",
    "topk_forward_kl",
    "topk_reverse_kl",
    "topk_tv",
    "truncated_weight",
]
