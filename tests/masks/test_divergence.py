# Axes in this file: N tokens, K listed vocabulary entries, V vocabulary. p anchor, q current.
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_plugins.masks.divergence import (
    PROBABILITY_CLAMP,
    anchor_log_tail,
    binary_kl,
    binary_tv,
    topk_forward_kl,
    topk_reverse_kl,
    topk_tv,
)

TOPK = (topk_forward_kl, topk_reverse_kl, topk_tv)
EMPTY = torch.tensor([-math.inf])


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def laws(seed: int, vocab: int, spread: float = 2.0, gap: float = 0.5) -> tuple[Tensor, Tensor]:
    """Two seeded laws in float64, (8, vocab), as log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(8, vocab, generator=generator, dtype=torch.float64)
    other = logits + gap * torch.randn(8, vocab, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1), other.log_softmax(-1)


def log_rest(logp_NV: Tensor, num_listed: int) -> Tensor:
    return torch.logsumexp(logp_NV[:, num_listed:], dim=-1)


def seen_through(divergence, logp_NV: Tensor, logq_NV: Tensor, num_listed: int) -> Tensor:
    return divergence(
        logp_NV[:, :num_listed], logq_NV[:, :num_listed], log_rest(logp_NV, num_listed), log_rest(logq_NV, num_listed)
    )


P5, Q5 = (0.30, 0.30, 0.20, 0.12, 0.08), (0.62, 0.31, 0.04, 0.02, 0.01)
P6, Q6 = (0.40, 0.25, 0.15, 0.10, 0.06, 0.04), (0.52, 0.20, 0.12, 0.08, 0.05, 0.03)


@pytest.mark.parametrize(
    ("divergence", "p", "q", "num_listed", "expected"),
    [
        (topk_forward_kl, P5, Q5, 5, 0.475636),
        (topk_forward_kl, P5, Q5, 3, 0.473694),
        (topk_reverse_kl, P5, Q5, 5, 0.339239),
        (topk_tv, P5, Q5, 5, 0.330000),
        (topk_forward_kl, P6, Q6, 6, 0.029073),
        (topk_forward_kl, P6, Q6, 3, 0.028940),
    ],
)
def test_worked_examples_of_the_predicted_mask(divergence, p, q, num_listed, expected):
    tail_p, tail_q = log(sum(p[num_listed:]))[0], log(sum(q[num_listed:]))[0]
    value = divergence(log(*p[:num_listed]), log(*q[:num_listed]), tail_p, tail_q)
    torch.testing.assert_close(value, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("p", "q", "tv", "kl"), [(0.001, 0.002, 0.001, 0.000307), (0.9, 0.7, 0.2, 0.116322), (0.5, 0.62, 0.12, 0.029663)]
)
def test_binary_values_of_dppo(p, q, tv, kl):
    logp, logq = log(p)[0], log(q)[0]
    torch.testing.assert_close(binary_tv(logp, logq), torch.tensor([tv]), atol=1e-6, rtol=0)
    torch.testing.assert_close(binary_kl(logp, logq), torch.tensor([kl]), atol=1e-6, rtol=0)


@given(seed=st.integers(0, 2**31), gap=st.floats(0.0, 5.0))
@settings(deadline=None)
def test_one_listed_entry_is_the_binary_divergence_bit_for_bit(seed, gap):
    logp, logq = (x[:, :1].float() for x in laws(seed, 12, gap=gap))
    tails = anchor_log_tail(logp), anchor_log_tail(logq)
    assert torch.equal(topk_forward_kl(logp, logq, *tails), binary_kl(logp[:, 0], logq[:, 0]))
    assert torch.equal(topk_tv(logp, logq, *tails), binary_tv(logp[:, 0], logq[:, 0]))


@given(seed=st.integers(0, 2**31), gap=st.floats(0.0, 5.0))
@settings(deadline=None)
def test_binary_divergences_match_their_definition_in_float64(seed, gap):
    logp, logq = (x[:, 0].float() for x in laws(seed, 12, gap=gap))
    p, q = logp.double().exp(), logq.double().exp()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(binary_kl(logp, logq).double(), kl, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(binary_tv(logp, logq).double(), (p - q).abs(), atol=1e-7, rtol=1e-6)


@given(seed=st.integers(0, 2**31), vocab=st.integers(2, 40), gap=st.floats(0.0, 5.0))
@settings(deadline=None)
def test_the_whole_vocabulary_listed_is_the_full_divergence(seed, vocab, gap):
    logp, logq = laws(seed, vocab, gap=gap)
    p, q = logp.exp(), logq.exp()
    empty = torch.full((8,), -math.inf)
    expected = (p * (logp - logq)).sum(-1), (q * (logq - logp)).sum(-1), 0.5 * (p - q).abs().sum(-1)
    for divergence, value in zip(TOPK, expected, strict=True):
        measured = divergence(logp, logq, empty, empty)
        torch.testing.assert_close(measured.double(), value, atol=2e-6, rtol=1e-5)


@given(seed=st.integers(0, 2**31), vocab=st.integers(3, 40), gap=st.floats(0.0, 5.0), data=st.data())
@settings(deadline=None)
def test_more_listed_entries_never_shrink_a_divergence(seed, vocab, gap, data):
    logp, logq = laws(seed, vocab, gap=gap)
    k = data.draw(st.integers(1, vocab - 2))
    for divergence in TOPK:
        coarse, fine = (seen_through(divergence, logp, logq, listed) for listed in (k, k + 1))
        assert (coarse >= 0).all()
        assert (coarse <= fine + 2e-6).all()
    assert (seen_through(topk_tv, logp, logq, k) <= 1 + 1e-6).all()


@pytest.mark.parametrize("divergence", TOPK)
def test_equal_policies_are_at_distance_zero(divergence):
    logp = laws(0, 30)[0].float()
    assert torch.equal(seen_through(divergence, logp, logp, 5), torch.zeros(8))


@pytest.mark.parametrize("divergence", TOPK)
def test_both_tails_empty_add_nothing(divergence):
    two = divergence(log(0.5, 0.5), log(0.4, 0.6), EMPTY, EMPTY)
    four = divergence(log(0.5, 0.5, 0.0, 0.0), log(0.4, 0.6, 0.0, 0.0), EMPTY, EMPTY)
    assert torch.equal(two, four)
    assert two.isfinite().all()


@pytest.mark.parametrize("divergence", TOPK)
@pytest.mark.parametrize("swapped", [False, True])
def test_one_empty_tail_stays_finite(divergence, swapped):
    full, cut = (log(0.5, 0.4), log(0.1)[0]), (log(0.55, 0.45), EMPTY)
    (logp, tail_p), (logq, tail_q) = (cut, full) if swapped else (full, cut)
    value = divergence(logp, logq, tail_p, tail_q)
    assert value.isfinite().all()
    assert (value > 0.03).all()


def test_the_clamp_is_documented():
    assert PROBABILITY_CLAMP == 1e-12


def test_an_empty_current_tail_is_read_at_the_clamp():
    value = topk_forward_kl(log(0.5, 0.4), log(0.55, 0.45), log(0.1)[0], EMPTY)
    expected = 0.5 * math.log(0.5 / 0.55) + 0.4 * math.log(0.4 / 0.45) + 0.1 * math.log(0.1 / PROBABILITY_CLAMP)
    torch.testing.assert_close(value, torch.tensor([expected]), atol=1e-5, rtol=0)


def test_a_listed_entry_the_current_policy_excludes_is_infinitely_far():
    # p = 1e-3 at a clamped q would read 0.02, which a threshold of 0.05 lets through.
    value = topk_forward_kl(log(0.999, 0.001), log(1.0, 0.0), EMPTY, EMPTY)
    assert torch.equal(value, torch.tensor([math.inf]))


def test_an_entry_the_anchor_excludes_is_finite_in_reverse():
    value = topk_reverse_kl(log(1.0, 0.0), log(0.9, 0.1), EMPTY, EMPTY)
    expected = 0.9 * math.log(0.9) + 0.1 * math.log(0.1 / PROBABILITY_CLAMP)
    torch.testing.assert_close(value, torch.tensor([expected]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("divergence", TOPK)
def test_no_nan_from_any_mixture_of_extremes(divergence):
    extremes = torch.tensor([-math.inf, -200.0, -30.0, -1.0, 0.0])
    grid = torch.cartesian_prod(*[extremes] * 4)
    value = divergence(grid[:, :1], grid[:, 1:2], grid[:, 2], grid[:, 3])
    assert not value.isnan().any()
    assert (value >= 0).all()
    assert not binary_kl(grid[:, 0], grid[:, 1]).isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", TOPK)
def test_low_precision_input_gives_float32_close_to_it(divergence, dtype):
    logp, logq = laws(3, 12, spread=1.0, gap=0.3)
    exact = seen_through(divergence, logp, logq, 6)
    rough = seen_through(divergence, logp.to(dtype), logq.to(dtype), 6)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, atol=2e-2, rtol=0)


def test_results_carry_no_gradient():
    logp, logq = (x.float().requires_grad_(True) for x in laws(1, 9))
    for divergence in TOPK:
        assert not seen_through(divergence, logp, logq, 3).requires_grad
    assert not binary_kl(logp[:, 0], logq[:, 0]).requires_grad
    assert not anchor_log_tail(logq[:, :3]).requires_grad


def test_leading_axes_are_free():
    logp, logq = (x.float() for x in laws(2, 9))
    flat = seen_through(topk_forward_kl, logp, logq, 4)
    tails = log_rest(logp, 4).view(2, 4), log_rest(logq, 4).view(2, 4)
    assert torch.equal(topk_forward_kl(logp[:, :4].view(2, 4, 4), logq[:, :4].view(2, 4, 4), *tails), flat.view(2, 4))


def test_anchor_tail_of_hand_values():
    tail = anchor_log_tail(torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.75, 0.5]]).log())
    torch.testing.assert_close(tail, torch.tensor([math.log(0.25), -math.inf, -math.inf]))
    # log 0.5 has no float32: what is left of 1 - 0.5 - 0.5 is its rounding, below the resolution.
    assert 0.0 <= anchor_log_tail(torch.tensor([[0.5, 0.5]]).log()).exp().item() < 1e-7


@given(seed=st.integers(0, 2**31), tail=st.floats(1e-9, 0.5))
@settings(deadline=None)
def test_anchor_tail_resolves_a_mass_to_1e_7(seed, tail):
    listed = laws(seed, 20)[0].exp() * (1 - tail)
    measured = anchor_log_tail(listed.log().float()).exp().double()
    torch.testing.assert_close(measured, torch.full((8,), tail, dtype=torch.float64), atol=2e-7, rtol=1e-6)


@given(seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_anchor_tail_adds_no_error_of_its_own(seed):
    logp = (laws(seed, 20)[0].exp() * (1 - 1e-4)).log().float()
    from_the_same_numbers = 1 - logp.double().exp().sum(-1)
    torch.testing.assert_close(anchor_log_tail(logp).exp().double(), from_the_same_numbers, atol=0, rtol=2e-6)


def test_shapes_that_do_not_match_are_named():
    logp = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"same entries.*\(3, 2\).*\(3, 4\)"):
        topk_tv(logp, torch.zeros(3, 4), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"log_tail_q.*\(3,\).*\(4,\)"):
        topk_forward_kl(logp, logp, torch.zeros(3), torch.zeros(4))
