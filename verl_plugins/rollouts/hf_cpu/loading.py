"""Loads a folder in Hugging Face's format for generation on the CPU, with errors that say what to change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to generate, and the ids that decoding needs."""

    model: Any  # a transformers model; typed by what `decode` needs of it
    vocabulary: int
    max_positions: int
    eos_ids: frozenset[int]


def load_model(
    path: str,
    *,
    tokenizer_path: str,
    dtype: str,
    override_config: Mapping[str, Any],
    trust_remote_code: bool,
) -> LoadedModel:
    """Load model, generation settings and the tokenizer's end-of-sequence id.

    Raises:
        ValueError: the folder is missing or incomplete, or a setting cannot be met here.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"actor_rollout_ref.rollout.dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    _require_folder("actor_rollout_ref.model.path", path)
    _require_folder("actor_rollout_ref.model.tokenizer_path", tokenizer_path)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _apply(config, override_config)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=_DTYPES[dtype],
            attn_implementation=_attention(override_config),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"actor_rollout_ref.model.path={path} cannot be loaded by transformers: {error}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"actor_rollout_ref.model.path={path} lacks {len(missing)} weights, first {missing[0]!r}")
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        vocabulary=vocabulary,
        max_positions=int(config.max_position_embeddings),
        eos_ids=_eos_ids(model.generation_config.eos_token_id, tokenizer.eos_token_id, vocabulary),
    )


def _require_folder(key: str, path: str) -> None:
    # A hub name has one slash at most and needs no folder; transformers looks it up in its cache.
    looks_local = path.startswith((os.sep, ".", "~")) or path.count("/") != 1
    if looks_local and not os.path.isdir(path):
        raise ValueError(f"{key}={path} is not a folder; give the folder that holds config.json and the weights")


def _attention(override_config: Mapping[str, Any]) -> str:
    asked = override_config.get("attn_implementation", _ATTENTION[0])
    return asked if asked in _ATTENTION else _ATTENTION[0]  # flash attention is the trainer's affair: same function


def _apply(config: Any, overrides: Mapping[str, Any]) -> None:
    """Change the model's configuration as the trainer does (verl/utils/model.py, update_model_config)."""
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            _apply(getattr(config, key), value)
        elif key != "attn_implementation":
            setattr(config, key, value)


def _eos_ids(generation: int | list[int] | None, tokenizer: int | None, vocabulary: int) -> frozenset[int]:
    listed = generation if isinstance(generation, list) else [generation]
    ids = frozenset(token for token in [*listed, tokenizer] if token is not None)
    if not ids:
        raise ValueError(
            "neither generation_config.json nor the tokenizer names an end-of-sequence token: every response would "
            "run to its limit; add eos_token_id to generation_config.json"
        )
    outside = sorted(token for token in ids if not 0 <= token < vocabulary)
    if outside:
        raise ValueError(f"end-of-sequence ids {outside} are outside the model's vocabulary of {vocabulary}")
    return ids
