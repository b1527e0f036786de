"""What this package registers in verl, as data: `plugin` carries it out, `verl-plugins list` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from verl_plugins.losses.trust_region import PRESETS


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One registry of verl, what we put there, and the module of verl that holds it."""

    kind: str
    names: tuple[str, ...]
    waits_for: str
    register: str  # "module:function" of ours
    chosen_by: str  # the configuration key that selects one of the names
    sentence: str


def registrations() -> tuple[Registration, ...]:
    """Return everything this package registers in verl."""
    return (
        Registration(
            kind="platform",
            names=("cpu",),
            waits_for="verl.plugin.platform",
            register="verl_plugins.platforms.cpu:register",
            chosen_by="trainer.device",
            sentence="Lets verl train without an accelerator (gloo, float32).",
        ),
        Registration(
            kind="policy loss",
            names=tuple(PRESETS),
            waits_for="verl.trainer.ppo.core_algos",
            register="verl_plugins.losses.policy:register",
            chosen_by="actor_rollout_ref.actor.policy_loss.loss_mode",
            sentence="Truncated importance weight times log-probability, under a trust-region mask.",
        ),
        Registration(
            kind="rollout hf_cpu",
            names=("hf_cpu",),
            waits_for="verl.workers.rollout.replica",
            register="verl_plugins.rollouts.hf_cpu.replica:register",
            chosen_by="actor_rollout_ref.rollout.name",
            sentence="Generates with transformers on a CPU and returns K probabilities per token; needs no vLLM.",
        ),
        Registration(
            kind="rollout vllm",
            names=("vllm",),
            waits_for="verl.workers.rollout.replica",
            register="verl_plugins.rollouts.vllm:register",
            chosen_by="actor_rollout_ref.rollout.name",
            sentence="verl's vLLM rollout, returning K probabilities per token when custom.topk is set.",
        ),
        Registration(
            kind="engine fsdp",
            names=("fsdp", "fsdp2"),
            waits_for="verl.workers.engine.fsdp.transformer_impl",
            register="verl_plugins.topk.engines:register_fsdp",
            chosen_by="actor_rollout_ref.actor.strategy",
            sentence="verl's FSDP engine, measuring the divergence from the logits of its own forward.",
        ),
        Registration(
            kind="engine megatron",
            names=("megatron",),
            waits_for="verl.workers.engine.megatron.transformer_impl",
            register="verl_plugins.topk.engines_megatron:register_megatron",
            chosen_by="actor_rollout_ref.actor.strategy",
            sentence="verl's Megatron engine, the same with the vocabulary sharded over tensor-parallel ranks.",
        ),
        Registration(
            kind="trainer",
            names=("verl_plugins",),
            waits_for="verl.trainer.ppo.v1.trainer_sync",
            register="verl_plugins.trainers.sync:register",
            chosen_by="trainer.v1.trainer_mode",
            sentence="verl's synchronous trainer, with K probabilities of the recomputed policy where the loss asks.",
        ),
    )
