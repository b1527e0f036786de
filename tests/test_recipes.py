from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass

import pytest
import ray
import yaml
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_plugins import checks
from verl_plugins.compose import ABSENT, changes, verl_defaults
from verl_plugins.config import PolicyLoss
from verl_plugins.launch import find_recipe, recipe_names, recipes_dir

RECIPES = recipe_names()
ROLLOUT = "actor_rollout_ref.rollout"
# Sections that verl hands on to somebody else as they are: to transformers, Megatron, PyTorch, Hydra, or to us.
HANDED_ON = (
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.ref.megatron.override_transformer_config",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    f"{ROLLOUT}.engine_kwargs",
    "hydra",
)
OURS = {f"{ROLLOUT}.custom.topk", "trainer.v1.verl_plugins"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a cluster were named, so that recipes for GPUs can be checked without one."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")


def leaves(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [prefix]
    return [leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else str(key))]


def test_the_recipes_of_the_first_version_are_there() -> None:
    expected = {"tiny_pdm", "tiny_pdm_vllm", "tiny_dppo", "tiny_grpo_clip_higher", "tiny_pdm_moe", "pdm_qwen3_30b"}
    assert expected <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_states_paper_command_and_hardware_and_little_else(name: str) -> None:
    text = find_recipe(name).read_text()
    header = text.split("defaults:")[0]
    assert all(line.startswith("#") for line in header.strip().splitlines())
    for label in ("Paper:", "Command:", "Hardware:"):
        assert label in header
    assert f"python -m verl.trainer.main_ppo --config recipes/{name}.yaml" in header
    content = yaml.safe_load(text)
    del content["defaults"]
    assert len(leaves(content)) <= 10


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_no_problem_once_its_files_are_there(
    name: str, composed: Callable[..., DictConfig], cluster: None
) -> None:
    config = composed(name)
    assert checks.problems(config) == []
    assert OmegaConf.missing_keys(config) <= {"reward.reward_model.rollout.name"}  # verl's, of a model nobody enables
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    assert loss_mode in POLICY_LOSS_REGISTRY
    assert checks.sentence(config).startswith(loss_mode)


@pytest.mark.parametrize("name", RECIPES)
def test_verls_own_validation_passes(name: str, composed: Callable[..., DictConfig]) -> None:
    config = composed(name)
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(config.algorithm)
    assert type(actor.policy_loss) is PolicyLoss
    assert rollout.custom.get("topk") == config.actor_rollout_ref.rollout.custom.topk


def section_class(config: DictConfig, key: str) -> tuple[type | None, str]:
    """The dataclass verl builds from the innermost section around a key, and the key's name in it."""
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        target = OmegaConf.select(config, ".".join([*parts[:depth], "_target_"]))
        if target is not None:
            module, name = target.rsplit(".", 1)
            return getattr(importlib.import_module(module), name), parts[depth]
    return None, parts[0]


@pytest.mark.parametrize("name", RECIPES)
def test_no_key_that_nobody_reads(name: str, composed: Callable[..., DictConfig]) -> None:
    config = composed(name)
    text = OmegaConf.to_yaml(config, resolve=False) + "".join(
        path.read_text() for path in recipes_dir().rglob("*.yaml")
    )
    new = [change.key for change in changes(config, verl_defaults(config)) if change.old == ABSENT]
    assert new
    for key in new:
        if key in OURS or key.startswith(HANDED_ON):
            continue
        if key.startswith("ray_kwargs.ray_init."):
            option = key.split(".")[2]
            assert option in inspect.signature(ray.init).parameters, key
            continue
        if "." not in key:
            assert re.search(r"\$\{" + re.escape(key) + r"\}", text), f"{key} is interpolated nowhere"
            continue
        owner, field = section_class(config, key)
        assert owner is not None and is_dataclass(owner), f"{key}: verl has no such section"
        assert field in {item.name for item in fields(owner)}, f"{key}: {owner.__name__} has no field {field}"


def test_a_key_that_nobody_reads_is_found(composed: Callable[..., DictConfig]) -> None:
    config = composed("tiny_pdm")
    owner, field = section_class(config, "actor_rollout_ref.actor.policy_loss.detla")
    assert owner is PolicyLoss
    assert field not in {item.name for item in fields(owner)}


@pytest.mark.parametrize("name", RECIPES)
def test_k_is_written_in_one_place(name: str, composed: Callable[..., DictConfig]) -> None:
    config = composed(name)
    named = [
        key for key in leaves(OmegaConf.to_container(config)) if key.rsplit(".", 1)[-1] in ("topk", "max_logprobs")
    ]
    ours = [key for key in named if not key.startswith("distillation.")]
    assert ours == [f"{ROLLOUT}.custom.topk"]


def test_tiny_recipes_mask_at_their_scale(composed: Callable[..., DictConfig]) -> None:
    for name in RECIPES:
        if name.startswith("tiny_") and composed(name).actor_rollout_ref.actor.policy_loss.delta is not None:
            assert composed(name).actor_rollout_ref.actor.policy_loss.delta == 0.05
            assert composed(name).data.train_batch_size > composed(name).actor_rollout_ref.actor.ppo_mini_batch_size


@pytest.mark.parametrize(
    ("name", "loss_mode"),
    [
        ("tiny_pdm", "pdm_topk_kl"),
        ("tiny_pdm_moe", "pdm_topk_kl"),
        ("tiny_pdm_vllm", "pdm_topk_kl"),
        ("tiny_dppo", "dppo_topk_kl"),
        ("tiny_grpo_clip_higher", "vanilla"),
        ("pdm_qwen3_30b", "pdm_topk_kl"),
    ],
)
def test_which_loss_a_recipe_trains_with(name: str, loss_mode: str, composed: Callable[..., DictConfig]) -> None:
    assert composed(name).actor_rollout_ref.actor.policy_loss.loss_mode == loss_mode
