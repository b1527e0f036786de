"""Our law of a token against vLLM's own sampler, on the same logits and parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_plugins.rollouts.hf_cpu.sampling import Law, SamplingParams, parse_sampling_params, processed_logits

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

VOCABULARY, EOS, PROMPT, RESPONSE = 48, 2, [5, 9, 9, 11], [7, 5]

ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.0},
    {"top_k": 4},
    {"top_p": 0.55},
    {"top_k": 12, "top_p": 0.8, "temperature": 1.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.7, "temperature": 0.8, "min_p": 0.05, "top_k": 20, "top_p": 0.9},
    {"min_tokens": 5, "stop_token_ids": [3, 4]},
    {"min_tokens": 2, "stop_token_ids": [3, 4]},
]


def vllm_logprobs(logits_BV: torch.Tensor, asked: list[dict[str, Any]]) -> torch.Tensor:
    """`processed_logprobs` of vLLM's sampler for requests that have produced RESPONSE after PROMPT."""
    from vllm import SamplingParams as VllmParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor, MinTokensLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    params = [VllmParams(max_tokens=8, **one) for one in asked]
    for one in params:
        one.update_from_generation_config({}, EOS)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(params)))
    processors = [kind(config, torch.device("cpu"), False) for kind in (MinPLogitsProcessor, MinTokensLogitsProcessor)]
    added = [(n, one, PROMPT, RESPONSE) for n, one in enumerate(params)]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=len(params), removed=[], added=added, moved=[]))
    zeros_B = torch.zeros(len(params))
    metadata = SamplingMetadata(
        temperature=torch.tensor([one.temperature for one in params]),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([one.top_p for one in params]),
        top_k=torch.tensor([one.top_k or VOCABULARY for one in params]),
        generators={n: torch.Generator() for n in range(len(params))},
        max_num_logprobs=-1,
        no_penalties=False,
        prompt_token_ids=torch.tensor([PROMPT] * len(params)),
        frequency_penalties=zeros_B,
        presence_penalties=zeros_B,
        repetition_penalties=torch.tensor([one.repetition_penalty for one in params]),
        output_token_ids=[RESPONSE] * len(params),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )
    return Sampler(logprobs_mode="processed_logprobs").forward(logits_BV.clone(), metadata).logprobs_tensors.logprobs


def our_logprobs(logits_BV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    seen_BV, barred_BV = torch.zeros(2, len(params), VOCABULARY, dtype=torch.bool)
    seen_BV[:, PROMPT + RESPONSE] = True
    for row, one in enumerate(params):
        barred_BV[row, [EOS, *one.stop_token_ids]] = True
    law = Law.of(params)
    return processed_logits(logits_BV, law, step=len(RESPONSE), seen_BV=seen_BV, barred_BV=barred_BV).log_softmax(-1)


@pytest.mark.parametrize("seed", range(5))
def test_the_law_of_every_parameter_is_vllms(seed: int):
    logits_BV = torch.randn(len(ASKED), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    params = [parse_sampling_params(one, max_tokens=8, vocabulary=VOCABULARY) for one in ASKED]
    ours, theirs = our_logprobs(logits_BV, params), vllm_logprobs(logits_BV, ASKED)
    torch.testing.assert_close(ours.exp(), theirs.exp(), atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.isneginf(), theirs.isneginf())
