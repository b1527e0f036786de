"""Run verl's trainer on a tiny recipe: a line per step, the reason if it fails, curves and a table at the end.

Usage: python tools/run_demo.py recipes/tiny_pdm.yaml [--seed 0] [--steps 60] [--out FOLDER] [KEY=VALUE ...]

The run has a folder of its own, so it never resumes another one. All output of the engines is in its train.log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

QUIET_S = 20.0  # after so long without news, say that it is alive
MEMORY_EVERY_S = 5.0
STOP_S = 20.0
MASKED, DIVERGENCE = "actor/masked_share", "actor/divergence_mean"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_WORKER = re.compile(r"^\((?P<name>\w+)[^)]*pid=\d+[^)]*\)\s*")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit|Died)\b.*:|verl_plugins: |\s+\d+\. )")
_ADVICE = {
    "this run is refused": "Correct what is named above; `.venv/bin/verl-plugins show RECIPE` checks without starting.",
    "No space left on device": "Free some disk space, or choose another folder with --out.",
    "OutOfMemory": "The demo needs about 6 GiB of free memory: close other programs.",
    "MemoryError": "The demo needs about 6 GiB of free memory: close other programs.",
    "/dev/shm": "Shared memory is short: in a container, start it with --shm-size=1g.",
    "ModuleNotFoundError": "A package is missing: `make setup`, for ROLLOUT=vllm also `make setup-vllm`.",
}


@dataclass
class Memory:
    """Memory of a process tree over time: each shared page counts once (PSS) where the system tells."""

    root: psutil.Process
    peak_bytes: int = 0
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def sample(self) -> None:
        """Add up the tree as it is now and remember its members."""
        total = 0
        for process in self._tree():
            self.seen[process.pid] = process
            try:
                info = process.memory_full_info()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended meanwhile
            total += getattr(info, "pss", info.rss)
        self.peak_bytes = max(self.peak_bytes, total)

    def end_survivors(self) -> list[str]:
        """Kill members of the tree that outlived the run; return their names."""
        left = [process for process in self.seen.values() if process.pid != self.root.pid and process.is_running()]
        names = []
        for process in left:
            try:
                names.append(process.name())
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)
        return names

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass
class Tail:
    """Complete new lines of a file that another process writes."""

    path: Path
    offset: int = 0

    def lines(self) -> Iterator[str]:
        """Yield what was added since the last call."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield line.decode(errors="replace").rstrip("\n")


def accuracy(data: dict[str, float]) -> float | None:
    """Return the sampled accuracy on the held-out problems in a row of metrics, if it was measured at that step."""
    names = [name for name in data if name.startswith("val-core/") and "/mean@" in name]
    names.sort(key=lambda name: "/acc/" not in name)
    return data[names[0]] if names else None


def step_line(row: dict[str, object], total: int) -> str:
    """Describe one row of the metric log."""
    data = row["data"]
    assert isinstance(data, dict)
    parts = [f"step {row['step']:>3}/{total}"]
    if "critic/score/mean" in data:
        parts.append(f"reward {data['critic/score/mean']:.2f}")
    if MASKED in data:
        parts.append(f"masked {100 * data[MASKED]:4.1f} %")
        parts.append(f"D {data[DIVERGENCE]:.4f}")
    if "timing_s/step" in data:
        parts.append(f"{data['timing_s/step']:4.1f} s")
    held_out = accuracy(data)
    if held_out is not None:
        parts.append(f"held-out accuracy {100 * held_out:.1f} %")
    return "  ".join(parts)


def reasons(log: str, at_most: int = 8) -> list[str]:
    """Return the lines of a log that say why a run ended, without repetition and worker prefixes."""
    found: dict[str, None] = {}
    for line in log.splitlines():
        text = _WORKER.sub("", _ANSI.sub("", line)).rstrip()
        if _ERROR.match(text):
            found.pop(text, None)
            found[text] = None
    return list(found)[-at_most:]


def advice(log: str) -> list[str]:
    """Return what to do about the failures we know."""
    known = [text for mark, text in _ADVICE.items() if mark in log]
    return list(dict.fromkeys(known))[:2] or ["`.venv/bin/verl-plugins doctor` says what is missing on this machine."]


