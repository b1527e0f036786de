"""The K-list contract: what `select_rows` builds, and what `check_rows` refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_plugins.topk.rows import check_k, check_rows, select_rows


def laws(seed: int, tokens: int, vocabulary: int) -> np.ndarray:
    """Random log-softmax rows, float32 [T, V]."""
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(tokens, vocabulary))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def candidates(logp_TV: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    best = np.argsort(-logp_TV, axis=1)[:, :width]
    return best, np.take_along_axis(logp_TV, best, axis=1)


def test_hand_written_rows():
    ids = np.array([[7, 3, 5], [4, 9, 2]])
    logps = np.log(np.array([[0.2, 0.5, 0.1], [0.6, 0.2, 0.1]]))
    sampled, sampled_logps = np.array([3, 8]), np.log(np.array([0.5, 0.05]))
    got_ids, got_logps = select_rows(ids, logps, sampled, sampled_logps, 2)
    np.testing.assert_array_equal(got_ids, [[3, 7], [4, 8]])  # token 8 was not listed: it replaces the last
    np.testing.assert_allclose(np.exp(got_logps), [[0.5, 0.2], [0.6, 0.05]], rtol=1e-6)
    assert (got_ids.dtype, got_logps.dtype) == (np.int32, np.float32)


def test_one_column_is_the_sampled_token():
    logp_TV = laws(0, 6, 11)
    sampled = np.array([0, 3, 10, 5, 5, 1])
    sampled_logps = logp_TV[np.arange(6), sampled]
    ids, logps = select_rows(*candidates(logp_TV, 4), sampled, sampled_logps, 1)
    np.testing.assert_array_equal(ids[:, 0], sampled)
    np.testing.assert_array_equal(logps[:, 0], sampled_logps)


def test_whole_vocabulary_keeps_all_mass():
    logp_TV = laws(1, 4, 128)
    sampled = np.array([0, 1, 2, 127])
    ids, logps = select_rows(*candidates(logp_TV, 128), sampled, logp_TV[np.arange(4), sampled], 128)
    np.testing.assert_array_equal(np.sort(ids, axis=1), np.tile(np.arange(128), (4, 1)))
    np.testing.assert_allclose(np.exp(logps).sum(1), 1.0, atol=1e-6)


def test_few_candidates_still_give_descending_rows():
    ids, logps = select_rows(np.array([[1, 2]]), np.array([[-2.0, -3.0]]), np.array([9]), np.array([-0.1]), 2)
    np.testing.assert_array_equal(ids, [[9, 1]])
    np.testing.assert_allclose(logps, [[-0.1, -2.0]])


def test_half_precision_input_gives_float32_rows():
    logp_TV = laws(2, 3, 9).astype(np.float16)
    sampled = np.array([1, 2, 3])
    ids, logps = select_rows(*candidates(logp_TV, 5), sampled, logp_TV[np.arange(3), sampled], 5)
    check_rows(ids, logps, sampled, logp_TV[np.arange(3), sampled])
    assert logps.dtype == np.float32


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), vocabulary=st.integers(2, 160), tokens=st.integers(0, 5), data=st.data())
def test_rows_satisfy_their_own_check(seed: int, vocabulary: int, tokens: int, data: st.DataObject):
    k = data.draw(st.integers(1, vocabulary))
    width = data.draw(st.integers(k, vocabulary))
    logp_TV = laws(seed, tokens, vocabulary)
    sampled = np.random.default_rng(seed + 1).integers(0, vocabulary, tokens)
    sampled_logps = logp_TV[np.arange(tokens), sampled]
    best_ids, best_logps = candidates(logp_TV, width)
    shuffled = np.random.default_rng(seed + 2).permuted(np.arange(width))
    ids, logps = select_rows(best_ids[:, shuffled], best_logps[:, shuffled], sampled, sampled_logps, k)
    assert ids.shape == (tokens, k)
    check_rows(ids, logps, sampled, sampled_logps)
    kept_mass, best_mass = np.exp(logps).sum(1), np.exp(best_logps[:, :k]).sum(1)
    assert (kept_mass <= best_mass + 1e-6).all()


GOOD_IDS = np.array([[3, 1], [0, 2]], np.int32)
GOOD_LOGPS = np.log(np.array([[0.5, 0.3], [0.6, 0.1]])).astype(np.float32)
SAMPLED = np.array([1, 0])


def broken(array: np.ndarray, value: float, *where: int) -> np.ndarray:
    copy = array.copy()
    copy[where] = value
    return copy


@pytest.mark.parametrize(
    ("ids", "logps", "message"),
    [
        (GOOD_IDS.astype(np.int64), GOOD_LOGPS, "rollout_topk_ids must be a numpy array of int32, got int64"),
        (GOOD_IDS, GOOD_LOGPS.astype(np.float64), "rollout_topk_logprobs must be a numpy array of float32"),
        (GOOD_IDS.tolist(), GOOD_LOGPS, "got list"),
        (GOOD_IDS[0], GOOD_LOGPS, "must be [T, K]"),
        (GOOD_IDS[:1], GOOD_LOGPS, "one row for each response token"),
        (broken(GOOD_IDS, 3, 0, 1), GOOD_LOGPS, "response token 0 lists a token twice"),
        (broken(GOOD_IDS, -1, 1, 1), GOOD_LOGPS, "response token 1 has a negative id"),
        (GOOD_IDS, broken(GOOD_LOGPS, -np.inf, 1, 1), "response token 1 has a log-probability that is not finite"),
        (GOOD_IDS, GOOD_LOGPS[:, ::-1].copy(), "response token 0 is not in descending order"),
        (GOOD_IDS, broken(GOOD_LOGPS, 2.0, 0, 0), "sums to more than probability 1"),
        (broken(GOOD_IDS, 7, 1, 0), GOOD_LOGPS, "response token 1 lacks the sampled token"),
    ],
)
def test_a_broken_promise_is_named(ids: np.ndarray, logps: np.ndarray, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rows(ids, logps, SAMPLED)


def test_a_list_that_contradicts_the_token_log_prob_is_refused():
    honest = GOOD_LOGPS[[0, 1], [1, 0]]
    check_rows(GOOD_IDS, GOOD_LOGPS, SAMPLED, honest)
    with pytest.raises(ValueError, match="response token 1 disagrees"):
        check_rows(GOOD_IDS, GOOD_LOGPS, SAMPLED, honest + np.array([0, 1e-3]))
    with pytest.raises(ValueError, match=re.escape("must be [2]")):
        check_rows(GOOD_IDS, GOOD_LOGPS, SAMPLED, honest[:1])


@pytest.mark.parametrize("k", [0, -1, 6, True, 2.0, "3"])
def test_impossible_k_names_the_override(k: object):
    with pytest.raises(ValueError, match=r"from 1 to 5.*actor_rollout_ref.rollout.custom.topk"):
        check_k(k, 5)  # type: ignore[arg-type]


def test_k_above_the_candidates_is_refused():
    with pytest.raises(ValueError, match="from 1 to 2"):
        select_rows(GOOD_IDS, GOOD_LOGPS, SAMPLED, np.zeros(2), 3)


@pytest.mark.parametrize(("ids", "sampled"), [(GOOD_IDS[0], SAMPLED), (GOOD_IDS[:1], SAMPLED), (GOOD_IDS, SAMPLED[:1])])
def test_shapes_that_disagree_are_refused(ids: np.ndarray, sampled: np.ndarray):
    with pytest.raises(ValueError, match="select_rows"):
        select_rows(ids, GOOD_LOGPS, sampled, np.zeros(2), 1)
