"""verl's synchronous trainer, repeatable and unable to wait for the dead: `trainer.v1.trainer_mode=verl_plugins`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import ray
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_plugins.config import PolicyLoss
from verl_plugins.losses.trust_region import TrustRegion
from verl_plugins.registrations import completed
from verl_plugins.topk.bound_loss import WANTS_ANCHOR_LISTS
from verl_plugins.trainers.liveness import ActorWatch, WatchfulReplayBuffer
from verl_plugins.trainers.metric_log import MetricLog

POLL_S = 0.1


class VerlPluginsTrainer(PPOTrainerSync):
    """Synchronous PPO as verl's `sync`, with four differences.

    Prompts have stable ids, so that a repeated step has the same samples in the same order. Waiting for samples polls
    every 0.1 s instead of 2 s and ends with the reason when an actor has died or a sample has failed. The metric log
    survives a restart. With anchor=old and a top-K divergence the old policy's K probabilities are computed along with
    its log-probabilities.
    """

    def __init__(self, config: Any) -> None:
        self._watch = ActorWatch({})
        self._num_fetched = 0
        super().__init__(config)
        if "file" in list(config.trainer.logger):
            os.environ.setdefault("VERL_FILE_LOGGER_PATH", str(Path(config.trainer.default_local_dir, "metrics.jsonl")))

    @property
    def trainer_mode(self) -> str:
        """Always "sync": verl gives a trainer of any other name the replay buffer of asynchronous training."""
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, _: str) -> None:
        """Ignore the name under which the trainer was chosen."""

    def _build_replay_buffer(self) -> ReplayBuffer:
        plain = super()._build_replay_buffer()
        if type(plain) is not ReplayBuffer:
            return plain
        return WatchfulReplayBuffer.from_plain(
            plain, poll_s=POLL_S, check=lambda: self._watch.check(), explain_failure=self._explain_failure
        )

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, watching every actor the samples depend on."""
        named: dict[str, Any] = {}
        named.update({f"agent loop worker {i}": w for i, w in enumerate(agent_loop_manager.agent_loop_workers)})
        named.update({f"training worker {i}": w for i, w in enumerate(self.actor_rollout_wg.workers)})
        named.update({f"reward worker {i}": w for i, w in enumerate(self.get_reward_handles() or [])})
        for rank, replica in enumerate(self.llm_server_manager.get_replicas()):
            named.update({f"rollout server {rank}.{i}": server for i, server in enumerate(replica.servers)})
        self._watch = ActorWatch(named)
        log_path = os.environ.get("VERL_FILE_LOGGER_PATH")
        self._metric_log = MetricLog(Path(log_path)) if log_path else None
        if self._metric_log is not None:
            self._metric_log.set_aside(self.global_steps if self.global_steps > 0 else -1)
        super().fit(agent_loop_manager)

    def on_train_begin(self) -> None:
        """Restore the rows of the steps before a restart, now that verl has opened the metric log."""
        super().on_train_begin()
        if self._metric_log is not None:
            self._metric_log.restore(self.logger)

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch: TensorDict = super()._fetch_one_gen_batch()
        count = len(batch["uid"])
        # verl splits keys at underscores and takes what stands before the first for the prompt's id.
        names = [f"{self.global_steps:07d}-{self._num_fetched + i:09d}" for i in range(count)]
        self._num_fetched += count
        batch["uid"] = _like(batch["uid"], names)
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        region = self._region()
        if region is None or not region.needs_topk or region.anchor != "old":
            return super()._compute_old_log_prob(batch, metrics)
        batch.extra_info[WANTS_ANCHOR_LISTS] = True
        batch = super()._compute_old_log_prob(batch, metrics)
        batch.extra_info.pop(WANTS_ANCHOR_LISTS, None)
        return batch

    def _region(self) -> TrustRegion | None:
        section = self.config.actor_rollout_ref.actor.policy_loss
        names = ("loss_mode", "divergence", "direction", "tail", "anchor", "delta", "truncation")
        return PolicyLoss(**{name: section[name] for name in names if name in section}).trust_region()

    def _explain_failure(self) -> str:
        """Ask the agent loop workers, whose log the trainer cannot see, what went wrong."""
        self._watch.check()
        asked = [worker.take_errors.remote() for worker in self.agent_loop_manager.agent_loop_workers]
        errors = [error for one in ray.get(asked, timeout=30) for error in one]
        return errors[0] if errors else "no error was recorded; see the agent loop worker's log"


def _like(column: Any, names: list[str]) -> Any:
    """Return `names` in the container verl keeps a text column in."""
    from verl.utils import tensordict_utils as tu

    return tu.get_tensordict({"uid": np.array(names, dtype=object)})["uid"] if len(column) else column


def register() -> None:
    """Put the trainer into verl's registry, which refuses a clash itself."""
    register_trainer("verl_plugins")(VerlPluginsTrainer)


completed(__name__)
