"""`actor_rollout_ref.rollout.name: hf_cpu` in verl: where its servers start, and how the trainer's weights reach them.

verl keeps a rollout in two halves. `HFCPUReplica` lives in the driver and starts the server process; `HFCPUWeights`
lives in each training process and sends weights to the server of the same rank. With two training ranks there are two
replicas, each fed by its own rank.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from verl_plugins.registrations import completed
from verl_plugins.rollouts.hf_cpu.server import HFCPUServer, ServerSettings

NAME = "hf_cpu"
_ENGINE_KWARGS = ("num_threads", "batch_window_s")
_PARALLEL_SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def register() -> None:
    """Put `hf_cpu` into verl's two registries of rollouts.

    Raises:
        ValueError: another rollout of this name is there.
    """
    adapter = f"{__name__}.{HFCPUWeights.__name__}"
    if _ROLLOUT_REGISTRY.setdefault((NAME, "async"), adapter) != adapter:
        raise ValueError(f"verl already has a rollout {NAME!r}: {_ROLLOUT_REGISTRY[(NAME, 'async')]}")
    loader = RolloutReplicaRegistry._registry.get(NAME, _load_replica)
    if loader is not _load_replica:
        raise ValueError(f"verl already has a rollout replica {NAME!r}: {loader}")
    RolloutReplicaRegistry.register(NAME, _load_replica)


def _load_replica() -> type[RolloutReplica]:
    return HFCPUReplica


def server_name(replica_rank: int, suffix: str = "") -> str:
    """Return the name of a replica's actor, by which the training process of the same rank finds it."""
    return f"{NAME}_server_{replica_rank}{suffix}"


def server_settings(rollout: Any, model: Any) -> ServerSettings:
    """Pick from verl's configuration what a server needs, and refuse what this rollout cannot do.

    Args:
        rollout: verl's RolloutConfig, or its mapping.
        model: verl's HFModelConfig, or its mapping.

    Raises:
        ValueError: names the key and the override to type.
    """
    for key in _PARALLEL_SIZES:
        if rollout.get(key, 1) != 1:
            raise ValueError(
                f"hf_cpu runs a model in one process, got {key} {rollout.get(key)}; "
                f"set actor_rollout_ref.rollout.{key}=1"
            )
    engine = _plain((rollout.get("engine_kwargs") or {}).get(NAME) or {})
    unknown = sorted(engine.keys() - set(_ENGINE_KWARGS))
    if unknown:
        raise ValueError(
            f"actor_rollout_ref.rollout.engine_kwargs.{NAME} has no {', '.join(unknown)}; "
            f"allowed: {', '.join(_ENGINE_KWARGS)}"
        )
    path = copy_to_local(model.get("local_path") or model.get("path"), use_shm=bool(model.get("use_shm")))
    tokenizer_path = model.get("tokenizer_path")
    overrides = _plain(model.get("override_config") or {})
    return ServerSettings(
        model_path=path,
        tokenizer_path=copy_to_local(tokenizer_path) if tokenizer_path else path,
        override_config=overrides.get("model_config", overrides),
        trust_remote_code=bool(model.get("trust_remote_code")),
        prompt_length=rollout.get("prompt_length"),
        response_length=rollout.get("response_length"),
        dtype=rollout.get("dtype"),
        max_model_len=rollout.get("max_model_len"),
        max_num_seqs=rollout.get("max_num_seqs"),
        ignore_eos=bool(rollout.get("ignore_eos")),
        repetition_penalty=rollout.get("repetition_penalty", 1.0),
        seed=rollout.get("seed"),
        full_determinism=bool(rollout.get("full_determinism")),
        **engine,
    )


def _plain(mapping: Any) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(mapping, resolve=True) if isinstance(mapping, DictConfig) else mapping
    return {str(key): value for key, value in found.items()}


class HFCPUReplica(RolloutReplica):
    """Starts one server process and hands its address to verl."""

    async def launch_servers(self) -> None:
        """Start the server and wait until its model is loaded; what fails there is raised here."""
        role = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        name = server_name(self.replica_rank, role + self.name_suffix)
        settings = server_settings(self.config, self.model_config)
        actor = ray.remote(HFCPUServer).options(
            name=name,
            max_concurrency=self.max_concurrency,
            num_cpus=0,  # verl's bundles have taken the nominal CPUs
        )
        server = actor.remote(settings, self.replica_rank)
        await server.launch.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class HFCPUWeights(BaseRollout):
    """The training process's end: streams its weights to the server of the same rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server's memory is never released."""

    async def release(self) -> None:
        """Do nothing: the server's memory is never released."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send every weight to the server, in buckets of float32.

        Raises:
            ValueError: the weights are a difference or an adapter, not whole tensors.
            RuntimeError: the server is gone.
            ray.exceptions.RayTaskError: the server refused them; its message says why.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise ValueError(
                "hf_cpu takes whole weights only; set actor_rollout_ref.model.lora.merge=true with an adapter, and "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        sender = _Sender(server_name(self.replica_rank), self._bucket_bytes, global_steps)
        failure: Exception | None = None
        # Each tensor is gathered from all ranks: stopping half way would leave the other ranks waiting in a collective.
        async for name, tensor in ensure_async_iterator(weights):
            if failure is None:
                try:
                    await sender.add(name, tensor)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure
        await sender.finish()


class _Sender:
    """Fills buckets and sends each when full; the last is marked."""

    def __init__(self, server: str, bucket_bytes: int, global_steps: int | None) -> None:
        self._server, self._bucket_bytes, self._global_steps = server, bucket_bytes, global_steps
        self._bucket: dict[str, np.ndarray] = {}
        self._size, self._first = 0, True

    async def add(self, name: str, tensor: torch.Tensor) -> None:
        array = tensor.detach().to("cpu", torch.float32).numpy()
        if self._bucket and self._size + array.nbytes > self._bucket_bytes:
            await self._send(last=False)
        self._bucket[name] = array
        self._size += array.nbytes

    async def finish(self) -> None:
        await self._send(last=True)

    async def _send(self, *, last: bool) -> None:
        gone = f"weight synchronisation: the rollout server {self._server} is gone"
        try:
            server = ray.get_actor(self._server)
        except ValueError as error:  # Ray's word for an actor that never was or has died
            raise RuntimeError(gone) from error
        part = server.load_weights.remote(self._bucket, first=self._first, last=last, global_steps=self._global_steps)
        try:
            await part
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"{gone}: {error}") from error
        self._bucket, self._size, self._first = {}, 0, False


completed(__name__)
