"""`hf_cpu` in verl: configuration, registration, and real servers in Ray fed by two training ranks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput, get_rollout_replica_class

from verl_plugins.rollouts.hf_cpu import replica
from verl_plugins.topk.rows import TOPK_IDS, TOPK_LOGPROBS, check_rows

SIZES = {"tensor_model_parallel_size": 1, "dtype": "float32", "prompt_length": 16, "response_length": 8}


def rollout_config(**changes: Any) -> RolloutConfig:
    transport = CheckpointEngineConfig(update_weights_bucket_megabytes=1)
    fixed = {"max_num_seqs": 32, "max_model_len": 64, "checkpoint_engine": transport}
    return RolloutConfig(name="hf_cpu", **{**SIZES, **fixed, **changes})


def model_config(folder: str, **changes: Any) -> Any:
    keys = {"path": folder, "local_path": None, "tokenizer_path": None, "use_shm": False, "trust_remote_code": False}
    return OmegaConf.create({**keys, "override_config": {"attn_implementation": "sdpa"}, **changes})


def test_settings_come_from_verls_configuration(dense_folder: str):
    engine = {"hf_cpu": {"num_threads": 2, "batch_window_s": 0.1}, "vllm": {"max_logprobs": 20}}
    overrides = {"model_config": {"rope_theta": 500.0}}
    settings = replica.server_settings(
        rollout_config(engine_kwargs=engine, ignore_eos=True, seed=9),
        model_config(dense_folder, override_config=overrides),
    )
    assert settings.model_path == settings.tokenizer_path == dense_folder
    assert (settings.num_threads, settings.batch_window_s, settings.seed, settings.ignore_eos) == (2, 0.1, 9, True)
    assert (settings.prompt_length, settings.response_length, settings.max_model_len) == (16, 8, 64)
    assert settings.override_config == {"rope_theta": 500.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "set actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        ({"data_parallel_size": 4}, "set actor_rollout_ref.rollout.data_parallel_size=1"),
        (
            {"engine_kwargs": {"hf_cpu": {"top_logprobs": 4}}},
            "engine_kwargs.hf_cpu has no top_logprobs; allowed: num_threads, batch_window_s",
        ),
    ],
)
def test_what_this_rollout_cannot_do_is_refused(dense_folder: str, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        replica.server_settings(rollout_config(**changes), model_config(dense_folder))


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    monkeypatch.delitem(_ROLLOUT_REGISTRY, ("hf_cpu", "async"), raising=False)
    RolloutReplicaRegistry._registry.pop("hf_cpu", None)


def test_verl_finds_both_halves(registries: None):
    replica.register()
    replica.register()
    assert get_rollout_replica_class("hf_cpu") is replica.HFCPUReplica
    assert get_rollout_class("hf_cpu") is replica.HFCPUWeights


def test_a_foreign_rollout_of_the_same_name_is_not_overwritten(registries: None):
    RolloutReplicaRegistry.register("hf_cpu", lambda: replica.HFCPUReplica)
    with pytest.raises(ValueError, match="already has a rollout replica 'hf_cpu'"):
        replica.register()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield
    ray.shutdown()


def replicas(folder: str, count: int, suffix: str = "") -> list[replica.HFCPUReplica]:
    return [
        replica.HFCPUReplica(rank, rollout_config(), model_config(folder), 1, name_suffix=suffix)
        for rank in range(count)
    ]


def weights_of(folder: str, change: float) -> list[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    changed = ((name, tensor + change) for name, tensor in model.state_dict().items())
    return list(unfuse_moe_params(changed, model.config.model_type))


def adapter(rank: int, monkeypatch: pytest.MonkeyPatch) -> replica.HFCPUWeights:
    monkeypatch.setenv("RANK", str(rank))
    config = rollout_config()
    # verl hands every training rank its model configuration as a dataclass already
    return replica.HFCPUWeights(config, config, device_mesh=None)


def test_two_ranks_feed_two_replicas(cluster: None, moe_folder: str, monkeypatch: pytest.MonkeyPatch):
    asked = {"seed": 1, "logprobs": True, "extra_args": {"rollout_topk": 20}}

    async def scenario() -> tuple[list[TokenOutput], list[TokenOutput]]:
        pair = replicas(moe_folder, 2)
        await asyncio.gather(*(server.launch_servers() for server in pair))
        assert [server.server_address for server in pair] == ["hf_cpu_server_0", "hf_cpu_server_1"]
        outputs = []
        for changes in ((0.0, 0.0), (0.0, 0.1)):
            for rank, change in enumerate(changes):
                weights = weights_of(moe_folder, change)
                await adapter(rank, monkeypatch).update_weights(iter(weights), global_steps=4, base_sync_done=True)
            outputs.append([await server.server_handle.generate.remote([5, 6], asked) for server in pair])
        await asyncio.gather(*(server.sleep() for server in pair), *(server.wake_up() for server in pair))
        await asyncio.gather(*(server.abort_all_requests() for server in pair))
        await asyncio.gather(*(server.resume_generation() for server in pair))
        return outputs[0], outputs[1]

    same, differing = asyncio.run(scenario())
    assert all(type(output) is TokenOutput and output.extra_fields["global_steps"] == 4 for output in same)
    assert same[0].log_probs == same[1].log_probs == differing[0].log_probs != differing[1].log_probs
    for output in same + differing:
        ids, logps = output.extra_fields[TOPK_IDS], output.extra_fields[TOPK_LOGPROBS]
        check_rows(ids, logps, np.array(output.token_ids), np.array(output.log_probs))


def test_a_failed_synchronisation_raises_after_the_last_tensor(
    cluster: None, dense_folder: str, monkeypatch: pytest.MonkeyPatch
):
    """Each tensor is a collective over the ranks: a rank that stopped early would leave the others hanging."""
    drawn = []

    def damaged() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(dense_folder, 0.0):
            drawn.append(name)
            yield name, tensor[:1] if name == "model.embed_tokens.weight" else tensor

    async def scenario() -> None:
        server = replicas(dense_folder, 1)[0]
        monkeypatch.setattr(replica, "server_name", lambda rank, suffix="": f"damaged_{rank}")
        await server.launch_servers()
        sender = adapter(0, monkeypatch)
        sender._bucket_bytes = 1000  # the damaged tensor is in the first of many buckets
        with pytest.raises(ValueError, match=r"model.embed_tokens.weight.*has shape \(1, 64\)"):
            await sender.update_weights(damaged(), global_steps=1)
        assert len(drawn) == len(weights_of(dense_folder, 0.0))
        with pytest.raises(RuntimeError, match="last weight synchronisation failed"):
            await server.server_handle.generate.remote([5], {})
        drawn.clear()
        ray.kill(server.server_handle)
        with pytest.raises(RuntimeError, match="rollout server damaged_0 is gone"):
            await sender.update_weights(damaged(), global_steps=1)
        assert len(drawn) == len(weights_of(dense_folder, 0.0))

    asyncio.run(scenario())


def test_a_missing_folder_ends_the_launch_with_its_name(cluster: None):
    server = replicas("/no/such/folder", 1, suffix="lost")[0]
    with pytest.raises(ValueError, match=re.escape("model.path=/no/such/folder is not a folder")):
        asyncio.run(server.launch_servers())


@pytest.mark.parametrize("asked", [{"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}])
def test_partial_weights_are_refused(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="hf_cpu takes whole weights only"):
        asyncio.run(adapter(0, monkeypatch).update_weights(iter([]), **asked))
