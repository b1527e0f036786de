"""The engine proxy in front of a fake engine that fills vLLM's own container of log-probabilities.

The container's file imports nothing of vLLM, so that of any version can be tried: `VLLM_LOGPROBS_FILES` names more
files, separated by colons.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_plugins.rollouts.vllm.proxy import RowCapture, TopKEngineProxy, empty_rows, requested_topk
from verl_plugins.topk.rows import REQUEST_TOPK, check_rows

VOCABULARY = 50


@dataclasses.dataclass
class SixLists:
    """The part of vLLM's FlatLogprobs that the proxy touches, for machines without vLLM."""

    start_indices: list[int] = dataclasses.field(default_factory=list)
    end_indices: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int | None] = dataclasses.field(default_factory=list)
    decoded_tokens: list[str | None] = dataclasses.field(default_factory=list)

    def append_fast(self, token_ids: Any, logprobs: Any, ranks: Any, decoded_tokens: Any) -> None:
        self.start_indices.append(len(self.logprobs))
        for token, logp, rank, text in zip(token_ids, logprobs, ranks, decoded_tokens, strict=False):
            self.token_ids.append(token)
            self.logprobs.append(logp)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.logprobs))


def logprobs_files() -> list[Path]:
    spec = importlib.util.find_spec("vllm")
    installed = [Path(spec.origin).with_name("logprobs.py")] if spec and spec.origin else []
    return installed + [Path(name) for name in os.environ.get("VLLM_LOGPROBS_FILES", "").split(":") if name]


