"""verl's vLLM replica, whose servers answer with K-lists."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_plugins.rollouts.vllm.server import TopKvLLMHttpServer


class TopKvLLMReplica(vLLMReplica):  # type: ignore[misc]
    """Starts `TopKvLLMHttpServer` where verl's replica starts its own server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TopKvLLMHttpServer)
