"""Seeded laws and what each process of a sharded vocabulary checks. A module of its own: a spawned process must be able
to import it by name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from verl_plugins.topk.gather import listed_logits, vocabulary_pass


def inputs(seed: int, rows: int = 11, vocab: int = 64, k: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded logits in float32, K distinct ids and a temperature per row."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4.0 * torch.randn(rows, vocab, generator=generator)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    return logits, ids, 0.5 + torch.rand(rows, generator=generator)


def expected(logits: Tensor, ids: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log q, log tail, log Z and the tail's sum of squares, in float64 from the whole law."""
    scaled = logits.double() / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    logq = scaled.log_softmax(-1)
    rest = logq.scatter(-1, ids.long(), -math.inf)
    tail, square = torch.logsumexp(rest, -1), torch.logsumexp(2 * rest, -1).exp()
    return logq.gather(-1, ids.long()), tail, torch.logsumexp(scaled, -1), square


def assert_matches(law, reference, atol: float = 3e-6) -> None:
    logq, tail, log_normaliser, square = (x.float() for x in reference)
    torch.testing.assert_close(law.logq_NK, logq, atol=atol, rtol=1e-6)
    torch.testing.assert_close(law.log_tail_N, tail, atol=atol, rtol=1e-6)
    torch.testing.assert_close(law.log_normaliser_N, log_normaliser, atol=atol, rtol=1e-6)
    if law.tail_square_N is not None:
        torch.testing.assert_close(law.tail_square_N, square, atol=0, rtol=3e-5)


def check_one_rank(rank: int, world_size: int, store: str) -> None:
    """On each of several processes that share the vocabulary: the same numbers as from the whole of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        whole, ids, temperature = inputs(seed, rows=11, vocab=64, k=5)
        whole = whole.to(dtype)
        whole[3, : 64 // world_size] = -math.inf  # one rank has nothing at all for this token
        mine = whole.chunk(world_size, dim=-1)[rank].contiguous()
        rows = torch.tensor([3, 0, 10, 3])
        for chosen in (None, rows):
            part = slice(None) if chosen is None else chosen
            k_ids, heat = ids[part], temperature[part]
            reference = expected(whole[part], k_ids, heat)
            for shift in (None, reference[2].float() + 0.5):
                law = vocabulary_pass(mine, k_ids, heat, group, chosen, chunk=3, shift_N=shift)
                alone = vocabulary_pass(whole, k_ids, heat, None, chosen, chunk=3, shift_N=shift)
                assert_matches(law, reference)
                torch.testing.assert_close(law.logq_NK, alone.logq_NK, atol=2e-6, rtol=1e-6)
            read = listed_logits(mine, k_ids, heat, group, chosen)
            assert torch.equal(read, listed_logits(whole, k_ids, heat, None, chosen))
            copies = [torch.empty_like(law.logq_NK) for _ in range(world_size)]
            dist.all_gather(copies, law.logq_NK.contiguous(), group=group)
            assert all(torch.equal(copy, law.logq_NK) for copy in copies)
    with pytest.raises(ValueError, match=r"\[0, 64\)"):
        listed_logits(mine, ids + 60, temperature, group)
    dist.destroy_process_group()
