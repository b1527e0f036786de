from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from verl_plugins.config import PolicyLoss, stray_policy_loss_keys, unknown_policy_loss_keys


def test_defaults_leave_every_choice_to_the_name() -> None:
    region = PolicyLoss(loss_mode="pdm_topk_tv").trust_region()
    assert region is not None
    assert (region.divergence, region.direction, region.delta, region.truncation) == ("topk_tv", "predicted", 0.15, 10)


def test_verls_own_loss_needs_none_of_our_keys() -> None:
    assert PolicyLoss().trust_region() is None
    assert PolicyLoss(loss_mode="gspo").loss_mode == "gspo"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loss_mode": "pdm_topk_kl", "delta": 0}, "policy_loss.delta=0"),
        ({"loss_mode": "pdm_topk_kl", "truncation": 0.1}, "policy_loss.truncation=0.1"),
        ({"loss_mode": "dppo_topk_kl", "tail": "exact"}, "policy_loss.tail='exact'"),
        ({"loss_mode": "vanilla", "delta": 0.1}, "policy_loss.delta=0.1 is not read by loss_mode='vanilla'"),
        ({"loss_mode": "gspo", "anchor": "old"}, "policy_loss.anchor='old' is not read by loss_mode='gspo'"),
    ],
)
def test_a_bad_value_ends_the_run_when_the_config_is_built(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        PolicyLoss(**keys)
    assert says in str(error.value)


def test_verl_builds_ours_inside_its_actor_config(composed: Callable[..., DictConfig]) -> None:
    actor = omega_conf_to_dataclass(composed("tiny_pdm").actor_rollout_ref.actor)
    assert isinstance(actor, ActorConfig)
    assert type(actor.policy_loss) is PolicyLoss
    region = actor.policy_loss.trust_region()
    assert region is not None and region.delta == 0.05


def test_verl_refuses_a_bad_value_there(composed: Callable[..., DictConfig]) -> None:
    config = composed("tiny_pdm")
    config.actor_rollout_ref.actor.policy_loss.delta = -1
    with pytest.raises(Exception, match=r"policy_loss\.delta=-1"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_unknown_keys_are_explained_with_the_nearest_name() -> None:
    section = OmegaConf.create({"loss_mode": "pdm_topk_kl", "detla": 1, "zzz": 2})
    first, second = unknown_policy_loss_keys(section)
    assert "policy_loss.detla is not a key" in first and "Did you mean 'delta'?" in first
    assert "policy_loss.zzz is not a key" in second and "Did you mean" not in second
    assert "Valid: loss_mode" in second


def test_stray_keys_are_those_nothing_reads() -> None:
    assert stray_policy_loss_keys({"loss_mode": "pdm_topk_kl", "delta": 0.1}) == []
    assert stray_policy_loss_keys({"loss_mode": "vanilla", "delta": None}) == []
    assert len(stray_policy_loss_keys({"loss_mode": "vanilla", "delta": 0.1, "tail": "exact"})) == 2
