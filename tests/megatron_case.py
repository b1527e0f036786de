"""The Megatron engine's logits processor, verl's real one inside, on gloo: sharded vocabulary, context parallelism, FP8
padding. A model is not built here (Megatron's needs CUDA); the logits are given."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

VOCABULARY, NUM_LISTED = 128, 8
LENGTHS = ((3, 10), (6, 15), (4, 12))


def make_batch(seed=3):
    from tensordict import TensorDict

    rng = torch.Generator().manual_seed(seed)
    fields = {}
    for prompt_len, response_len in LENGTHS:
        total = prompt_len + response_len
        ids = torch.randint(0, VOCABULARY, (total,), generator=rng)
        logits = 3 * torch.randn(total, VOCABULARY, generator=rng)
        law = torch.log_softmax(
            logits[prompt_len - 1 : -1] + 0.5 * torch.randn(response_len, VOCABULARY, generator=rng), -1
        )
        top = law.topk(NUM_LISTED, -1).indices
        missing = ~(top == ids[prompt_len:, None]).any(-1)
        top[missing, -1] = ids[prompt_len:][missing]
        one = {
            "input_ids": ids,
            "prompts": ids[:prompt_len],
            "responses": ids[prompt_len:],
            "rollout_topk_ids": top.int(),
            "rollout_topk_logprobs": law.gather(1, top),
            "logits": logits,
        }
        for name, value in one.items():
            fields.setdefault(name, []).append(value)
    nested = {name: torch.nested.as_nested_tensor(v, layout=torch.jagged) for name, v in fields.items()}
    return TensorDict(nested, batch_size=len(LENGTHS))


def expected(batch, region, temperature):
    """Per sequence, unsharded, the whole log-softmax."""
    from verl_plugins.topk.gather import vocabulary_pass
    from verl_plugins.topk.measure import measure

    out = []
    for i, (prompt_len, _) in enumerate(LENGTHS):
        ids, sampled = batch["rollout_topk_ids"][i].long(), batch["responses"][i]
        law = vocabulary_pass(batch["logits"][i][prompt_len - 1 : -1], ids, temperature)
        out.append(
            measure(
                region,
                law,
                ids_NK=ids,
                sampled_N=sampled,
                anchor_logp_NK=batch["rollout_topk_logprobs"][i],
                vocab_size=VOCABULARY,
            )
        )
    return out


def worker(rank, port, tp, cp, fp8, tail, temperature):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(tp * cp))
    dist.init_process_group("gloo", rank=rank, world_size=tp * cp)
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

    from verl_plugins.losses.trust_region import resolve
    from verl_plugins.topk.bound_loss import BoundLoss
    from verl_plugins.topk.engines_megatron import TrustRegionMegatronEngine

    engine = TrustRegionMegatronEngine.__new__(TrustRegionMegatronEngine)
    engine.engine_config = SimpleNamespace(entropy_from_logits_with_chunking=False, pad_to_length=False)
    engine.tf_config = SimpleNamespace(fp8="hybrid" if fp8 else None)
    text = SimpleNamespace(vocab_size=VOCABULARY)
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))
    region = resolve("pdm_topk_kl", tail=tail)
    batch = make_batch()
    pack = {"pre_process": True, "use_fp8_padding": fp8}
    logits, sequence, _ = preprocess_thd_engine(batch["logits"], **pack)
    part = VOCABULARY // tp
    shard = mpu.get_tensor_model_parallel_rank()
    logits = logits[..., shard * part : (shard + 1) * part].clone().requires_grad_()
    label = preprocess_thd_engine(batch["input_ids"], need_roll=True, **pack)[0]
    temperatures = torch.full(label.shape, temperature)
    output = engine._lm_head_logits_processor(
        logits * 1.0,
        label,
        temperatures,
        logits_processor_func=BoundLoss(lambda **_: None, region),
        batch=batch.exclude("logits"),
        data_format="thd",
        calculate_sum_pi_squared=False,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
    )
    assert output["log_probs"].requires_grad and not output["divergence"].requires_grad
    output["log_probs"].sum().backward()
    assert logits.grad.abs().sum() > 0
    unpacked = {k: postprocess_thd_engine(v, sequence, batch["input_ids"], len(LENGTHS)) for k, v in output.items()}
    for i, ((prompt_len, _), want) in enumerate(zip(LENGTHS, expected(batch, region, temperature), strict=True)):
        for name, value in want.named():
            got = unpacked[name][i][prompt_len - 1 : -1]
            torch.testing.assert_close(got, value, atol=3e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    dist.destroy_process_group()
