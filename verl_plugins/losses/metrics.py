"""Metrics of a mini-batch from what the loss saw: computed on the device, moved to the host once.

Shapes: N response tokens of this rank's part of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
# torch.quantile refuses more than 2^24 elements.
_MOST_SORTED = 1 << 24


def mini_batch_metrics(
    micro_batches: Sequence[Mapping[str, Tensor]], *, first: bool, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Reduce what the micro-batches of one mini-batch left behind.

    Shares are over all response tokens of the mini-batch, on all data-parallel ranks (sums are reduced before the
    division, so that ranks of unequal length count by tokens). Quantiles are of this rank's tokens; verl averages them
    over ranks.

    Args:
        micro_batches: `TokenSignals.observed` of each micro-batch.
        first: whether no update has happened since the rollout: then the divergence is the mismatch between engine
            and trainer, and is reported as such.
        group: data-parallel group, or None.

    Returns:
        metric name to value; empty if no loss of ours ran.
    """
    if not micro_batches or not micro_batches[0]:
        return {}
    joined = {name: torch.cat([observed[name].float() for observed in micro_batches]) for name in micro_batches[0]}
    divergence_N = joined["divergence"].nan_to_num(posinf=torch.finfo(torch.float32).max)
    masked_N, positive_N = joined["masked"], (joined["advantage"] > 0).float()
    sums = {
        "masked_share": masked_N,
        "masked_share_positive": masked_N * positive_N,
        "masked_share_negative": masked_N * (1.0 - positive_N),
        "divergence_mean": divergence_N,
        "importance_ratio_mean": joined["ratio"],
        "truncated_share": joined["truncated"],
    }
    optional = {
        "masked_share_direction_only": "masked_here_only",
        "direction_disagreement_share": "directions_disagree",
        "tail_mass_mean": "tail_mass",
    }
    sums.update({metric: joined[name] for metric, name in optional.items() if name in joined})
    count = torch.full((), float(len(divergence_N)), device=divergence_N.device)
    totals = torch.stack([count, *(term_N.sum() for term_N in sums.values())]).double()
    if group is not None and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(totals, group=group)
    largest = {"divergence": divergence_N, "importance_ratio": joined["ratio"]}
    if "list_mismatch" in joined:
        largest["list_mismatch"] = joined["list_mismatch"]
    tails = torch.cat([_quantiles(divergence_N), *(_largest(values_N) for values_N in largest.values())])
    values = torch.cat([totals[1:] / totals[0].clamp(min=1.0), tails.double()]).tolist()
    names = [*sums, *(f"divergence_{name}" for name in _QUANTILES), *(f"{name}_max" for name in largest)]
    metrics = {f"actor/{name}": value for name, value in zip(names, values, strict=True)}
    if first:
        metrics["actor/divergence_first"] = metrics["actor/divergence_mean"]
    return metrics


def _quantiles(values_N: Tensor) -> Tensor:
    levels = torch.tensor(list(_QUANTILES.values()), device=values_N.device)
    return torch.quantile(values_N[:_MOST_SORTED], levels) if len(values_N) else torch.zeros_like(levels)


def _largest(values_N: Tensor) -> Tensor:
    return values_N.max()[None] if len(values_N) else values_N.new_zeros(1)
