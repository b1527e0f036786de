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

from .models import MOE_SIZES, SIZES, ModelKind, build_model
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
            "qwen3": WarmStart(skill_steps=600, slip_steps=120, correct_share=0.56),
            "qwen3_moe": WarmStart(skill_steps=650, slip_steps=120, correct_share=0.56),
        },
    ),
    "chain": TaskSettings(
        num_warm=16384,
        num_train=8192,
        num_test=256,
        max_tokens=128,
        warm={
            "qwen3": WarmStart(skill_steps=500, slip_steps=100, correct_share=0.45),
            "qwen3_moe": WarmStart(skill_steps=500, slip_steps=100, correct_share=0.45),
        },
    ),
    "worded": TaskSettings(
        num_warm=16384,
        num_train=8192,
        num_test=256,
        max_tokens=96,
        warm={
            "qwen3": WarmStart(skill_steps=500, slip_steps=100, correct_share=0.45),
            "qwen3_moe": WarmStart(skill_steps=500, slip_steps=100, correct_share=0.45),
        },
    ),
}
