"""verl's real FSDP2 engine with ours on top, in this process, on a random tiny Qwen3: no Ray, no rollout."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

VOCABULARY, NUM_LISTED = 64, 6


def write_model(folder: Path, *, moe: bool = False, seed: int = 0) -> Path:
    """Save a random tiny model and a tokenizer that matches it."""
    from tokenizers import Tokenizer, models
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    vocab = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab=vocab, unk_token="t0")),
        unk_token="t0",
        pad_token="t1",
        eos_token="t2",
    )
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if moe:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shape, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # a flat random law would hide errors of the tail
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_engine(folder: Path, *, packed: bool = True, lr: float = 1e-2, dtype: str = "fp32") -> Any:
    """Build verl's engine for this device from the registry, in a process group of one."""
    from verl.utils.device import get_device_name
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.checkpoint import CheckpointConfig
    from verl.workers.engine import EngineRegistry

    if not torch.distributed.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=str(folder),
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            use_torch_compile=False,
            mixed_precision=precision,
            use_dynamic_bsz=False,
            use_remove_padding=packed,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=lr, weight_decay=0.0, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    assert get_device_name() == "cpu"
    engine.initialize()
    return engine


def make_batch(
    engine: Any, *, seed: int = 0, lengths: tuple[tuple[int, int], ...] = ((3, 5), (4, 2), (2, 7), (5, 4)), noise: float
) -> TensorDict:
    """A rollout's batch: K-lists of a policy that differs from the engine's by `noise` in the logits.

    Also holds `full_rollout_logp` (B, R, V), the whole rollout law, for slow twins.
    """
    rng = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Tensor]] = []
    for prompt_len, response_len in lengths:
        ids = torch.randint(3, VOCABULARY, (prompt_len + response_len,), generator=rng)
        rows.append({"ids": ids, "prompt": ids[:prompt_len], "response": ids[prompt_len:]})
    logits = full_logits(engine, [row["ids"] for row in rows])
    fields: dict[str, list[Tensor]] = {}
    for row, logits_SV in zip(rows, logits, strict=True):
        prompt_len, response_len = len(row["prompt"]), len(row["response"])
        law_RV = logits_SV[prompt_len - 1 : -1]
        rollout_RV = torch.log_softmax(law_RV + noise * torch.randn(law_RV.shape, generator=rng), -1)
        sampled_R1 = row["response"][:, None]
        top_RK = rollout_RV.topk(NUM_LISTED, -1).indices
        missing_R = ~(top_RK == sampled_R1).any(-1)
        top_RK[missing_R, -1] = sampled_R1[missing_R, 0]
        one = {
            "input_ids": row["ids"],
            "position_ids": torch.arange(prompt_len + response_len),
            "prompts": row["prompt"],
            "responses": row["response"],
            "response_mask": torch.ones(response_len, dtype=torch.int64),
            "loss_mask": torch.ones(response_len, dtype=torch.int64),
            "rollout_log_probs": rollout_RV.gather(1, sampled_R1)[:, 0],
            "old_log_probs": rollout_RV.gather(1, sampled_R1)[:, 0],
            "advantages": torch.full((response_len,), float(torch.randn((), generator=rng))),
            "rollout_topk_ids": top_RK.int(),
            "rollout_topk_logprobs": rollout_RV.gather(1, top_RK),
            "full_rollout_logp": rollout_RV,
        }
        for name, value in one.items():
            fields.setdefault(name, []).append(value)
    nested = {name: torch.nested.as_nested_tensor(v, layout=torch.jagged) for name, v in fields.items()}
    return TensorDict(nested, batch_size=len(rows))


def full_logits(engine: Any, sequences: list[Tensor]) -> list[Tensor]:
    """Logits of each sequence on its own, no padding, no packing."""
    with torch.no_grad():
        return [
            engine.module(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False).logits[0]
            for ids in sequences
        ]


def actor_loss(policy_loss: Mapping[str, Any], **actor: Any) -> partial[Any]:
    """verl's own loss function, as its worker builds it."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_plugins.config import PolicyLoss

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_torch_compile=False,
        policy_loss=PolicyLoss(**policy_loss),
        **actor,
    )
    return partial(ppo_loss, config=config)


def run_loss(
    engine: Any, batch: TensorDict, loss: partial[Any], *, micro: int, packed: bool = True, temperature: float = 1.0
) -> tuple[float, dict[str, Any], np.ndarray]:
    """One forward and backward through the engine: loss, metrics, gradient of all parameters, flat."""
    from verl.utils import tensordict_utils as tu

    data = batch.copy()
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro,
        use_fused_kernels=False,
        calculate_entropy=False,
        global_batch_size=len(batch),
        temperature=temperature,
        update_lr_scheduler=True,
        pad_token_id=1,
    )
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, loss)
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        flat = torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).reshape(-1) for g in grads])
        gradient = flat.double().numpy().copy()
        engine.optimizer_zero_grad()
    return float(sum(output["loss"])), output["metrics"], gradient
