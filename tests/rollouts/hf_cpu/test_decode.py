"""Generation against a twin without cache, padding or batch, and what makes a response end."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from verl_plugins.rollouts.hf_cpu.decode import Completion, Request, generate
from verl_plugins.rollouts.hf_cpu.sampling import Law, parse_sampling_params, processed_logits
from verl_plugins.topk.rows import check_rows

VOCABULARY, EOS = 160, 2


def request(prompt: list[int], seed: int = 0, max_tokens: int = 12, **asked: Any) -> Request:
    params = parse_sampling_params(asked, max_tokens=max_tokens, vocabulary=VOCABULARY)
    return Request(prompt_ids=prompt, params=params, seed=seed)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def run(model: PreTrainedModel, requests: list[Request], **kwargs: Any) -> list[Completion]:
    return generate(model, requests, vocabulary=VOCABULARY, eos_ids={EOS}, **kwargs)


@torch.no_grad()
def slow_twin(model: PreTrainedModel, asked: Request) -> tuple[list[int], list[float], list[torch.Tensor], str]:
    """One request alone; the whole sequence goes through the model again for each token."""
    params, generator = asked.params, torch.Generator().manual_seed(asked.seed)
    uniforms = torch.rand(params.max_tokens, generator=generator, dtype=torch.float64)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    tokens, logps, laws = [], [], []
    while True:
        sequence = [*asked.prompt_ids, *tokens]
        seen_BV, barred_BV = torch.zeros(2, 1, VOCABULARY, dtype=torch.bool)
        seen_BV[0, sequence] = True
        barred_BV[0, [EOS, *params.stop_token_ids]] = True
        raw = model(torch.tensor([sequence])).logits[:, -1]
        logits = processed_logits(raw, Law.of([params]), step=len(tokens), seen_BV=seen_BV, barred_BV=barred_BV)
        law = logits.log_softmax(-1)[0]
        if params.greedy:
            token = int(logits.argmax())
        else:
            below = itertools.accumulate(law.double().exp().tolist())
            token = next(token for token, mass in enumerate(below) if mass > uniforms[len(tokens)])
        tokens.append(token)
        logps.append(float(law[token]))
        laws.append(law)
        if token in stops:
            return tokens, logps, laws, "stop"
        if len(tokens) == params.max_tokens:
            return tokens, logps, laws, "length"


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 5, "repetition_penalty": 1.4},
    {"min_p": 0.05, "max_tokens": 25},
    {"max_tokens": 1},
    {"stop_token_ids": list(range(40, 80)), "temperature": 1.5},
    {"stop_token_ids": list(range(40, 160)), "min_tokens": 6},
    {"ignore_eos": True, "max_tokens": 20},
    {"extra_args": {"rollout_topk": 5}},
]


def test_a_mixed_batch_equals_the_slow_twin(model: PreTrainedModel):
    requests = [request(prompt, seed=n, **ASKED[n % len(ASKED)]) for n, prompt in enumerate(prompts(3 * len(ASKED)))]
    for asked, got in zip(requests, run(model, requests), strict=True):
        tokens, logps, _, reason = slow_twin(model, asked)
        assert got.token_ids == tokens
        assert got.finish_reason == reason
        np.testing.assert_allclose(got.logps, logps, atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 20, 128])
def test_k_lists_hold_the_best_tokens_and_the_sampled_one(model: PreTrainedModel, k: int):
    extra = {"rollout_topk": k}
    requests = [request(prompt, seed=n, extra_args=extra, temperature=1.3) for n, prompt in enumerate(prompts(6))]
    forced = 0
    for asked, got in zip(requests, run(model, requests), strict=True):
        tokens, logps, laws, _ = slow_twin(model, asked)
        assert got.topk_ids is not None and got.topk_logps is not None
        assert got.topk_ids.shape == (len(tokens), k)
        check_rows(got.topk_ids, got.topk_logps, np.array(tokens), np.array(got.logps))
        for ids, listed, token, law in zip(got.topk_ids, got.topk_logps, tokens, laws, strict=True):
            best = law.topk(k).indices.tolist()
            forced += token not in best
            expected = set(best) if token in best else set(best[:-1]) | {token}
            assert set(ids.tolist()) == expected
            np.testing.assert_allclose(listed, law[torch.tensor(ids).long()], atol=1e-5)
        np.testing.assert_allclose(got.logps, logps, atol=1e-5)
    assert forced or k == 128  # the case of a sampled token outside the K best has been met


def test_requests_of_one_batch_may_ask_for_different_k(dense: PreTrainedModel):
    wanted = [None, 1, 7, 20]
    extras = [{} if k is None else {"extra_args": {"rollout_topk": k}} for k in wanted]
    got = run(dense, [request([5, 6, 7], seed=4, **extra) for extra in extras])
    assert [None if c.topk_ids is None else c.topk_ids.shape[1] for c in got] == wanted
    assert len({tuple(c.token_ids) for c in got}) == 1


def test_a_seed_decides_the_sample_whatever_the_batch(model: PreTrainedModel):
    asked = request([9, 8, 7], seed=11, max_tokens=16)
    alone = run(model, [asked])[0]
    for others in (1, 7, 30):
        crowd = [request(prompt, seed=100 + n) for n, prompt in enumerate(prompts(others, seed=others))]
        joined = run(model, [*crowd, asked])[-1]
        assert joined.token_ids == alone.token_ids
        np.testing.assert_allclose(joined.logps, alone.logps, atol=1e-5)


def test_a_longer_limit_continues_the_same_sample(dense: PreTrainedModel):
    short, long = run(dense, [request([4], seed=3, max_tokens=m, ignore_eos=True) for m in (7, 40)])
    assert long.token_ids[:7] == short.token_ids


def test_seeds_differ(dense: PreTrainedModel):
    got = run(dense, [request([4, 5], seed=seed, ignore_eos=True) for seed in range(16)])
    assert len({tuple(completion.token_ids) for completion in got}) == 16


def test_first_tokens_follow_the_models_law(dense: PreTrainedModel):
    prompt = [17, 23]
    with torch.no_grad():
        probs = dense(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    draws = 4000
    got = run(dense, [request(prompt, seed=seed, max_tokens=1) for seed in range(draws)])
    counts = torch.tensor([c.token_ids[0] for c in got]).bincount(minlength=VOCABULARY)
    expected = draws * probs
    often = expected >= 5  # chi-square with the rare tokens pooled
    pooled = torch.stack([counts[~often].sum(), expected[~often].sum()])
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    statistic += (pooled[0] - pooled[1]) ** 2 / pooled[1].clamp(min=1)
    freedom = int(often.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_the_stop_token_ends_and_belongs_to_the_response(dense: PreTrainedModel):
    free = run(dense, [request([30, 31], seed=2, max_tokens=10, ignore_eos=True)])[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    got = run(dense, [request([30, 31], seed=2, max_tokens=10, ignore_eos=True, stop_token_ids=[stop])])[0]
    assert got.token_ids == free.token_ids[: first + 1]
    assert got.finish_reason == "stop"


def test_a_stop_token_at_the_limit_counts_as_stop(dense: PreTrainedModel):
    free = run(dense, [request([30, 31], seed=2, max_tokens=3, ignore_eos=True)])[0]
    got = run(dense, [request([30, 31], seed=2, max_tokens=3, ignore_eos=True, stop_token_ids=[free.token_ids[-1]])])[0]
    assert (got.token_ids, got.finish_reason) == (free.token_ids, "stop")


def test_min_tokens_bars_stops_until_then(dense: PreTrainedModel):
    stops = list(range(VOCABULARY - 1))  # everything but one token
    got = run(dense, [request([30], seed=2, max_tokens=9, min_tokens=5, stop_token_ids=stops)])[0]
    assert got.token_ids[:5] == [VOCABULARY - 1] * 5
    assert all(token not in got.token_ids[:-1] for token in stops) and len(got.token_ids) >= 5


class CountingModel:
    """Counts how many rows each forward pass has."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.rows = model, []

    def __call__(self, **kwargs: Any) -> Any:
        self.rows.append(kwargs["input_ids"].shape[0])
        return self.model(**kwargs)


