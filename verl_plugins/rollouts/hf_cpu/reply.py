"""What the server answers: verl's `TokenOutput`, without verl in the server's process.

Importing verl costs a second and 60 MB more in every server. The reply is therefore a class of ours that turns into
`TokenOutput` when it is unpickled, in the process of the caller, which has verl loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_plugins.rollouts.hf_cpu.decode import Completion
from verl_plugins.topk.rows import TOPK_IDS, TOPK_LOGPROBS


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The fields of verl's `TokenOutput` (verl/workers/rollout/replica.py) that this rollout fills."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    extra_fields: dict[str, Any]

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], object], tuple[dict[str, Any]]]:
        return token_output, (vars(self),)


def reply_of(completion: Completion | None, *, logprobs: bool, global_steps: int | None) -> Reply:
    """Put a completion into verl's words; None is a request that was given up before it started."""
    extra_fields: dict[str, Any] = {"global_steps": global_steps}
    if completion is None:
        return Reply(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=extra_fields)
    if completion.topk_ids is not None:
        extra_fields[TOPK_IDS], extra_fields[TOPK_LOGPROBS] = completion.topk_ids, completion.topk_logps
    return Reply(
        token_ids=completion.token_ids,
        log_probs=completion.logps if logprobs else None,
        # vLLM's "stop" and "length" are both "completed" in verl (vllm_async_server.py, generate).
        stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
        extra_fields=extra_fields,
    )


def token_output(fields: dict[str, Any]) -> object:
    """Build verl's `TokenOutput`; called by pickle in the process that receives a reply."""
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(**fields)
