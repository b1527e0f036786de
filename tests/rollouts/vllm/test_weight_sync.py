"""The sender that waits for an answer, with verl's own sender and receiver in two threads of one process."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def failed(error: Exception) -> Future[None]:
    call: Future[None] = Future()
    call.set_exception(error)
    return call


def test_a_running_receiver_is_waited_for() -> None:
    from verl_plugins.rollouts.vllm.weight_sync import ReceiverWatch

    watch = ReceiverWatch(0)
    watch.check()
    watch.follow(Future())
    watch.check()


def test_the_receivers_reason_is_the_last_line() -> None:
    from verl_plugins.rollouts.vllm.weight_sync import ReceiverWatch, WeightSyncError

    watch = ReceiverWatch(3)
    watch.follow(failed(RuntimeError("remote traceback\n  line 7\nValueError: shapes differ")))
    with pytest.raises(WeightSyncError, match=r"replica 3 failed: ValueError: shapes differ$"):
        watch.check()
    watch.follow(failed(RuntimeError()))
    with pytest.raises(WeightSyncError, match=r"replica 3 failed: RuntimeError$"):
        watch.check()


def test_a_receiver_that_finished_early_is_reported_after_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_plugins.rollouts.vllm import weight_sync

    monkeypatch.setattr(weight_sync, "_GRACE_S", 0.05)
    watch = weight_sync.ReceiverWatch(0)
    done: Future[None] = Future()
    done.set_result(None)
    watch.follow(done)
    watch.check()
    time.sleep(0.1)
    with pytest.raises(weight_sync.WeightSyncError, match="finished before it had taken all weights"):
        watch.check()


def handle(folder: Path) -> str:
    return f"ipc://{folder}/weights.sock"


def send(folder: Path, weights: Iterator[tuple[str, torch.Tensor]], check: Callable[[], None]) -> None:
    import asyncio

    from verl_plugins.rollouts.vllm.weight_sync import WatchedWeightSender

    sender = WatchedWeightSender(handle(folder), bucket_size_mb=1, use_shm=True, check=check)
    asyncio.run(sender.async_send_weights(weights))


def receive(folder: Path, on_bucket: Callable[..., None], call: Future[None]) -> threading.Thread:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    def run() -> None:
        try:
            BucketedWeightReceiver(handle(folder), torch.device("cpu"), use_shm=True).receive_weights(on_bucket)
            call.set_result(None)
        except Exception as error:
            call.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def some_weights() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for index in range(9):
        yield f"weight.{index}", torch.randn(300, 300, generator=generator)  # 3 of them fill a bucket


def test_all_weights_arrive(tmp_path: Path) -> None:
    from verl_plugins.rollouts.vllm.weight_sync import ReceiverWatch

    received: dict[str, torch.Tensor] = {}
    buckets: list[bool] = []

    def keep(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        received.update({name: tensor.clone() for name, tensor in weights})
        buckets.append(is_last)

    watch, call = ReceiverWatch(0), Future[None]()
    watch.follow(call)
    thread = receive(tmp_path, keep, call)
    send(tmp_path, some_weights(), watch.check)
    thread.join(timeout=20)
    assert len(buckets) > 2 and buckets[-1]
    for name, tensor in some_weights():
        torch.testing.assert_close(received[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_receiver_that_fails_on_a_bucket_ends_the_sender(tmp_path: Path, bucket: int) -> None:
    from verl_plugins.rollouts.vllm.weight_sync import ReceiverWatch, WeightSyncError

    seen: list[Any] = []

    def fail(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        seen.append(len(weights))
        if len(seen) > bucket:
            raise ValueError("no such parameter")

    watch, call = ReceiverWatch(0), Future[None]()
    watch.follow(call)
    receive(tmp_path, fail, call)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="replica 0 failed"):
        send(tmp_path, some_weights(), watch.check)
    assert time.monotonic() - started < 10
    assert not list(tmp_path.iterdir())  # the socket is gone, the next run may bind it


def test_a_receiver_that_never_came_ends_the_sender(tmp_path: Path) -> None:
    from verl_plugins.rollouts.vllm.weight_sync import ReceiverWatch, WeightSyncError

    watch = ReceiverWatch(0)
    watch.follow(failed(RuntimeError("EngineDeadError")))
    with pytest.raises(WeightSyncError, match="EngineDeadError"):
        send(tmp_path, some_weights(), watch.check)
