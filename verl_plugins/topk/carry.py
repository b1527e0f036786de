"""From the rollout server through verl's agent loop into TransferQueue: K-lists and sampling seeds of each request.

Any agent loop of verl works unchanged: its server client is wrapped, and what the server returned is attached to the
loop's output when it is done. Select it by
`actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_plugins.topk.carry.TopKAgentLoopManager`.
"""

from __future__ import annotations

import hashlib
import json
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_plugins.topk.alignment import align_lists
from verl_plugins.topk.rows import REQUEST_TOPK, TOPK_IDS, TOPK_LOGPROBS, Ids, Logps, check_rows

# verl ships the worker as a Ray actor class, which cannot be subclassed; this is the class inside it.
_AgentLoopWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
_SEED_BITS = 48


@dataclass
class Session:
    """One sample of one problem: how to ask for it, and what came back, turn by turn."""

    identity: str
    num_listed: int
    turns: list[tuple[list[int], Ids, Logps]] = field(default_factory=list)
    num_requests: int = 0

    def next_seed(self) -> int:
        """Return the seed of the next request: a function of run seed, step, problem, sample index and turn."""
        text = f"{self.identity}|{self.num_requests}"
        self.num_requests += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


_SESSION: ContextVar[Session | None] = ContextVar("verl_plugins_session", default=None)


def session_identity(run_seed: int, step: int, validate: bool, problem: Any, index: Any, sample: int) -> str:
    """Name a sample by what does not change when a run is repeated (verl's own ids are random)."""
    content = json.dumps(problem, default=str, ensure_ascii=False)
    return f"{run_seed}|{'val' if validate else 'train'}|{step}|{index}|{sample}|{content}"


class SeededClient:
    """verl's server client that asks for K probabilities and a seed in the session at hand, and keeps the answer."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request_id: Any, *, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Forward one request. The caller's sampling parameters are shared between samples and stay as they are."""
        session = _SESSION.get()
        if session is None:
            return await self._client.generate(request_id, sampling_params=sampling_params, **kwargs)
        asked = {**sampling_params, "seed": session.next_seed()}
        if session.num_listed:
            asked["extra_args"] = {**(sampling_params.get("extra_args") or {}), REQUEST_TOPK: session.num_listed}
        output = await self._client.generate(request_id, sampling_params=asked, **kwargs)
        if session.num_listed:
            session.turns.append(_take_lists(output, session.num_listed))
        return output


def _take_lists(output: Any, num_listed: int) -> tuple[list[int], Ids, Logps]:
    ids_TK = output.extra_fields.pop(TOPK_IDS, None)
    logps_TK = output.extra_fields.pop(TOPK_LOGPROBS, None)
    if ids_TK is None or logps_TK is None:
        raise RuntimeError(
            f"verl_plugins: the rollout was asked for {num_listed} probabilities per token and returned none. "
            "Its replica class is not ours; `verl-plugins doctor` says which rollouts are registered."
        )
    # Arrays that crossed a process border share read-only memory with it.
    ids_TK, logps_TK = ids_TK.copy(), logps_TK.copy()
    check_rows(ids_TK, logps_TK, output.token_ids, output.log_probs)
    return list(output.token_ids), ids_TK, logps_TK


class TopKAgentLoopOutput(AgentLoopOutput):
    """verl's output with the K-lists as two tensors of their own, (T, K), instead of pickled extra fields."""

    def as_dict(self) -> dict[str, Any]:
        """Return verl's fields and ours."""
        fields: dict[str, Any] = super().as_dict()
        for name in (TOPK_IDS, TOPK_LOGPROBS):
            fields[name] = torch.from_numpy(fields["extra_fields"].pop(name))
        return fields


class TopKAgentLoopWorker(_AgentLoopWorker):  # type: ignore[misc, valid-type]
    """verl's agent loop worker with a session around each sample."""

    llm_client: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        rollout = config.actor_rollout_ref.rollout
        self.llm_client = SeededClient(self.llm_client)
        self._num_listed = int(OmegaConf.select(rollout, "custom.topk") or 0)
        self._run_seed = int(rollout.get("seed") or 0)
        self._errors: list[str] = []

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        """Run one sample. What fails is kept for the trainer, which cannot see this worker's log."""
        validate = bool(trajectory["validate"])
        identity = session_identity(
            self._run_seed,
            int(trajectory["step"]),
            validate,
            kwargs.get("raw_prompt"),
            trajectory["sample_index"],
            int(kwargs.get("session_id", 0)),
        )
        token = _SESSION.set(Session(identity=identity, num_listed=0 if validate else self._num_listed))
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            self._errors.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            _SESSION.reset(token)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        session = _SESSION.get()
        if session is not None and session.num_listed:
            outputs = output if isinstance(output, list) else [output]
            output = [_with_lists(one, session) for one in outputs]
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def take_errors(self) -> list[str]:
        """Return what failed since the last call, most recent last."""
        errors, self._errors = self._errors, []
        return errors


def _with_lists(output: AgentLoopOutput, session: Session) -> TopKAgentLoopOutput:
    ids_TK, logps_TK = align_lists(session.turns, output.response_ids, output.response_mask)
    fields = dict(output)
    fields["extra_fields"] = {**output.extra_fields, TOPK_IDS: ids_TK, TOPK_LOGPROBS: logps_TK}
    copy: TopKAgentLoopOutput = TopKAgentLoopOutput.model_construct(set(output.model_fields_set), **fields)
    return copy


class TopKAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TopKAgentLoopWorker)
