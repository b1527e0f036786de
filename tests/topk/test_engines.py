"""The FSDP engine against a slow twin that sees the whole vocabulary, through verl's own engine and loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_case import NUM_LISTED, VOCABULARY, actor_loss, build_engine, full_logits, make_batch, run_loss, write_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return build_engine(write_model(tmp_path_factory.mktemp("model")))


def slow_loss(engine, batch, *, divergence, direction, tail, delta, cap=10.0, temperature=1.0):
    """METHODS 3.1 and 4, token by token, in float64; returns loss and share of masked tokens."""
    losses, masked, count = [], 0, 0
    sequences = list(batch["input_ids"].unbind())
    for i, logits_SV in enumerate(full_logits(engine, sequences)):
        prompt_len, response = len(batch["prompts"][i]), batch["responses"][i]
        logq_RV = torch.log_softmax(logits_SV[prompt_len - 1 : -1].double() / temperature, -1)
        for t, a in enumerate(response.tolist()):
            listed = batch["rollout_topk_ids"][i][t].long()
            logp_K = batch["rollout_topk_logprobs"][i][t].double()
            p, q = logp_K.exp(), logq_RV[t].exp()
            p_a, q_a, adv = float(p[listed == a]), float(q[a]), float(batch["advantages"][i][t])
            rest = torch.ones(VOCABULARY, dtype=torch.bool)
            rest[listed] = False
            p_T, q_T = float(1 - p.sum()), float(q[rest].sum())
            if divergence == "topk_kl":
                value = float((p * (p / q[listed]).log()).sum()) + p_T * float(np.log(p_T / q_T))
                square = {
                    "aggregated": q_T**2,
                    "uniform": q_T**2 / int(rest.sum()),
                    "exact": float((q[rest] ** 2).sum()),
                }
                gap = q[listed] - p
                predicted = adv * (
                    q_a - p_a - float((q[listed] * gap).sum()) - (q_T - p_T) * square[tail or "aggregated"] / q_T
                )
            else:
                value = 0.5 * (float((p - q[listed]).abs().sum()) + abs(p_T - q_T))
                predicted = None
            worse = predicted > 0 if direction == "predicted" else adv * (q_a - p_a) > 0
            drop = value > delta and worse
            masked += drop
            count += 1
            losses.append(-adv * min(q_a / p_a, cap) * (0.0 if drop else 1.0) * float(logq_RV[t, a]))
    return sum(losses) / count, masked / count


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("divergence", "direction", "tail"),
    [
        ("topk_kl", "predicted", "aggregated"),
        ("topk_kl", "predicted", "uniform"),
        ("topk_kl", "predicted", "exact"),
        ("topk_kl", "ratio", None),
        ("topk_tv", "ratio", None),
    ],
)
def test_loss_and_masked_share_equal_the_slow_twin(engine, divergence, direction, tail, packed):
    batch = make_batch(engine, noise=0.7)
    keys = {"loss_mode": "pdm_topk_kl", "divergence": divergence, "direction": direction, "tail": tail, "delta": 0.1}
    loss, metrics, _ = run_loss(engine, batch, actor_loss(keys), micro=2, packed=packed)
    expected, share = slow_loss(engine, batch, divergence=divergence, direction=direction, tail=tail, delta=0.1)
    assert 0 < share < 1
    assert metrics["actor/masked_share"] == [pytest.approx(share, abs=1e-9)]
    assert loss == pytest.approx(expected, abs=2e-6)


def test_temperature_divides_the_logits_of_the_measurement_too(engine):
    batch = make_batch(engine, noise=0.7)
    loss, _, _ = run_loss(
        engine, batch, actor_loss({"loss_mode": "pdm_topk_kl", "delta": 0.1}), micro=4, temperature=0.7
    )
    expected, _ = slow_loss(
        engine, batch, divergence="topk_kl", direction="predicted", tail="aggregated", delta=0.1, temperature=0.7
    )
    assert loss == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(engine, mode):
    batch = make_batch(engine, noise=0.7)
    loss = actor_loss({"loss_mode": "pdm_topk_kl", "delta": 0.1}, loss_agg_mode=mode, loss_scale_factor=7)
    runs = [run_loss(engine, batch, loss, micro=micro) for micro in (1, 2, 4)]
    for value, metrics, gradient in runs[1:]:
        assert value == pytest.approx(runs[0][0], rel=1e-6)
        assert metrics["actor/masked_share"] == runs[0][1]["actor/masked_share"]
        assert np.linalg.norm(gradient - runs[0][2]) < 1e-5 * np.linalg.norm(gradient)


def test_a_masked_token_moves_nothing(engine):
    batch = make_batch(engine, noise=0.7)
    everything = actor_loss({"loss_mode": "dppo_topk_tv", "delta": 1e-9})
    kept_by_sign, _, gradient = run_loss(engine, batch, everything, micro=4)
    _, _, free = run_loss(engine, batch, actor_loss({"loss_mode": "no_mask"}), micro=4)
    assert np.abs(gradient).max() < np.abs(free).max()
    assert np.isfinite(kept_by_sign)


def test_k_one_is_the_binary_divergence(engine):
    batch = make_batch(engine, noise=0.7)
    ids = [row[:, None] for row in batch["responses"].unbind()]
    batch["rollout_topk_ids"] = torch.nested.as_nested_tensor([i.int() for i in ids], layout=torch.jagged)
    logps = [row[:, None] for row in batch["rollout_log_probs"].unbind()]
    batch["rollout_topk_logprobs"] = torch.nested.as_nested_tensor(logps, layout=torch.jagged)
    top = run_loss(engine, batch, actor_loss({"loss_mode": "dppo_topk_kl", "delta": 0.1}), micro=2)
    binary = run_loss(engine, batch, actor_loss({"loss_mode": "dppo_binary_kl", "delta": 0.1}), micro=2)
    assert top[0] == pytest.approx(binary[0], abs=1e-7)
    assert top[1]["actor/masked_share"] == binary[1]["actor/masked_share"]
    assert top[1]["actor/divergence_mean"] == [pytest.approx(binary[1]["actor/divergence_mean"][0], abs=1e-6)]


def test_lists_of_the_recomputed_policy_give_no_divergence_before_an_update(engine):
    from verl.utils import tensordict_utils as tu

    from verl_plugins.topk.bound_loss import ANCHOR_LISTS, WANTS_ANCHOR_LISTS

    batch = make_batch(engine, noise=0.7)
    data = batch.copy()
    tu.assign_non_tensor(
        data,
        use_remove_padding=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        temperature=1.0,
        pad_token_id=1,
        **{WANTS_ANCHOR_LISTS: True},
    )
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    assert output[ANCHOR_LISTS].values().shape == (batch["input_ids"].values().shape[0], NUM_LISTED + 1)
    batch[ANCHOR_LISTS] = output[ANCHOR_LISTS]
    loss = actor_loss({"loss_mode": "pdm_topk_kl", "anchor": "old", "delta": 1e-4})
    _, metrics, _ = run_loss(engine, batch, loss, micro=2)
    assert metrics["actor/divergence_max"][0] < 1e-5
    assert metrics["actor/masked_share"] == [0.0]
    assert metrics["actor/importance_ratio_mean"] == [pytest.approx(1.0, abs=1e-5)]


def test_first_mini_batch_is_marked_and_reset_by_the_last(engine):
    batch = make_batch(engine, noise=0.3)
    _, metrics, _ = run_loss(engine, batch, actor_loss({"loss_mode": "pdm_topk_kl"}), micro=2)
    assert metrics["actor/divergence_first"] == metrics["actor/divergence_mean"]


def test_other_losses_run_on_verls_engine_unchanged(engine):
    batch = make_batch(engine, noise=0.3)
    _, metrics, _ = run_loss(engine, batch, actor_loss({"loss_mode": "vanilla"}), micro=2)
    assert not any(name.startswith("actor/divergence") for name in metrics)


def test_lists_of_other_tokens_are_seen(engine):
    batch = make_batch(engine, noise=0.3)
    loss = actor_loss({"loss_mode": "pdm_topk_kl"})
    assert run_loss(engine, batch, loss, micro=2)[1]["actor/list_mismatch_max"][0] < 1e-6
    batch["rollout_log_probs"] = batch["rollout_log_probs"] + 0.01
    assert run_loss(engine, batch, loss, micro=2)[1]["actor/list_mismatch_max"][0] == pytest.approx(0.01, abs=1e-6)


def test_missing_lists_are_named(engine):
    batch = make_batch(engine, noise=0.3).exclude("rollout_topk_ids", "rollout_topk_logprobs")
    with pytest.raises(ValueError, match=r"rollout\.custom\.topk"):
        run_loss(engine, batch, actor_loss({"loss_mode": "pdm_topk_kl"}), micro=2)
