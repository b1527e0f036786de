"""The process behind one `hf_cpu` replica: a transformers model that answers verl's generate calls in batches.

The methods are those verl calls on a rollout server (verl/workers/rollout/vllm_rollout/vllm_async_server.py); a plain
class, made a Ray actor by `replica.py`. Neither verl nor Ray is imported here, which halves the start of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_plugins.rollouts.hf_cpu.batching import Batcher
from verl_plugins.rollouts.hf_cpu.decode import Completion, Request, generate
from verl_plugins.rollouts.hf_cpu.loading import LoadedModel, load_model
from verl_plugins.rollouts.hf_cpu.reply import Reply, reply_of
from verl_plugins.rollouts.hf_cpu.sampling import SamplingParams, parse_sampling_params
from verl_plugins.rollouts.hf_cpu.weights import WeightSync


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server needs of verl's rollout and model configuration, without verl's classes.

    `num_threads` is the model's; with less work than milliseconds an operation, a second thread makes it slower.
    `batch_window_s` is how long a batch that is not full waits for more requests.
    """

    model_path: str
    tokenizer_path: str
    prompt_length: int
    response_length: int
    dtype: str = "float32"
    override_config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 256
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    seed: int = 0
    full_determinism: bool = False
    num_threads: int = 1
    batch_window_s: float = 0.02


