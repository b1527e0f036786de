from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_plugins.launch import (
    RecipeError,
    find_recipe,
    is_trainer_program,
    recipe_names,
    recipes_dir,
    search_folders,
    translate,
    wants_cpu,
)

MINE = "trainer: {experiment_name: mine}\n"
RECIPE = "defaults: [ppo_trainer, _self_]\n"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str = RECIPE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def translated(*words: str) -> list[str]:
    argv = ["main_ppo.py", *words]
    translate(argv)
    return argv[1:]


@pytest.mark.parametrize("typed", ["runs/mine.yaml", "runs/mine", "./runs/../runs/mine.yaml"])
def test_a_path_is_translated(in_folder: Path, typed: str) -> None:
    path = write(in_folder / "runs" / "mine.yaml")
    assert translated("--config", typed) == ["--config-dir", str(path.parent), "--config-name", "mine"]


def test_the_form_with_an_equals_sign(in_folder: Path) -> None:
    write(in_folder / "mine.yaml")
    assert translated("--config=mine.yaml") == ["--config-dir", str(in_folder), "--config-name", "mine"]


def test_a_name_finds_a_shipped_recipe(in_folder: Path) -> None:
    assert translated("--config", "tiny_pdm") == ["--config-dir", str(recipes_dir()), "--config-name", "tiny_pdm"]
    assert find_recipe("tiny_pdm.yaml") == recipes_dir() / "tiny_pdm.yaml"


def test_a_path_wins_over_a_name(in_folder: Path) -> None:
    mine = write(in_folder / "tiny_pdm.yaml")
    assert find_recipe("tiny_pdm") == mine


def test_every_other_argument_stays_where_it_is(in_folder: Path) -> None:
    write(in_folder / "mine.yaml")
    words = translated("-m", "--config", "mine.yaml", "--cfg", "job", "trainer.nnodes=1,2", "--info", "searchpath")
    assert words[0] == "-m"
    assert words[5:] == ["--cfg", "job", "trainer.nnodes=1,2", "--info", "searchpath"]


@pytest.mark.parametrize("words", [[], ["--config-name", "x"], ["--config-dir=a", "-cn", "b"], ["trainer.nnodes=1"]])
def test_nothing_is_translated_without_the_flag(words: list[str]) -> None:
    argv = ["main_ppo.py", *words]
    assert translate(argv) is None
    assert argv[1:] == words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config"], "--config needs a recipe"),
        (["--config", "--cfg", "job"], "--config needs a recipe"),
        (["--config", "trainer.nnodes=1"], "--config needs a recipe"),
        (["--config", "tiny_pdm", "--config=tiny_dppo"], "given twice"),
        (["--config", "tiny_pdm", "--config-name", "x"], "--config and --config-name both name"),
        (["--config", "tiny_pdm", "-cp=x"], "--config and -cp=x both name"),
        (["--config", "tiny_pdn"], "Did you mean tiny_pdm"),
        (["--config", "zzzzzz"], "Shipped: "),
        (["--config", "."], "is a folder"),
        (["--config", "/nowhere/tiny_pdm.yaml"], "is not there"),
        (["--config", ""], "--config needs a recipe"),
        (["--config="], "is a folder"),
    ],
)
def test_mistakes_are_answered(in_folder: Path, words: list[str], says: str) -> None:
    with pytest.raises(RecipeError) as error:
        translated(*words)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", RECIPE, "Hydra reads .yaml files only, got suffix '.txt'"),
        ("a.yml", RECIPE, "Hydra reads .yaml files only, got suffix '.yml'"),
        ("a.yaml", "defaults: [a\n b: c", "not YAML"),
        ("a.yaml", "trainer: {nnodes: 1}\n", "starts with `defaults: [ppo_trainer, _self_]`"),
        ("a.yaml", "- a\n- b\n", "starts with `defaults:"),
        ("a.yaml", "", "starts with `defaults:"),
    ],
)
def test_what_is_no_recipe_is_refused(in_folder: Path, name: str, content: str, says: str) -> None:
    write(in_folder / name, content)
    with pytest.raises(RecipeError) as error:
        find_recipe(name)
    assert says in str(error.value)
    assert name in str(error.value)


