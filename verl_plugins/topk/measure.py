"""From logits and K-lists to the per-token scalars of a trust region. Pure torch, no gradient, float32.

Shapes: M rows of logits, V vocabulary (this rank's part of it), N response tokens, K listed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_plugins.losses.trust_region import TrustRegion
from verl_plugins.masks.direction import Tail, TopKDivergence, slope, tail_square
from verl_plugins.masks.divergence import anchor_log_tail, topk_forward_kl, topk_reverse_kl, topk_tv
from verl_plugins.topk.gather import (
    ListedDistribution,
    distribution_from_log_prob,
    listed_logits,
    sampled_index,
    vocabulary_pass,
)

MEASURES = ("anchor_logp", "divergence", "slope", "tail_mass")

_Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_DIVERGENCES: Mapping[str, tuple[TopKDivergence, _Divergence]] = {
    "topk_kl": ("topk_forward_kl", topk_forward_kl),
    "topk_reverse_kl": ("topk_reverse_kl", topk_reverse_kl),
    "topk_tv": ("topk_tv", topk_tv),
}


@dataclass(frozen=True, kw_only=True)
class TokenMeasures:
    """Scalars per token: anchor log-probability, divergence, slope s with change A·s, unlisted mass."""

    anchor_logp_N: Tensor
    divergence_N: Tensor
    slope_N: Tensor
    tail_mass_N: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) in the order of `MEASURES`."""
        for name in MEASURES:
            yield name, getattr(self, f"{name}_N")


@torch.no_grad()
def current_law(
    region: TrustRegion,
    *,
    logits_MV: Tensor,
    row_N: Tensor,
    ids_NK: Tensor,
    sampled_N: Tensor,
    temperature_N: Tensor | None,
    logp_sampled_N: Tensor,
    group: dist.ProcessGroup | None = None,
) -> ListedDistribution:
    """Read the current policy's K listed probabilities and tail from logits, as cheaply as the region allows.

    K logits per token are enough where the trainer's log-probability is float32, since log Z is then the sampled
    token's logit minus it. The exact tail, and log-probabilities of fewer bits (log Z would be off by up to 0.045, seen
    at delta 0.05), take one chunked float32 pass over the vocabulary.

    Args:
        region: the trust region in force, with a top-K divergence.
        logits_MV: logits before the temperature, any float type, left as they are.
        row_N: row of `logits_MV` that predicts each token.
        ids_NK: listed ids, int64, the sampled one among them.
        sampled_N: sampled ids.
        temperature_N: sampling temperature of each token; None is 1.
        logp_sampled_N: the trainer's own log-probability of the sampled token.
        group: tensor-parallel group over which the vocabulary is sharded.

    Raises:
        ValueError: a sampled token is not in its list (checked on a CPU), or shapes do not match.
    """
    index_N = sampled_index(ids_NK, sampled_N)
    listed_NK = listed_logits(logits_MV, ids_NK, temperature_N, group, row_N)
    if logp_sampled_N.dtype == torch.float32 and not region.needs_vocabulary_pass:
        return distribution_from_log_prob(listed_NK, logp_sampled_N, index_N)
    # A guess of log Z, good enough to keep exp() in range, spares the search for the largest logit.
    shift_N = listed_NK.gather(1, index_N[:, None])[:, 0] - logp_sampled_N.float()
    squares = region.needs_vocabulary_pass
    return vocabulary_pass(logits_MV, ids_NK, temperature_N, group, row_N, shift_N=shift_N, squares=squares)


@torch.no_grad()
def measure(
    region: TrustRegion,
    current: ListedDistribution,
    *,
    ids_NK: Tensor,
    sampled_N: Tensor,
    anchor_logp_NK: Tensor,
    vocab_size: int,
    anchor_log_tail_N: Tensor | None = None,
) -> TokenMeasures:
    """Measure divergence from the anchor and its predicted change at each response token.

    Args:
        region: the trust region in force, with a top-K divergence.
        current: the current policy, from `current_law`.
        ids_NK: listed ids, int64, the sampled one among them.
        sampled_N: sampled ids.
        anchor_logp_NK: log-probabilities of the listed ids under the anchor, in nats.
        vocab_size: V without padding, for the uniform tail.
        anchor_log_tail_N: log of the anchor's mass outside the list; None computes it as 1 - sum.

    Returns:
        scalars per token, float32.

    Source: METHODS 3.1, 4.2 and 4.3.
    """
    name, divergence = _DIVERGENCES[region.divergence]
    index_N = sampled_index(ids_NK, sampled_N)
    tail_p_N = anchor_log_tail(anchor_logp_NK) if anchor_log_tail_N is None else anchor_log_tail_N
    exact_N = current.tail_square_N if region.tail == "exact" else None
    tail: Tail = region.tail  # type: ignore[assignment]
    square_N = tail_square(tail, current.log_tail_N, vocab_size - ids_NK.shape[1], exact_N)
    laws = anchor_logp_NK, current.logq_NK, tail_p_N, current.log_tail_N
    # The slope is measured for direction=ratio too, so that the metrics can say where the two directions disagree.
    return TokenMeasures(
        anchor_logp_N=anchor_logp_NK.gather(1, index_N[:, None])[:, 0].float(),
        divergence_N=divergence(*laws),
        slope_N=slope(name, *laws, square_N, index_N),
        tail_mass_N=current.log_tail_N.exp(),
    )


@torch.no_grad()
def anchor_lists(
    logits_MV: Tensor,
    row_N: Tensor,
    ids_NK: Tensor,
    temperature_N: Tensor | None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Log-probabilities of the listed tokens and, last, of all others together, under the policy at hand.

    This is what anchor=old remembers of the policy before the update.

    Returns:
        (N, K + 1), float32, in nats.
    """
    law = vocabulary_pass(logits_MV, ids_NK, temperature_N, group, row_N, squares=False)
    return torch.cat([law.logq_NK, law.log_tail_N[:, None]], dim=1)
