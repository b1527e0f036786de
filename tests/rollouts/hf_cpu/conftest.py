"""Tiny random models, and the same model as a folder with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 160
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,  # peaked enough that a wrong position or mask shows in the samples
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def dense_model(seed: int = 0, *, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()


def moe_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).eval()


MAKE = {"dense": dense_model, "moe": moe_model}


@pytest.fixture(scope="session", params=["dense", "moe"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MAKE[request.param]()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_dense() -> Callable[..., PreTrainedModel]:
    return dense_model


@pytest.fixture(scope="session")
def make_moe() -> Callable[..., PreTrainedModel]:
    return moe_model


@pytest.fixture(scope="session", params=["dense", "moe"])
def make(request: pytest.FixtureRequest) -> Callable[..., PreTrainedModel]:
    return MAKE[request.param]


@pytest.fixture(scope="session")
def dense() -> PreTrainedModel:
    return dense_model()


def save(kind: str, path: Path) -> str:
    MAKE[kind]().save_pretrained(path)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{n}": n for n in range(3, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("dense", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(params=["dense_folder", "moe_folder"])
def folder(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)
