# Axes in this file: N tokens, K listed vocabulary entries, V vocabulary. p anchor, q current, a the sampled token.
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_plugins.masks.direction import Tail, TopKDivergence, ratio_slope, slope, tail_square
from verl_plugins.masks.divergence import anchor_log_tail

DIVERGENCES = get_args(TopKDivergence)
SEEDS = st.integers(0, 2**31)


@dataclass
class Case:
    """A law pair over V entries, the listed ones first; all float64."""

    p: Tensor
    q: Tensor
    sampled: int
    num_listed: int

    def predicted(self, divergence: str, tail: str) -> float:
        k = self.num_listed
        logp, logq = self.p.log()[None], self.q.log()[None]
        tail_p, tail_q = self.p[k:].sum()[None].log(), self.q[k:].sum()[None].log()
        exact = self.q[k:].square().sum()[None] if tail == "exact" else None
        square = tail_square(tail, tail_q, len(self.p) - k, exact)
        index = torch.tensor([self.sampled])
        return slope(divergence, logp[:, :k], logq[:, :k], tail_p, tail_q, square, index).item()

    @property
    def step(self) -> Tensor:
        """The token's own logit step e_a - q."""
        return torch.nn.functional.one_hot(torch.tensor(self.sampled), len(self.q)).double() - self.q


def case(seed: int, vocab: int, num_listed: int, gap: float) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(vocab, generator=generator, dtype=torch.float64)
    q = (logits + gap * torch.randn(vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    p = logits.softmax(-1)
    sampled = int(torch.randint(num_listed, (1,), generator=generator))
    return Case(p, q, sampled, num_listed)


@st.composite
def cases(draw, max_vocab: int = 30) -> Case:
    vocab = draw(st.integers(2, max_vocab))
    return case(draw(SEEDS), vocab, draw(st.integers(1, vocab)), draw(st.sampled_from([0.05, 0.3, 1.0, 3.0])))


def merged(law: Tensor, num_listed: int) -> Tensor:
    """The listed entries and, where anything is left, the tail as one entry."""
    if num_listed == len(law):
        return law
    return torch.cat((law[:num_listed], law[num_listed:].sum()[None]))


def full_divergence(divergence: str, p: Tensor, q: Tensor) -> Tensor:
    if divergence == "topk_forward_kl":
        return (p * (p / q).log()).sum()
    if divergence == "topk_reverse_kl":
        return (q * (q / p).log()).sum()
    return 0.5 * (p - q).abs().sum()


def autograd_slope(divergence: str, example: Case, num_listed: int) -> float:
    """Derivative along e_a - q of the divergence seen through `num_listed` entries, by autograd on the logits."""
    logits = example.q.log().requires_grad_(True)
    value = full_divergence(divergence, merged(example.p, num_listed), merged(logits.softmax(-1), num_listed))
    (gradient,) = torch.autograd.grad(value, logits)
    return float(gradient @ example.step)


P5 = torch.tensor([0.30, 0.30, 0.20, 0.12, 0.08], dtype=torch.float64)
Q5 = torch.tensor([0.62, 0.31, 0.04, 0.02, 0.01], dtype=torch.float64)
P6 = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.06, 0.04], dtype=torch.float64)
Q6 = torch.tensor([0.52, 0.20, 0.12, 0.08, 0.05, 0.03], dtype=torch.float64)


@pytest.mark.parametrize(
    ("divergence", "tail", "num_listed", "expected"),
    [
        ("topk_forward_kl", "exact", 5, -0.182400),
        ("topk_forward_kl", "aggregated", 3, -0.180000),
        ("topk_forward_kl", "uniform", 3, -0.182550),
        ("topk_forward_kl", "exact", 3, -0.182267),
        ("topk_reverse_kl", "exact", 5, -0.209984),
        ("topk_tv", "exact", 5, -0.009982),
    ],
)
def test_worked_example_in_which_the_ratio_test_is_wrong(divergence, tail, num_listed, expected):
    example = Case(P5, Q5, sampled=1, num_listed=num_listed)
    assert example.predicted(divergence, tail) == pytest.approx(expected, abs=1e-6)
    # r = 1.0333 > 1: DPPO would drop a positive advantage here, although D falls.
    assert ratio_slope(P5[1:2].log(), Q5[1:2].log()).item() == 1.0


