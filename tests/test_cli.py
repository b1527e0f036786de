from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from verl_plugins import cli, doctor, environment
from verl_plugins.compose import ABSENT, ComposeError, changes, compose, verl_defaults
from verl_plugins.launch import find_recipe
from verl_plugins.losses.trust_region import KEYS, PRESETS
from verl_plugins.registrations import registrations

LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> doctor.Report:
    """A report that `doctor` prints instead of looking."""
    packages = tuple(
        environment.Found(requirement=item, distribution=item.distributions[0], version=item.low, verdict="ok")
        for item in environment.REQUIREMENTS
    )
    made = doctor.Report(packages=packages, entry_point=[], verl=None, done={"platform": ("cpu",)})
    monkeypatch.setattr(doctor, "examine", lambda: made)
    return made


def without(report: doctor.Report, package: str) -> None:
    report.packages = tuple(
        environment.Found(requirement=item.requirement, distribution=None, version=None, verdict="missing")
        if item.requirement.package == package
        else item
        for item in report.packages
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_importing_it_costs_nothing() -> None:
    program = (
        "import sys, verl_plugins.cli; print(sorted({'torch', 'verl', 'ray', 'hydra', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_list_names_everything_registered(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    for item in registrations():
        assert item.kind in out and item.chosen_by in out
        assert all(name in out for name in item.names)
    for name, preset in PRESETS.items():
        assert f"{name:<20} {preset.paper}" in out
    for key in KEYS:
        assert f"{LOSS}.{key}" in out
    assert "actor_rollout_ref.rollout.custom.topk" in out


def test_list_of_keys_only(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "list", "--keys")
    assert f"{LOSS}.delta" in out and "> 0 nats for KL, in (0, 1] for TV" in " ".join(out.split())
    assert "rollout hf_cpu" not in out


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(run(capsys, "list", "--json")[1])
    names = {entry["name"] for entry in content["registered"]}
    assert names == {name for item in registrations() for name in item.names}
    (entry,) = [entry for entry in content["registered"] if entry["name"] == "pdm_topk_kl"]
    assert entry["paper"].endswith("arXiv:2607.10848") and entry["divergence"] == "topk_kl"
    assert [key["key"] for key in content["keys"]][-1] == "actor_rollout_ref.rollout.custom.topk"
    assert set(json.loads(run(capsys, "list", "--keys", "--json")[1])) == {"keys"}


def test_doctor_is_content(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.recipes = {"tiny_pdm": []}
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "verdict: the plugin works; 1 of 1 recipes can start here" in out
    assert "tiny_pdm: ready" in out


def test_doctor_shows_the_traceback_of_a_failure(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.failed = {"policy loss": "Traceback (most recent call last):\nValueError: registered already\n"}
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "policy loss      FAILED" in out and "ValueError: registered already" in out
    assert "verdict: broken" in out


def test_doctor_fails_with_an_unsupported_verl(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.verl = "verl 0.8 is installed"
    assert run(capsys, "doctor")[0] == 1
    report.verl, report.entry_point = None, ["no entry point"]
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "problem: no entry point" in out


def test_doctor_says_what_is_absent_and_why(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.absent = {"engine megatron": "No module named 'megatron'"}
    without(report, "megatron-core")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "absent, verl itself cannot use it here: No module named 'megatron'" in out
    assert "missing: recipes with strategy=megatron" in out


def test_doctor_as_json(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.recipes = {"tiny_pdm": ["no world"]}
    content = json.loads(run(capsys, "doctor", "--json")[1])
    assert content["broken"] is False
    assert content["recipes"] == {"tiny_pdm": ["no world"]}
    assert content["packages"][0]["requirement"]["package"] == "verl"


def test_doctor_accepts_a_version_by_flag(
    report: doctor.Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.ACCEPT_VERL, "")
    run(capsys, "doctor", "--accept-verl", "0.9.7")
    assert cli.os.environ[environment.ACCEPT_VERL] == "0.9.7"


def test_a_broken_import_of_the_plugin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ImportError("No module named 'wrapt'")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = doctor.examine()
    assert "No module named 'wrapt'" in found.failed["plugin"] and found.broken


@pytest.mark.parametrize(
    ("recipe", "absent", "says"),
    [
        ("tiny_pdm", "vLLM", []),
        ("tiny_pdm_vllm", "vLLM", ["vLLM is not installed (supported: >=0.24.0, <0.31)"]),
        ("pdm_qwen3_30b", "megatron-core", ["megatron-core is not installed"]),
        ("pdm_qwen3_30b", "transformer-engine", ["transformer-engine is not installed"]),
        ("tiny_pdm", "TransferQueue", ["TransferQueue is not installed"]),
    ],
)
def test_what_a_recipe_needs(
    report: doctor.Report, composed: Callable[..., DictConfig], recipe: str, absent: str, says: list[str]
) -> None:
    without(report, absent)
    found = list(doctor.needs(composed(recipe), report.packages))
    assert len(found) == len(says)
    assert all(text in problem for text, problem in zip(says, found, strict=True))


def test_an_unsupported_version_is_named(report: doctor.Report, composed: Callable[..., DictConfig]) -> None:
    report.packages = tuple(
        environment.Found(requirement=item.requirement, distribution="vllm", version="0.19.0", verdict="unsupported")
        if item.requirement.package == "vLLM"
        else item
        for item in report.packages
    )
    assert list(doctor.needs(composed("tiny_pdm_vllm"), report.packages)) == [
        "vLLM 0.19.0 is not supported (supported: >=0.24.0, <0.31)"
    ]


def test_show(stub_files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "tiny_pdm", *stub_files, f"{LOSS}.direction=ratio")
    assert code == 0
    assert "loss: pdm_topk_kl: minus advantage x min(r, 10)" in out
    assert "note: direction=ratio overrides what loss_mode=pdm_topk_kl names." in out
    assert f"  {LOSS}.loss_mode: vanilla -> pdm_topk_kl" in out
    assert f"  {LOSS}.delta: (absent) -> 0.05" in out
    assert "critic.rollout_n" not in out and "keys that follow" in out


@pytest.mark.parametrize(("recipe", "platform"), [("tiny_pdm", "cpu"), ("pdm_qwen3_30b", None)])
def test_show_chooses_the_platform_as_the_trainer_does(
    recipe: str, platform: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "to be restored")
    monkeypatch.delenv("VERL_PLATFORM")
    run(capsys, "show", recipe)
    assert cli.os.environ.get("VERL_PLATFORM") == platform


def test_show_with_keys_has_those_that_follow_and_what_ours_mean(
    stub_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "show", "tiny_pdm", "--keys", *stub_files)
    assert "critic.rollout_n: 1 -> 8" in out
    assert f"  {LOSS}.truncation: 10.0" in out and KEYS["truncation"].sentence.split(";")[0] in out


def test_show_as_json(stub_files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "tiny_pdm", "--json", *stub_files, "actor_rollout_ref.rollout.top_p=0.9")
    content = json.loads(out)
    assert code == 1
    assert len(content["problems"]) == 1 and "top_p=0.9" in content["problems"][0]
    changed = {entry["key"]: entry for entry in content["changes"]}
    assert changed["actor_rollout_ref.rollout.n"] == {
        "key": "actor_rollout_ref.rollout.n",
        "old": 1,
        "new": 8,
        "stated": True,
    }
    assert changed["critic.rollout_n"]["stated"] is False


def test_show_prints_problems_and_fails(stub_files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "tiny_pdm", *stub_files, f"{LOSS}.delta=-1")
    assert code == 1
    assert "problem: actor_rollout_ref.actor.policy_loss.delta=-1" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny_pdn"], ["tiny_pdn: is not there", "Did you mean tiny_pdm"]),
        (["tiny_pdm", "trainer"], ["'trainer' is not an override. Write KEY=VALUE."]),
        (["tiny_pdm", f"{LOSS}.detla=1"], [f"override {LOSS}.detla=1", f"Did you mean '{LOSS}.delta'?"]),
        (["tiny_pdm", "trainer.nnodes=[["], ["tiny_pdm.yaml", "no viable alternative"]),
        (["tiny_pdm", "world=${oc.env:VERL_PLUGINS_NO_SUCH}"], ["interpolation", "VERL_PLUGINS_NO_SUCH"]),
        (["tiny_pdm", "model_engine=nothing"], ["model_engine", "nothing"]),
    ],
)
def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str], words: list[str], says: list[str]) -> None:
    code, out, err = run(capsys, "show", *words)
    assert code == 2 and out == ""
    assert "Traceback" not in err
    for text in says:
        assert text in err


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["lst"])
    assert stop.value.code == 2
    assert "invalid choice: 'lst'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list", "tiny_pdm"], ["show", "tiny_pdm", "--kyes"], ["doctor", "--jsn", "a=1"]])
def test_an_argument_that_is_not_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_changes_against_the_defaults_of_the_same_engine(composed: Callable[..., DictConfig]) -> None:
    config = composed("pdm_qwen3_30b")
    defaults = verl_defaults(config)
    found = {change.key: change for change in changes(config, defaults)}
    assert defaults.model_engine == "megatron"
    assert "actor_rollout_ref.actor.strategy" not in found
    assert found["trainer.v1.trainer_mode"].old == "sync"
    assert found[f"{LOSS}.anchor"].old == ABSENT
    assert changes(defaults, defaults) == []


def test_a_recipe_of_the_users_own_composes_from_ours(tmp_path: Path) -> None:
    recipe = tmp_path / "it's mine.yaml"
    recipe.write_text("defaults: [tiny_dppo, _self_]\ntrainer: {experiment_name: mine}\n")
    config = compose(find_recipe(str(recipe)))
    assert config.trainer.experiment_name == "mine"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "dppo_topk_kl"


def test_a_default_that_is_not_there(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [tiny_nothing, _self_]\n")
    with pytest.raises(ComposeError, match="tiny_nothing"):
        compose(find_recipe(str(recipe)))
