"""Where response tokens stand among the rows of a micro-batch's logits.

verl packs sequences one after another (or pads them), each prompt then response. The row at position t predicts token
t + 1, so response token j of a sequence with P prompt tokens is predicted by its row P - 1 + j.

Shapes: B sequences, N response tokens of the micro-batch in order, K listed tokens, M rows of logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_plugins.losses.trust_region import TrustRegion
from verl_plugins.topk.bound_loss import ANCHOR_LISTS
from verl_plugins.topk.rows import TOPK_IDS, TOPK_LOGPROBS


@dataclass(frozen=True, kw_only=True)
class ResponseRows:
    """Response tokens of a micro-batch: which they are, and, once placed, where their logits are.

    Attributes:
        sequence_N, column_N: sequence and position in it of the row that predicts each token.
        packed_N: the same as an index into the sequences laid end to end.
        order_N: index of each token among all response tokens of the micro-batch (a rank may hold a part).
        sampled_N, ids_NK: sampled token and the K listed ones, int64.
        logits_MV, row_N, temperature_N: set by `in_packed`, `in_padded` or `at`; a temperature of None is 1 everywhere.
    """

    sequence_N: Tensor
    column_N: Tensor
    packed_N: Tensor
    order_N: Tensor
    sampled_N: Tensor
    ids_NK: Tensor
    logits_MV: Tensor
    row_N: Tensor
    temperature_N: Tensor | None

    def in_packed(self, logits_MV: Tensor, temperature_M: Tensor | None, start: int) -> ResponseRows:
        """Place the tokens whose rows are in `logits_MV`, rows [start, start + M) of the packed sequence."""
        here = (self.packed_N >= start) & (self.packed_N < start + logits_MV.shape[0])
        part = self._select(here)
        row_N = part.packed_N - start
        return replace(part, logits_MV=logits_MV, row_N=row_N, temperature_N=_of_rows(temperature_M, row_N))

    def in_padded(self, logits_BSV: Tensor, temperature_B: Tensor | None) -> ResponseRows:
        """Place the tokens in logits padded to the longest sequence, without copying them."""
        num_columns = logits_BSV.shape[1]
        return replace(
            self,
            logits_MV=logits_BSV.reshape(-1, logits_BSV.shape[-1]),
            row_N=self.sequence_N * num_columns + self.column_N,
            temperature_N=_of_rows(temperature_B, self.sequence_N),
        )

    def at(self, logits_MV: Tensor, number_M: Tensor, temperature_M: Tensor) -> ResponseRows:
        """Place the tokens whose running number (from 1) stands in `number_M`; 0 is no response token."""
        row_N = number_M.nonzero()[:, 0]
        part = self._take(number_M[row_N] - 1)
        return replace(part, logits_MV=logits_MV, row_N=row_N, temperature_N=_of_rows(temperature_M, row_N))

    def _take(self, order_N: Tensor) -> ResponseRows:
        names = ("sequence_N", "column_N", "packed_N", "order_N", "sampled_N", "ids_NK")
        return replace(self, **{name: getattr(self, name)[order_N] for name in names})

    def _select(self, keep_N: Tensor) -> ResponseRows:
        return self if bool(keep_N.all()) else self._take(keep_N.nonzero()[:, 0])


def _of_rows(temperature: Tensor | None, index_N: Tensor) -> Tensor | None:
    return None if temperature is None else temperature.reshape(-1)[index_N].float()


def response_rows(micro_batch: TensorDict) -> ResponseRows:
    """Index the response tokens of a micro-batch that carries K-lists.

    Raises:
        ValueError: the K-lists are missing or not aligned with the responses.
    """
    if TOPK_IDS not in micro_batch.keys():
        raise ValueError(
            f"verl_plugins: the micro-batch carries no {TOPK_IDS}. The rollout must be asked for K probabilities: set "
            "actor_rollout_ref.rollout.custom.topk and "
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_plugins.topk.carry.TopKAgentLoopManager."
        )
    start_B = micro_batch["input_ids"].offsets()
    lengths_B = micro_batch["responses"].offsets().diff()
    ids_NK, sampled_N = micro_batch[TOPK_IDS].values(), micro_batch["responses"].values()
    if ids_NK.shape[0] != sampled_N.shape[0]:
        raise ValueError(f"verl_plugins: {ids_NK.shape[0]} K-lists for {sampled_N.shape[0]} response tokens")
    total = int(sampled_N.shape[0])
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=sampled_N.device), lengths_B)
    within_N = torch.arange(total, device=sampled_N.device) - (lengths_B.cumsum(0) - lengths_B)[sequence_N]
    first_B = start_B.diff() - lengths_B - 1
    column_N = first_B[sequence_N] + within_N
    empty = sampled_N.new_zeros(0)
    return ResponseRows(
        sequence_N=sequence_N,
        column_N=column_N,
        packed_N=start_B[sequence_N] + column_N,
        order_N=torch.arange(total, device=sampled_N.device),
        sampled_N=sampled_N,
        ids_NK=ids_NK.long(),
        logits_MV=empty,
        row_N=empty,
        temperature_N=empty,
    )


def anchor_inputs(micro_batch: TensorDict, region: TrustRegion, rows: ResponseRows) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of the K tokens under the anchor, (N, K), and of its tail, (N,), if it is known.

    The rollout reports K tokens only, so its tail is 1 - Σ; the recomputed policy was seen whole, so its tail is exact.
    """
    if region.anchor == "rollout":
        return micro_batch[TOPK_LOGPROBS].values()[rows.order_N].float(), None
    if ANCHOR_LISTS not in micro_batch.keys():
        raise ValueError(
            "verl_plugins: anchor=old with a top-K divergence, but the old policy's K probabilities were not computed. "
            "Set trainer.v1.trainer_mode=verl_plugins."
        )
    lists_NK1 = micro_batch[ANCHOR_LISTS].values()[rows.packed_N].float()
    return lists_NK1[:, :-1], lists_NK1[:, -1]


def to_nested(packed: Tensor, micro_batch: TensorDict) -> Tensor:
    """View values of the packed sequence as one jagged row per sequence, as verl's own model outputs are."""
    return torch.nested.nested_tensor_from_jagged(packed, micro_batch["input_ids"].offsets())
