"""Tiny models, and one real vLLM server in its own process, for the tests of the vLLM rollout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 512


def write_model(folder: Path, *, experts: bool, seed: int) -> Path:
    """Write a random Qwen3 (or Qwen3-MoE) and a tokenizer of as many words as it has tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if experts:
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **moe))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**size))
    model.float().save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return write_model


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), experts=False, seed=0)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3_moe"), experts=True, seed=1)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray
    from verl.utils.device import get_device_name

    if get_device_name() != "cpu":
        pytest.skip("these tests run vLLM's CPU build")
    environment = {
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        # Ray gives its workers the niceness 15; beside other work on the machine they would not start within minutes.
        "RAY_worker_niceness": "0",
    }
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield
    ray.shutdown()
