"""Problems on disk, in the columns verl's dataset reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .problems import Problem


@dataclass(frozen=True)
class Question:
    """What is asked and what is right: all that reinforcement learning sees of a problem."""

    question: str
    answer: int


def to_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema; `data_source` names the metric, `tiny/sum` becomes `val-core/tiny/sum/...`."""
    return {
        "data_source": f"tiny/{problem.task}",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "num_steps": len(problem.deltas)},
    }


def write_problems(path: Path, problems: Sequence[Problem], split: str) -> None:
    """Write one split."""
    rows = [to_row(problem, split, index) for index, problem in enumerate(problems)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def read_questions(path: Path) -> list[Question]:
    """Read a split back.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file lacks a column of the schema.
    """
    table = pq.read_table(path)
    missing = {"prompt", "reward_model"} - set(table.column_names)
    if missing:
        raise ValueError(
            f"{path} lacks the columns {', '.join(sorted(missing))}; it has {', '.join(table.column_names)}"
        )
    return [
        Question(row["prompt"][-1]["content"], int(row["reward_model"]["ground_truth"]))
        for row in table.select(["prompt", "reward_model"]).to_pylist()
    ]
