"""Real verl, Ray and rollout engine, a few steps each. Together the runs cover every rollout, rank count, model kind,
trainer and loss family at least once:

| run                | rollout | ranks | model | loss                                   | trainer      |
|--------------------|---------|-------|-------|----------------------------------------|--------------|
| resumed            | hf_cpu  | 1     | dense | PDM forward KL, bypass                 | verl_plugins |
| two ranks          | hf_cpu  | 2     | MoE   | PDM exact tail, dynamic batch          | verl_plugins |
| old anchor         | hf_cpu  | 1     | dense | DPPO TV against the recomputed policy  | verl_plugins |
| verl's own trainer | hf_cpu  | 1     | dense | binary KL, padded                      | sync         |
| vllm               | vllm    | 1     | dense | PDM reverse KL, K=50                   | verl_plugins |
| vllm moe           | vllm    | 1     | MoE   | DPPO forward KL                        | verl_plugins |
"""

from __future__ import annotations

import pytest
from trainer_run import start, train

pytestmark = pytest.mark.end_to_end

SHORT = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_training_steps=2")
COMPARE = ("algorithm.rollout_correction.bypass_mode=false",)
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
# Compared on the resumed run: sampling is seeded per request, so what differs is rounding of another batch order.
RESUME_TOLERANCE = 1e-4
COMPARED_ON_RESUME = (
    "critic/score/mean",
    "response_length/mean",
    "actor/divergence_mean",
    "actor/masked_share",
    "actor/pg_loss",
)


def assert_probabilities_agree(rows):
    """fp32: what the rollout sampled from is what the trainer computes, after each weight synchronisation."""
    for step, row in rows.items():
        assert row["training/rollout_probs_diff_mean"] <= 1e-6, step
        assert row["training/rollout_probs_diff_max"] <= 1e-5, step
        assert row["actor/divergence_first"] <= 1e-6, step
        # Each K-list holds its own token, with the log-probability that verl carries beside it.
        assert row.get("actor/list_mismatch_max", 0.0) <= 1e-6, step


def assert_masks_acted(rows):
    assert all(row["actor/divergence_max"] > 0 for row in rows.values())
    assert all(
        row["actor/masked_share"]
        == pytest.approx(row["actor/masked_share_positive"] + row["actor/masked_share_negative"], abs=1e-6)
        for row in rows.values()
    )
    assert any(row["actor/masked_share"] > 0 for row in rows.values())


def test_killed_run_resumes_where_it_was(world, tmp_path):
    keys = (
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    )
    whole = train("tiny_pdm", world, tmp_path / "whole", *keys).rows
    assert sorted(whole) == [1, 2, 3, 4]
    assert_masks_acted(whole)

    killed = start("tiny_pdm", world, tmp_path / "killed", *keys)
    killed.wait_until(lambda run: 3 in run.rows, 300)
    killed.kill()
    assert not killed.orphans()
    resumed = train("tiny_pdm", world, tmp_path / "killed", *keys)
    rows = resumed.rows
    assert sorted(rows) == [1, 2, 3, 4]
    assert "Resuming from" in resumed.log or "global_step_2" in resumed.log
    for step in rows:
        for name in COMPARED_ON_RESUME:
            assert rows[step][name] == pytest.approx(whole[step][name], abs=RESUME_TOLERANCE), (step, name)


def test_two_ranks_of_a_mixture_of_experts(world, tmp_path):
    run = train(
        "tiny_pdm_moe",
        world,
        tmp_path,
        *SHORT,
        *COMPARE,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512",
        f"{POLICY_LOSS}.tail=exact",
    )
    assert_probabilities_agree(run.rows)
    assert_masks_acted(run.rows)
    assert "tail: exact" in run.log
    assert "actor/list_mismatch_max" in run.rows[1]


def test_anchor_old_recomputes_the_lists(world, tmp_path):
    run = train(
        "tiny_dppo",
        world,
        tmp_path,
        *SHORT,
        *COMPARE,
        f"{POLICY_LOSS}.loss_mode=dppo_topk_tv",
        f"{POLICY_LOSS}.anchor=old",
    )
    assert_masks_acted(run.rows)
    # The anchor is the trainer's own policy: no mismatch at all before the first update.
    assert all(row["actor/divergence_first"] <= 1e-6 for row in run.rows.values())


def test_verls_own_trainer_and_padded_batches(world, tmp_path):
    run = train(
        "tiny_pdm",
        world,
        tmp_path,
        *SHORT,
        *COMPARE,
        "trainer.v1.trainer_mode=sync",
        "actor_rollout_ref.model.use_remove_padding=false",
        f"{POLICY_LOSS}.loss_mode=dppo_binary_kl",
        VERL_FILE_LOGGER_PATH=str(tmp_path / "metrics.jsonl"),
    )
    assert_probabilities_agree(run.rows)
    assert "actor/tail_mass_mean" not in run.rows[1]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("qwen3_sum", (f"{POLICY_LOSS}.divergence=topk_reverse_kl", "actor_rollout_ref.rollout.custom.topk=50")),
        ("qwen3_moe_sum", (f"{POLICY_LOSS}.loss_mode=dppo_topk_kl",)),
    ],
)
def test_vllm_on_the_cpu(world, tmp_path, model, keys):
    pytest.importorskip("vllm")
    run = train(
        "tiny_pdm_vllm",
        world,
        tmp_path,
        *SHORT,
        *COMPARE,
        f"actor_rollout_ref.model.path={world}/{model}",
        *keys,
        timeout_s=560,
    )
    assert_probabilities_agree(run.rows)
    assert_masks_acted(run.rows)
