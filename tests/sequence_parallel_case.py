"""The FSDP engine's measurement with each sequence split over Ulysses ranks: what runs in each gloo process.

No attention is involved: the logits of a token depend on that token alone, so every rank can make its own part.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from engine_case import NUM_LISTED, VOCABULARY
from tensordict import TensorDict

LENGTHS = ((3, 6), (5, 2), (2, 7))  # 25 tokens, padded to 26 on two ranks


def table() -> torch.Tensor:
    return 2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))


def make_batch() -> TensorDict:
    rng = torch.Generator().manual_seed(0)
    fields: dict[str, list[torch.Tensor]] = {}
    for prompt_len, response_len in LENGTHS:
        ids = torch.randint(0, VOCABULARY, (prompt_len + response_len,), generator=rng)
        law = table()[ids[prompt_len - 1 : -1]] + 0.5 * torch.randn(response_len, VOCABULARY, generator=rng)
        law = torch.log_softmax(law, -1)
        top = law.topk(NUM_LISTED, -1).indices
        missing = ~(top == ids[prompt_len:, None]).any(-1)
        top[missing, -1] = ids[prompt_len:][missing]
        one = {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "prompts": ids[:prompt_len],
            "responses": ids[prompt_len:],
            "rollout_topk_ids": top.int(),
            "rollout_topk_logprobs": law.gather(1, top),
        }
        for name, value in one.items():
            fields.setdefault(name, []).append(value)
    nested = {name: torch.nested.as_nested_tensor(v, layout=torch.jagged) for name, v in fields.items()}
    return TensorDict(nested, batch_size=len(LENGTHS))


def measured(size: int) -> dict[str, torch.Tensor]:
    """Run verl's own input and output preparation around our measurement, on this rank's part of the sequence."""
    from verl.utils import tensordict_utils as tu

    from verl_plugins.losses.trust_region import resolve
    from verl_plugins.topk.bound_loss import BoundLoss
    from verl_plugins.topk.engines import CPUTrustRegionFSDPEngine

    engine = CPUTrustRegionFSDPEngine.__new__(CPUTrustRegionFSDPEngine)
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = size > 1, size
    engine.pad_to_length = False
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.module = SimpleNamespace(config=SimpleNamespace())
    text = SimpleNamespace(vocab_size=VOCABULARY)
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))
    batch = make_batch()
    tu.assign_non_tensor(batch, use_remove_padding=True, calculate_entropy=False, temperature=0.8)
    inputs, output_args = engine.prepare_model_inputs(batch)
    logits = table()[inputs["input_ids"]].requires_grad_()
    loss = BoundLoss(lambda **_: None, resolve("pdm_topk_kl", tail="exact"))
    result = engine.prepare_model_outputs(SimpleNamespace(logits=logits), output_args, batch, loss)
    return {name: value.values().detach() for name, value in result.items()}


def worker(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    alone = measured(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    together = measured(size)
    assert together.keys() == alone.keys() and "divergence" in alone
    assert alone["divergence"].count_nonzero() == sum(response for _, response in LENGTHS)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, msg=lambda m, name=name: f"{name}: {m}")
    dist.destroy_process_group()
