"""One row per step in the metric log, also when a run was killed and started again.

verl's `file` logger truncates its file when it opens it, so a resumed run would forget its first half.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def rows_until(path: Path, last_step: int) -> list[bytes]:
    """Return the rows of steps up to `last_step`, the last of each step, in step order; a torn last line is dropped."""
    if not path.is_file():
        return []
    kept: dict[int, bytes] = {}
    for line in path.read_bytes().splitlines():
        try:
            step = int(json.loads(line)["step"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
        if step <= last_step:
            kept[step] = line
    return [kept[step] for step in sorted(kept)]


class MetricLog:
    """The `file` logger's JSONL, carried over a restart.

    Between verl's truncation and our restoring it the rows live in a second file, so that a kill loses nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spare = path.with_name(path.name + ".before_resume")

    def set_aside(self, last_step: int) -> None:
        """Copy the rows of finished steps before the logger opens the file."""
        rows = rows_until(self.path, last_step)
        older = rows_until(self._spare, last_step)
        if len(older) > len(rows):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._spare.with_name(self._spare.name + ".partial")
        partial.write_bytes(b"".join(row + b"\n" for row in rows))
        os.replace(partial, self._spare)

    def restore(self, tracking: Any) -> None:
        """Put them back in front, through the logger's own handle; a step validated again on resume keeps its row."""
        writer = tracking.logger.get("file")
        if writer is None or not self._spare.is_file():
            return
        before = self._spare.read_bytes().splitlines()
        steps = {json.loads(row)["step"] for row in before}
        new = [row for row in self.path.read_bytes().splitlines() if json.loads(row)["step"] not in steps]
        writer.fp.seek(0)
        writer.fp.truncate()
        writer.fp.write(b"".join(row + b"\n" for row in [*before, *new]))
        self._spare.unlink()