def test_finished_requests_leave_the_batch(dense: PreTrainedModel):
    counting = CountingModel(dense)
    limits = [2, 5, 5, 9]
    generate(
        counting,
        [request([7, n + 3], seed=n, max_tokens=limit, ignore_eos=True) for n, limit in enumerate(limits)],
        vocabulary=VOCABULARY,
        eos_ids={EOS},
    )
    assert counting.rows == [sum(limit > step for limit in limits) for step in range(9)]


def test_cancelled_requests_return_what_they_have(dense: PreTrainedModel):
    class Cancelling(CountingModel):
        def __call__(self, **kwargs: Any) -> Any:
            if len(self.rows) == 3:
                cancelled.add(1)
            return super().__call__(**kwargs)

    cancelled: set[int] = {2}
    extra = {"rollout_topk": 4}
    requests = [request([7, 8], seed=n, max_tokens=8, ignore_eos=True, extra_args=extra) for n in range(3)]
    free = run(dense, requests)
    got = generate(Cancelling(dense), requests, vocabulary=VOCABULARY, eos_ids={EOS}, cancelled=cancelled)
    assert [c.finish_reason for c in got] == ["length", "abort", "abort"]
    assert got[0].token_ids == free[0].token_ids
    assert got[1].token_ids == free[1].token_ids[:4]
    assert got[2].token_ids == [] and got[2].topk_ids is not None and got[2].topk_ids.shape == (0, 4)


