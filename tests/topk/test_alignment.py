from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_plugins.topk.alignment import align_lists


def turn(rng, tokens, num_listed, vocabulary=50):
    """What a rollout returns for `tokens`: lists that hold each token somewhere."""
    ids = np.stack([rng.permutation(vocabulary)[:num_listed] for _ in tokens]).astype(np.int32).reshape(-1, num_listed)
    for row, token in zip(ids, tokens, strict=True):
        if token not in row:
            row[rng.integers(num_listed)] = token
    return list(tokens), ids, rng.normal(size=ids.shape).astype(np.float32) - 3


def test_single_turn_is_taken_as_it_is():
    tokens, ids, logps = turn(np.random.default_rng(0), [4, 9, 2], 5)
    got_ids, got_logps = align_lists([(tokens, ids, logps)], tokens, [1, 1, 1])
    assert np.array_equal(got_ids, ids) and np.array_equal(got_logps, logps)
    assert got_ids.dtype == np.int32 and got_logps.dtype == np.float32


def test_truncated_response_uses_the_first_lists():
    tokens, ids, logps = turn(np.random.default_rng(0), [4, 9, 2], 5)
    got_ids, got_logps = align_lists([(tokens, ids, logps)], tokens[:2], [1, 1])
    assert np.array_equal(got_ids, ids[:2]) and np.array_equal(got_logps, logps[:2])


def test_edited_tokens_are_refused():
    tokens, ids, logps = turn(np.random.default_rng(0), [4, 9, 2], 5)
    with pytest.raises(ValueError, match="cannot be aligned"):
        align_lists([(tokens, ids, logps)], [4, 8, 2], [1, 1, 1])
    with pytest.raises(ValueError, match="cannot be aligned"):
        align_lists([(tokens, ids, logps)], [4, 9, 2, 7], [1, 1, 1, 1])


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    turns=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4),
    num_listed=st.integers(1, 8),
    cut=st.integers(1, 40),
)
def test_every_position_lists_its_own_token(seed, turns, num_listed, cut):
    rng = np.random.default_rng(seed)
    returned, response, mask, expected = [], [], [], []
    for generated, tool in turns:
        one = turn(rng, rng.integers(0, 50, generated).tolist(), num_listed)
        returned.append(one)
        response += [*one[0], *rng.integers(0, 50, tool).tolist()]
        mask += [1] * generated + [0] * tool
        expected += [*one[1], *[None] * tool]
    response, mask, expected = response[:cut], mask[:cut], expected[:cut]
    ids, logps = align_lists(returned, response, mask)
    assert ids.shape == logps.shape == (len(response), num_listed)
    for row, logp, token, mine, want in zip(ids, logps, response, mask, expected, strict=True):
        assert token in row and len(set(row.tolist())) == num_listed
        assert np.array_equal(row, want) if mine else np.exp(logp, dtype=np.float64).sum() == 1.0
