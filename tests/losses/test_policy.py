"""The registered loss in verl's signature: gradients against finite differences in float64, and METHODS' numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_plugins.config import PolicyLoss
from verl_plugins.losses.policy import trust_region_loss
from verl_plugins.losses.signals import TokenSignals, token_signals
from verl_plugins.losses.trust_region import PRESETS


def actor(**keys):
    return SimpleNamespace(
        policy_loss=PolicyLoss(**keys), global_batch_info={}, clip_ratio_low=0.2, clip_ratio_high=0.28
    )


def call(logp, anchor, advantage, *, mask=None, measured=None, **keys):
    signals = TokenSignals(anchor_logp_BT=anchor.float(), **(measured or {}))
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    with token_signals(signals):
        loss, metrics = trust_region_loss(anchor, logp, advantage, mask, "token-mean", actor(**keys))
    assert metrics == {}
    return loss, signals


@pytest.mark.parametrize(
    ("name", "p", "q", "advantage", "kept"),
    [
        ("ppo_ratio_mask", 0.001, 0.002, 1.0, False),  # r = 2
        ("dppo_binary_tv", 0.001, 0.002, 1.0, True),  # TV .001
        ("dppo_binary_kl", 0.001, 0.002, 1.0, True),  # KL .000307
        ("ppo_ratio_mask", 0.9, 0.7, -1.0, False),  # r = .777778
        ("dppo_binary_tv", 0.9, 0.7, -1.0, False),  # TV .2 > .15
        ("dppo_binary_kl", 0.9, 0.7, -1.0, False),  # KL .116322 > .05
        ("ppo_ratio_mask", 0.5, 0.62, 1.0, True),  # r = 1.24
        ("dppo_binary_tv", 0.5, 0.62, 1.0, True),
        ("dppo_binary_kl", 0.5, 0.62, 1.0, True),
        ("no_mask", 0.9, 0.1, -1.0, True),
        ("dppo_binary_tv", 0.9, 0.7, 0.0, True),  # A = 0 keeps
    ],
)
def test_worked_numbers(name, p, q, advantage, kept):
    logp = torch.tensor([[q]], dtype=torch.float64).log().requires_grad_()
    loss, signals = call(
        logp, torch.tensor([[p]], dtype=torch.float64).log(), torch.tensor([[advantage]]), loss_mode=name
    )
    loss.backward()
    assert bool(signals.observed["masked"]) is not kept
    expected = -advantage * min(q / p, 10.0) if kept else 0.0
    assert float(logp.grad) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert float(loss) == pytest.approx(expected * math.log(q), rel=1e-6, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(PRESETS)))
def test_gradient_is_that_of_the_surrogate_with_weight_and_mask_held(seed, name):
    rng = torch.Generator().manual_seed(seed)
    shape = (2, 3)
    logp = (-torch.rand(shape, generator=rng, dtype=torch.float64) * 3 - 0.01).requires_grad_()
    anchor = -torch.rand(shape, generator=rng, dtype=torch.float64) * 3 - 0.01
    advantage = torch.randn(shape, generator=rng, dtype=torch.float64)
    measured = {
        "divergence_BT": torch.rand(shape, generator=rng),
        "slope_BT": torch.randn(shape, generator=rng),
        "tail_mass_BT": torch.rand(shape, generator=rng),
    }
    loss, signals = call(logp, anchor, advantage, measured=measured, loss_mode=name)
    loss.backward()
    held = torch.where(signals.observed["masked"].view(shape), 0.0, (logp.detach() - anchor).exp().clamp(max=10.0))
    step = 1e-6
    for index in [(0, 0), (1, 2)]:
        up, down = logp.detach().clone(), logp.detach().clone()
        up[index] += step
        down[index] -= step
        slope = ((-advantage * held * up).mean() - (-advantage * held * down).mean()) / (2 * step)
        assert float(logp.grad[index]) == pytest.approx(float(slope), rel=1e-4, abs=1e-7)


def test_strict_inequalities_and_equality_keep():
    logp = torch.zeros(1, 4).log_softmax(-1)
    delta = 0.5
    measured = {
        "divergence_BT": torch.tensor([[delta, delta + 1e-3, delta + 1e-3, math.inf]]),
        "slope_BT": torch.tensor([[1.0, 0.0, -1.0, 1.0]]),
        "tail_mass_BT": torch.zeros(1, 4),
    }
    _, signals = call(logp, logp, torch.ones(1, 4), measured=measured, loss_mode="pdm_topk_kl", delta=delta)
    assert signals.observed["masked"].tolist() == [False, False, False, True]


def test_masked_and_padded_tokens_change_nothing():
    logp = torch.tensor([[-0.5, -2.0, -1.0]], requires_grad=True)
    anchor, advantage = torch.tensor([[-0.5, -0.1, -1.0]]), torch.tensor([[1.0, -1.0, 1.0]])
    mask = torch.tensor([[True, True, False]])
    loss, _ = call(logp, anchor, advantage, mask=mask, loss_mode="dppo_binary_tv")
    loss.backward()
    assert logp.grad[0, 1:].tolist() == [0.0, 0.0]
    assert float(logp.grad[0, 0]) == pytest.approx(-0.5)  # 1 / (2 response tokens): the masked one still counts


def test_truncation_is_its_own_key():
    logp, anchor = torch.tensor([[-0.1]], requires_grad=True), torch.tensor([[-5.0]])
    loss, signals = call(logp, anchor, torch.tensor([[-1.0]]), loss_mode="no_mask", truncation=4.0)
    loss.backward()
    assert float(logp.grad) == pytest.approx(4.0) and bool(signals.observed["truncated"])


def test_bfloat16_log_probs_give_a_float32_weight():
    logp = torch.tensor([[-0.5, -1.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, signals = call(logp, torch.tensor([[-0.5, -1.0]]), torch.ones(1, 2), loss_mode="dppo_binary_kl")
    assert signals.observed["ratio"].dtype == torch.float32 and torch.isfinite(loss)


NOTHING = (torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))


def test_outside_our_engine_the_loss_says_so():
    with pytest.raises(RuntimeError, match="outside a verl_plugins engine"):
        trust_region_loss(*NOTHING, config=actor(loss_mode="pdm_topk_kl"))


def test_verls_own_dataclass_is_refused():
    from verl.workers.config import PolicyLossConfig

    config = SimpleNamespace(policy_loss=PolicyLossConfig(loss_mode="pdm_topk_kl"), global_batch_info={})
    with pytest.raises(TypeError, match=r"_target_=verl_plugins\.config\.PolicyLoss"):
        trust_region_loss(*NOTHING, config=config)


def test_importance_weights_and_rollout_anchor_are_refused_together():
    config = actor(loss_mode="dppo_binary_kl")
    signals = TokenSignals(anchor_logp_BT=torch.zeros(1, 1))
    with token_signals(signals), pytest.raises(ValueError, match="rollout_is=null"):
        trust_region_loss(*NOTHING, config=config, rollout_is_weights=torch.ones(1, 1))
