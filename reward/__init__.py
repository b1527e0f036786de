"""Math verifier for reinforcement learning: explained verdicts, no code execution, bounded time."""

from __future__ import annotations

from reward.batch import verify_many
from reward.extract import extract
from reward.score import check_gold, score, verify, verify_async
from reward.verdict import Verdict
from reward.verl import compute_score, compute_score_async, overlong_penalty

__all__ = [
    "Verdict",
    "check_gold",
    "compute_score",
    "compute_score_async",
    "extract",
    "overlong_penalty",
    "score",
    "verify",
    "verify_async",
    "verify_many",
]
