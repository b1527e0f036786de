from __future__ import annotations

import os

import pytest

from verl_plugins.rollouts.vllm.settings import (
    CPU_ENVIRONMENT,
    allowed_logprobs,
    check_cpu,
    check_topk,
    configured_topk,
    cpu_engine_arguments,
    set_cpu_environment,
)


def test_k_is_read_from_custom() -> None:
    assert [configured_topk(custom) for custom in (None, {}, {"topk": None}, {"topk": 128})] == [0, 0, 0, 128]


@pytest.mark.parametrize(
    ("k", "requested", "limit"), [(0, None, None), (0, 5, 5), (50, None, 50), (1, 20, 20), (9, -1, -1)]
)
def test_the_limit_of_vllm_follows_k(k: int, requested: int | None, limit: int | None) -> None:
    assert allowed_logprobs(k, requested) == limit


def test_a_limit_below_k_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_logprobs=20 is below .*custom\.topk=50\. Remove max_logprobs"):
        allowed_logprobs(50, 20)


@pytest.mark.parametrize(
    ("k", "temperature", "mode"), [(0, 0.7, "raw_logits"), (20, 0.7, "processed_logprobs"), (20, 1.0, "raw_logprobs")]
)
def test_the_sampled_law_is_accepted(k: int, temperature: float, mode: str) -> None:
    check_topk(k, vocabulary=512, temperature=temperature, logprobs_mode=mode)


@pytest.mark.parametrize(
    ("temperature", "mode"), [(0.7, "raw_logprobs"), (1.0, "raw_logits"), (1.0, "processed_logits"), (1.0, None)]
)
def test_another_law_is_refused_with_the_override(temperature: float, mode: str | None) -> None:
    with pytest.raises(ValueError, match=r"Set actor_rollout_ref\.rollout\.logprobs_mode=processed_logprobs"):
        check_topk(20, vocabulary=512, temperature=temperature, logprobs_mode=mode)


def test_k_above_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to 100"):
        check_topk(101, vocabulary=100, temperature=1.0, logprobs_mode="processed_logprobs")


def test_one_process_holds_engine_and_worker_unless_the_model_is_split() -> None:
    assert cpu_engine_arguments(1)["distributed_executor_backend"].endswith(".UniProcExecutor")
    assert "distributed_executor_backend" not in cpu_engine_arguments(2)


def test_what_a_cpu_cannot_do_is_refused_before_the_start() -> None:
    check_cpu(free_cache_engine=False, head_dim=32, supported_head_dims=[32, 64])
    with pytest.raises(ValueError, match=r"Set actor_rollout_ref\.rollout\.free_cache_engine=false"):
        check_cpu(free_cache_engine=True, head_dim=32, supported_head_dims=[32, 64])
    with pytest.raises(ValueError, match=r"head_dim=16 .* takes 32, 64"):
        check_cpu(free_cache_engine=False, head_dim=16, supported_head_dims=[32, 64])


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    set_cpu_environment()
    assert {name: os.environ[name] for name in CPU_ENVIRONMENT} == {**CPU_ENVIRONMENT, "TORCHDYNAMO_DISABLE": "0"}
