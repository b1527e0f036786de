from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_plugins.losses.trust_region import (
    ANCHORS,
    DIRECTIONS,
    DIVERGENCES,
    KEYS,
    PRESETS,
    TAILS,
    TrustRegion,
    nearest,
    resolve,
)


def resolved(name: str, **keys: object) -> TrustRegion:
    region = resolve(name, **keys)  # type: ignore[arg-type]
    assert region is not None
    return region


@pytest.mark.parametrize(
    ("name", "divergence", "direction", "anchor", "delta"),
    [
        ("pdm_topk_kl", "topk_kl", "predicted", "rollout", 0.5),
        ("pdm_topk_tv", "topk_tv", "predicted", "rollout", 0.15),
        ("pdm_topk_reverse_kl", "topk_reverse_kl", "predicted", "rollout", 0.5),
        ("dppo_topk_kl", "topk_kl", "ratio", "rollout", 0.5),
        ("dppo_topk_tv", "topk_tv", "ratio", "rollout", 0.15),
        ("dppo_binary_kl", "binary_kl", "ratio", "rollout", 0.05),
        ("dppo_binary_tv", "binary_tv", "ratio", "rollout", 0.15),
        ("dppo_binary_kl_old", "binary_kl", "ratio", "old", 0.05),
        ("dppo_binary_tv_old", "binary_tv", "ratio", "old", 0.15),
        ("ppo_ratio_mask", "ratio", "ratio", "rollout", math.inf),
        ("no_mask", "none", "ratio", "rollout", math.inf),
    ],
)
def test_each_name_is_a_point_of_the_product(
    name: str, divergence: str, direction: str, anchor: str, delta: float
) -> None:
    region = resolved(name)
    assert (region.divergence, region.direction, region.anchor, region.delta) == (divergence, direction, anchor, delta)
    assert (region.name, region.tail, region.truncation) == (name, "aggregated", 10.0)


def test_the_table_above_is_complete() -> None:
    table = test_each_name_is_a_point_of_the_product.pytestmark[0].args[1]
    assert {row[0] for row in table} == set(PRESETS)


def test_a_name_of_verl_is_not_ours() -> None:
    assert resolve("vanilla") is None
    assert resolve("dppo_tv") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("divergence", "topk_tv"),
        ("direction", "ratio"),
        ("tail", "exact"),
        ("anchor", "old"),
        ("delta", 0.05),
        ("truncation", 3.0),
    ],
)
def test_a_key_that_is_set_wins_over_the_name(key: str, value: object) -> None:
    changed, plain = resolved("pdm_topk_kl", **{key: value}), resolved("pdm_topk_kl")
    assert getattr(changed, key) == value != getattr(plain, key)


def test_the_default_threshold_follows_the_divergence() -> None:
    assert resolved("pdm_topk_kl", divergence="topk_tv").delta == 0.15
    assert resolved("pdm_topk_kl", divergence="binary_kl").delta == 0.05


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("pdm_topk_kl", {"divergence": "topk_lk"}, ["divergence='topk_lk'", "topk_kl", "Did you mean 'topk_kl'?"]),
        ("pdm_topk_kl", {"direction": "forward"}, ["direction='forward'", "ratio, predicted"]),
        ("pdm_topk_kl", {"tail": "uniformly"}, ["tail='uniformly'", "aggregated, uniform, exact"]),
        ("pdm_topk_kl", {"anchor": "new"}, ["anchor='new'", "rollout, old"]),
        ("pdm_topk_kl", {"delta": 0.0}, ["delta=0.0", "(0, inf)"]),
        ("pdm_topk_kl", {"delta": -1}, ["delta=-1"]),
        ("pdm_topk_kl", {"delta": math.nan}, ["delta=nan"]),
        ("pdm_topk_kl", {"delta": math.inf}, ["delta=inf"]),
        ("pdm_topk_kl", {"delta": True}, ["delta=True"]),
        ("pdm_topk_kl", {"delta": "0.5"}, ["delta='0.5'"]),
        ("pdm_topk_tv", {"delta": 1.5}, ["delta=1.5", "(0, 1]"]),
        ("pdm_topk_kl", {"truncation": 0.5}, ["truncation=0.5", "[1, inf)"]),
        ("no_mask", {"direction": "predicted"}, ["direction='predicted'", "ratio with divergence=none"]),
        ("ppo_ratio_mask", {"direction": "predicted"}, ["ratio with divergence=ratio"]),
        ("ppo_ratio_mask", {"delta": 0.2}, ["delta=0.2", "clip_ratio_low"]),
        ("dppo_binary_kl", {"tail": "exact"}, ["tail='exact'", "Only top-K divergences have a tail"]),
        ("dppo_topk_kl", {"tail": "exact"}, ["tail='exact'", "direction=ratio"]),
    ],
)
def test_what_is_out_of_range_or_contradicts_is_refused(name: str, keys: dict[str, object], says: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        resolve(name, **keys)  # type: ignore[arg-type]
    message = str(error.value)
    for text in [*says, "actor_rollout_ref.actor.policy_loss.", "Set "]:
        assert text in message


@given(
    name=st.sampled_from(sorted(PRESETS)),
    divergence=st.none() | st.sampled_from(DIVERGENCES),
    direction=st.none() | st.sampled_from(DIRECTIONS),
    tail=st.none() | st.sampled_from(TAILS),
    anchor=st.none() | st.sampled_from(ANCHORS),
    delta=st.none() | st.floats(0.001, 1.0),
)
@settings(deadline=None, max_examples=300)
def test_every_point_is_either_consistent_or_refused(
    name: str, divergence: str | None, direction: str | None, tail: str | None, anchor: str | None, delta: float | None
) -> None:
    try:
        region = resolved(name, divergence=divergence, direction=direction, tail=tail, anchor=anchor, delta=delta)
    except ValueError as error:
        assert "actor_rollout_ref.actor.policy_loss." in str(error)
        return
    assert region.delta > 0
    assert region.needs_topk == region.divergence.startswith("topk_")
    assert region.needs_vocabulary_pass == (region.tail == "exact")
    if region.divergence in ("ratio", "none"):
        assert region.direction == "ratio"
    words = region.sentence(20)
    assert ("K=20" in words) == region.needs_topk
    assert ("recomputed" in words) == (region.anchor == "old")


def test_sentences_say_what_masks() -> None:
    assert "no token is masked" in resolved("no_mask").sentence()
    assert "clip_ratio_low" in resolved("ppo_ratio_mask").sentence()
    assert "exceeds 0.05 and the token's own update would increase it" in resolved("pdm_topk_kl", delta=0.05).sentence()
    assert "pushes the ratio further from 1" in resolved("dppo_topk_kl").sentence()
    assert "min(r, 3)" in resolved("no_mask", truncation=3.0).sentence()


def test_every_key_is_documented() -> None:
    assert list(KEYS) == ["loss_mode", "divergence", "direction", "tail", "anchor", "delta", "truncation"]
    for doc in KEYS.values():
        assert doc.default and doc.allowed and doc.sentence.endswith(".")


def test_nearest_names_the_closest_or_nothing() -> None:
    assert nearest("detla", ["delta", "tail"]) == " Did you mean 'delta'?"
    assert nearest("xyz", ["delta", "tail"]) == ""
