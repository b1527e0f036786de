"""Math verifier for reinforcement learning: explained verdicts, no code execution, bounded time."""

from __future__ import annotations

from reward.score import compute_score, score, verify
from reward.extract import extract
from reward.verdict import Verdict

__all__ = ["Verdict", "compute_score", "extract", "score", "verify"]