def test_binary_content_is_refused(in_folder: Path) -> None:
    (in_folder / "a.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RecipeError, match="not YAML"):
        find_recipe("a.yaml")


@pytest.mark.parametrize("start", ["tiny_pdm", "tiny_dppo"])
def test_a_recipe_that_starts_from_its_own_name_is_refused(in_folder: Path, start: str) -> None:
    write(in_folder / "tiny_pdm.yaml", f"defaults: [{start}, _self_]\n")
    with pytest.raises(RecipeError, match="starts from a recipe named 'tiny_pdm', which is its own name"):
        find_recipe("tiny_pdm.yaml")
    write(in_folder / "mine.yaml", f"defaults: [{start}, override model_engine: dp, _self_]\n")
    assert find_recipe("mine") == in_folder / "mine.yaml"


def test_a_name_of_verls_own_is_refused(in_folder: Path) -> None:
    import verl  # noqa: F401 - the names are known once verl is there

    write(in_folder / "ppo_trainer.yaml")
    with pytest.raises(RecipeError, match="verl has a configuration named 'ppo_trainer'"):
        find_recipe("ppo_trainer.yaml")


def test_shipped_recipes_share_no_name_with_verl_and_parts_are_no_recipes() -> None:
    import verl

    verls = {path.stem for path in (Path(verl.__file__).parent / "trainer" / "config").rglob("*.yaml")}
    assert not verls & set(recipe_names())
    assert "tiny_pdm" in recipe_names()
    assert not any("_base" in name for name in recipe_names())


def test_the_folder_of_the_recipe_is_searched_before_ours(in_folder: Path) -> None:
    assert search_folders(in_folder / "mine.yaml") == [in_folder, recipes_dir()]
    assert search_folders(recipes_dir() / "tiny_pdm.yaml") == [recipes_dir()]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("defaults: [ppo_trainer, _self_]\n", [], False),
        ("defaults: [ppo_trainer, _self_]\n", ["trainer.device=cpu"], True),
        ("defaults: [ppo_trainer, _self_]\ntrainer: {device: cpu}\n", [], True),
        ("defaults: [ppo_trainer, _self_]\ntrainer: {device: cpu}\n", ["trainer.device=cuda"], False),
        ("defaults: [tiny_dppo, _self_]\n", [], True),
        ("defaults: [tiny_dppo, _self_]\ntrainer: {device: cuda}\n", [], False),
        ("defaults: [tiny_pdm, pdm_qwen3_30b, _self_]\n", ["trainer.nnodes=2"], True),
    ],
)
def test_which_runs_are_for_the_cpu(in_folder: Path, text: str, words: list[str], expected: bool) -> None:
    assert wants_cpu(write(in_folder / "mine.yaml", text), words) is expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "-m", "verl.trainer.main_ppo", "--config", "a"], True),
        (["python", "-W", "ignore", "-mverl.trainer.main_ppo"], True),
        (["python", "/x/verl/trainer/main_ppo.py", "--config", "a"], True),
        (["python", "-m", "pytest", "--config", "a"], False),
        (["python", "-m", "verl.trainer.sft_trainer", "--config", "a"], False),
        (["python", "train.py", "--config", "a"], False),
        (["python", "-m", "pytest", "-m", "verl.trainer.main_ppo"], False),
        (["python"], False),
        (["python", "-m"], False),
    ],
)
def test_only_verls_trainer_is_looked_at(argv: list[str], expected: bool) -> None:
    assert is_trainer_program(argv) is expected


def run_main_ppo(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *words]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_users_own_file_of_a_shipped_name_runs_beside_hydras_flags(tmp_path: Path) -> None:
    from verl_plugins.compose import compose

    recipe = write(tmp_path / "runs" / "tiny_pdm.yaml", "defaults: [ppo_trainer, _base/plugin, _self_]\n" + MINE)
    words = ["trainer.project_name=typed", "+ray_kwargs.ray_init.address=auto"]
    done = run_main_ppo("--config", "runs/tiny_pdm.yaml", *words, "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = OmegaConf.create(done.stdout)
    assert printed.trainer.experiment_name == "mine"
    assert printed.actor_rollout_ref.actor.policy_loss._target_ == "verl_plugins.config.PolicyLoss"
    assert printed == compose(recipe, words)  # which is what `verl-plugins show` explains


def test_a_wrong_path_ends_the_program_with_the_reason(tmp_path: Path) -> None:
    done = run_main_ppo("--config", "runs/tiny_pdn.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("verl_plugins: --config runs/tiny_pdn.yaml: is not there")
    assert "Did you mean tiny_pdm" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"), [("detla", "delta"), ("+divergance", "divergence"), ("direktion", "direction")]
)
def test_a_misspelt_key_of_ours_is_named(typed: str, meant: str) -> None:
    prefix = "+" if typed.startswith("+") else ""
    word = f"{prefix}actor_rollout_ref.actor.policy_loss.{typed.lstrip('+')}=0.1"
    with pytest.raises(RecipeError, match=rf"Did you mean actor_rollout_ref\.actor\.policy_loss\.{meant}\?"):
        translate(["main_ppo", "--config", "tiny_pdm", word])


def test_keys_of_verls_own_losses_are_left_to_hydra() -> None:
    argv = ["main_ppo", "--config", "tiny_pdm", "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.1"]
    assert translate(argv) is not None