def follow(process: subprocess.Popen[bytes], run: Path, steps: int, memory: Memory) -> None:
    """Print news until the process ends: what the plugin says, and a line for each row of the metric log."""
    log, metrics = Tail(run / "train.log"), Tail(run / "metrics.jsonl")
    started = last_news = time.monotonic()
    last_memory = 0.0
    training, running = False, True
    workers: dict[str, None] = {}
    while running:
        running = process.poll() is None
        news = []
        for line in log.lines():
            if line.startswith("verl_plugins"):
                news.append(line)
            elif speaker := _WORKER.match(_ANSI.sub("", line)):
                workers[speaker["name"]] = None
        for line in metrics.lines():
            training = True
            news.append(step_line(json.loads(line), steps))
        now = time.monotonic()
        if news:
            print("\n".join(news), flush=True)
            last_news = now
        elif now - last_news > QUIET_S:
            what = "training" if training else f"verl starts its processes: {', '.join(workers) or 'Ray first'}"
            print(f"... {now - started:.0f} s, {what}", flush=True)
            last_news = now
        if running and now - last_memory > MEMORY_EVERY_S:
            memory.sample()
            last_memory = now
        time.sleep(0.3)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the trainer as Ctrl-C would, so that Ray ends its own processes."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def train(command: list[str], run: Path, steps: int) -> tuple[int, float, int]:
    """Run the command to its end; return exit code, seconds and peak memory in bytes."""
    started = time.monotonic()
    # Ray gives its workers niceness 15: beside other work the demo would take many times as long.
    environment = {"RAY_worker_niceness": "0", **os.environ}
    with (run / "train.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        memory = Memory(psutil.Process(process.pid))
        try:
            follow(process, run, steps, memory)
        finally:
            stop(process)
            survivors = memory.end_survivors()
    if survivors:
        print(f"ended {len(survivors)} processes that the run left behind")
    return process.returncode, time.monotonic() - started, memory.peak_bytes


def report_failure(run: Path, code: int) -> None:
    """Print why the run ended and what to do."""
    log = (run / "train.log").read_text(errors="replace")
    lines = reasons(log) or log.splitlines()[-5:]
    print(f"\nThe run ended with exit code {code}:", file=sys.stderr)
    print("\n".join(f"  {line}" for line in lines), file=sys.stderr)
    print("\n".join(advice(log)), file=sys.stderr)
    print(f"Everything it printed is in {run / 'train.log'}", file=sys.stderr)


def main() -> int:
    """Return the trainer's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder of this run; default outputs/demo/RECIPE-seedN-TIME")
    arguments = parser.parse_intermixed_args()
    name = f"{arguments.recipe.stem}-seed{arguments.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = arguments.out or Path("outputs", "demo", name)
    if run.exists():
        parser.error(f"--out {run} is there already; a run has a folder of its own")
    run.mkdir(parents=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config", str(arguments.recipe)]
    command += [f"trainer.default_local_dir={run}", f"actor_rollout_ref.rollout.seed={arguments.seed}"]
    command += [f"trainer.total_training_steps={arguments.steps}", "trainer.resume_mode=disable", *arguments.overrides]
    shown = " ".join(["python", *command[1:]])
    print(f"{shown}\nlog: {run / 'train.log'}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code, wall_s, peak_bytes = train(command, run, arguments.steps)
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    facts = {"command": shown, "exit_code": code, "wall_s": wall_s, "peak_memory_bytes": peak_bytes}
    (run / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
    if code:
        report_failure(run, code)
        return code
    plot = [
        sys.executable,
        "tools/plot_runs.py",
        str(run),
        "--title",
        f"{arguments.recipe.stem}, seed {arguments.seed}",
    ]
    plot += ["--wall-s", f"{wall_s:.1f}", "--peak-gib", f"{peak_bytes / 2**30:.3f}"]
    print(flush=True)
    if plotted := subprocess.run(plot, check=False).returncode:
        return plotted
    print(
        "\nTo be able to stop and go on, add trainer.save_freq=10 and trainer.resume_mode=auto to the command above "
        "and start\nthe same command again: it continues from the last checkpoint in trainer.default_local_dir."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
