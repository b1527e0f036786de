"""The law of one token: each filter against a twin written token by token, and what a request may ask."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_plugins.rollouts.hf_cpu.sampling import Law, SamplingParams, draw, parse_sampling_params, processed_logits

VOCABULARY = 12


def parse(**asked: Any) -> SamplingParams:
    return parse_sampling_params(asked, max_tokens=asked.get("max_tokens", 8), vocabulary=VOCABULARY)


def slow_law(
    logits: list[float], params: SamplingParams, *, step: int, seen: set[int], barred: set[int]
) -> list[float]:
    """Log-probabilities of one position, in plain Python; follows vLLM's documented order."""
    scores = dict(enumerate(logits))
    if step < params.min_tokens:
        scores.update(dict.fromkeys(barred, -math.inf))
    for token in seen:
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    temperature = 1.0 if params.greedy else params.temperature
    best = max(scores.values())
    scores = {token: (score - best) / temperature for token, score in scores.items()}  # 0 for the best token
    if params.min_p:
        scores = {t: s if s >= math.log(params.min_p) - 1e-7 else -math.inf for t, s in scores.items()}
    ranked = sorted(scores, key=lambda token: -scores[token])
    kept = ranked[: params.top_k] if params.top_k else ranked
    mass = sum(math.exp(scores[t]) for t in kept)
    if params.top_p < 1:
        before, nucleus = 0.0, []
        for token in kept:  # a token stays while those above it hold less than top_p
            if before < params.top_p:
                nucleus.append(token)
            before += math.exp(scores[token]) / mass
        kept = nucleus
    total = math.log(sum(math.exp(scores[t]) for t in kept))
    return [scores[t] - total if t in kept else -math.inf for t in range(len(logits))]


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.35, 0.01]),
    top_k=st.sampled_from([0, 1, 3, VOCABULARY - 1]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    min_tokens=st.sampled_from([0, 4]),
)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**31), params=st.lists(PARAMS, min_size=1, max_size=5))
def test_each_row_of_a_mixed_batch_equals_its_slow_twin(seed: int, params: list[SamplingParams]):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(len(params), VOCABULARY, generator=generator) * 2
    seen_BV = torch.rand(len(params), VOCABULARY, generator=generator) < 0.3
    barred_BV = torch.rand(len(params), VOCABULARY, generator=generator) < 0.2
    step = seed % 6
    got_BV = processed_logits(logits_BV, Law.of(params), step=step, seen_BV=seen_BV, barred_BV=barred_BV)
    for row, param in enumerate(params):
        sets = {
            "seen": set(seen_BV[row].nonzero()[:, 0].tolist()),
            "barred": set(barred_BV[row].nonzero()[:, 0].tolist()),
        }
        expected = torch.tensor(slow_law(logits_BV[row].tolist(), param, step=step, **sets))
        torch.testing.assert_close(got_BV[row].log_softmax(-1), expected, atol=2e-5, rtol=2e-5)


def test_hand_computed_filters():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])

    def law(**asked: Any) -> list[float]:
        params = parse_sampling_params(asked, max_tokens=1, vocabulary=4)
        return processed_logits(probs.log(), Law.of([params]), step=0).softmax(-1)[0].tolist()

    assert law() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-6)
    assert law(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert law(top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert law(min_p=0.4) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert law(temperature=0.5) == pytest.approx([p * p / 0.365 for p in (0.5, 0.3, 0.15, 0.05)], abs=1e-6)


def test_neutral_parameters_return_the_logits_untouched():
    logits_BV = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    assert torch.equal(processed_logits(logits_BV, Law.of([parse()] * 3), step=0), logits_BV)


def test_half_precision_logits_are_filtered_in_float32():
    logits_BV = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1)).bfloat16()
    law = Law.of([parse(top_p=0.9, temperature=0.7)] * 2)
    got = processed_logits(logits_BV, law, step=0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, processed_logits(logits_BV.float(), law, step=0))


def test_selecting_rows_selects_every_parameter():
    asked = [
        parse(top_k=1),
        parse(top_p=0.5, min_tokens=2),
        parse(temperature=0),
        parse(repetition_penalty=1.5, min_p=0.2),
    ]
    logits_BV = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    masks_BV = {"seen_BV": logits_BV > 1, "barred_BV": logits_BV < -1}
    rows = torch.tensor([1, 3])
    whole = processed_logits(logits_BV, Law.of(asked), step=0, **masks_BV)[rows]
    part_masks = {name: mask[rows] for name, mask in masks_BV.items()}
    part = processed_logits(logits_BV[rows], Law.of(asked).select(rows), step=0, **part_masks)
    assert torch.equal(part, whole)


