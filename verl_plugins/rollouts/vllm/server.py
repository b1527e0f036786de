"""verl's vLLM server, with K-lists in its replies and a CPU's engine settings where the platform is a CPU."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from verl.utils.device import get_device_name
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_plugins.rollouts.vllm import settings
from verl_plugins.rollouts.vllm.proxy import TopKEngineProxy, empty_rows, requested_topk
from verl_plugins.topk.rows import TOPK_IDS, TOPK_LOGPROBS

CPU_WORKER_EXTENSION = "verl_plugins.platforms.vllm_cpu.CPUWorkerExtension"

_LIVENESS_INTERVAL_S = 1.0
_Result = TypeVar("_Result")


class TopKvLLMHttpServer(vLLMHttpServer):  # type: ignore[misc]
    """Serves `extra_args["rollout_topk"]=K`: the reply's extra fields then hold the K-list of each response token."""

    engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._on_cpu = get_device_name() == "cpu"
        if self._on_cpu:
            settings.set_cpu_environment()
        super().__init__(*args, **kwargs)

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the engine as verl does, then stand between it and the server."""
        await super().run_server(args)
        self.engine = TopKEngineProxy(self.engine)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """Generate as verl does and add the rows, when the request asks for them.

        Raises:
            RuntimeError: vLLM answered with tokens and without their rows.
        """
        k = requested_topk(sampling_params.get("extra_args"))
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        finally:
            rows = self.engine.pop_rows(request_id)
        if not k:
            return output
        if rows is None and output.token_ids:
            raise RuntimeError(f"vLLM returned {len(output.token_ids)} tokens and no K-list for request {request_id}")
        output.extra_fields[TOPK_IDS], output.extra_fields[TOPK_LOGPROBS] = rows or empty_rows(k)
        return output

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> None:
        """Call a method of every worker; fail, rather than wait for ever, when the engine dies meanwhile."""
        await self._while_alive(super().collective_rpc(*args, **kwargs))

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes of the old weights; fail when the engine dies meanwhile."""
        await self._while_alive(super().clear_kv_cache())

    async def _while_alive(self, call: Awaitable[_Result]) -> _Result:
        # vLLM fails the requests of an engine that dies, but leaves its calls to the workers pending.
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.wait({task}, timeout=_LIVENESS_INTERVAL_S)
            if not task.done() and self.engine.errored:
                task.cancel()
                raise self.engine.dead_error
        return task.result()

    def _validate_configs(self) -> None:
        super()._validate_configs()
        text = self.model_config.hf_config.get_text_config()
        if self._on_cpu:
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            settings.check_cpu(
                free_cache_engine=self.config.free_cache_engine,
                head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
                supported_head_dims=CPUAttentionBackend.get_supported_head_sizes(),
            )
        settings.check_topk(
            self._topk(),
            vocabulary=min(len(self.model_config.tokenizer), text.vocab_size),
            temperature=self.config.temperature,
            logprobs_mode=self.config.logprobs_mode,
        )

    def _topk(self) -> int:
        return settings.configured_topk(self.config.custom)

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        limit = settings.allowed_logprobs(self._topk(), engine_kwargs.get("max_logprobs"))
        if limit is not None:
            engine_kwargs["max_logprobs"] = limit
        if self._on_cpu:
            defaults = settings.cpu_engine_arguments(self.config.tensor_model_parallel_size)
            engine_kwargs.update({**defaults, **engine_kwargs})

    def _get_worker_extension_cls(self) -> str:
        return CPU_WORKER_EXTENSION if self._on_cpu else super()._get_worker_extension_cls()
