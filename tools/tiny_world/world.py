"""What the tiny world consists of on disk, how each part is built, and when a part may be kept.

    FOLDER/manifest.json                 settings, versions and measured accuracies of every finished part
    FOLDER/sum/{train,test}.parquet      problems of a task
    FOLDER/qwen3_sum/                    a model after its warm start on that task, with the tokenizer

A part is written under another name and moved into place when it is complete, then entered in the manifest: a part that
is there and in the manifest with the settings asked for is whole, and any other is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from .models import MODEL_KINDS, MOE_SIZES, SIZES, ModelKind, build_model
from .parquet import write_problems
from .problems import Problem, Task, split_problems
from .sampling import accuracy
from .tokenizer import build_tokenizer
from .warm_start import WarmStart, warm_start

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How many distinct problems each split has, the longest response, and the warm start of each kind of model."""

    num_warm: int
    num_train: int
    num_test: int
    max_tokens: int
    warm: Mapping[ModelKind, WarmStart]


TASK_SETTINGS: Mapping[Task, TaskSettings] = {
    # 4,095 sums of two two-digit numbers exist when the order of the terms does not count.
    "sum": TaskSettings(
        num_warm=1791,
        num_train=2048,
        num_test=256,
        max_tokens=8,
        warm={
            "qwen3": WarmStart(skill_steps=600, slip_steps=120, correct_share=0.48),
            "qwen3_moe": WarmStart(skill_steps=650, slip_steps=120, correct_share=0.48),
        },
    ),
    "chain": TaskSettings(
        num_warm=3072,
        num_train=2048,
        num_test=256,
        max_tokens=128,
        warm=dict.fromkeys(MODEL_KINDS, WarmStart(skill_steps=740, slip_steps=80, correct_share=0.5, batch_size=32)),
    ),
    "worded": TaskSettings(
        num_warm=8192,
        num_train=4096,
        num_test=256,
        max_tokens=112,
        warm=dict.fromkeys(MODEL_KINDS, WarmStart(skill_steps=720, slip_steps=80, correct_share=0.5, batch_size=32)),
    ),
}


def task_part(task: Task) -> str:
    """Folder of a task's problems."""
    return task


def model_part(kind: ModelKind, task: Task) -> str:
    """Folder of a model warmed up on a task."""
    return f"{kind}_{task}"


def splits(task: Task, settings: TaskSettings, seed: int) -> dict[str, list[Problem]]:
    """The disjoint splits of a task: held-out test problems, those of reinforcement learning, and supervised ones."""
    sizes = {"test": settings.num_test, "train": settings.num_train, "warm": settings.num_warm}
    return split_problems(task, sizes, seed)


def task_identity(task: Task, settings: TaskSettings, seed: int) -> dict[str, Any]:
    """Everything the problems of a task depend on; equal identities mean equal files."""
    sizes = {"num_test": settings.num_test, "num_train": settings.num_train, "num_warm": settings.num_warm}
    return {"task": task, "seed": seed, "source": _source_digest(), **sizes}


def model_identity(kind: ModelKind, task: Task, settings: TaskSettings, seed: int) -> dict[str, Any]:
    """Everything a warmed-up model depends on, versions of its libraries aside."""
    sizes = {**SIZES, **(MOE_SIZES if kind == "qwen3_moe" else {})}
    return {**task_identity(task, settings, seed), "sizes": sizes, "warm_start": asdict(settings.warm[kind])}


def _source_digest() -> str:
    """Digest of this package's source: another generator makes another world."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build_task(folder: Path, task: Task, settings: TaskSettings, seed: int) -> dict[str, Any]:
    """Write the problems of a task; the supervised ones stay out, they are drawn again where they are needed."""
    for split, problems in splits(task, settings, seed).items():
        if split != "warm":
            write_problems(folder / f"{split}.parquet", problems, split)
    return {}


def build_warm_model(
    folder: Path,
    kind: ModelKind,
    task: Task,
    settings: TaskSettings,
    seed: int,
    report: Callable[[int, int, float], None],
) -> dict[str, Any]:
    """Train a model on a task, save it with its tokenizer, and return its accuracies on the held-out problems.

    On one thread, so that the result does not depend on the number of cores.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    problems, tokenizer = splits(task, settings, seed), build_tokenizer()
    model = build_model(kind, seed, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    held_out = frozenset(problem.key for problem in problems["test"])
    warm_start(model, tokenizer, problems["warm"], settings.warm[kind], seed, held_out, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    measured = problems["test"][:128]
    return {
        "sampled_accuracy": accuracy(
            model, tokenizer, measured, max_tokens=settings.max_tokens, temperature=1.0, samples=4, seed=seed
        ),
        "greedy_accuracy": accuracy(model, tokenizer, measured, max_tokens=settings.max_tokens, temperature=0.0),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def read_manifest(root: Path) -> dict[str, Any]:
    """The parts entered so far; empty where there is no manifest.

    Raises:
        ValueError: the file is not a manifest of ours, so that `root` may hold something else.
    """
    path = root / MANIFEST
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest of the tiny world. Choose another --out, or remove it.") from error


def is_complete(root: Path, part: str, identity: Mapping[str, Any]) -> bool:
    """Whether a part is there, whole, and made with these settings."""
    entry = read_manifest(root).get(part)
    if entry is None or entry["identity"] != json.loads(json.dumps(identity)):
        return False
    return _file_sizes(root / part) == entry["files"]


def enter(root: Path, part: str, identity: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Move a finished part into place and enter it in the manifest."""
    parts = read_manifest(root)
    # Out of the manifest before it is replaced: a kill in between leaves a part that is built again.
    if parts.pop(part, None) is not None:
        _write_manifest(root, parts)
    shutil.rmtree(root / part, ignore_errors=True)
    os.replace(partial(root, part), root / part)
    parts[part] = {
        "identity": dict(identity),
        "measured": dict(measured),
        "files": _file_sizes(root / part),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "python": platform.python_version(),
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    _write_manifest(root, parts)


def partial(root: Path, part: str) -> Path:
    """Where a part is while it is being made."""
    return root / f".{part}.partial"


def _write_manifest(root: Path, parts: Mapping[str, Any]) -> None:
    path = root / MANIFEST
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"parts": parts}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(draft, path)


def _file_sizes(folder: Path) -> dict[str, int]:
    return {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
