from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf

from verl_plugins import checks
from verl_plugins.registrations import STATUS

LOSS = "actor_rollout_ref.actor.policy_loss"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OLD_TOPK = {f"{LOSS}.anchor": "old", f"{CORRECTION}.bypass_mode": False}


def changed(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def test_the_recipe_itself_has_no_problem_and_no_note(composed: Callable[..., DictConfig]) -> None:
    config = composed("tiny_pdm")
    assert checks.problems(config) == []
    assert checks.warnings(config) == []
    assert checks.topk(config) == 20


# One rule each: what is changed, and what the message must name (key, value, what is allowed, what to type).
RULES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {f"{LOSS}.loss_mode": "pdm_topk"},
        ["loss_mode='pdm_topk'", "not registered", "Did you mean 'pdm_"],
    ),
    ({f"{LOSS}._target_": "verl.workers.config.PolicyLossConfig"}, [f"{LOSS}._target_=verl_plugins.config.PolicyLoss"]),
    ({f"{LOSS}.detla": 0.1}, [f"{LOSS}.detla", "Did you mean 'delta'?", "truncation"]),
    ({f"{LOSS}.delta": -0.5}, [f"{LOSS}.delta=-0.5", "(0, inf)", f"Set {LOSS}.delta="]),
    ({f"{LOSS}.truncation": 0}, [f"{LOSS}.truncation=0", "[1, inf)"]),
    ({f"{LOSS}.direction": "predict"}, [f"{LOSS}.direction='predict'", "ratio, predicted", "'predicted'?"]),
    ({f"{ROLLOUT}.custom.topk": None}, [f"{ROLLOUT}.custom.topk is not set", f"Set {ROLLOUT}.custom.topk=20"]),
    ({f"{ROLLOUT}.custom.topk": 0}, [f"{ROLLOUT}.custom.topk=0", "at least 1"]),
    ({f"{ROLLOUT}.custom.topk": True}, [f"{ROLLOUT}.custom.topk=True", "integer"]),
    ({f"{ROLLOUT}.custom.topk": 2.5}, [f"{ROLLOUT}.custom.topk=2.5", "integer"]),
    ({f"{ROLLOUT}.custom.topk": 513}, [f"{ROLLOUT}.custom.topk=513", "512", f"Set {ROLLOUT}.custom.topk"]),
    ({f"{ROLLOUT}.name": "sglang"}, [f"{ROLLOUT}.name=sglang", "hf_cpu, vllm"]),
    ({f"{ROLLOUT}.agent.agent_loop_manager_class": None}, ["agent_loop_manager_class=None", "TopKAgentLoopManager"]),
    ({"trainer.v1.trainer_mode": "separate_async"}, ["separate_async", "Set trainer.v1.trainer_mode=verl_plugins"]),
    ({"distillation.enabled": True}, ["distillation.enabled=true", "Set distillation.enabled=false"]),
    ({"actor_rollout_ref.model.use_fused_kernels": True}, ["use_fused_kernels=true", "use_fused_kernels=false"]),
    ({f"{ROLLOUT}.top_p": 0.9}, [f"{ROLLOUT}.top_p=0.9", f"Set {ROLLOUT}.top_p=1"]),
    ({f"{ROLLOUT}.top_k": 50}, [f"{ROLLOUT}.top_k=50", f"Set {ROLLOUT}.top_k=-1"]),
    ({f"{ROLLOUT}.temperature": 0}, [f"{ROLLOUT}.temperature=0", "above 0"]),
    ({f"{ROLLOUT}.repetition_penalty": 1.1}, [f"{ROLLOUT}.repetition_penalty", "1.0"]),
    (
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs", f"{ROLLOUT}.temperature": 0.8},
        ["logprobs_mode=raw_logprobs", "temperature=0.8", "logprobs_mode=processed_logprobs"],
    ),
    ({f"{ROLLOUT}.calculate_log_probs": False}, [f"Set {ROLLOUT}.calculate_log_probs=true"]),
    ({f"{CORRECTION}.rollout_is": "token"}, ["rollout_is=token", f"Set {CORRECTION}.rollout_is=null"]),
    ({f"{LOSS}.anchor": "old"}, [f"{LOSS}.anchor=old", f"Set {CORRECTION}.bypass_mode=false"]),
    ({**OLD_TOPK, "trainer.v1.trainer_mode": "sync"}, [f"{LOSS}.anchor=old", "trainer.v1.trainer_mode=verl_plugins"]),
    ({"trainer.use_v1": False}, ["trainer.use_v1=false", "replaces loss_mode in bypass mode"]),
    ({"trainer.use_v1": False, f"{CORRECTION}.bypass_mode": False}, ["does not carry K", "Set trainer.use_v1=true"]),
    ({"actor_rollout_ref.actor.ppo_mini_batch_size": 5}, ["ppo_mini_batch_size=5", "data.train_batch_size=16"]),
    ({"actor_rollout_ref.actor.ppo_mini_batch_size": 0}, ["ppo_mini_batch_size=0"]),
    ({"actor_rollout_ref.model.path": "outputs/no/where"}, ["model.path=outputs/no/where", "no config.json"]),
    ({"actor_rollout_ref.model.path": "./tiny_x"}, ["tools/make_tiny.py", "Set actor_rollout_ref.model.path=FOLDER"]),
    ({"data.train_files": "./none.parquet"}, ["data.train_files=./none.parquet", "Set data.train_files=FILE.parquet"]),
    ({"data.val_files": ["./none.parquet"]}, ["data.val_files=./none.parquet", "no such file"]),
    ({"trainer.device": "cuda"}, ["trainer.device=cuda", "no accelerator", "ray job submit"]),
]


