"""The Megatron engine against an unsharded twin: see megatron_case.py for what runs in each process."""

from __future__ import annotations

import socket

import pytest
import torch
from megatron_case import worker

pytest.importorskip("megatron.core")


@pytest.mark.parametrize(
    ("tp", "cp", "fp8", "tail", "temperature"),
    [
        (1, 1, False, "aggregated", 0.7),
        (2, 1, False, "aggregated", 1.0),
        (2, 1, True, "exact", 0.7),
        (1, 2, False, "uniform", 1.0),
        (1, 2, True, "exact", 1.0),
    ],
)
def test_sharded_measurement_equals_the_unsharded_one(tp, cp, fp8, tail, temperature):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, tp, cp, fp8, tail, temperature), nprocs=tp * cp)
