# Axes in this file: N tokens whose law is wanted, K listed vocabulary entries, V vocabulary entries held by this rank
# (the whole vocabulary, or one rank's share of it), M rows of the logits tensor (N of them are wanted).
"""The current policy's probabilities of K listed tokens, from logits that are there anyway.

Nothing here records a gradient, changes the logits or allocates a second [M, V] tensor. Two ways lead to the same
`ListedDistribution`: `distribution_from_log_prob` reads K logits per token and needs the trainer's own log-probability
in float32, `vocabulary_pass` reads every logit once more, in float32, and needs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES_CPU = 8 * 2**20
"""Size of the float32 buffer of `vocabulary_pass` on a CPU: what its caches hold while it is read several times."""

CHUNK_BYTES_ACCELERATOR = 256 * 2**20
"""The same on an accelerator: large enough that launching kernels costs nothing next to running them."""


_LOG2_E = math.log2(math.e)
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class ListedDistribution:
    """What the masks need to know of the current policy at N tokens: K entries and a tail. All float32, detached.

    Attributes:
        logq_NK: log-probabilities of the listed entries, in nats.
        log_tail_N: log of the mass of all other entries, in nats; -inf for none.
        log_normaliser_N: log Z, the log of the sum of exp(logits / temperature).
        tail_square_N: sum of q squared over all other entries; None where it was not summed.
    """

    logq_NK: Tensor
    log_tail_N: Tensor
    log_normaliser_N: Tensor
    tail_square_N: Tensor | None


@torch.no_grad()
def listed_logits(
    logits_MV: Tensor,
    ids_NK: Tensor,
    temperature: Tensor | float | None = None,
    group: dist.ProcessGroup | None = None,
    rows_N: Tensor | None = None,
    check_ids: bool | None = None,
) -> Tensor:
    """Logits over temperature at K listed ids per token, as float32.

    The division is done in the logits' own type, as verl does it: log Z recovered from verl's log-probability belongs
    to those numbers, and in bfloat16 a logit of 20 divided otherwise would be off by up to 0.06.

    Args:
        logits_MV: logits of any float type; with `group`, this rank's equal share of the vocabulary, in rank order.
        ids_NK: ids in the whole vocabulary, distinct within a token.
        temperature: sampling temperature, one number or one per token; None where the logits are already divided.
        group: process group over which the vocabulary is sharded; None where it is not.
        rows_N: row of `logits_MV` for each token; None takes them all, in order.
        check_ids: whether ids outside the vocabulary raise. None checks on a CPU only: elsewhere the check would wait
            for the device. Unchecked, such ids fail inside the device's own gather, or with `group` read as logit 0.

    Returns:
        logits_NK, float32, detached, the same on every rank of the group.

    Raises:
        ValueError: shapes that do not match, a temperature at or below 0, or an id outside the vocabulary.
    """
    temperature_N1 = _checked(logits_MV, ids_NK, temperature, group, rows_N, check_ids)
    local_NK, owned_NK = _local_ids(ids_NK, logits_MV.shape[-1], group)
    if rows_N is None:
        logits_NK = logits_MV.detach().gather(-1, local_NK)
    else:
        logits_NK = logits_MV.detach()[rows_N.unsqueeze(-1), local_NK]
    if temperature_N1 is not None:
        logits_NK = logits_NK / temperature_N1.to(logits_NK.dtype)
    logits_NK = logits_NK.float()
    if group is not None:
        logits_NK = torch.where(owned_NK, logits_NK, 0.0)
        dist.all_reduce(logits_NK, group=group)
    return logits_NK


@torch.no_grad()
def distribution_from_log_prob(
    logits_NK: Tensor, logp_sampled_N: Tensor, sampled_index_N: Tensor
) -> ListedDistribution:
    """Probabilities of the list without reading the vocabulary again: log Z is a logit minus its log-probability.

    The tail is as fine as log Z, about 1e-6 at logits of usual size; below that it is noise and may come out as zero.
    For K=1 the list's log-probability is the trainer's own, bit for bit.

    Args:
        logits_NK: from `listed_logits`, at the temperature of `logp_sampled_N`.
        logp_sampled_N: the trainer's log-probability of the sampled token, in nats and float32. In bfloat16 log Z would
            be off by up to 0.045, which a threshold of 0.05 sees: use `vocabulary_pass`.
        sampled_index_N: place of the sampled token in the list, from `sampled_index`.

    Returns:
        The distribution, without `tail_square_N`.

    Raises:
        ValueError: `logp_sampled_N` has fewer than 32 bits.
    """
    if logp_sampled_N.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log-probabilities must be float32 to recover log Z from them, got {logp_sampled_N.dtype}; "
            "use vocabulary_pass instead"
        )
    # float64 makes "logit - (logit - logp)" exact, so that the sampled token's log-probability comes back unchanged.
    wide_NK = logits_NK.detach().double()
    sampled_N1 = wide_NK.gather(-1, sampled_index_N.long().unsqueeze(-1))
    log_normaliser_N1 = sampled_N1 - logp_sampled_N.detach().double().unsqueeze(-1)
    logq_NK = wide_NK - log_normaliser_N1
    log_listed_N = torch.logsumexp(logq_NK, dim=-1).clamp_max(0.0)
    return ListedDistribution(
        logq_NK=logq_NK.float(),
        log_tail_N=(-torch.expm1(log_listed_N)).log().float(),
        log_normaliser_N=log_normaliser_N1.squeeze(-1).float(),
        tail_square_N=None,
    )


@torch.no_grad()
def vocabulary_pass(
    logits_MV: Tensor,
    ids_NK: Tensor,
    temperature: Tensor | float | None = None,
    group: dist.ProcessGroup | None = None,
    rows_N: Tensor | None = None,
    chunk: int | None = None,
    shift_N: Tensor | None = None,
    check_ids: bool | None = None,
    squares: bool = True,
) -> ListedDistribution:
    """Probabilities of the list and of its tail from one more reading of the logits, in float32, chunk by chunk.

    The tail is summed over the unlisted entries themselves, so it has full relative precision however small it is.

    Args:
        logits_MV: as in `listed_logits`.
        ids_NK: as in `listed_logits`.
        temperature: as in `listed_logits`.
        group: as in `listed_logits`.
        rows_N: as in `listed_logits`.
        chunk: tokens per chunk; None sizes it by `CHUNK_BYTES_CPU` or `CHUNK_BYTES_ACCELERATOR`.
        shift_N: a guess of log Z within about 10 nats, equal on all ranks, for instance the sampled logit minus its
            log-probability in any precision. It saves the search for the largest logit and does not enter the result.
        check_ids: as in `listed_logits`.
        squares: whether to sum q squared over the tail, which is one more reading of the buffer.

    Returns:
        The distribution, the same on every rank of the group; `tail_square_N` is None without `squares`.

    Raises:
        ValueError: shapes that do not match, a temperature at or below 0, `chunk` below 1, or an id outside the
            vocabulary.
    """
    temperature_N1 = _checked(logits_MV, ids_NK, temperature, group, rows_N, check_ids)
    if shift_N is not None and shift_N.shape != ids_NK.shape[:-1]:
        raise ValueError(f"shift must have one value per token, got {tuple(shift_N.shape)} for {tuple(ids_NK.shape)}")
    shift_N1 = None if shift_N is None else shift_N.detach().float().unsqueeze(-1)
    sums = _Sums.empty(ids_NK, logits_MV.device)
    local_NK, owned_NK = _local_ids(ids_NK, logits_MV.shape[-1], group)
    # What to multiply the listed entries by: 0 takes an owned one out of the tail, 1 leaves another rank's place alone.
    factor_NK = (~owned_NK).float()
    for part, values_CV in _chunks(logits_MV.detach(), ids_NK.shape[0], rows_N, chunk):
        heat_C1 = 1.0 if temperature_N1 is None else temperature_N1[part]
        # A rank whose every logit is -inf would otherwise compute -inf minus -inf.
        peak_C1 = values_CV.amax(-1, keepdim=True).clamp_min_(_LOWEST) if shift_N1 is None else shift_N1[part] * heat_C1
        values_CV.sub_(peak_C1)
        sums.listed_NK[part] = values_CV.gather(-1, local_NK[part]) / heat_C1
        # On a CPU exp2 takes a third of the time of exp, and the factor it needs takes the temperature along.
        values_CV.mul_(_LOG2_E / heat_C1).exp2_().scatter_reduce_(-1, local_NK[part], factor_NK[part], reduce="prod")
        sums.peak_N[part] = (peak_C1 / heat_C1).squeeze(-1)
        sums.rest_N[part] = values_CV.sum(-1)
        if squares:
            sums.square_N[part] = torch.linalg.vector_norm(values_CV, dim=-1).square_()
    if group is not None:
        sums = sums.reduced(owned_NK, group, same_peak=shift_N is not None)
    return sums.normalised(squares=squares)


@dataclass(frozen=True, slots=True)
class _Sums:
    """What one pass leaves behind, relative to exp(peak) so that nothing overflows."""

    listed_NK: Tensor
    peak_N: Tensor
    rest_N: Tensor
    square_N: Tensor

    @classmethod
    def empty(cls, ids_NK: Tensor, device: torch.device) -> _Sums:
        listed_NK = torch.empty(ids_NK.shape, dtype=torch.float32, device=device)
        peak_N, rest_N, square_N = (listed_NK.new_zeros(ids_NK.shape[:-1]) for _ in range(3))
        return cls(listed_NK, peak_N, rest_N, square_N)

    def reduced(self, owned_NK: Tensor, group: dist.ProcessGroup, *, same_peak: bool) -> _Sums:
        """The sums over all shards, relative to the largest of their peaks; two all-reduces of at most [N, K+2]."""
        peak_N = self.peak_N.clone()
        if not same_peak:
            dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
        below_N1 = (self.peak_N - peak_N).unsqueeze(-1)
        listed_NK = torch.where(owned_NK, self.listed_NK + below_N1, 0.0)
        scale_N1 = below_N1.exp()
        rest_N1, square_N1 = self.rest_N.unsqueeze(-1) * scale_N1, self.square_N.unsqueeze(-1) * scale_N1.square()
        packed = torch.cat((listed_NK, rest_N1, square_N1), dim=-1)
        dist.all_reduce(packed, group=group)
        return _Sums(packed[:, :-2], peak_N, packed[:, -2], packed[:, -1])

    def normalised(self, *, squares: bool) -> ListedDistribution:
        total_N = self.rest_N + self.listed_NK.exp().sum(-1)
        log_total_N = total_N.log()
        return ListedDistribution(
            logq_NK=self.listed_NK - log_total_N.unsqueeze(-1),
            log_tail_N=self.rest_N.log() - log_total_N,
            log_normaliser_N=self.peak_N + log_total_N,
            tail_square_N=self.square_N / total_N.square() if squares else None,
        )


def sampled_index(ids_NK: Tensor, sampled_N: Tensor, check_ids: bool | None = None) -> Tensor:
    """Place of the sampled token in each token's list.

    Args:
        ids_NK: listed ids, distinct within a token.
        sampled_N: id of the sampled token.
        check_ids: whether a sampled token that is not listed raises; None checks on a CPU only, as in
            `listed_logits`. Unchecked, its place reads as 0.

    Returns:
        index_N, int64, in [0, K).

    Raises:
        ValueError: a sampled token is not in its list.
    """
    match_NK = ids_NK == sampled_N.unsqueeze(-1)
    if _check_wanted(check_ids, ids_NK) and not bool(match_NK.any(-1).all()):
        token = int((~match_NK.any(-1)).nonzero()[0, 0])
        raise ValueError(
            f"the sampled token must be one of the K listed ids; token {token} sampled {int(sampled_N[token])} "
            f"and lists {ids_NK[token].tolist()}"
        )
    return match_NK.int().argmax(-1)


def _chunks(
    logits_MV: Tensor, num_tokens: int, rows_N: Tensor | None, chunk: int | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (tokens, their logits in float32), a chunk at a time, in one buffer that the receiver may overwrite."""
    size = chunk_tokens(logits_MV) if chunk is None else chunk
    if size < 1:
        raise ValueError(f"chunk must be at least 1 token, got {size}")
    buffer_CV = torch.empty(min(size, num_tokens), logits_MV.shape[-1], dtype=torch.float32, device=logits_MV.device)
    for start in range(0, num_tokens, size):
        part = slice(start, min(start + size, num_tokens))
        values_CV = buffer_CV[: part.stop - part.start]
        if rows_N is None:
            values_CV.copy_(logits_MV[part])
        elif logits_MV.dtype == torch.float32:
            torch.index_select(logits_MV, 0, rows_N[part], out=values_CV)
        else:
            values_CV.copy_(logits_MV.index_select(0, rows_N[part]))
        yield part, values_CV


