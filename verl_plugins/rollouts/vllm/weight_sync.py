"""A weight synchronisation with vLLM that ends with the reason when it fails.

verl's trainer sends weights through a ZMQ request socket and waits for each answer without limit; when the receiving
worker has failed or died there is nobody left to answer. Here the same sender looks, while it waits, at the remote
call that runs the receiver, and raises what that call raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray.exceptions import RayError
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from zmq.constants import PollEvent

_POLL_MS = 200
# The last answer and the receiver's result travel separately: either may arrive first.
_GRACE_S = 5.0


class WeightSyncError(RuntimeError):
    """vLLM did not take the new weights; the run must not go on with the old ones."""


class ReceiverWatch:
    """Knows whether the receiver of a synchronisation still runs."""

    def __init__(self, replica_rank: int) -> None:
        self._replica_rank = replica_rank
        self._call: Future[Any] | None = None
        self._finished_at: float | None = None

    def follow(self, call: Future[Any]) -> None:
        """Watch this remote call from now on."""
        self._call, self._finished_at = call, None

    def check(self) -> None:
        """Return if an answer may still come.

        Raises:
            WeightSyncError: the receiver failed, or finished without having taken all weights.
        """
        if self._call is None or not self._call.done():
            return
        error = self._call.exception()
        if error is not None:
            raise self.failure(error) from error
        now = time.monotonic()
        self._finished_at = self._finished_at or now
        if now - self._finished_at > _GRACE_S:
            raise WeightSyncError(
                f"weight synchronisation with vLLM replica {self._replica_rank}: the receiving worker finished "
                "before it had taken all weights"
            )

    def failure(self, error: BaseException) -> WeightSyncError:
        """Return the error that names the reason: the last line of what the remote call raised."""
        reason = [type(error).__name__, *str(error).strip().splitlines()][-1]
        return WeightSyncError(f"weight synchronisation with vLLM replica {self._replica_rank} failed: {reason}")


class WatchedSocket:
    """A ZMQ request socket whose waits are interrupted by `check` raising."""

    def __init__(self, socket: Any, check: Callable[[], None]) -> None:
        self._socket = socket
        self._check = check

    def send_pyobj(self, message: object) -> None:
        """Send as soon as the receiver is connected."""
        self._wait(PollEvent.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """Return the receiver's answer."""
        self._wait(PollEvent.POLLIN)
        answer: bytes = self._socket.recv()
        return answer

    def close(self) -> None:
        """Close, dropping what the receiver has not taken: there is nobody to take it."""
        self._socket.close(linger=0)

    def _wait(self, event: PollEvent) -> None:
        while not self._socket.poll(_POLL_MS, event):
            self._check()


class WatchedWeightSender(BucketedWeightSender):  # type: ignore[misc]
    """verl's sender on a watched socket."""

    def __init__(self, *args: Any, check: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check = check

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket: Any = WatchedSocket(self.socket, self._check)


class WatchedServerAdapter(ServerAdapter):  # type: ignore[misc]
    """verl's adapter between trainer and vLLM, for full weights and for deltas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = ReceiverWatch(self.replica_rank)

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """Send the weights as verl does.

        Raises:
            WeightSyncError: the receiver failed, with its reason.
        """
        with _sender(partial(WatchedWeightSender, check=self._watch.check)):
            try:
                return await super().update_weights(weights, *args, **kwargs)
            except RayError as error:
                raise self._watch.failure(error) from error

    async def _execute_method(self, method: str, non_block: bool = False, **kwargs: Any) -> Any:
        call = await super()._execute_method(method, non_block=non_block, **kwargs)
        if non_block and call is not None:
            self._watch.follow(call.future())
        return call


@contextmanager
def _sender(sender: Callable[..., BucketedWeightSender]) -> Iterator[None]:
    # verl's methods name the sender class of their module and offer no other way to choose it. One adapter lives in a
    # process and its synchronisations do not overlap.
    original = vllm_rollout.BucketedWeightSender
    vllm_rollout.BucketedWeightSender = sender
    try:
        yield
    finally:
        vllm_rollout.BucketedWeightSender = original
