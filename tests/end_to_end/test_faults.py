"""Whatever dies or fails, the run ends with the reason, a non-zero exit code and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from trainer_run import REPOSITORY, start

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

LONG = (
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=1000",
)


def assert_ended_with_the_reason(run, code, *words):
    assert code != 0
    for word in words:
        assert word in run.log, f"{word!r} is not in:\n{run.log[-3000:]}"
    assert not run.orphans()


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("HFCPUServer", "class_name: HFCPUServer"),
        ("TopKAgentLoopWorker", "agent loop worker"),
        ("WorkerDict", "WorkerDict"),
    ],
)
def test_dead_worker_ends_the_run(world, tmp_path, title, named):
    run = start("tiny_pdm", world, tmp_path, *LONG)
    run.wait_until(lambda run: 1 in run.rows, 300)
    run.find(title).send_signal(signal.SIGKILL)
    assert_ended_with_the_reason(run, run.wait(120), named)


@pytest.mark.parametrize(
    ("fault", "words"), [("weight_sync", "injected: the second weight"), ("reward", "injected: the reward")]
)
def test_failure_inside_a_worker_ends_the_run(world, tmp_path, fault, words):
    run = start(
        "tiny_pdm",
        world,
        tmp_path,
        *LONG,
        VERL_PLUGINS_FAULT=fault,
        PYTHONPATH=str(REPOSITORY / "tests" / "injected"),
    )
    assert_ended_with_the_reason(run, run.wait(400), words)


def test_full_disk_at_a_checkpoint_ends_the_run_and_keeps_the_last_one(world, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        run = start("tiny_pdm", world, disk / "run", *LONG, "trainer.save_freq=1")
        # A full disk also stops the log, so the exit code and the checkpoint marker are what can be asked.
        assert run.wait(400) != 0
        marker = disk / "run" / "latest_checkpointed_iteration.txt"
        assert not marker.exists() or (disk / "run" / f"global_step_{marker.read_text()}").is_dir()
        assert not run.orphans()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_interrupt_from_the_keyboard_leaves_nothing_behind(world, tmp_path):
    run = start("tiny_pdm", world, tmp_path, *LONG)
    run.wait_until(lambda run: 1 in run.rows, 300)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(60) != 0
    assert not run.orphans()