class HFCPUServer:
    """One replica's model and its queue.

    Args:
        settings: see `ServerSettings`.
        replica_rank: which replica this is; part of the seed of requests that bring none.
    """

    def __init__(self, settings: ServerSettings, replica_rank: int) -> None:
        self._settings, self._replica_rank = settings, replica_rank
        self._global_steps: int | None = None
        self._seeds = torch.Generator().manual_seed(settings.seed + replica_rank)
        self._loaded: LoadedModel | None = None
        self._max_model_len = 0
        self._sync: WeightSync | None = None
        self._sync_failure: str | None = None
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="model", initializer=torch.set_num_threads, initargs=(settings.num_threads,)
        )
        self._batcher: Batcher[Request, Completion] = Batcher(
            self._run_batch,
            max_batch=settings.max_num_seqs,
            window_s=settings.batch_window_s,
            worker=self._worker,
        )

    async def launch(self) -> None:
        """Load the model.

        Raises:
            ValueError: the folder or a setting is wrong; verl's driver gets it as it is.
        """
        settings = self._settings
        loaded = load_model(
            settings.model_path,
            tokenizer_path=settings.tokenizer_path,
            dtype=settings.dtype,
            override_config=settings.override_config,
            trust_remote_code=settings.trust_remote_code,
        )
        self._max_model_len = settings.max_model_len or loaded.max_positions
        if self._max_model_len > loaded.max_positions:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len={self._max_model_len} exceeds the model's "
                f"max_position_embeddings={loaded.max_positions}"
            )
        self._loaded = loaded

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str = "",
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Continue one prompt.

        Args:
            prompt_ids: at least one token of the vocabulary.
            sampling_params: by vLLM's names; `extra_args={"rollout_topk": K}` asks for the K-list.
            request_id: names the request for `abort_request`.
            image_data: and the three that follow: this rollout takes text only.

        Returns:
            the response; in the process of a remote caller verl's `TokenOutput`.

        Raises:
            ValueError: the request cannot be met as it stands.
            RuntimeError: its batch failed, or the last weight synchronisation did.
        """
        if image_data or video_data or audio_data:
            raise ValueError("hf_cpu takes text only; use actor_rollout_ref.rollout.name=vllm for images and sound")
        params = self._params(prompt_ids, sampling_params)
        seed = params.seed
        if seed is None:
            seed = self._next_seed()
        request = Request(prompt_ids=list(prompt_ids), params=params, seed=seed)
        completion = await self._batcher.submit(request_id, request)
        return reply_of(completion, logprobs=params.logprobs, global_steps=self._global_steps)

    async def load_weights(
        self, bucket: Mapping[str, NDArray[np.float32]], *, first: bool, last: bool, global_steps: int | None
    ) -> int:
        """Take one part of the trainer's weights; nothing is generated between the first part and the last.

        Returns:
            how many tensors arrived in all, after the last part; else 0.

        Raises:
            ValueError: a part does not fit, or the set is incomplete. The server then refuses to generate: its
                weights are a mixture.
        """
        self._batcher.hold()
        try:
            received = await asyncio.get_running_loop().run_in_executor(
                self._worker, self._receive, bucket, first, last
            )
        except Exception as error:
            self._sync, self._sync_failure = None, str(error)
            self._batcher.release()  # waiting requests must fail, not hang
            raise
        if last:
            self._sync, self._sync_failure = None, None
            if global_steps is not None:
                self._global_steps = global_steps
            self._batcher.release()
        return received

    async def set_global_steps(self, global_steps: int) -> None:
        """Name the training step of the weights; replies carry it."""
        self._global_steps = global_steps

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, int | list[str]]:
        """Answer every request with what it has, and admit none until `resume_generation`.

        Args:
            reset_prefix_cache: no meaning here, there is none.
            reject_request: answer requests that come in the meantime as aborted instead of keeping them.
        """
        given_up = await self._batcher.abort(pause=True, reject=reject_request)
        return {"aborted_count": len(given_up), "request_ids": given_up}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, bool | str]:
        """Answer one request with what it has."""
        given_up = await self._batcher.abort(request_id=request_id)
        return {"aborted": bool(given_up), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self._batcher.resume()

    async def wait_for_requests_to_drain(self) -> None:
        """Wait until every request has been answered."""
        await self._batcher.wait_idle()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: the weights never leave the memory of this process."""

    async def sleep(self) -> None:
        """Do nothing: the weights never leave the memory of this process."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: keys and values live no longer than their batch."""

    async def release_kv_cache(self) -> None:
        """Do nothing: keys and values live no longer than their batch."""

    async def resume_kv_cache(self) -> None:
        """Do nothing: keys and values live no longer than their batch."""

    async def start_profile(self, **_: object) -> None:
        """Do nothing: there is no engine to profile."""

    async def stop_profile(self) -> None:
        """Do nothing: there is no engine to profile."""

    def _params(self, prompt_ids: Sequence[int], asked: Mapping[str, Any]) -> SamplingParams:
        model, settings = self._model, self._settings
        if not len(prompt_ids):
            raise ValueError("the prompt is empty; a causal model needs at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < model.vocabulary:
            raise ValueError(
                f"the prompt holds tokens from {min(prompt_ids)} to {max(prompt_ids)}, the model's vocabulary has "
                f"{model.vocabulary}: do tokenizer and model belong together?"
            )
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens and leaves no room in a context of {self._max_model_len}; "
                "raise actor_rollout_ref.rollout.max_model_len or lower data.max_prompt_length"
            )
        asked = {key: value for key, value in asked.items() if value is not None}
        limit = asked.get("max_tokens", asked.get("max_new_tokens"))
        if limit is None:
            # verl's default: what prompt and response may have together, minus what the prompt took.
            limit = min(settings.response_length, settings.prompt_length + settings.response_length - len(prompt_ids))
        asked.setdefault("repetition_penalty", settings.repetition_penalty)
        asked.setdefault("ignore_eos", settings.ignore_eos)
        return parse_sampling_params(asked, max_tokens=max(1, min(limit, room)), vocabulary=model.vocabulary)

    def _next_seed(self) -> int:
        if self._settings.full_determinism:
            raise ValueError(
                "actor_rollout_ref.rollout.full_determinism=true needs a seed in every request's sampling parameters: "
                "without one a sample depends on the order in which requests arrive"
            )
        return int(torch.randint(2**62, (), generator=self._seeds))

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise RuntimeError("the server has no model yet: launch() has not finished or has failed")
        return self._loaded

    def _run_batch(self, requests: Sequence[Request], cancelled: Collection[int]) -> list[Completion]:
        if self._sync_failure is not None:
            raise RuntimeError(
                f"the last weight synchronisation failed, so the weights are a mixture: {self._sync_failure}"
            )
        model = self._model
        return generate(model.model, requests, vocabulary=model.vocabulary, eos_ids=model.eos_ids, cancelled=cancelled)

    def _receive(self, bucket: Mapping[str, NDArray[np.float32]], first: bool, last: bool) -> int:
        if first:
            self._sync = WeightSync(self._model.model)
        if self._sync is None:
            raise RuntimeError("a later part of the weights arrived without the first")
        for name, array in bucket.items():
            self._sync.receive(name, torch.from_numpy(np.array(array)))  # Ray's arrays are read-only
        return self._sync.finish() if last else 0
