"""verl's server and weight adapter with a real vLLM engine on the CPU, each in its own process as in a run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from verl_plugins.topk.rows import REQUEST_TOPK, TOPK_IDS, TOPK_LOGPROBS, check_rows

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPTS = ([5, 17, 300, 42], [7, 8, 9], [500, 4, 4, 31, 60])


def rollout_config(k: int | None, **changes: Any) -> Any:
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    return RolloutConfig(
        name="vllm",
        dtype="float32",
        temperature=changes.pop("temperature", 0.7),
        tensor_model_parallel_size=1,
        prompt_length=16,
        response_length=16,
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        free_cache_engine=False,
        load_format="dummy",
        checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1),
        custom=None if k is None else {"topk": k},
        **changes,
    )


class Server:
    """A running server, and verl's side of a weight synchronisation with it."""

    def __init__(self, model: Path, config: Any, replica_rank: int = 0) -> None:
        import ray
        from verl.workers.config import HFModelConfig
        from verl.workers.rollout.replica import RolloutMode

        from verl_plugins.rollouts.vllm.server import TopKvLLMHttpServer

        self.model, self.config, self.ray, self.replica_rank = model, config, ray, replica_rank
        self.model_config = HFModelConfig(path=str(model))
        self.handle = (
            ray.remote(TopKvLLMHttpServer)
            .options(name=f"vllm_server_{replica_rank}_0", max_concurrency=100, num_cpus=1)
            .remote(
                config=config,
                model_config=self.model_config,
                rollout_mode=RolloutMode.HYBRID,
                workers=[],
                replica_rank=replica_rank,
                node_rank=0,
                gpus_per_node=1,
                nnodes=1,
                cuda_visible_devices="",
            )
        )
        ray.get(self.handle.launch_server.remote(), timeout=400)

    def submit(self, prompt: list[int], k: int | None, **sampling: Any) -> Any:
        self._count = getattr(self, "_count", 0) + 1
        params = {"temperature": self.config.temperature, "logprobs": True, "max_tokens": 12, "ignore_eos": True}
        params |= sampling
        if k is not None:
            params["extra_args"] = {REQUEST_TOPK: k}
        return self.handle.generate.remote(prompt, params, f"request-{self._count}")

    def generate(self, prompt: list[int], k: int | None, **sampling: Any) -> Any:
        return self.ray.get(self.submit(prompt, k, **sampling), timeout=120)

    def adapter(self) -> Any:
        from verl_plugins.rollouts.vllm.weight_sync import WatchedServerAdapter

        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        return WatchedServerAdapter(self.config, self.model_config, device_mesh=None, replica_rank=self.replica_rank)

    def synchronise(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        asyncio.run(asyncio.wait_for(self.adapter().update_weights(weights, global_steps=1), timeout=120))

    def engine_core(self) -> psutil.Process:
        pid = self.ray.get(self.handle.__ray_call__.remote(lambda _: os.getpid()))
        (engine,) = (p for p in psutil.Process(pid).children(recursive=True) if "EngineCore" in p.name())
        return engine

    def stop(self) -> None:
        pid = self.ray.get(self.handle.__ray_call__.remote(lambda _: os.getpid()))
        children = psutil.Process(pid).children(recursive=True)
        self.ray.kill(self.handle)
        assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.fixture(scope="module", params=["dense", "moe"])
def server(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Server]:
    model = request.getfixturevalue(f"{request.param}_model")
    running = Server(model, rollout_config(k=50))
    running.synchronise(stored_weights(model))  # as a run starts: the engine's own weights are random
    yield running
    running.stop()


def reference_logp_TV(model: Path, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def stored_weights(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from load_file(model / "model.safetensors").items()


def assert_rows_match(output: Any, reference_TV: torch.Tensor, k: int, tolerance: float = 1e-5) -> None:
    ids, logps = output.extra_fields[TOPK_IDS], output.extra_fields[TOPK_LOGPROBS]
    assert ids.shape == logps.shape == (len(output.token_ids), k)
    check_rows(ids, logps, np.asarray(output.token_ids), np.asarray(output.log_probs))
    expected = reference_TV.gather(1, torch.tensor(ids, dtype=torch.long)).numpy()
    np.testing.assert_allclose(logps, expected, atol=tolerance, rtol=0)
    best = reference_TV.topk(k, dim=1).values.numpy()
    np.testing.assert_allclose(logps[:, : k - 1], best[:, : k - 1], atol=tolerance, rtol=0)


@pytest.mark.parametrize("k", [1, 20, 50])
def test_rows_are_the_law_of_the_same_weights_in_transformers(server: Server, k: int) -> None:
    outputs = [server.submit(prompt, k) for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, server.ray.get(outputs, timeout=120), strict=True):
        reference = reference_logp_TV(server.model, prompt, output.token_ids, server.config.temperature)
        assert_rows_match(output, reference, k)


def test_a_request_without_k_is_verls_own(server: Server) -> None:
    output = server.generate(PROMPTS[0], k=None, seed=11)
    assert TOPK_IDS not in output.extra_fields and TOPK_LOGPROBS not in output.extra_fields
    assert len(output.log_probs) == len(output.token_ids) == 12
    with_rows = server.generate(PROMPTS[0], k=20, seed=11)
    assert with_rows.token_ids == output.token_ids
    np.testing.assert_allclose(with_rows.log_probs, output.log_probs, atol=1e-6)


def test_equal_seeds_give_equal_samples_in_any_batch(server: Server) -> None:
    alone = server.generate(PROMPTS[1], k=20, seed=3).token_ids
    crowd = [server.submit(PROMPTS[i % 3], k=[None, 20, 7][i % 3], seed=100 + i) for i in range(9)]
    crowded = server.submit(PROMPTS[1], k=20, seed=3)
    others = server.ray.get(crowd, timeout=120)
    assert server.ray.get(crowded, timeout=120).token_ids == alone
    assert server.generate(PROMPTS[1], k=20, seed=4).token_ids != alone
    assert len({tuple(output.token_ids) for output in others}) == 9


def test_interrupted_requests_bring_the_rows_of_their_tokens(server: Server) -> None:
    waiting = [server.submit(PROMPTS[i % 3], k=20, max_tokens=4 + 3 * (i % 16)) for i in range(60)]
    server.ray.wait(waiting, num_returns=1, timeout=120)
    server.ray.get(server.handle.abort_all_requests.remote(), timeout=120)
    server.ray.get(server.handle.resume_generation.remote(), timeout=120)
    outputs = server.ray.get(waiting, timeout=120)
    assert {output.stop_reason for output in outputs} == {"completed", "aborted"}
    for output in outputs:
        assert output.extra_fields[TOPK_IDS].shape == (len(output.token_ids), 20)
        if output.token_ids:
            rows = output.extra_fields[TOPK_IDS], output.extra_fields[TOPK_LOGPROBS]
            check_rows(*rows, np.asarray(output.token_ids), np.asarray(output.log_probs))
    leftover = server.ray.get(server.handle.__ray_call__.remote(lambda self: len(self.engine._rows)))
    assert leftover == 0


def test_a_k_above_the_configured_one_is_refused_by_the_engine(server: Server) -> None:
    with pytest.raises(Exception, match="max allowed: 50"):
        server.generate(PROMPTS[0], k=51)
    assert server.generate(PROMPTS[0], k=50).extra_fields[TOPK_IDS].shape == (12, 50)


def test_new_weights_are_the_ones_sampled_from(server: Server, tmp_path: Path, make_model: Any) -> None:
    experts = "moe" in server.model.name
    other = make_model(tmp_path / "other", experts=experts, seed=7)
    for model in (other, server.model):
        server.synchronise(stored_weights(model))
        output = server.generate(PROMPTS[2], k=20)
        reference = reference_logp_TV(model, PROMPTS[2], output.token_ids, server.config.temperature)
        assert_rows_match(output, reference, k=20)


def test_a_failed_synchronisation_ends_with_the_reason(server: Server) -> None:
    from verl_plugins.rollouts.vllm.weight_sync import WeightSyncError

    wrong = (("model.embed_tokens.weight", torch.zeros(512, 3)) for _ in range(1))
    with pytest.raises(WeightSyncError, match=r"replica 0 failed: .*RuntimeError: The size of tensor"):
        server.synchronise(wrong)
    server.synchronise(stored_weights(server.model))  # the next one works
    output = server.generate(PROMPTS[0], k=20)
    assert_rows_match(output, reference_logp_TV(server.model, PROMPTS[0], output.token_ids, 0.7), k=20)


def test_an_engine_that_dies_ends_the_synchronisation(ray_cluster: None, dense_model: Path) -> None:
    from verl_plugins.rollouts.vllm.weight_sync import WeightSyncError

    doomed = Server(dense_model, rollout_config(k=20), replica_rank=1)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.ones(64)
        doomed.engine_core().kill()
        yield from stored_weights(dense_model)

    try:
        with pytest.raises(WeightSyncError, match="EngineCore"):
            doomed.synchronise(weights())
        with pytest.raises(Exception, match="EngineDeadError"):
            doomed.generate(PROMPTS[0], k=20)
        with pytest.raises(Exception, match="EngineDeadError"):
            doomed.synchronise(stored_weights(dense_model))
    finally:
        doomed.stop()
