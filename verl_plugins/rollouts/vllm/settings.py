"""What K asks of vLLM's configuration, and what a CPU does. Pure: free of verl and vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from verl_plugins.topk.rows import check_k

_ROLLOUT: Final = "actor_rollout_ref.rollout"

CPU_ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_TARGET_DEVICE": "cpu",
    # Binding would pin every engine of the machine to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's sampler is compiled at the first request otherwise, enforce_eager or not.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of the engine on a CPU, unless the user's own sets it."""


def configured_topk(custom: Mapping[str, Any] | None) -> int:
    """Return K of `actor_rollout_ref.rollout.custom.topk`, 0 when it is not set."""
    return int((custom or {}).get("topk") or 0)


def check_topk(k: int, *, vocabulary: int, temperature: float, logprobs_mode: str | None) -> None:
    """Refuse a configuration whose K-lists would not be the law that was sampled.

    Args:
        k: configured number of listed tokens, 0 for none.
        vocabulary: tokens the sampler may choose from.
        temperature: of the training rollout.
        logprobs_mode: vLLM's mode in force.

    Raises:
        ValueError: K exceeds the vocabulary, or the log-probabilities ignore the temperature.
    """
    if k == 0:
        return
    check_k(k, vocabulary)
    if logprobs_mode != "processed_logprobs" and not (logprobs_mode == "raw_logprobs" and temperature == 1.0):
        raise ValueError(
            f"{_ROLLOUT}.logprobs_mode={logprobs_mode} with custom.topk={k} and temperature={temperature:g}: vLLM "
            "would list the law before the temperature, the trainer divides its logits by it. "
            f"Set {_ROLLOUT}.logprobs_mode=processed_logprobs"
        )


def allowed_logprobs(k: int, requested: int | None) -> int | None:
    """Return vLLM's `max_logprobs` for K, None to leave vLLM's default.

    Args:
        k: configured number of listed tokens, 0 for none.
        requested: `engine_kwargs.vllm.max_logprobs`; -1 is vLLM's word for the whole vocabulary.

    Raises:
        ValueError: the user's own limit is below K.
    """
    if k == 0 or requested == -1:
        return requested
    if requested is not None and requested < k:
        raise ValueError(
            f"{_ROLLOUT}.engine_kwargs.vllm.max_logprobs={requested} is below {_ROLLOUT}.custom.topk={k}. "
            "Remove max_logprobs: it is set from topk"
        )
    return k if requested is None else requested


def cpu_engine_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Return the arguments of the engine on a CPU, each of which `engine_kwargs.vllm` may set otherwise."""
    arguments: dict[str, Any] = {
        # Without it vLLM reserves a share of the machine's memory and runs a warm-up to measure the rest.
        "kv_cache_memory_bytes": 256 << 20,
        # The alternative compiles C++ for tens of seconds in each new engine.
        "enforce_eager": True,
        # vLLM's CPU worker cannot release memory.
        "enable_sleep_mode": False,
    }
    if tensor_parallel_size == 1:
        # A worker process of its own would cost 10 s of start-up and 500 MiB, and leave its queues in /dev/shm. vLLM
        # prefers one because it binds threads there; we do not bind (`CPU_ENVIRONMENT`).
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return arguments


def check_cpu(*, free_cache_engine: bool, head_dim: int, supported_head_dims: Sequence[int]) -> None:
    """Refuse what vLLM's CPU worker cannot do; it would say so minutes later, at the first request, and die of it.

    Raises:
        ValueError: the run would ask the engine to release its memory between steps, or the model's attention heads
            have a size without a kernel.
    """
    if free_cache_engine:
        raise ValueError(
            f"{_ROLLOUT}.free_cache_engine=true: vLLM cannot release memory on a CPU. "
            f"Set {_ROLLOUT}.free_cache_engine=false"
        )
    if head_dim not in supported_head_dims:
        raise ValueError(
            f"head_dim={head_dim} of the model: vLLM's attention on a CPU takes "
            f"{', '.join(map(str, supported_head_dims))}. Use another model, or set {_ROLLOUT}.name=hf_cpu"
        )


def set_cpu_environment() -> None:
    """Set `CPU_ENVIRONMENT` for the engine processes that this one starts."""
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
