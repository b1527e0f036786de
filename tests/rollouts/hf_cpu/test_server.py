"""The server as a plain object: requests, limits, failures, abort and weights."""

from __future__ import annotations

import asyncio
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.rollout.replica import TokenOutput

from verl_plugins.rollouts.hf_cpu.reply import Reply
from verl_plugins.rollouts.hf_cpu.server import HFCPUServer, ServerSettings
from verl_plugins.topk.rows import TOPK_IDS, TOPK_LOGPROBS, check_rows

Scenario = Callable[[HFCPUServer], Awaitable[Any]]


def settings_for(folder: str, **changes: Any) -> ServerSettings:
    plain = ServerSettings(
        model_path=folder,
        tokenizer_path=folder,
        prompt_length=16,
        response_length=12,
        max_model_len=64,
        batch_window_s=0.01,
        seed=5,
    )
    return replace(plain, **changes)


def with_server(folder: str, scenario: Scenario, **changes: Any) -> Any:
    async def run() -> Any:
        server = HFCPUServer(settings_for(folder, **changes), replica_rank=0)
        await server.launch()
        return await scenario(server)

    return asyncio.run(run())


def arrays_of(folder: str, change: float = 0.0) -> dict[str, np.ndarray]:
    """The folder's weights under verl's names, each moved by `change`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = unfuse_moe_params(iter(model.state_dict().items()), model.config.model_type)
    return {name: (tensor + change).numpy() for name, tensor in named}


def test_a_reply_becomes_verls_token_output_where_it_is_unpickled(folder: str):
    async def scenario(server: HFCPUServer) -> Reply:
        await server.set_global_steps(3)
        asked = {
            "logprobs": True,
            "seed": 1,
            "extra_args": {"rollout_topk": 20},
            "top_k": -1,
            "repetition_penalty": 1.0,
        }
        return await server.generate([5, 6, 7], asked, request_id="a")

    output = pickle.loads(pickle.dumps(with_server(folder, scenario)))
    assert type(output) is TokenOutput
    assert output.stop_reason == "completed" and 1 <= len(output.token_ids) <= 12
    assert output.extra_fields["global_steps"] == 3
    check_rows(
        output.extra_fields[TOPK_IDS],
        output.extra_fields[TOPK_LOGPROBS],
        np.array(output.token_ids),
        np.array(output.log_probs),
    )


def test_without_logprobs_and_k_nothing_extra_travels(dense_folder: str):
    output = with_server(dense_folder, lambda server: server.generate([5], {"temperature": 0.0, "logprobs": False}))
    assert output.log_probs is None and list(output.extra_fields) == ["global_steps"]


def test_the_limit_follows_verl(dense_folder: str):
    async def scenario(server: HFCPUServer) -> list[int]:
        free = {"ignore_eos": True}
        asked = [
            ([5] * 4, free),  # response_length
            ([5] * 20, free),  # prompt_length + response_length - prompt
            ([5] * 4, {**free, "max_tokens": 30}),
            ([5] * 4, {**free, "max_new_tokens": 2}),
            ([5] * 60, {**free, "max_tokens": 30}),  # what the context leaves
            ([5] * 40, free),  # nothing left of the budget: one token
        ]
        replies = await asyncio.gather(*(server.generate(prompt, params) for prompt, params in asked))
        return [len(reply.token_ids) for reply in replies]

    assert with_server(dense_folder, scenario) == [12, 8, 30, 2, 4, 1]


@pytest.mark.parametrize(
    ("prompt", "asked", "message"),
    [
        ([5] * 64, {}, "the prompt has 64 tokens and leaves no room in a context of 64"),
        ([], {}, "the prompt is empty"),
        ([3, 160], {}, "from 3 to 160, the model's vocabulary has 160"),
        ([-1], {}, "from -1 to -1"),
        ([5], {"beam_width": 2}, "no sampling parameter beam_width"),
        ([5], {"extra_args": {"rollout_topk": 161}}, "from 1 to 160"),
    ],
)
def test_a_request_that_cannot_be_met_fails_alone(dense_folder: str, prompt: list[int], asked: Any, message: str):
    async def scenario(server: HFCPUServer) -> list[Any]:
        requests = [server.generate([5], {}), server.generate(prompt, asked), server.generate([6], {})]
        return await asyncio.gather(*requests, return_exceptions=True)

    good, bad, also_good = with_server(dense_folder, scenario)
    assert isinstance(bad, ValueError) and message in str(bad)
    assert good.token_ids and also_good.token_ids


def test_images_are_refused(dense_folder: str):
    with pytest.raises(ValueError, match="takes text only"):
        with_server(dense_folder, lambda server: server.generate([5], {}, image_data=["picture"]))


def test_seeds_reproduce_across_servers_and_batches(folder: str):
    async def crowded(server: HFCPUServer) -> list[int]:
        replies = await asyncio.gather(*(server.generate([5 + n % 3], {"seed": n}) for n in range(20)))
        return [reply.token_ids for reply in replies]

    async def in_turn(server: HFCPUServer) -> list[list[int]]:
        return [(await server.generate([5 + n % 3], {"seed": n})).token_ids for n in (19, 4)]

    together = with_server(folder, crowded)
    assert with_server(folder, in_turn, max_num_seqs=1, batch_window_s=0.0) == [together[19], together[4]]


def test_requests_without_seed_differ_and_follow_the_servers_seed(dense_folder: str):
    async def scenario(server: HFCPUServer) -> list[list[int]]:
        replies = await asyncio.gather(*(server.generate([5], {"ignore_eos": True}) for _ in range(8)))
        return [reply.token_ids for reply in replies]

    first, again = (with_server(dense_folder, scenario) for _ in range(2))
    assert first == again and len({tuple(tokens) for tokens in first}) == 8
    assert with_server(dense_folder, scenario, seed=6) != first


def test_full_determinism_demands_a_seed(dense_folder: str):
    async def scenario(server: HFCPUServer) -> Reply:
        with pytest.raises(ValueError, match="full_determinism=true needs a seed"):
            await server.generate([5], {})
        return await server.generate([5], {"seed": 0})

    assert with_server(dense_folder, scenario, full_determinism=True).token_ids


def test_a_failing_batch_reaches_its_callers_and_the_server_lives(dense_folder: str):
    async def scenario(server: HFCPUServer) -> None:
        assert server._loaded is not None
        healthy = server._loaded

        def explode(**_: Any) -> None:
            raise MemoryError("no room for the cache")

        server._loaded = replace(healthy, model=explode)
        failures = await asyncio.gather(*(server.generate([5], {}) for _ in range(3)), return_exceptions=True)
        assert [str(f) for f in failures] == ["a batch of 3 requests failed: MemoryError: no room for the cache"] * 3
        server._loaded = healthy
        assert (await server.generate([5], {})).token_ids

    with_server(dense_folder, scenario)


def test_abort_returns_partial_responses_and_pauses_until_resume(dense_folder: str):
    async def scenario(server: HFCPUServer) -> None:
        asked = {"ignore_eos": True, "max_tokens": 60, "seed": 1, "logprobs": True}
        whole = await server.generate([5], asked)
        running = asyncio.create_task(server.generate([5], asked, request_id="long"))
        await asyncio.sleep(0.03)
        report = await server.abort_all_requests()
        partial = await running
        assert report == {"aborted_count": 1, "request_ids": ["long"]}
        assert partial.stop_reason == "aborted"
        assert partial.token_ids == whole.token_ids[: len(partial.token_ids)] and len(partial.token_ids) < 60
        waiting = asyncio.create_task(server.generate([5], asked))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await server.resume_generation()
        assert (await waiting).token_ids == whole.token_ids
        await server.abort_all_requests(reject_request=True)
        rejected = await server.generate([5], asked)
        assert (rejected.token_ids, rejected.log_probs, rejected.stop_reason) == ([], None, "aborted")

    with_server(dense_folder, scenario)


def test_weights_in_several_buckets_change_what_is_generated(folder: str):
    async def scenario(server: HFCPUServer) -> None:
        asked = {"seed": 3, "ignore_eos": True, "logprobs": True}
        before = await server.generate([5, 9], asked)
        arrays = arrays_of(folder, change=0.05)
        names = sorted(arrays)
        middle = len(names) // 2
        await server.load_weights({n: arrays[n] for n in names[:middle]}, first=True, last=False, global_steps=7)
        waiting = asyncio.create_task(server.generate([5, 9], asked))
        await asyncio.sleep(0.05)
        assert not waiting.done()  # half the weights are new: nobody may sample from them
        count = await server.load_weights(
            {n: arrays[n] for n in names[middle:]}, first=False, last=True, global_steps=7
        )
        after = await waiting
        assert count == len(names)
        assert after.log_probs != before.log_probs and after.extra_fields["global_steps"] == 7
        await server.load_weights(arrays_of(folder), first=True, last=True, global_steps=None)
        restored = await server.generate([5, 9], asked)
        assert restored.log_probs == before.log_probs and restored.extra_fields["global_steps"] == 7

    with_server(folder, scenario)


@pytest.mark.parametrize("kind", ["missing", "unexpected", "shape"])
def test_a_failed_synchronisation_stops_generation_until_a_good_one(dense_folder: str, kind: str):
    async def scenario(server: HFCPUServer) -> None:
        arrays, norm = arrays_of(dense_folder), "model.norm.weight"
        if kind == "missing":
            del arrays[norm]
        elif kind == "unexpected":
            arrays["model.extra.weight"] = np.zeros(2, np.float32)
        else:
            arrays[norm] = np.zeros(3, np.float32)
        with pytest.raises(ValueError, match="weight synchronisation"):
            await server.load_weights(arrays, first=True, last=True, global_steps=1)
        with pytest.raises(RuntimeError, match="last weight synchronisation failed"):
            await server.generate([5], {})
        await server.load_weights(arrays_of(dense_folder), first=True, last=True, global_steps=1)
        assert (await server.generate([5], {})).token_ids

    with_server(dense_folder, scenario)


def test_a_later_bucket_without_the_first_is_refused(dense_folder: str):
    with pytest.raises(RuntimeError, match="without the first"):
        with_server(dense_folder, lambda server: server.load_weights({}, first=False, last=True, global_steps=0))


def test_end_of_sequence_ids_come_from_generation_config_and_tokenizer(dense_folder: str, tmp_path: Path):
    copy = shutil.copytree(dense_folder, tmp_path / "model")
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')

    async def scenario(server: HFCPUServer) -> frozenset[int]:
        assert server._loaded is not None
        return server._loaded.eos_ids

    assert with_server(str(copy), scenario) == {2, 7, 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "/no/such/folder"}, "actor_rollout_ref.model.path=/no/such/folder is not a folder"),
        ({"tokenizer_path": "./nowhere"}, "actor_rollout_ref.model.tokenizer_path=./nowhere is not a folder"),
        ({"dtype": "int8"}, "actor_rollout_ref.rollout.dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's max_position_embeddings=128"),
    ],
)
def test_launch_says_what_is_wrong(dense_folder: str, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        with_server(dense_folder, lambda server: server.clear_kv_cache(), **changes)


def test_launch_refuses_a_folder_without_weights(dense_folder: str, tmp_path: Path):
    copy = shutil.copytree(dense_folder, tmp_path / "model")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be loaded by transformers"):
        with_server(str(copy), lambda server: server.sleep())


def test_launch_refuses_a_folder_that_lacks_a_layer(dense_folder: str, tmp_path: Path):
    copy = shutil.copytree(dense_folder, tmp_path / "model")
    config = (copy / "config.json").read_text()
    deeper = re.sub(
        r'"num_hidden_layers": 2', '"num_hidden_layers": 3', re.sub(r'"layer_types": \[[^]]*\],', "", config)
    )
    (copy / "config.json").write_text(deeper)
    with pytest.raises(ValueError, match=r"lacks \d+ weights"):
        with_server(str(copy), lambda server: server.sleep())


def test_the_server_process_needs_neither_verl_nor_ray():
    program = (
        "import sys, verl_plugins.rollouts.hf_cpu.server\n"
        "print(sorted({'verl', 'ray', 'vllm', 'tensordict', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
