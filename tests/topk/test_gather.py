# Axes in this file: M rows of logits, N tokens, K listed vocabulary entries, V vocabulary.
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gather_case import assert_matches, check_one_rank, expected, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_plugins.masks.direction import tail_square
from verl_plugins.masks.divergence import binary_kl, binary_tv, topk_forward_kl, topk_tv
from verl_plugins.topk.gather import (
    CHUNK_BYTES_CPU,
    chunk_tokens,
    distribution_from_log_prob,
    listed_logits,
    sampled_index,
    vocabulary_pass,
)

SEEDS = st.integers(0, 2**31)


def test_hand_computed():
    law = vocabulary_pass(torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log() + 3.0, torch.tensor([[1, 0]]))
    torch.testing.assert_close(law.logq_NK.exp(), torch.tensor([[0.25, 0.5]]))
    torch.testing.assert_close(law.log_tail_N.exp(), torch.tensor([0.25]))
    torch.testing.assert_close(law.log_normaliser_N, torch.tensor([3.0]))
    torch.testing.assert_close(law.tail_square_N, torch.tensor([2 * 0.125**2]))


@given(seed=SEEDS, rows=st.integers(1, 9), vocab=st.integers(2, 70), chunk=st.integers(1, 10), data=st.data())
@settings(deadline=None)
def test_a_pass_equals_the_float64_law(seed, rows, vocab, chunk, data):
    k = data.draw(st.integers(1, vocab - 1))
    logits, ids, temperature = inputs(seed, rows, vocab, k)
    assert_matches(vocabulary_pass(logits, ids, temperature, chunk=chunk), expected(logits, ids, temperature))


@given(seed=SEEDS, num_tokens=st.integers(1, 20), chunk=st.integers(1, 10), shifted=st.booleans())
@settings(deadline=None)
def test_rows_choose_tokens_and_a_shift_changes_nothing(seed, num_tokens, chunk, shifted):
    logits, _, _ = inputs(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rows = torch.randint(len(logits), (num_tokens,), generator=generator)
    _, ids, temperature = inputs(seed + 2, num_tokens)
    reference = expected(logits[rows], ids, temperature)
    shift = reference[2].float() + 3.0 * torch.randn(num_tokens, generator=generator) if shifted else None
    law = vocabulary_pass(logits, ids, temperature, rows_N=rows, chunk=chunk, shift_N=shift)
    assert_matches(law, reference)
    torch.testing.assert_close(
        listed_logits(logits, ids, temperature, rows_N=rows), logits[rows].gather(-1, ids) / temperature[:, None]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("selected", [False, True])
def test_other_float_types_are_read_in_float32(dtype, selected):
    logits, ids, temperature = inputs(7)
    logits = logits.to(dtype)
    rows = torch.arange(len(logits)) if selected else None
    law = vocabulary_pass(logits, ids.int(), temperature, rows_N=rows, chunk=4)
    assert all(x.dtype == torch.float32 for x in (law.logq_NK, law.log_tail_N, law.log_normaliser_N, law.tail_square_N))
    assert_matches(law, expected(logits, ids, temperature))
    assert listed_logits(logits, ids.int(), 0.7, rows_N=rows).dtype == torch.float32


def test_a_tail_far_below_float32_resolution_is_still_exact():
    logits = torch.full((1, 100), -70.0)
    logits[0, :3] = 0.0
    law = vocabulary_pass(logits, torch.tensor([[0, 1, 2]]))
    torch.testing.assert_close(law.log_tail_N, torch.tensor([math.log(97) - 70.0 - math.log(3)]), atol=1e-5, rtol=0)


def test_excluded_entries_and_an_empty_tail_give_no_nan():
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf], [0.0, -math.inf, 2.0, -math.inf]])
    ids = torch.tensor([[0, 1], [0, 1]])
    law = vocabulary_pass(logits, ids)
    assert law.log_tail_N[0] == -math.inf
    assert law.tail_square_N[0] == 0
    assert law.logq_NK[1, 1] == -math.inf
    for value in (law.logq_NK, law.log_tail_N, law.log_normaliser_N, law.tail_square_N):
        assert not value.isnan().any()


