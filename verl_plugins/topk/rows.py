"""The K-list of a rollout: K token ids and log-probabilities for each response token. The one contract of all engines.

Any rollout that answers a request for K in this form works with the losses that need it; nothing else of an engine is
assumed. Numpy only, so that a server process pays for neither torch nor verl.

A row holds the K most probable tokens in descending order, the sampled token always among them: when it is not one of
the K best it takes the place of the last. Ids are int32 and log-probabilities float32, 8 K bytes a response token (160
at K = 20). Half precision would save a quarter of that and cost the method: bfloat16 rounds a log-probability of -3 by
up to 0.008, and a divergence threshold is near 0.05.

Shapes in this file: T response tokens, C candidate tokens (C >= K), K listed tokens.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

REQUEST_TOPK: Final = "rollout_topk"
"""Key of `sampling_params["extra_args"]` under which a request asks for K."""

TOPK_IDS: Final = "rollout_topk_ids"
"""Key of the reply's extra fields: int32 [T, K] token ids."""

TOPK_LOGPROBS: Final = "rollout_topk_logprobs"
"""Key of the reply's extra fields: float32 [T, K] log-probabilities in nats, at the sampling temperature."""

Ids = NDArray[np.int32]
Logps = NDArray[np.float32]

# A float32 log-softmax over 150,000 tokens leaves the probabilities of a row summing to 1 within about 1e-5.
_MASS_TOLERANCE = 1e-3


def select_rows(
    ids_TC: NDArray[np.integer],
    logp_TC: NDArray[np.floating],
    sampled_T: NDArray[np.integer],
    sampled_logp_T: NDArray[np.floating],
    k: int,
) -> tuple[Ids, Logps]:
    """Cut each row of candidates to the K best, with the sampled token forced among them.

    Args:
        ids_TC: the C most probable tokens of each position, in any order, without repetition.
        logp_TC: their log-probabilities in nats under the law that was sampled.
        sampled_T: the token that was sampled at each position.
        sampled_logp_T: its log-probability under the same law.
        k: how many tokens to keep, at least 1.

    Returns:
        int32 [T, K] ids and float32 [T, K] log-probabilities, descending in each row, ids unique.

    Raises:
        ValueError: K is not positive or exceeds the candidates, or the shapes disagree.
    """
    ids, logps = np.asarray(ids_TC), np.asarray(logp_TC)
    sampled, sampled_logps = np.asarray(sampled_T), np.asarray(sampled_logp_T)
    if ids.ndim != 2 or ids.shape != logps.shape:
        raise ValueError(f"select_rows: ids and logps must both be [T, C], got {ids.shape} and {logps.shape}")
    if sampled.shape != ids.shape[:1] or sampled_logps.shape != ids.shape[:1]:
        raise ValueError(f"select_rows: sampled must be [{len(ids)}], got {sampled.shape} and {sampled_logps.shape}")
    check_k(k, ids.shape[1])
    ids, logps = _sorted(ids, logps)
    ids, logps = ids[:, :k].astype(np.int32), logps[:, :k].astype(np.float32)
    absent = ~(ids == sampled[:, None]).any(axis=1)
    ids[absent, -1], logps[absent, -1] = sampled[absent], sampled_logps[absent]
    # Candidates may have been too few to hold the sampled token although it is more probable than some of them.
    return _sorted(ids, logps)


def check_k(k: int, vocabulary: int) -> None:
    """Refuse a K that no row can have.

    Raises:
        ValueError: K is not an integer from 1 to the vocabulary.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= vocabulary:
        raise ValueError(
            f"{REQUEST_TOPK} must be an integer from 1 to {vocabulary} (the vocabulary), got {k!r}; "
            "set actor_rollout_ref.rollout.custom.topk"
        )


def check_rows(ids_TK: Ids, logp_TK: Logps, sampled_T: ArrayLike, sampled_logp_T: ArrayLike | None = None) -> None:
    """Verify that an engine's answer is what this module promises.

    Args:
        ids_TK: the ids of the reply.
        logp_TK: the log-probabilities of the reply.
        sampled_T: the response tokens the rows belong to.
        sampled_logp_T: their log-probabilities as the engine reports them apart from the list, compared if given.

    Raises:
        ValueError: says which promise is broken, and at which response token.
    """
    sampled = np.asarray(sampled_T)
    _check_form(ids_TK, logp_TK, sampled)
    if ids_TK.size == 0:
        return
    ordered = np.sort(ids_TK, axis=1)
    _refuse((ordered[:, 1:] == ordered[:, :-1]).any(axis=1), "lists a token twice", ids_TK)
    _refuse((ids_TK < 0).any(axis=1), "has a negative id", ids_TK)
    _refuse(~np.isfinite(logp_TK).all(axis=1), "has a log-probability that is not finite", logp_TK)
    _refuse((np.diff(logp_TK, axis=1) > 0).any(axis=1), "is not in descending order", logp_TK)
    mass_T = np.exp(logp_TK, dtype=np.float64).sum(axis=1)
    _refuse(mass_T > 1 + _MASS_TOLERANCE, "sums to more than probability 1: logits instead of log-probs?", logp_TK)
    hit_TK = ids_TK == sampled[:, None]
    _refuse(~hit_TK.any(axis=1), "lacks the sampled token", ids_TK)
    if sampled_logp_T is not None:
        expected = np.asarray(sampled_logp_T, dtype=np.float32)
        if expected.shape != sampled.shape:
            raise ValueError(f"sampled log-probs must be [{len(sampled)}], got {expected.shape}")
        wrong_T = np.abs(logp_TK[hit_TK] - expected) > 1e-5 + 1e-5 * np.abs(expected)
        _refuse(wrong_T, "disagrees with the log-prob of the sampled token", logp_TK)


def _check_form(ids_TK: Ids, logp_TK: Logps, sampled_T: NDArray[np.integer]) -> None:
    for name, array, dtype in ((TOPK_IDS, ids_TK, np.int32), (TOPK_LOGPROBS, logp_TK, np.float32)):
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} must be a numpy array of {np.dtype(dtype)}, got {got}")
        if array.ndim != 2 or array.shape[1] < 1:
            raise ValueError(f"{name} must be [T, K] with K >= 1, got {array.shape}")
    if ids_TK.shape != logp_TK.shape or sampled_T.shape != ids_TK.shape[:1]:
        raise ValueError(
            f"{TOPK_IDS} {ids_TK.shape}, {TOPK_LOGPROBS} {logp_TK.shape} and the {len(sampled_T)} sampled tokens "
            "must have one row for each response token"
        )


def _refuse(broken_T: Any, what: str, values_TK: NDArray[np.generic]) -> None:
    if broken_T.any():
        token = int(np.argmax(broken_T))
        raise ValueError(f"the K-list of response token {token} {what}: {values_TK[token][:8].tolist()}")


def _sorted(ids_TC: NDArray[np.integer], logp_TC: NDArray[np.floating]) -> tuple[NDArray[Any], NDArray[Any]]:
    order_TC = np.argsort(-logp_TC, axis=1, kind="stable")
    return np.take_along_axis(ids_TC, order_TC, axis=1), np.take_along_axis(logp_TC, order_TC, axis=1)