@pytest.mark.parametrize(("changes", "says"), RULES, ids=[" ".join(rule[0]) + str(n) for n, rule in enumerate(RULES)])
def test_each_rule_fires_alone(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: list[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = checks.problems(changed(composed("tiny_pdm"), changes))
    assert len(found) == 1, found
    for text in says:
        assert text in found[0]


@pytest.mark.parametrize(
    "changes",
    [
        OLD_TOPK,
        {f"{CORRECTION}.bypass_mode": False},
        {f"{LOSS}.loss_mode": "dppo_binary_tv_old", f"{CORRECTION}.bypass_mode": False, f"{ROLLOUT}.name": "sglang"},
        {f"{LOSS}.loss_mode": "no_mask", f"{LOSS}.delta": None, f"{ROLLOUT}.custom.topk": None},
        {f"{LOSS}.loss_mode": "vanilla", f"{LOSS}.delta": None, f"{ROLLOUT}.top_p": 0.9},
        {f"{ROLLOUT}.custom.topk": 1},
        {f"{ROLLOUT}.custom.topk": 512},
        {f"{LOSS}.tail": "exact", f"{ROLLOUT}.temperature": 0.7},
        {"actor_rollout_ref.model.path": "Qwen/Qwen3-0.6B"},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_what_is_consistent_is_allowed(composed: Callable[..., DictConfig], changes: dict[str, Any]) -> None:
    assert checks.problems(changed(composed("tiny_pdm"), changes)) == []


def test_a_run_for_the_cpu_that_verl_would_put_elsewhere(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: "cuda")
    assert checks.problems(composed("tiny_pdm")) == []  # nothing is about to run
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "verl.trainer.main_ppo"])
    (found,) = checks.problems(composed("tiny_pdm"))
    assert found == "trainer.device=cpu, but verl chose cuda. Set VERL_PLATFORM=cpu in the environment."


def test_a_key_that_verls_loss_never_reads_is_refused(composed: Callable[..., DictConfig]) -> None:
    config = changed(composed("tiny_pdm"), {f"{LOSS}.loss_mode": "vanilla"})
    (found,) = checks.problems(config)
    assert f"{LOSS}.delta=0.05 is not read by loss_mode='vanilla'" in found


def test_all_problems_are_shown_at_once(composed: Callable[..., DictConfig]) -> None:
    config = changed(composed("tiny_pdm"), {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": 5, "trainer.use_v1": False})
    assert len(checks.problems(config)) == 3


def test_a_file_that_is_no_parquet_or_lacks_a_column(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    table = pyarrow.table({name: ["x"] for name in ("prompts", "data_source", "reward_model")})
    pyarrow.parquet.write_table(table, tmp_path / "column.parquet")
    text = changed(composed("tiny_pdm"), {"data.train_files": str(tmp_path / "text.parquet")})
    column = changed(composed("tiny_pdm"), {"data.train_files": str(tmp_path / "column.parquet")})
    assert "not a parquet file" in checks.problems(text)[0]
    (found,) = checks.problems(column)
    assert "column 'prompt' is missing (it has prompts, data_source, reward_model)" in found
    assert "Did you mean 'prompts'?" in found and "data.prompt_key=NAME" in found
    both = {"data.prompt_key": "prompts", "data.val_files": str(tmp_path / "column.parquet")}
    assert checks.problems(changed(column, both)) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 16}, "one update per batch"),
        (
            {f"{LOSS}.loss_mode": "vanilla", f"{LOSS}.delta": None, f"{ROLLOUT}.custom.topk": None},
            "dual clip is on: for negative advantages the ratio is capped at clip_ratio_c=3",
        ),
        (
            {f"{LOSS}.loss_mode": "dppo_binary_tv", f"{LOSS}.direction": "predicted", f"{ROLLOUT}.custom.topk": None},
            "a binary divergence moves with the ratio",
        ),
        ({f"{LOSS}.direction": "ratio"}, "direction=ratio overrides what loss_mode=pdm_topk_kl names"),
        ({f"{LOSS}.loss_mode": "dppo_binary_kl"}, f"{ROLLOUT}.custom.topk=20: K probabilities are carried"),
    ],
)
def test_notes_say_what_is_allowed_and_surprises(
    composed: Callable[..., DictConfig], changes: dict[str, Any], says: str
) -> None:
    config = changed(composed("tiny_pdm"), changes)
    assert any(says in note for note in checks.warnings(config))
    assert checks.problems(config) == []


def test_two_epochs_are_two_updates(composed: Callable[..., DictConfig]) -> None:
    changes = {"actor_rollout_ref.actor.ppo_mini_batch_size": 16, "actor_rollout_ref.actor.ppo_epochs": 2}
    assert checks.warnings(changed(composed("tiny_pdm"), changes)) == []


def test_the_loss_in_words(composed: Callable[..., DictConfig]) -> None:
    assert checks.sentence(composed("tiny_pdm")).startswith("pdm_topk_kl: minus advantage x min(r, 10)")
    assert "K=20" in checks.sentence(composed("tiny_pdm"))
    assert "clip(r, 1 - 0.2, 1 + 0.28)" in checks.sentence(composed("tiny_grpo_clip_higher"))
    refused = changed(composed("tiny_pdm"), {f"{LOSS}.delta": -1})
    assert "refused" in checks.sentence(refused)


def test_the_guard_refuses_before_anything_starts(
    composed: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        checks.RecipeGuard().on_job_start(changed(composed("tiny_pdm"), {f"{ROLLOUT}.top_p": 0.5}))
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert "this run is refused, nothing was started" in printed and "top_p=0.5" in printed


def test_the_guard_refuses_what_it_cannot_check(
    composed: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(composed("tiny_pdm"), {"actor_rollout_ref.actor.ppo_mini_batch_size": "four"})
    with pytest.raises(SystemExit):
        checks.RecipeGuard().on_job_start(config)
    assert "could not be checked: TypeError" in capsys.readouterr().err


def test_the_guard_says_which_loss_is_in_force(
    composed: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    checks.RecipeGuard().on_job_start(changed(composed("tiny_pdm"), {f"{LOSS}.direction": "ratio"}))
    printed = capsys.readouterr().err
    assert "verl_plugins: pdm_topk_kl: minus advantage" in printed
    assert "verl_plugins: note: direction=ratio overrides" in printed


def test_a_failed_registration_is_a_problem(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS.failed, "policy loss", "Traceback\nValueError: registered already")
    (found,) = checks.problems(composed("tiny_pdm"))
    assert "policy loss: ValueError: registered already" in found and "verl-plugins doctor" in found


def test_a_plugin_that_verl_did_not_load_is_a_problem(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STATUS, "done", {})
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (found,) = checks.problems(composed("tiny_pdm"))
    assert "verl did not load the plugin (VERL_USE_EXTERNAL_PLUGINS=none)" in found


def test_an_unsupported_verl_is_a_problem(composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_plugins.environment.version", lambda name: "0.10.0")
    (found,) = checks.problems(composed("tiny_pdm"))
    assert "verl 0.10.0 is installed" in found and "VERL_PLUGINS_ACCEPT_VERL=0.10.0" in found
    monkeypatch.setenv("VERL_PLUGINS_ACCEPT_VERL", "0.10.0")
    assert checks.problems(composed("tiny_pdm")) == []
