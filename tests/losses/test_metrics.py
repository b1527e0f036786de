from __future__ import annotations

import pytest
import torch

from verl_plugins.losses.metrics import mini_batch_metrics


def seen(divergence, masked, advantage, ratio=None):
    n = len(divergence)
    return {
        "divergence": torch.tensor(divergence),
        "masked": torch.tensor(masked),
        "advantage": torch.tensor(advantage),
        "ratio": torch.tensor(ratio or [1.0] * n),
        "truncated": torch.zeros(n, dtype=torch.bool),
    }


def test_shares_are_over_tokens_not_over_micro_batches():
    first = seen([0.1, 0.3, 0.2], [True, True, False], [1.0, -1.0, 1.0], [1.0, 2.0, 3.0])
    second = seen([0.8], [False], [1.0])
    metrics = mini_batch_metrics([first, second], first=True)
    assert metrics["actor/masked_share"] == pytest.approx(0.5)
    assert metrics["actor/masked_share_positive"] == pytest.approx(0.25)
    assert metrics["actor/masked_share_negative"] == pytest.approx(0.25)
    assert metrics["actor/divergence_mean"] == pytest.approx(0.35)
    assert metrics["actor/divergence_first"] == metrics["actor/divergence_mean"]
    assert metrics["actor/divergence_max"] == pytest.approx(0.8)
    assert metrics["actor/importance_ratio_mean"] == pytest.approx(1.75)
    assert metrics["actor/divergence_p50"] == pytest.approx(0.25)


def test_later_mini_batches_do_not_report_the_mismatch():
    assert "actor/divergence_first" not in mini_batch_metrics([seen([0.1], [False], [1.0])], first=False)


def test_infinite_divergence_stays_finite_and_empty_is_zero():
    metrics = mini_batch_metrics([seen([float("inf")], [True], [1.0])], first=False)
    assert metrics["actor/divergence_max"] == torch.finfo(torch.float32).max
    empty = {name: value[:0] for name, value in seen([0.1], [False], [1.0]).items()}
    assert mini_batch_metrics([empty], first=False)["actor/masked_share"] == 0.0
    assert mini_batch_metrics([], first=True) == {}
