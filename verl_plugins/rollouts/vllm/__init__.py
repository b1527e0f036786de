"""vLLM with the K most probable tokens of each position: verl's own replica and adapter, subclassed.

`register` puts both in front of verl's, under the same name: other parts of verl test for "vllm". Nothing here imports
vLLM before verl asks for the replica, and nothing changes where vLLM is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ADAPTER = "verl_plugins.rollouts.vllm.weight_sync.WatchedServerAdapter"
_VERL_ADAPTER = "verl.workers.rollout.vllm_rollout.ServerAdapter"


def load_replica() -> type[Any]:
    """Import vLLM and return the replica class; what verl calls when a run uses `rollout.name=vllm`."""
    from verl_plugins.rollouts.vllm.replica import TopKvLLMReplica

    return TopKvLLMReplica


def register() -> None:
    """Register the replica and the adapter under "vllm".

    Raises:
        ValueError: another plugin has replaced verl's own, so that one of the two would be lost without a word.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_plugins.rollouts.vllm import distribution

    registered: Callable[[], type[Any]] | None = RolloutReplicaRegistry._registry.get("vllm")
    if registered is not None and registered.__module__ not in (__name__, RolloutReplicaRegistry.__module__):
        raise ValueError(
            f"rollout 'vllm' is registered by {registered.__module__}; two plugins cannot both replace it. "
            "Uninstall one of them, or set actor_rollout_ref.rollout.name=hf_cpu"
        )
    adapter = _ROLLOUT_REGISTRY.get(("vllm", "async"))
    if adapter not in (None, ADAPTER, _VERL_ADAPTER):
        raise ValueError(f"the weight adapter of rollout 'vllm' is {adapter}; two plugins cannot both replace it")
    distribution.install()
    RolloutReplicaRegistry.register("vllm", load_replica)
    _ROLLOUT_REGISTRY[("vllm", "async")] = ADAPTER