def load_container(file: Path) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(f"logprobs_{abs(hash(file))}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    container: Callable[[], Any] = module.FlatLogprobs
    return container


@pytest.fixture(params=[None, *logprobs_files()], ids=lambda file: file.parent.parent.name if file else "six lists")
def container(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return load_container(request.param) if request.param else SixLists


def laws(seed: int, tokens: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    logp_TV = np.log(rng.dirichlet(np.full(VOCABULARY, 0.3), tokens).clip(1e-12))
    return logp_TV, [int(rng.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum())) for row in logp_TV]


def parameters(k: int | None, **changes: Any) -> SimpleNamespace:
    extra_args = None if k is None else {REQUEST_TOPK: k}
    values = {"logprobs": 0, "flat_logprobs": False, "detokenize": True, "stop": [], "extra_args": extra_args}
    return SimpleNamespace(**{**values, **changes})


class FakeEngine:
    """Streams cumulative outputs that share one container, several tokens at a time, as vLLM's does."""

    model = "m"

    def __init__(self, container: Callable[[], Any], logp_TV: np.ndarray, sampled: list[int], burst: int = 1) -> None:
        self.container, self.logp_TV, self.sampled, self.burst = container, logp_TV, sampled, burst
        self.seen: SimpleNamespace | None = None
        self.closed = False
        self.fails_after: int | None = None

    async def generate(
        self, *, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[SimpleNamespace]:
        self.seen = sampling_params
        k = sampling_params.logprobs
        flat = self.container()
        try:
            for position, token in enumerate(self.sampled):
                if position == self.fails_after:
                    raise RuntimeError("engine failed")
                row = self.logp_TV[position]
                best = np.argsort(-row)[:k]
                rank = int((row > row[token]).sum() + 1)
                flat.append_fast(
                    [token, *best.tolist()],
                    [float(row[token]), *row[best].tolist()],
                    itertools.chain((rank,), range(1, k + 1)),
                    itertools.repeat(None),
                )
                done = position + 1 == len(self.sampled)
                if done or (position + 1) % self.burst == 0:
                    completion = SimpleNamespace(token_ids=self.sampled[: position + 1], logprobs=flat)
                    yield SimpleNamespace(outputs=[completion], finished=done)
        finally:
            self.closed = True


async def run(proxy: TopKEngineProxy, params: Any, request_id: str = "r") -> Any:
    final = None
    async for output in proxy.generate(prompt=None, sampling_params=params, request_id=request_id, priority=0):
        final = output
    return final


def read_as_verl_does(completion: Any) -> list[float]:
    return [logprobs[completion.token_ids[i]].logprob for i, logprobs in enumerate(completion.logprobs)]


@pytest.mark.parametrize(("k", "burst"), [(1, 1), (5, 1), (5, 3), (VOCABULARY, 4)])
def test_rows_are_the_k_best_with_the_sampled_token(container: Callable[[], Any], k: int, burst: int) -> None:
    logp_TV, sampled = laws(seed=k + burst, tokens=13)
    proxy = TopKEngineProxy(FakeEngine(container, logp_TV, sampled, burst))
    final = asyncio.run(run(proxy, parameters(k)))
    rows = proxy.pop_rows("r")
    assert rows is not None and proxy.pop_rows("r") is None
    ids, logps = rows
    assert ids.dtype == np.int32 and logps.dtype == np.float32 and ids.shape == (13, k)
    sampled_logps = logp_TV[np.arange(13), sampled]
    check_rows(ids, logps, np.array(sampled), sampled_logps)
    np.testing.assert_allclose(logps, np.take_along_axis(logp_TV, ids.astype(int), 1), atol=1e-6)
    for t in range(13):
        assert set(np.argsort(-logp_TV[t])[: k - 1]) <= set(ids[t])
    np.testing.assert_allclose(read_as_verl_does(final.outputs[0]), sampled_logps, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), k=st.integers(1, VOCABULARY), tokens=st.integers(0, 9), burst=st.integers(1, 4))
def test_rows_do_not_depend_on_how_the_tokens_arrive(seed: int, k: int, tokens: int, burst: int) -> None:
    logp_TV, sampled = laws(seed, tokens)
    rows = []
    for size in (1, burst):
        proxy = TopKEngineProxy(FakeEngine(SixLists, logp_TV, sampled, size))
        asyncio.run(run(proxy, parameters(k)))
        rows.append(proxy.pop_rows("r") or empty_rows(k))
    np.testing.assert_array_equal(rows[0][0], rows[1][0])
    np.testing.assert_array_equal(rows[0][1], rows[1][1])
    assert rows[0][0].shape == (tokens, k)


def test_hand_value() -> None:
    capture = RowCapture(2)
    flat = SixLists()
    flat.append_fast([7, 3, 7], [-1.0, -0.5, -1.0], [2, 1, 2], [None] * 3)  # sampled is the second best
    flat.append_fast([9, 3, 7], [-4.0, -0.25, -2.0], [5, 1, 2], [None] * 3)  # sampled is not among the two best
    capture.take(flat)
    assert flat == SixLists() and len(capture) == 2
    ids, logps = capture.rows([7, 9])
    assert ids.tolist() == [[3, 7], [3, 9]] and logps.tolist() == [[-0.5, -1.0], [-0.25, -4.0]]
    assert [entry for entry in capture] == [{7: (-1.0,)}, {9: (-4.0,)}] and capture[-1] == {9: (-4.0,)}
    with pytest.raises(IndexError):
        capture[2]


def test_a_request_without_k_reaches_the_engine_as_it_is(container: Callable[[], Any]) -> None:
    logp_TV, sampled = laws(seed=1, tokens=4)
    engine = FakeEngine(container, logp_TV, sampled)
    proxy = TopKEngineProxy(engine)
    params = parameters(None, extra_args={"other": 1})
    final = asyncio.run(run(proxy, params))
    assert vars(engine.seen) == vars(parameters(None, extra_args={"other": 1}))
    assert isinstance(final.outputs[0].logprobs, container) and proxy.pop_rows("r") is None
    assert proxy.model == "m"


def test_the_engine_is_asked_for_k_without_text() -> None:
    engine = FakeEngine(SixLists, *laws(seed=2, tokens=2))
    asyncio.run(run(TopKEngineProxy(engine), parameters(4)))
    assert engine.seen == parameters(None, logprobs=4, flat_logprobs=True, detokenize=False)


def test_stop_strings_keep_the_text_and_other_arguments_survive() -> None:
    engine = FakeEngine(SixLists, *laws(seed=3, tokens=2))
    params = parameters(4, stop=["!"], extra_args={REQUEST_TOPK: 4, "kv_transfer_params": {"a": 1}})
    asyncio.run(run(TopKEngineProxy(engine), params))
    assert engine.seen is not None and engine.seen.detokenize
    assert engine.seen.extra_args == {"kv_transfer_params": {"a": 1}}


def test_a_failing_request_leaves_nothing_behind() -> None:
    engine = FakeEngine(SixLists, *laws(seed=4, tokens=6))
    engine.fails_after = 3
    proxy = TopKEngineProxy(engine)
    with pytest.raises(RuntimeError, match="engine failed"):
        asyncio.run(run(proxy, parameters(4)))
    assert proxy.pop_rows("r") is None and not proxy._rows


def test_a_cancelled_request_closes_the_engines_stream() -> None:
    engine = FakeEngine(SixLists, *laws(seed=5, tokens=6))
    proxy = TopKEngineProxy(engine)

    async def cancelled() -> None:
        outputs = proxy.generate(prompt=None, sampling_params=parameters(4), request_id="r")
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(cancelled())
    assert engine.closed and not proxy._rows


def test_rows_of_other_tokens_are_refused() -> None:
    capture = RowCapture(1)
    flat = SixLists()
    flat.append_fast([7, 3], [-1.0, -0.5], [2, 1], [None] * 2)
    capture.take(flat)
    with pytest.raises(RuntimeError, match="do not belong to its 1 tokens"):
        capture.rows([8])
    with pytest.raises(RuntimeError, match="do not belong to its 2 tokens"):
        capture.rows([7, 7])


def test_a_position_of_another_width_is_refused() -> None:
    flat = SixLists()
    flat.append_fast([7, 3], [-1.0, -0.5], [2, 1], [None] * 2)
    with pytest.raises(RuntimeError, match=r"2 log-probabilities for 1 positions; expected 4 for each"):
        RowCapture(3).take(flat)


def test_requested_topk_reads_only_its_own_key() -> None:
    assert [requested_topk(value) for value in (None, {}, {"a": 1}, {REQUEST_TOPK: 20})] == [0, 0, 0, 20]
