"""verl's own trainer as a user starts it, in its own processes, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parent.parent
_MARK = "VERL_PLUGINS_TEST_RUN"


@dataclass
class TrainerRun:
    """One `python -m verl.trainer.main_ppo --config RECIPE [overrides]`."""

    folder: Path
    process: subprocess.Popen[bytes]
    mark: str
    started: float = field(default_factory=time.monotonic)

    @property
    def log(self) -> str:
        """Everything it printed so far."""
        return (self.folder / "train.log").read_text(errors="replace")

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        """Metrics by step, from verl's file logger; fails if a step has two rows."""
        path = self.folder / "metrics.jsonl"
        rows: dict[int, dict[str, float]] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # being written
            assert row["step"] not in rows, f"step {row['step']} has two rows"
            rows[row["step"]] = row["data"]
        return rows

    def processes(self) -> list[psutil.Process]:
        """Every process of this run that is alive, found by an environment variable all of them inherit."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def find(self, title: str) -> psutil.Process:
        """The process whose title contains `title` (Ray names its actors so)."""
        for process in self.processes():
            if title in " ".join(process.cmdline()):
                return process
        raise LookupError(f"no process titled {title!r} in {[' '.join(p.cmdline())[:60] for p in self.processes()]}")

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code; a run that hangs is killed and fails the test."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            tail = self.log[-3000:]
            self.kill()
            raise AssertionError(f"the run did not end within {timeout_s:.0f} s:\n{tail}") from None

    def wait_until(self, condition: Callable[[TrainerRun], bool], timeout_s: float) -> None:
        """Poll until `condition`, or fail."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early with {self.process.returncode}:\n{self.log[-3000:]}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"waited {timeout_s:.0f} s in vain:\n{self.log[-3000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """kill -9 of everything the run consists of."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)

    def orphans(self, grace_s: float = 20.0) -> list[str]:
        """Command lines of processes left behind after the driver's end and a grace period."""
        deadline = time.monotonic() + grace_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [" ".join(process.cmdline())[:120] for process in left]


def start(recipe: str, world: Path, folder: Path, *overrides: str, **environment: str) -> TrainerRun:
    """Start a recipe on the tiny world `world`, with its output in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "--config",
        str(REPOSITORY / "recipes" / f"{recipe}.yaml"),
        f"world={world}",
        f"trainer.default_local_dir={folder}",
        *overrides,
    ]
    with open(folder / "train.log", "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # Ray gives its workers niceness 15: on a busy machine they would not even start in time.
            env={"RAY_worker_niceness": "0", **os.environ, _MARK: mark, **environment},
            start_new_session=True,
            # A test suite in the background ignores the interrupt, and what it starts would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    return TrainerRun(folder=folder, process=process, mark=mark)


def train(
    recipe: str, world: Path, folder: Path, *overrides: str, timeout_s: float = 420.0, **environment: str
) -> TrainerRun:
    """Run a recipe to its end, which must be a good one."""
    run = start(recipe, world, folder, *overrides, **environment)
    code = run.wait(timeout_s)
    assert code == 0, f"exit code {code}:\n{run.log[-4000:]}"
    assert not run.orphans()
    return run
