"""Weights as verl sends them, into the model, and every way a set can be wrong."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_plugins.rollouts.hf_cpu.weights import WeightSync, receive_all

Make = Callable[..., PreTrainedModel]

IDS = torch.arange(3, 23)[None]


def sent(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """What verl's FSDP engine yields for this model."""
    return list(unfuse_moe_params(iter(model.state_dict().items()), model.config.model_type))


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_the_receiver_computes_what_the_sender_does(make: Make):
    trained, rollout = make(seed=1), make(seed=2)
    assert not torch.allclose(logits(trained), logits(rollout), atol=1e-2)
    count = receive_all(rollout, sent(trained))
    assert count == len(sent(trained))
    assert torch.equal(logits(trained), logits(rollout))
    for parameter in trained.parameters():
        parameter.data.zero_()  # the rollout must own its weights
    assert logits(rollout).abs().sum() > 0


def test_verl_sends_experts_one_by_one_and_packed_ones_fit_too(make_moe: Make):
    trained, by_expert, packed = make_moe(seed=1), make_moe(seed=2), make_moe(seed=3)
    assert any(".experts.3.up_proj.weight" in name for name, _ in sent(trained))
    receive_all(by_expert, sent(trained))
    receive_all(packed, trained.state_dict().items())
    assert torch.equal(logits(by_expert), logits(packed))


def test_weights_arrive_in_the_models_own_type(make_dense: Make):
    trained, rollout = make_dense(seed=1), make_dense(seed=2).bfloat16()
    receive_all(rollout, sent(trained))
    assert {p.dtype for p in rollout.parameters()} == {torch.bfloat16}
    assert torch.equal(rollout.lm_head.weight, trained.lm_head.weight.bfloat16())


@pytest.mark.parametrize("names", [{"lm_head.weight"}, {"model.embed_tokens.weight"}, set()])
def test_tied_weights_may_come_under_either_name_or_both(names: set[str], make_dense: Make):
    trained, rollout = make_dense(seed=1, tied=True), make_dense(seed=2, tied=True)
    receive_all(rollout, [(name, tensor) for name, tensor in sent(trained) if name not in names])
    assert torch.equal(logits(trained), logits(rollout))
    assert rollout.lm_head.weight.data_ptr() == rollout.model.embed_tokens.weight.data_ptr()


def test_tied_weights_that_differ_are_refused(make_dense: Make):
    trained, rollout = make_dense(seed=1), make_dense(seed=2, tied=True)
    with pytest.raises(ValueError, match="differs from the weight it is tied to"):
        receive_all(rollout, sent(trained))


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.experts.2.down_proj.weight"])
def test_a_missing_tensor_is_named(lost: str, make_moe: Make):
    weights = [(name, tensor) for name, tensor in sent(make_moe(seed=1)) if name != lost]
    expected = lost.replace(".2.down_proj.weight", ".down_proj")
    with pytest.raises(ValueError, match=re.escape(f"did not arrive completely: {expected}")):
        receive_all(make_moe(seed=2), weights)


def test_nothing_sent_is_all_missing(make_dense: Make):
    with pytest.raises(ValueError, match=r"25 of 25 tensors.*, \.\.\.$"):
        WeightSync(make_dense()).finish()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.7.mlp.up_proj.weight", (96, 64), "has no tensor 'model.layers.7.mlp.up_proj.weight'"),
        ("model.norm.weight", (32,), "'model.norm.weight' has shape (32,), the rollout model's has (64,)"),
        (
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            (64, 64),
            "has shape (64, 64), the rollout model's has (32, 64)",
        ),
        ("model.layers.0.mlp.experts.9.gate_proj.weight", (32, 64), "has no tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...], message: str, make_moe: Make):
    with pytest.raises(ValueError, match=re.escape(message)):
        WeightSync(make_moe()).receive(name, torch.zeros(shape))


def test_the_same_name_twice_is_refused(make_dense: Make):
    sync = WeightSync(make_dense())
    sync.receive("model.norm.weight", torch.ones(64))
    with pytest.raises(ValueError, match="arrived twice"):
        sync.receive("model.norm.weight", torch.ones(64))
