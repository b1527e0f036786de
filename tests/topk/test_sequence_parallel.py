from __future__ import annotations

import socket

import torch
from sequence_parallel_case import worker


def test_measurement_split_over_ranks_equals_the_whole():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(2, port), nprocs=2)
