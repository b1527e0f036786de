# Axes in this file: N tokens.
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_plugins.masks.direction import ratio_slope, slope, tail_square
from verl_plugins.masks.divergence import binary_kl, binary_tv, topk_forward_kl
from verl_plugins.masks.keep import clip_band_mask, keep_mask, truncated_weight


def tokens(seed: int, num_tokens: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded log p_a, log q_a and advantages, float32, with some exact zeros and ties."""
    generator = torch.Generator().manual_seed(seed)
    logp = -3.0 * torch.rand(num_tokens, generator=generator) - 0.01
    logq = torch.clamp(logp + 0.5 * torch.randn(num_tokens, generator=generator), max=-0.001)
    advantage = torch.randn(num_tokens, generator=generator)
    advantage[::7], logq[::5] = 0.0, logp[::5]
    return logp, logq, advantage


def test_only_too_far_and_farther_is_dropped():
    divergence = torch.tensor([0.06, 0.06, 0.06, 0.06, 0.04, 0.05, math.inf])
    direction = torch.tensor([0.1, -0.1, -0.1, 0.1, 0.1, 0.1, 1e-30])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1e-30])
    keep = keep_mask(divergence, direction, advantage, delta=0.05)
    assert keep.dtype == torch.bool
    assert keep.tolist() == [False, True, False, True, True, True, False]


@pytest.mark.parametrize("far", [0.1, math.inf])
def test_no_advantage_or_no_slope_keeps(far):
    keep = keep_mask(torch.full((2,), far), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), delta=0.05)
    assert keep.all()


def test_equal_probabilities_keep_under_the_ratio_direction():
    logp = torch.tensor([-0.5])
    assert keep_mask(torch.tensor([9.0]), ratio_slope(logp, logp), torch.tensor([1.0]), delta=0.05).all()


@pytest.mark.parametrize(
    ("p", "q", "advantage", "in_band", "under_tv", "under_kl"),
    [(0.001, 0.002, 1.0, False, True, True), (0.9, 0.7, -1.0, False, False, False), (0.5, 0.62, 1.0, True, True, True)],
)
def test_worked_examples_of_the_three_masks(p, q, advantage, in_band, under_tv, under_kl):
    logp, logq, weight = (torch.tensor([x]) for x in (math.log(p), math.log(q), advantage))
    direction = ratio_slope(logp, logq)
    assert clip_band_mask(logq - logp, weight, clip_low=0.2, clip_high=0.28).item() is in_band
    assert keep_mask(binary_tv(logp, logq), direction, weight, delta=0.15).item() is under_tv
    assert keep_mask(binary_kl(logp, logq), direction, weight, delta=0.05).item() is under_kl


@pytest.mark.parametrize("tail", ["aggregated", "uniform"])
def test_worked_example_that_dppo_masks_and_the_prediction_keeps(tail):
    logp, logq = torch.tensor([[0.30, 0.30, 0.20]]).log(), torch.tensor([[0.62, 0.31, 0.04]]).log()
    tail_p, tail_q, index = torch.tensor([math.log(0.2)]), torch.tensor([math.log(0.03)]), torch.tensor([1])
    distance = topk_forward_kl(logp, logq, tail_p, tail_q)
    predicted = slope("topk_forward_kl", logp, logq, tail_p, tail_q, tail_square(tail, tail_q, 2), index)
    advantage = torch.ones(1)
    assert not keep_mask(distance, ratio_slope(logp[:, 1], logq[:, 1]), advantage, delta=0.05).item()
    assert keep_mask(distance, predicted, advantage, delta=0.05).item()


@given(seed=st.integers(0, 2**31), delta=st.floats(0.0, 1.0))
@settings(deadline=None)
def test_a_wider_threshold_never_drops_more_and_infinity_drops_none(seed, delta):
    logp, logq, advantage = tokens(seed)
    distance, direction = binary_tv(logp, logq), ratio_slope(logp, logq)
    narrow = keep_mask(distance, direction, advantage, delta)
    assert (narrow <= keep_mask(distance, direction, advantage, delta + 0.1)).all()
    assert keep_mask(distance, direction, advantage, math.inf).all()


@given(seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_flipping_the_advantage_drops_the_other_side(seed):
    logp, logq, advantage = tokens(seed)
    distance, direction = binary_tv(logp, logq), ratio_slope(logp, logq)
    far = (distance > 0.05) & (advantage != 0) & (direction != 0)
    one, other = (keep_mask(distance, direction, sign * advantage, 0.05) for sign in (1, -1))
    assert torch.equal(one ^ other, far)


def verl_kept(loss_mode: str, seed: int, low: float, high: float) -> Tensor:
    """Tokens to which verl's own loss of that name gives a gradient."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=1e9,
    )
    logp, logq, advantage = tokens(seed)
    logq = logq.clone().requires_grad_(True)
    loss, _ = core_algos.get_policy_loss_fn(loss_mode)(
        old_log_prob=logp[None],
        log_prob=logq[None],
        advantages=advantage[None],
        response_mask=torch.ones(1, len(logp)),
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    assert logq.grad is not None
    return logq.grad != 0


@pytest.mark.parametrize(("loss_mode", "delta"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_the_binary_masks_are_those_of_verl(loss_mode, delta, seed):
    logp, logq, advantage = tokens(seed)
    if loss_mode == "dppo_tv":
        distance = binary_tv(logp, logq)
    else:
        distance = binary_kl(logp, logq)
        p, q = logp.exp(), logq.exp()
        as_verl = p * (logp - logq) + (1 - p) * ((1 - p + 1e-8) / (1 - q + 1e-8)).log()
        torch.testing.assert_close(distance, as_verl, atol=2e-6, rtol=1e-4)
    ours = keep_mask(distance, ratio_slope(logp, logq), advantage, delta)
    decided = (advantage != 0) & ((distance - delta).abs() > 1e-5)
    assert torch.equal(ours[decided], verl_kept(loss_mode, seed, delta, delta)[decided])


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_the_clip_band_is_where_the_vanilla_loss_of_verl_has_a_gradient(seed):
    logp, logq, advantage = tokens(seed)
    ours = clip_band_mask(logq - logp, advantage, clip_low=0.2, clip_high=0.28)
    moving = advantage != 0
    assert torch.equal(ours[moving], verl_kept("vanilla", seed, 0.2, 0.28)[moving])
    assert ours[~moving].all()


def test_clip_band_is_not_symmetric_in_the_logarithm():
    log_ratio = torch.tensor([0.81, 0.79, 1.27, 1.29]).log()
    assert clip_band_mask(log_ratio, -torch.ones(4), 0.2, 0.28).tolist() == [True, False, True, True]
    assert clip_band_mask(log_ratio, torch.ones(4), 0.2, 0.28).tolist() == [True, True, True, False]


def test_clip_band_of_extremes():
    log_ratio = torch.tensor([math.inf, -math.inf, 500.0, 0.0])
    up, down = torch.ones(4), -torch.ones(4)
    assert clip_band_mask(log_ratio, up, 0.2, 0.28).tolist() == [False, True, False, True]
    assert clip_band_mask(log_ratio, down, 0.2, 0.28).tolist() == [True, False, True, True]


def test_truncated_weight_of_hand_values():
    log_ratio = torch.tensor([0.0, math.log(2.0), math.log(3.0), 1e4, math.inf, -1e4, -math.inf], requires_grad=True)
    weight = truncated_weight(log_ratio, cap=2.5)
    torch.testing.assert_close(weight, torch.tensor([1.0, 2.0, 2.5, 2.5, 2.5, 0.0, 0.0]))
    assert not weight.requires_grad
    assert truncated_weight(torch.tensor([1e4]), cap=10.0).item() == 10.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_gives_a_float32_weight_and_a_bool_mask(dtype):
    log_ratio = torch.tensor([0.5, 12.0, -0.5], dtype=dtype)
    weight = truncated_weight(log_ratio, cap=1e4)
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, torch.tensor([math.exp(0.5), 1e4, math.exp(-0.5)]), rtol=1e-3, atol=0)
    assert keep_mask(log_ratio, log_ratio, log_ratio, delta=1.0).tolist() == [True, False, True]


def test_wrong_arguments_are_named():
    one = torch.ones(1)
    for delta in (-0.1, math.nan):
        with pytest.raises(ValueError, match=r"delta.*policy_loss\.delta"):
            keep_mask(one, one, one, delta)
    with pytest.raises(ValueError, match=r"one shape.*\(1,\), \(2,\)"):
        keep_mask(one, torch.ones(2), one, 0.1)
    with pytest.raises(ValueError, match=r"clip_low.*\[0, 1\].*1\.5.*clip_ratio_low"):
        clip_band_mask(one, one, 1.5, 0.2)
    with pytest.raises(ValueError, match=r"clip_high.*-0\.1.*clip_ratio_high"):
        clip_band_mask(one, one, 0.2, -0.1)
    with pytest.raises(ValueError, match="one shape"):
        clip_band_mask(one, torch.ones(2), 0.2, 0.2)
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"cap.*policy_loss\.truncation"):
            truncated_weight(one, cap)
