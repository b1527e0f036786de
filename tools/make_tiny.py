"""Build the tiny world: problems, tokenizer and warmed-up models, from nothing, in about a minute.

    python tools/make_tiny.py                       # task sum, both models, in outputs/tiny_world
    python tools/make_tiny.py --task all --out DIR  # also the tasks chain and worded, in about two minutes

What is there already with the same settings is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bind
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tiny_world.models import MODEL_KINDS, ModelKind
from tiny_world.problems import TASKS, Task
from tiny_world.world import (
    TASK_SETTINGS,
    TaskSettings,
    build_task,
    build_warm_model,
    enter,
    is_complete,
    model_identity,
    model_part,
    partial,
    read_manifest,
    task_identity,
    task_part,
)

SAMPLED_RANGE = (0.30, 0.50)
"""Where sampled accuracy should start: low enough to rise, high enough that groups are mixed."""


DEFAULT_KINDS: Mapping[Task, tuple[ModelKind, ...]] = {"sum": MODEL_KINDS, "chain": ("qwen3",), "worded": ("qwen3",)}


@dataclass(frozen=True)
class Part:
    """A folder of the world: its name, what it depends on, and how to fill it."""

    name: str
    identity: dict[str, Any]
    build: Callable[[Path], dict[str, Any]]


def progress(part: str, started: float, step: int, total: int, loss: float) -> None:
    """Print one line of a warm start."""
    if step % 100 == 0 or step == total:
        print(f"{part:<16} step {step:>4}/{total}  loss {loss:.3f}  {time.monotonic() - started:4.0f} s", flush=True)


def build_model_part(folder: Path, kind: ModelKind, task: Task, settings: TaskSettings, seed: int) -> dict[str, Any]:
    """Fill the folder of a model, with progress."""
    report = bind(progress, model_part(kind, task), time.monotonic())
    return build_warm_model(folder, kind, task, settings, seed, report)


def parts_of(
    tasks: Sequence[Task],
    kinds: Sequence[ModelKind] | None,
    seed: int,
    settings: Mapping[Task, TaskSettings] = TASK_SETTINGS,
) -> list[Part]:
    """The parts asked for, what takes longest first; `kinds` None is `DEFAULT_KINDS` of each task."""
    models = [
        Part(
            model_part(kind, task),
            model_identity(kind, task, settings[task], seed),
            bind(build_model_part, kind=kind, task=task, settings=settings[task], seed=seed),
        )
        for task in sorted(tasks, key=TASKS.index, reverse=True)
        for kind in kinds or DEFAULT_KINDS[task]
    ]
    problems = [
        Part(
            task_part(task),
            task_identity(task, settings[task], seed),
            bind(build_task, task=task, settings=settings[task], seed=seed),
        )
        for task in tasks
    ]
    return [*models, *problems]


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder: a second builder waits, then finds everything made."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process builds in {root}: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(root: Path, parts: Sequence[Part], jobs: int) -> None:
    """Build what is missing, several parts at a time, each in a process with one thread; with one job, in this one."""
    missing = [part for part in parts if not is_complete(root, part.name, part.identity)]
    for part in parts:
        if part not in missing:
            print(f"{part.name:<16} kept", flush=True)
    for part in missing:
        shutil.rmtree(partial(root, part.name), ignore_errors=True)
        partial(root, part.name).mkdir()
    for part, measured in _built(root, missing, jobs):
        enter(root, part.name, part.identity, measured)
        print(f"{part.name:<16} done", flush=True)


def _built(root: Path, parts: Sequence[Part], jobs: int) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Fill the folder of each part, and yield it with what was measured as soon as it is full."""
    if min(jobs, len(parts)) <= 1:
        for part in parts:
            yield part, part.build(partial(root, part.name))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(parts)), mp_context=context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(part.build, partial(root, part.name)): part for part in parts}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _end_with_parent() -> None:
    """Let a worker end when its parent is killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def report(root: Path, parts: Sequence[Part]) -> str:
    """The accuracies of the models asked for, and a warning where one is out of range."""
    entries = read_manifest(root)
    lines = [f"{'model':<16} {'sampled':>8} {'greedy':>8}   accuracy on held-out problems"]
    for part in parts:
        measured = entries[part.name]["measured"]
        if "sampled_accuracy" not in measured:
            continue
        sampled, greedy = measured["sampled_accuracy"], measured["greedy_accuracy"]
        low, high = SAMPLED_RANGE
        remark = "" if low <= sampled <= high else f"   outside {low:.2f} to {high:.2f}: try another --seed"
        lines.append(f"{part.name:<16} {sampled:>8.3f} {greedy:>8.3f}{remark}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the world; 0 when everything asked for is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/tiny_world"), help="folder of the world")
    parser.add_argument("--seed", type=int, default=0, help="problems, weights and training; the same seed, same world")
    parser.add_argument("--task", nargs="+", choices=[*TASKS, "all"], default=["sum"], help="tasks to build")
    parser.add_argument(
        "--model", nargs="+", choices=MODEL_KINDS, help="kinds of model (default: both for sum, qwen3 for the others)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parts to build at a time")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    tasks = list(TASK_SETTINGS) if "all" in options.task else list(dict.fromkeys(options.task))
    parts = parts_of(tasks, options.model, options.seed)
    started = time.monotonic()
    try:
        with locked(options.out):
            build(options.out, parts, options.jobs)
            print(report(options.out, parts))
    except (OSError, ValueError) as error:
        print(f"make_tiny: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print("make_tiny: a worker was killed, most likely for memory: try --jobs 1", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_tiny: stopped; parts that were done are kept", file=sys.stderr)
        return 130
    print(f"{options.out} is ready after {time.monotonic() - started:.0f} s; try: make demo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