def test_draw_inverts_the_distribution_function():
    logp_BV = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(6, 4)
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    drawn = draw(logp_BV, logp_BV, torch.zeros(6, dtype=torch.bool), uniforms)
    assert drawn.tolist() == [0, 0, 2, 2, 3, 3]  # token 1 has no probability


def test_draw_never_takes_a_token_of_probability_zero():
    logp_BV = torch.full((3, 5), -math.inf)
    logp_BV[:, 2] = 0.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logp_BV, logp_BV, torch.zeros(3, dtype=torch.bool), uniforms).tolist() == [2, 2, 2]


def test_draws_follow_the_law():
    probs = torch.tensor([0.05, 0.6, 0.25, 0.1])
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logp_BV = probs.log().expand(len(uniforms), 4)
    counts = draw(logp_BV, logp_BV, torch.zeros(len(uniforms), dtype=torch.bool), uniforms).bincount(minlength=4)
    chi_square = ((counts - len(uniforms) * probs) ** 2 / (len(uniforms) * probs)).sum()
    assert chi_square < 16.3  # 99.9 % quantile of three degrees of freedom


def test_greedy_takes_the_best_logit_even_where_the_softmax_ties():
    logits_BV = torch.tensor([[20.0, 20.000002, -300.0]])
    logp_BV = logits_BV.log_softmax(-1)
    for greedy in ([True], [True, False]):
        rows = len(greedy)
        token = draw(
            logits_BV.expand(rows, 3), logp_BV.expand(rows, 3), torch.tensor(greedy), torch.zeros(rows).double()
        )
        assert token[0] == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop": ["\n"]}, "stop strings need detokenisation"),
        ({"presence_penalty": 0.1}, "no sampling parameter presence_penalty; allowed: temperature, top_p"),
        ({"n": 2, "best_of": 3}, "no sampling parameter best_of, n"),
        ({"logprobs": 5}, 'extra_args={"rollout_topk": K}'),
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or in [0.01, 2.0], got -0.1"),
        ({"temperature": 0.001}, "temperature must be 0 (greedy) or in"),
        ({"temperature": 2.5}, "temperature must be 0 (greedy) or in"),
        ({"temperature": float("nan")}, "temperature must be 0 (greedy) or in"),
        ({"top_p": 0.0}, "top_p must be in (0, 1]"),
        ({"top_k": -2}, "top_k must be -1 or 0"),
        ({"min_p": 1.5}, "min_p must be in [0, 1]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"min_tokens": 9}, "min_tokens must be in [0, 8]"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids must be integers from 0 to 11"),
        ({"stop_token_ids": ["7"]}, "stop_token_ids must be integers"),
        ({"extra_args": {"topk": 3}}, "extra_args rollout_topk only, got topk"),
        ({"extra_args": {"rollout_topk": 13}}, "from 1 to 12 (the vocabulary), got 13"),
        ({"extra_args": {"rollout_topk": 0}}, "from 1 to 12"),
        ({"extra_args": {"rollout_topk": 2}, "top_p": 0.9}, "top_p changes it"),
        ({"extra_args": {"rollout_topk": 2}, "top_k": 3, "min_p": 0.1}, "top_k, min_p changes it"),
        ({"extra_args": {"rollout_topk": 2}, "repetition_penalty": 1.1}, "repetition_penalty changes it"),
        ({"extra_args": {"rollout_topk": 2}, "min_tokens": 1}, "min_tokens changes it"),
    ],
)
def test_a_request_that_cannot_be_met_says_what_is_allowed(asked: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(**asked)


def test_none_and_neutral_values_are_defaults():
    everything = parse(
        temperature=None, top_k=None, seed=-1, stop=None, stop_token_ids=None, extra_args=None, logprobs=0
    )
    assert everything == parse() == parse(top_k=-1, stop=[], top_p=1.0) == parse(top_k=VOCABULARY + 5)


def test_greedy_ignores_filters():
    params = parse(temperature=0, top_k=3, top_p=0.2, min_p=0.5)
    assert (params.greedy, params.top_k, params.top_p, params.min_p) == (True, 0, 1.0, 0.0)