def test_a_batch_cancelled_at_once_is_empty(dense: PreTrainedModel):
    got = run(dense, [request([7]), request([8], extra_args={"rollout_topk": 3})], cancelled={0, 1})
    assert [(c.token_ids, c.logps, c.finish_reason) for c in got] == [([], [], "abort")] * 2


def test_diverged_weights_are_reported(dense: PreTrainedModel):
    class Diverged(CountingModel):
        def __call__(self, **kwargs: Any) -> Any:
            output = self.model(**kwargs)
            output.logits[0, -1, 3] = float("nan")
            return output

    with pytest.raises(FloatingPointError, match="weights have diverged"):
        generate(Diverged(dense), [request([7])], vocabulary=VOCABULARY, eos_ids={EOS})


def test_bfloat16_weights_sample_in_float32():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    half = Qwen3ForCausalLM(config).eval().bfloat16()
    got = run(half, [request([5, 6], seed=1, extra_args={"rollout_topk": 20})])[0]
    assert got.topk_logps is not None
    check_rows(got.topk_ids, got.topk_logps, np.array(got.token_ids), np.array(got.logps))
    with torch.no_grad():
        law = half(torch.tensor([[5, 6]])).logits[0, -1].float().log_softmax(-1)
    np.testing.assert_allclose(got.logps[0], law[got.token_ids[0]], atol=2e-2)


@pytest.mark.slow  # a time: on a busy machine it says more about its neighbours
def test_twenty_columns_cost_at_most_15_percent_more_than_one(dense: PreTrainedModel):
    def seconds(k: int) -> float:
        extra = {"rollout_topk": k}
        requests = [
            request(p, seed=n, max_tokens=32, ignore_eos=True, extra_args=extra) for n, p in enumerate(prompts(32))
        ]
        start = time.process_time()
        run(dense, requests)
        return time.process_time() - start

    seconds(1), seconds(20)
    pairs = [(seconds(1), seconds(20)) for _ in range(9)]
    one, twenty = (min(column) for column in zip(*pairs, strict=True))
    assert twenty <= 1.15 * one, f"K=20 took {twenty:.3f} s, K=1 {one:.3f} s"
