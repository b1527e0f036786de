"""End a run with the reason when something it waits for can no longer answer.

verl's trainer polls TransferQueue for finished samples and never asks whether those who should write them are alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

CHECK_EVERY_S = 2.0


class ActorWatch:
    """Asks actors for a sign of life and raises when one is dead; costs nothing while they are busy."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors = dict(actors)
        self._asked: dict[Any, str] = {}
        self._last = 0.0

    def check(self) -> None:
        """Raise RuntimeError naming the first dead actor. Rate-limited; never blocks."""
        now = time.monotonic()
        if now - self._last < CHECK_EVERY_S:
            return
        self._last = now
        waiting = set(self._asked.values())
        for name, actor in self._actors.items():
            if name not in waiting:
                self._asked[actor.__ray_ready__.remote()] = name
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for answer in done:
            name = self._asked.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.RayError as error:
                raise RuntimeError(f"verl_plugins: {name} died while the trainer waited for it: {error}") from error


class WatchfulReplayBuffer(ReplayBuffer):
    """verl's synchronous buffer that polls faster, notices the dead, refuses failed samples, and keeps a stable order.

    Order matters for resuming: verl hands out samples in the order their writers finished, so the mini-batches of a
    repeated step would differ.
    """

    check: Callable[[], None]
    explain_failure: Callable[[], str]

    @classmethod
    def from_plain(
        cls, plain: ReplayBuffer, *, poll_s: float, check: Callable[[], None], explain_failure: Callable[[], str]
    ) -> WatchfulReplayBuffer:
        """Take over the state of a buffer verl has built and configured."""
        buffer = cls.__new__(cls)
        buffer.__dict__.update(plain.__dict__)
        buffer.poll_interval = poll_s
        buffer.check = check
        buffer.explain_failure = explain_failure
        return buffer

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check()
        if self.failure_keys[partition_id] and not self.sync_refill_failed_groups:
            raise RuntimeError(
                f"verl_plugins: {len(self.failure_keys[partition_id])} prompts failed in the rollout: "
                f"{self.explain_failure()}"
            )
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]:
        keys: set[str] = super()._sampleable_terminal_keys(partition_id, eviction_reasons)
        failed = keys & self.failure_keys[partition_id]
        if failed and not self.sync_refill_failed_groups:
            raise RuntimeError(f"verl_plugins: {len(failed)} prompts failed in the rollout: {self.explain_failure()}")
        return keys

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        ordered = dict(sorted(partition_snapshot.items(), key=lambda item: _sample_order(item[0])))
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)


def _sample_order(key: str) -> tuple[str, int, int]:
    """Sort `{uid}_{session}_{output}` by its numbers; prompts' own keys first."""
    parts = key.rsplit("_", 2)
    return (parts[0], int(parts[1]), int(parts[2])) if len(parts) == 3 else (key, -1, -1)
