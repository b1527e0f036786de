"""Which K-list belongs to which response token: the engine returns lists turn by turn, verl keeps one response.

Shapes: T response tokens (generated ones and, in multi-turn, those of tools), G generated tokens over all turns, K.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_plugins.topk.rows import Ids, Logps

# Log-probability of filler entries at tokens the policy did not generate; exp() of it is 0 in float32.
_FILLER_LOGP = -200.0


def align_lists(
    turns: Sequence[tuple[Sequence[int], Ids, Logps]],
    response_ids: Sequence[int],
    response_mask: Sequence[int],
) -> tuple[Ids, Logps]:
    """Give every response token a K-list, in place order.

    Generated tokens (mask 1) take the lists of the turns in order; a truncated response uses the first of them. Tokens
    of tools and templates (mask 0) get a list that holds the token itself with probability 1, so that whatever is
    computed there is finite; the response mask drops it.

    Args:
        turns: of each generation call, the returned tokens and their (T_turn, K) ids and log-probabilities.
        response_ids: T tokens verl keeps.
        response_mask: T flags, 1 where the policy generated the token.

    Returns:
        ids (T, K) int32 and log-probabilities (T, K) float32.

    Raises:
        ValueError: the generated tokens of the response are not those the engine returned: the lists would be of
            other positions.
    """
    ids_GK = np.concatenate([ids for _, ids, _ in turns])
    logps_GK = np.concatenate([logps for _, _, logps in turns])
    generated_G = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens, _, _ in turns])
    tokens_T = np.asarray(response_ids, dtype=np.int64)
    mine_T = np.asarray(response_mask, dtype=bool)
    count = int(mine_T.sum())
    if count > len(generated_G) or not np.array_equal(tokens_T[mine_T], generated_G[:count]):
        raise ValueError(
            f"verl_plugins: the response holds {count} generated tokens which are not the first of the "
            f"{len(generated_G)} the rollout returned, so its K probabilities cannot be aligned. An agent loop that "
            "edits generated tokens cannot be used with a top-K divergence; choose a binary one."
        )
    num_listed = ids_GK.shape[1]
    ids_TK = np.tile(np.arange(num_listed, dtype=np.int32), (len(tokens_T), 1))
    logps_TK = np.full((len(tokens_T), num_listed), _FILLER_LOGP, dtype=np.float32)
    place_T = np.minimum(tokens_T, num_listed - 1)
    rows = np.arange(len(tokens_T))
    ids_TK[rows, place_T] = tokens_T
    logps_TK[rows, place_T] = 0.0
    ids_TK[mine_T], logps_TK[mine_T] = ids_GK[:count], logps_GK[:count]
    return ids_TK, logps_TK