@pytest.mark.parametrize(
    ("tail", "num_listed", "expected"),
    [("exact", 6, 0.073600), ("aggregated", 3, 0.077600), ("uniform", 3, 0.073333), ("exact", 3, 0.073650)],
)
def test_worked_example_in_which_both_tests_agree(tail, num_listed, expected):
    assert Case(P6, Q6, 0, num_listed).predicted("topk_forward_kl", tail) == pytest.approx(expected, abs=1e-6)


def test_worked_example_with_a_negative_advantage():
    assert -1.0 * Case(P6, Q6, 1, 6).predicted("topk_forward_kl", "exact") == pytest.approx(0.096400, abs=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(example=cases())
@settings(deadline=None)
def test_the_exact_tail_is_the_derivative_of_the_divergence_that_is_thresholded(divergence, example):
    expected = autograd_slope(divergence, example, example.num_listed)
    assert example.predicted(divergence, "exact") == pytest.approx(expected, abs=3e-6, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(example=cases())
@settings(deadline=None)
def test_central_differences_agree(divergence, example):
    k, eps = example.num_listed, 1e-6
    p = merged(example.p, k)
    assume((p - merged(example.q, k)).abs().min() > 1e-4)  # the TV's kink has no derivative
    shifted = [(example.q.log() + sign * eps * example.step).softmax(-1) for sign in (1, -1)]
    up, down = (full_divergence(divergence, p, merged(q, k)) for q in shifted)
    expected = float(up - down) / (2 * eps)
    assert example.predicted(divergence, "exact") == pytest.approx(expected, abs=3e-6, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(example=cases())
@settings(deadline=None)
def test_a_tail_that_really_is_uniform_makes_that_form_the_full_derivative(divergence, example):
    k, vocab = example.num_listed, len(example.p)
    for law in (example.p, example.q):
        law[k:] = law[k:].sum() / max(vocab - k, 1)
    expected = autograd_slope(divergence, example, vocab)
    assert example.predicted(divergence, "uniform") == pytest.approx(expected, abs=3e-6, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(example=cases())
@settings(deadline=None)
def test_a_tail_that_really_is_one_token_makes_the_aggregated_form_the_full_derivative(divergence, example):
    k = example.num_listed
    aggregated = Case(merged(example.p, k), merged(example.q, k), example.sampled, k)
    expected = autograd_slope(divergence, aggregated, len(aggregated.p))
    assert example.predicted(divergence, "aggregated") == pytest.approx(expected, abs=3e-6, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", get_args(Tail))
def test_all_tails_are_one_when_everything_is_listed(divergence, tail):
    example = case(seed=5, vocab=9, num_listed=9, gap=1.0)
    assert example.predicted(divergence, tail) == example.predicted(divergence, "exact")
    assert example.predicted(divergence, tail) == pytest.approx(autograd_slope(divergence, example, 9), abs=1e-6)


@given(example=cases())
@settings(deadline=None)
def test_the_two_estimators_are_the_ends_of_the_interval_of_the_true_value(example):
    q_tail, unlisted = example.q[example.num_listed :], len(example.q) - example.num_listed
    log_tail = q_tail.sum()[None].log()
    exact = tail_square("exact", log_tail, unlisted, q_tail.square().sum()[None])
    low, high = (tail_square(tail, log_tail, unlisted) for tail in ("uniform", "aggregated"))
    assert (low <= exact * (1 + 1e-5)).all()
    assert (exact <= high * (1 + 1e-5)).all()
    for divergence in DIVERGENCES:  # the slope is linear in it, so it lies between the two estimates as well
        first, second = sorted(example.predicted(divergence, tail) for tail in ("uniform", "aggregated"))
        assert first - 1e-6 <= example.predicted(divergence, "exact") <= second + 1e-6


@given(example=cases())
@settings(deadline=None)
def test_the_tests_disagree_iff_the_mean_gap_has_the_sign_of_the_gap_and_exceeds_it(example):
    gap = (example.q - example.p)[example.sampled]
    mean_gap = (example.q * (example.q - example.p)).sum()
    assume((gap - mean_gap).abs() > 1e-5 and gap.abs() > 1e-5)
    whole = Case(example.p, example.q, example.sampled, len(example.p))
    ratio = ratio_slope(example.p.log(), example.q.log())[example.sampled].item()
    disagree = math.copysign(1, whole.predicted("topk_forward_kl", "exact")) != ratio
    assert disagree == bool((mean_gap.sign() == gap.sign()) & (mean_gap.abs() > gap.abs()))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", get_args(Tail))
@given(seed=SEEDS, vocab=st.integers(2, 30), gap=st.sampled_from([0.05, 0.3, 1.0, 3.0]))
@settings(deadline=None)
def test_one_listed_entry_predicts_what_the_ratio_says(divergence, tail, seed, vocab, gap):
    example = case(seed, vocab, 1, gap)
    assume((example.q - example.p)[0].abs() > 1e-5)
    predicted = example.predicted(divergence, tail)
    assert math.copysign(1, predicted) == ratio_slope(example.p[:1].log(), example.q[:1].log()).item()


@given(example=cases())
@settings(deadline=None)
def test_the_sampled_probability_rises_along_its_own_step(example):
    # The reason why the ratio direction is exact for the binary divergences.
    a, q, eps = example.sampled, example.q, 1e-6
    up, down = ((q.log() + sign * eps * example.step).softmax(-1)[a] for sign in (1, -1))
    rate = q[a] * (1 - 2 * q[a] + q.square().sum())
    assert rate > 0
    assert float(up - down) / (2 * eps) == pytest.approx(float(rate), abs=1e-8)


def test_erratum_the_local_term_is_no_square_and_the_mean_is_subtracted():
    gap = Q5 - P5
    published = gap[1] ** 2 + (Q5[:3] * gap[:3]).sum()
    truth = autograd_slope("topk_forward_kl", Case(P5, Q5, 1, 5), 5)
    assert published == pytest.approx(0.1952, abs=1e-6)
    assert truth == pytest.approx(-0.1824, abs=1e-6)


def test_erratum_the_tests_disagree_although_gap_and_mean_gap_point_the_same_way():
    gap, mean_gap = float(Q5[1] - P5[1]), float((Q5 * (Q5 - P5)).sum())
    assert gap == pytest.approx(0.01)
    assert mean_gap == pytest.approx(0.1924)
    assert Case(P5, Q5, 1, 5).predicted("topk_forward_kl", "exact") < 0 < gap


def test_erratum_the_estimators_differ_by_the_tail_times_its_gap_without_a_square():
    example = Case(P5, Q5, 1, 3)
    tail_p, tail_q, unlisted = 0.20, 0.03, 2
    difference = example.predicted("topk_forward_kl", "uniform") - example.predicted("topk_forward_kl", "aggregated")
    assert difference == pytest.approx(tail_q * (tail_q - tail_p) * (1 - 1 / unlisted), abs=1e-7)
    published = tail_q * (tail_q - tail_p) ** 2 * (1 - 1 / unlisted)
    assert abs(difference - published) > 0.002


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", ["aggregated", "uniform"])
def test_an_empty_current_tail_drops_its_term(divergence, tail):
    logp, logq = torch.tensor([[0.5, 0.4]]).log(), torch.tensor([[0.55, 0.45]]).log()
    index, empty, tiny = torch.tensor([0]), torch.tensor([-math.inf]), torch.tensor([-60.0])
    log_tail_p = torch.tensor([math.log(0.1)])
    at_zero, near_zero = (
        slope(divergence, logp, logq, log_tail_p, log_tail_q, tail_square(tail, log_tail_q, 8), index)
        for log_tail_q in (empty, tiny)
    )
    assert at_zero.isfinite().all()
    torch.testing.assert_close(at_zero, near_zero, atol=1e-7, rtol=0)


def test_an_entry_at_the_kink_of_the_total_variation_has_rate_zero():
    logp, logq = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.5, 0.4, 0.1]]).log()
    empty, index = torch.tensor([-math.inf]), torch.tensor([0])
    measured = slope("topk_tv", logp, logq, empty, empty, torch.zeros(1), index)
    rates, q = [0.0, 0.5, -0.5], [0.5, 0.4, 0.1]
    mean = sum(x * y for x, y in zip(q, rates, strict=True))
    steps = [x * (y - mean) for x, y in zip(q, rates, strict=True)]
    assert measured.item() == pytest.approx(steps[0] - sum(x * y for x, y in zip(q, steps, strict=True)), abs=1e-7)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_slopes_of_any_mixture_of_extremes_are_finite(divergence):
    extremes = torch.tensor([-math.inf, -200.0, -30.0, -1.0, 0.0])
    grid = torch.cartesian_prod(*[extremes] * 4)
    index = torch.zeros(len(grid), dtype=torch.long)
    for tail in ("aggregated", "uniform"):
        square = tail_square(tail, grid[:, 3], 7)
        value = slope(divergence, grid[:, :1], grid[:, 1:2], grid[:, 2], grid[:, 3], square, index)
        assert value.isfinite().all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_gives_float32_close_to_it(divergence, dtype):
    example = case(seed=11, vocab=12, num_listed=6, gap=0.5)
    logp, logq, index = example.p.log()[None, :6], example.q.log()[None, :6], torch.tensor([example.sampled])
    rough_p, rough_q = logp.to(dtype), logq.to(dtype)
    tail_q = anchor_log_tail(rough_q)
    square = tail_square("aggregated", tail_q, 6)
    rough = slope(divergence, rough_p, rough_q, anchor_log_tail(rough_p), tail_q, square, index)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(example.predicted(divergence, "aggregated"), abs=2e-2)


def test_ratio_slope_of_extremes():
    logp = torch.tensor([-1.0, -1.0, -1.0, -math.inf, -math.inf, -1.0])
    logq = torch.tensor([-0.9, -1.1, -1.0, -math.inf, -1.0, -math.inf])
    assert ratio_slope(logp, logq).tolist() == [1.0, -1.0, 0.0, 0.0, 1.0, -1.0]


def test_nothing_carries_a_gradient():
    logp = torch.tensor([[0.5, 0.3]]).log()
    logq = torch.tensor([[0.4, 0.4]]).log().requires_grad_(True)
    tail = torch.tensor([0.2]).log().requires_grad_(True)
    square = tail_square("aggregated", tail, 5)
    assert not square.requires_grad
    assert not slope("topk_tv", logp, logq, tail, tail, square, torch.tensor([1])).requires_grad
    assert not ratio_slope(logp[:, 0], logq[:, 0]).requires_grad


def test_wrong_arguments_are_named():
    logp, tail, index = torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"aggregated, uniform, exact.*'even'"):
        tail_square("even", tail, 5)
    with pytest.raises(ValueError, match="exact_N"):
        tail_square("exact", tail, 5)
    with pytest.raises(ValueError, match="exact_N"):
        tail_square("uniform", tail, 5, exact_N=tail)
    with pytest.raises(ValueError, match=r"exact_N.*\(2,\).*\(3,\)"):
        tail_square("exact", tail, 5, exact_N=torch.zeros(3))
    with pytest.raises(ValueError, match=r"topk_forward_kl.*'binary_kl'.*ratio_slope"):
        slope("binary_kl", logp, logp, tail, tail, tail, index)
    with pytest.raises(ValueError, match=r"tail_square.*\(2,\).*\(5,\)"):
        slope("topk_tv", logp, logp, tail, tail, torch.zeros(5), index)
