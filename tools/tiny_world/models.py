"""Randomly initialised tiny models of the two kinds that the large recipes train."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .tokenizer import VOCAB_SIZE

ModelKind = Literal["qwen3", "qwen3_moe"]
MODEL_KINDS: tuple[ModelKind, ...] = ("qwen3", "qwen3_moe")

# Divisible by 32: vLLM's CPU kernels need it of the hidden and intermediate sizes.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE_SIZES: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def build_model(kind: ModelKind, seed: int, *, pad_token_id: int, eos_token_id: int) -> PreTrainedModel:
    """Build a model in float32 with weights drawn from `seed`.

    Raises:
        ValueError: unknown kind.
    """
    shared: dict[str, Any] = {
        **SIZES,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shared))
    elif kind == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **MOE_SIZES))
    else:
        raise ValueError(f"kind must be one of {', '.join(MODEL_KINDS)}, got {kind!r}")
    return model.to(torch.float32)
