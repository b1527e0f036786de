"""What this package registers in verl, as data, and what has become of it in this process.

`plugin` carries it out, `verl-plugins list` prints it, `checks` asks whether it went well.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class Status:
    """What has happened so far in this process: kind of registration -> names, traceback, or reason."""

    done: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Return why the plugin must not be trusted, or None."""
        if self.failed:
            return "; ".join(f"{kind}: {why.strip().splitlines()[-1]}" for kind, why in self.failed.items())
        if not self.done:
            policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
            return f"verl did not load the plugin (VERL_USE_EXTERNAL_PLUGINS={policy})"
        return None


# Here and not in `plugin`: verl drops a plugin that raises, and with it what the module knew.
STATUS = Status()

# Registrations that came while the module they need was being imported, by that module's name.
DEFERRED: dict[str, Callable[[], None]] = {}


def completed(module: str) -> None:
    """Last line of each module that registers a class of its own: carry out what had to wait for it.

    Imported directly, before verl, such a module first imports the very module of verl whose import sets off its
    registration, at a moment when it has no class to give yet.
    """
    if module in DEFERRED:
        DEFERRED.pop(module)()


def check_signature(function: Callable[..., object], keywords: tuple[str, ...], what: str) -> None:
    """Refuse a function that verl would fail to call, naming what is missing.

    Raises:
        TypeError: verl passes a keyword that the function does not take.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in keywords if name not in parameters]
    if missing and not takes_any:
        raise TypeError(f"{what}: verl calls it with {missing}, which {function.__qualname__} does not take")


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