def test_without_squares_there_are_none_and_nothing_else_changes():
    logits, ids, temperature = inputs(6)
    full, lean = (vocabulary_pass(logits, ids, temperature, squares=wanted) for wanted in (True, False))
    assert lean.tail_square_N is None
    assert torch.equal(lean.logq_NK, full.logq_NK)
    assert torch.equal(lean.log_tail_N, full.log_tail_N)


def test_uninitialised_memory_is_never_read(monkeypatch):
    logits, ids, temperature = inputs(3)
    plain_empty, plain_new_empty = torch.empty, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: plain_empty(*size, **options).fill_(math.nan))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *size: plain_new_empty(self, *size).fill_(math.nan))
    assert_matches(vocabulary_pass(logits, ids, temperature, chunk=4), expected(logits, ids, temperature))


@given(seed=SEEDS, vocab=st.integers(3, 70), data=st.data())
@settings(deadline=None)
def test_the_trainers_log_probability_gives_the_same_law_without_a_pass(seed, vocab, data):
    logits, ids, temperature = inputs(seed, vocab=vocab, k=data.draw(st.integers(1, vocab - 1)))
    place = data.draw(st.integers(0, ids.shape[-1] - 1))
    sampled = ids[:, place]
    index = sampled_index(ids, sampled)
    logp = (logits / temperature[:, None]).log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
    law = distribution_from_log_prob(listed_logits(logits, ids, temperature), logp, index)
    logq, tail, log_normaliser, _ = expected(logits, ids, temperature)
    torch.testing.assert_close(law.logq_NK, logq.float(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(law.log_normaliser_N, log_normaliser.float(), atol=1e-5, rtol=1e-6)
    # As fine as log Z: in probability, not in its logarithm.
    torch.testing.assert_close(law.log_tail_N.exp(), tail.exp().float(), atol=1e-5, rtol=0)
    assert law.tail_square_N is None


@given(seed=SEEDS)
@settings(deadline=None)
def test_one_listed_entry_returns_the_trainers_own_number_and_the_binary_divergence_bit_for_bit(seed):
    logits, ids, _ = inputs(seed, k=1)
    logq = logits.log_softmax(-1).gather(-1, ids)[:, 0]
    logp = (logq - 0.3).clamp(max=-1e-3)
    zero = torch.zeros(len(ids), dtype=torch.long)
    law = distribution_from_log_prob(listed_logits(logits, ids), logq, zero)
    assert torch.equal(law.logq_NK[:, 0], logq)
    anchor_tail = (-torch.expm1(logp.double())).log().float()
    assert torch.equal(topk_forward_kl(logp[:, None], law.logq_NK, anchor_tail, law.log_tail_N), binary_kl(logp, logq))
    assert torch.equal(topk_tv(logp[:, None], law.logq_NK, anchor_tail, law.log_tail_N), binary_tv(logp, logq))


@given(seed=SEEDS)
@settings(deadline=None)
def test_the_true_sum_of_squares_lies_between_the_two_estimates(seed):
    logits, ids, temperature = inputs(seed)
    law = vocabulary_pass(logits, ids, temperature)
    low, high = (tail_square(tail, law.log_tail_N, 59) for tail in ("uniform", "aggregated"))
    assert (low * (1 - 1e-5) <= law.tail_square_N).all()
    assert (law.tail_square_N <= high * (1 + 1e-5)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_z_is_recovered_from_float32_log_probabilities_of_half_precision_logits(temperature):
    logits, ids, _ = inputs(4)
    logits = (5.0 * logits).bfloat16()
    heat = torch.full((11,), temperature)
    scaled = logits / heat[:, None].to(logits.dtype)  # verl's own rounding
    logp = scaled.float().log_softmax(-1).gather(-1, ids[:, :1])[:, 0]
    law = distribution_from_log_prob(listed_logits(logits, ids, heat), logp, torch.zeros(11, dtype=torch.long))
    torch.testing.assert_close(law.log_normaliser_N, torch.logsumexp(scaled.float(), -1), atol=2e-5, rtol=0)
    torch.testing.assert_close(law.logq_NK, scaled.float().log_softmax(-1).gather(-1, ids), atol=2e-5, rtol=0)


def test_bfloat16_log_probabilities_are_refused_where_they_would_decide_log_z():
    logits, ids, _ = inputs(0)
    with pytest.raises(ValueError, match=r"float32.*bfloat16.*vocabulary_pass"):
        distribution_from_log_prob(logits.gather(-1, ids), torch.zeros(11, dtype=torch.bfloat16), ids[:, 0] * 0)


def test_logits_are_left_alone_and_no_gradient_is_recorded():
    logits, ids, temperature = inputs(1)
    before = logits.clone()
    logits.requires_grad_(True)
    for rows in (None, torch.arange(11)):
        law = vocabulary_pass(logits, ids, temperature, rows_N=rows, chunk=20)
        assert not any(x.requires_grad for x in (law.logq_NK, law.log_tail_N, law.tail_square_N))
        assert not listed_logits(logits, ids, temperature, rows_N=rows).requires_grad
    assert torch.equal(logits.detach(), before)
    assert logits._version == 0


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operation inside it brings into being."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.seen = {x.untyped_storage().data_ptr() for x in known}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in self.seen:
                self.seen.add(value.untyped_storage().data_ptr())
                self.kept.append(value)  # alive, so that no later storage can reuse its address
        return result

    def sizes(self) -> list[int]:
        return sorted(x.untyped_storage().nbytes() for x in self.kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [False, True])
def test_memory_is_bounded_by_the_chunk(dtype, selected):
    chunk, rows, vocab = 2, 64, 8192
    logits, ids, temperature = inputs(2, rows, vocab, 4)
    logits = logits.to(dtype)
    chosen = torch.arange(rows) if selected else None
    with Allocations(logits, ids, temperature) as allocations:
        vocabulary_pass(logits, ids, temperature, rows_N=chosen, chunk=chunk)
    sizes = allocations.sizes()
    assert sizes[-1] == chunk * vocab * 4
    # One float32 buffer; rows picked from half-precision logits pass through a copy of half that size, chunk by chunk.
    copies = rows // chunk if selected and dtype == torch.bfloat16 else 0
    large = [size for size in sizes if size > 16 * rows * 4 * 4]
    assert large == [chunk * vocab * 2] * copies + [chunk * vocab * 4]
    with Allocations(logits, ids, temperature) as allocations:
        listed_logits(logits, ids, temperature, rows_N=chosen)
    assert allocations.sizes()[-1] <= 8 * rows * 4


def test_the_default_chunk_fills_its_buffer():
    assert chunk_tokens(torch.empty(1, 151_936, device="cpu")) == CHUNK_BYTES_CPU // (4 * 151_936)
    assert chunk_tokens(torch.empty(1, CHUNK_BYTES_CPU)) == 1


def test_sampled_index_finds_the_token_and_names_the_one_that_is_not_listed():
    ids = torch.tensor([[5, 7, 9], [1, 2, 3]])
    assert sampled_index(ids, torch.tensor([9, 1])).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"token 1 sampled 4 and lists \[1, 2, 3\]"):
        sampled_index(ids, torch.tensor([9, 4]))


def test_wrong_arguments_are_named():
    logits, ids, _ = inputs(0)
    for read in (listed_logits, vocabulary_pass):
        for bad in (64, -1):
            with pytest.raises(ValueError, match=rf"\[0, 64\).*{bad}"):
                read(logits, torch.where(ids == ids[0, 0], bad, ids))
        with pytest.raises(ValueError, match="11 expected, got 3"):
            read(logits, ids[:3])
        with pytest.raises(ValueError, match="4 expected, got 11"):
            read(logits, ids, rows_N=torch.arange(4))
        with pytest.raises(ValueError, match=r"two axes.*\(1, 11, 64\)"):
            read(logits[None], ids)
        with pytest.raises(ValueError, match=r"temperature.*rollout\.temperature"):
            read(logits, ids, 0.0)
        with pytest.raises(ValueError, match=r"temperature.*\(3,\)"):
            read(logits, ids, torch.ones(3))
    with pytest.raises(ValueError, match="chunk"):
        vocabulary_pass(logits, ids, chunk=0)
    with pytest.raises(ValueError, match="shift"):
        vocabulary_pass(logits, ids, shift_N=torch.zeros(3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_vocabulary_gives_the_unsharded_result(world_size: int, tmp_path: Path):
    torch.multiprocessing.spawn(check_one_rank, args=(world_size, str(tmp_path / "store")), nprocs=world_size)
