"""Requests and answers around verl's agent loop, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_plugins.topk import carry
from verl_plugins.topk.rows import REQUEST_TOPK, TOPK_IDS, TOPK_LOGPROBS


class Server:
    """Answers as a rollout does, and remembers what it was asked."""

    def __init__(self, *, lists: bool = True, tokens=(3, 1)):
        self.lists, self.tokens, self.asked = lists, list(tokens), []

    async def generate(self, request_id, *, sampling_params, **_):
        self.asked.append(sampling_params)
        extra = {"global_steps": 7}
        k = (sampling_params.get("extra_args") or {}).get(REQUEST_TOPK)
        if k and self.lists:
            ids = np.stack([np.array([t, *[j for j in range(9) if j != t][: k - 1]]) for t in self.tokens])
            extra[TOPK_IDS] = ids.astype(np.int32)
            extra[TOPK_LOGPROBS] = np.tile(np.log(np.float32(0.9) / k), ids.shape).astype(np.float32)
        logps = None if not k else extra[TOPK_LOGPROBS][:, 0].tolist() if self.lists else [-1.0] * len(self.tokens)
        return SimpleNamespace(token_ids=self.tokens, log_probs=logps, extra_fields=extra)


def ask(server, session, params, times=1):
    async def run():
        token = carry._SESSION.set(session)
        try:
            client = carry.SeededClient(server)
            return [await client.generate("r", sampling_params=params, prompt_ids=[1]) for _ in range(times)]
        finally:
            carry._SESSION.reset(token)

    return asyncio.run(run())


def test_request_asks_for_k_and_a_seed_and_leaves_the_shared_parameters_alone():
    server, params = Server(), {"temperature": 1.0, "logprobs": True}
    session = carry.Session(identity="a", num_listed=3)
    (output,) = ask(server, session, params)
    assert server.asked[0]["extra_args"] == {REQUEST_TOPK: 3}
    assert 0 <= server.asked[0]["seed"] < 2**48
    assert params == {"temperature": 1.0, "logprobs": True}
    assert output.extra_fields == {"global_steps": 7}
    assert session.turns[0][0] == [3, 1] and session.turns[0][1].shape == (2, 3)


def test_validation_asks_for_no_lists_but_for_a_seed():
    server = Server()
    ask(server, carry.Session(identity="a", num_listed=0), {"temperature": 0.7})
    assert "extra_args" not in server.asked[0] and "seed" in server.asked[0]


def test_outside_a_session_the_request_is_verls_own():
    server = Server()
    ask(server, None, {"temperature": 1.0})
    assert server.asked == [{"temperature": 1.0}]


def test_rollout_that_returns_no_lists_is_named():
    with pytest.raises(RuntimeError, match="returned none"):
        ask(Server(lists=False), carry.Session(identity="a", num_listed=2), {})


def test_seed_depends_on_every_part_of_the_identity_and_on_the_turn_only():
    base = dict(run_seed=0, step=3, validate=False, problem=[{"role": "user", "content": "1+1"}], index=5, sample=0)
    other = dict(run_seed=1, step=4, validate=True, problem=[{"role": "user", "content": "1+2"}], index=6, sample=1)

    def seeds(**changed):
        session = carry.Session(identity=carry.session_identity(**{**base, **changed}), num_listed=0)
        return session.next_seed(), session.next_seed()

    assert seeds() == seeds()
    drawn = {seeds(), *(seeds(**{name: value}) for name, value in other.items())}
    assert len(drawn) == 7 and len({seed for pair in drawn for seed in pair}) == 14


def test_output_carries_the_lists_as_tensors_and_not_as_extra_fields():
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    session = carry.Session(identity="a", num_listed=3)
    ask(Server(), session, {})
    output = AgentLoopOutput(
        prompt_ids=[5, 6],
        response_ids=[3, 1, 8],
        response_mask=[1, 1, 0],
        response_logprobs=[-1.2, -1.2, 0.0],
        metrics=AgentLoopMetrics(),
        extra_fields={"global_steps": 7},
    )
    fields = carry._with_lists(output, session).as_dict()
    assert fields[TOPK_IDS].dtype == torch.int32 and fields[TOPK_IDS].shape == (3, 3)
    assert fields[TOPK_LOGPROBS].dtype == torch.float32
    assert fields["extra_fields"] == {"global_steps": 7} and output.extra_fields == {"global_steps": 7}
    assert torch.equal(fields["responses"], torch.tensor([3, 1, 8])) and "rollout_log_probs" in fields
    assert all(token in row for token, row in zip([3, 1, 8], fields[TOPK_IDS].tolist(), strict=True))