def chunk_tokens(logits_MV: Tensor) -> int:
    """Tokens per chunk whose float32 logits fill the buffer size of this device."""
    size_bytes = CHUNK_BYTES_CPU if logits_MV.device.type == "cpu" else CHUNK_BYTES_ACCELERATOR
    return max(1, size_bytes // (4 * logits_MV.shape[-1]))


def _local_ids(ids_NK: Tensor, shard_size: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Ids within this rank's share (clamped into it) and whether the rank holds them."""
    offset = 0 if group is None else dist.get_rank(group) * shard_size
    local_NK = ids_NK.long() - offset
    if group is None:
        return local_NK, torch.ones_like(local_NK, dtype=torch.bool)
    owned_NK = (local_NK >= 0) & (local_NK < shard_size)
    return local_NK.clamp(0, shard_size - 1), owned_NK


def _check_wanted(check_ids: bool | None, ids_NK: Tensor) -> bool:
    return ids_NK.device.type == "cpu" if check_ids is None else check_ids


def _checked(
    logits_MV: Tensor,
    ids_NK: Tensor,
    temperature: Tensor | float | None,
    group: dist.ProcessGroup | None,
    rows_N: Tensor | None,
    check_ids: bool | None,
) -> Tensor | None:
    """Refuse arguments that do not fit each other; return the temperature as [N, 1], None where it is 1."""
    if logits_MV.ndim != 2 or ids_NK.ndim != 2:
        raise ValueError(
            f"logits and ids must have two axes, got shapes {tuple(logits_MV.shape)} and {tuple(ids_NK.shape)}"
        )
    num_tokens = logits_MV.shape[0] if rows_N is None else rows_N.shape[0]
    if ids_NK.shape[0] != num_tokens:
        wanted = "row of logits" if rows_N is None else "entry of rows"
        raise ValueError(f"ids must list one set per {wanted}: {num_tokens} expected, got {ids_NK.shape[0]}")
    num_entries = logits_MV.shape[-1] * (1 if group is None else dist.get_world_size(group))
    if _check_wanted(check_ids, ids_NK) and ids_NK.numel():
        low, high = (int(x) for x in ids_NK.aminmax())
        if low < 0 or high >= num_entries:
            raise ValueError(f"ids must lie in [0, {num_entries}), the vocabulary; got a range of [{low}, {high}]")
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_tokens,):
            raise ValueError(
                f"temperature must be one number or one per token ({num_tokens}), got shape {tuple(temperature.shape)}"
            )
        return temperature.detach().float().unsqueeze(-1)
    if temperature is not None and not temperature > 0.0:
        raise ValueError(
            f"temperature must be above 0, got {temperature}; type e.g. actor_rollout_ref.rollout.temperature=1.0"
        )
    if temperature is None or temperature == 1.0:
        return None
    return torch.full((1, 1), temperature, device=logits_MV.device).expand(num_tokens, 1)
