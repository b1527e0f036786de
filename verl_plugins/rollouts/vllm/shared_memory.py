"""The shared memory that vLLM's engine processes map, and freeing what they leave behind.

An engine unlinks its message queues when Python collects them, which a process that is stopped does not wait for. Each
engine would leave one file of 160 MiB (sparse) in /dev/shm.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

_SEGMENTS = "/dev/shm/psm_"


def mapped_segments(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared memory segments of Python that these processes map."""
    found: set[Path] = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended, and its mappings with it
            continue
        paths = (line.split(maxsplit=5)[-1].strip() for line in maps.splitlines() if _SEGMENTS in line)
        found.update(Path(path) for path in paths if path.startswith(_SEGMENTS) and not path.endswith("(deleted)"))
    return found


def free(segments: Iterable[Path]) -> None:
    """Unlink the segments that are still there; processes that map them keep them until they end."""
    for segment in segments:
        segment.unlink(missing_ok=True)
