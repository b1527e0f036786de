"""verl's vLLM replica, whose servers answer with K-lists."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_plugins.rollouts.vllm.server import TopKvLLMHttpServer


class TopKvLLMReplica(vLLMReplica):  # type: ignore[misc]
    """Starts `TopKvLLMHttpServer` where verl's replica starts its own server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TopKvLLMHttpServer)

    async def shutdown(self) -> None:
        """Stop the engines in order, at the end of a run; verl leaves that to Ray, which kills them."""
        await asyncio.gather(*[server.shutdown.remote() for server in self.servers])
