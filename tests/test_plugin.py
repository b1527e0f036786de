from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import verl  # noqa: F401 - loads the plugin as verl does
from verl.plugin.platform import PlatformRegistry
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn

from verl_plugins import plugin
from verl_plugins.losses.trust_region import PRESETS
from verl_plugins.registrations import STATUS, Registration, Status, check_signature, registrations


@pytest.fixture
def clean_status(monkeypatch: pytest.MonkeyPatch) -> Iterator[Status]:
    for name in ("failed", "absent"):
        monkeypatch.setattr(STATUS, name, dict(getattr(STATUS, name)))
    yield STATUS
    STATUS.done.pop("test", None)  # what really is registered stays registered


def registration(register: str, waits_for: str = "verl") -> Registration:
    return Registration(
        kind="test", names=("x",), waits_for=waits_for, register=register, chosen_by="key", sentence="Sentence."
    )


def raises() -> None:
    raise ValueError("policy loss 'x' is registered already")


def test_verl_itself_has_loaded_the_plugin() -> None:
    assert "verl_plugins.plugin" in sys.modules
    assert "platform" in STATUS.done
    assert PlatformRegistry.get("cpu") is not None


def test_forcing_registers_everything_verl_can_use_here(clean_status: Status) -> None:
    status = plugin.force()
    assert status.failed == {}
    assert {*status.done, *status.absent} == {item.kind for item in registrations()}
    assert {"platform", "policy loss", "rollout hf_cpu", "rollout vllm", "engine fsdp", "trainer"} <= set(status.done)
    for why in status.absent.values():
        assert "megatron" in why
    for name in PRESETS:
        assert get_policy_loss_fn(name).__module__ == "verl_plugins.losses.policy"


def test_a_registration_that_fails_is_kept_and_raised(clean_status: Status) -> None:
    with pytest.raises(ValueError, match="registered already"):
        plugin._run(registration(f"{__name__}:raises"))
    assert "ValueError: policy loss 'x' is registered already" in clean_status.failed["test"]
    problem = clean_status.problem()
    assert problem is not None and "test: ValueError: policy loss 'x' is registered already" in problem


def test_a_registration_that_succeeds_later_is_forgiven(clean_status: Status) -> None:
    clean_status.failed["test"] = "an earlier failure"
    plugin._run(registration(f"{__name__}:registration_that_works"))
    assert clean_status.problem() is None
    assert clean_status.done["test"] == ("x",)


def registration_that_works() -> None:
    pass


def test_forcing_collects_failures_and_absences(clean_status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    items = (registration("", waits_for="nothing_of_that_name"), registration("", waits_for=f"{__name__}_broken"))
    monkeypatch.setattr(plugin, "registrations", lambda: (items[0], replace(items[1], kind="broken")))

    def import_module(name: str) -> object:
        if name.endswith("_broken"):
            raise RuntimeError("half of it is missing")
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    status = plugin.force()
    assert status.absent["test"] == "No module named 'nothing_of_that_name'"
    assert "RuntimeError: half of it is missing" in status.failed["broken"]


def test_a_name_that_another_package_took_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_plugins.losses.policy import register

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "pdm_topk_kl", raises)
    with pytest.raises(ValueError, match=r"policy loss 'pdm_topk_kl' is registered already, by .*test_plugin"):
        register()


def test_registering_twice_is_no_clash() -> None:
    from verl_plugins.losses.policy import register

    register()
    assert get_policy_loss_fn("pdm_topk_kl").__module__ == "verl_plugins.losses.policy"


def test_a_signature_verl_cannot_call_is_refused() -> None:
    def short(log_prob: object, advantages: object) -> None: ...

    def anything(**keywords: object) -> None: ...

    check_signature(short, ("log_prob", "advantages"), "policy loss")
    check_signature(anything, ("log_prob", "config"), "policy loss")
    with pytest.raises(TypeError, match=r"policy loss: verl calls it with \['config'\], which .*short does not take"):
        check_signature(short, ("log_prob", "config"), "policy loss")


def test_the_names_of_verl_are_left_alone() -> None:
    assert POLICY_LOSS_REGISTRY["vanilla"].__module__ == "verl.trainer.ppo.core_algos"
    assert not {name for name in PRESETS if name in ("vanilla", "gspo", "dppo_tv", "dppo_kl", "cispo")}


@pytest.mark.parametrize("argv", [["python", "-m", "pytest"], ["python", "train.py"]])
def test_arguments_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.setattr(sys, "argv", ["prog", "--config", "nowhere.yaml"])
    plugin._activate()
    assert sys.argv == ["prog", "--config", "nowhere.yaml"]


def test_the_trainers_argument_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "verl.trainer.main_ppo"])
    monkeypatch.setattr(sys, "argv", ["main_ppo.py", "--config", "nowhere.yaml"])
    with pytest.raises(SystemExit) as stop:
        plugin._activate()
    assert str(stop.value.code).startswith("verl_plugins: --config nowhere.yaml: is not there")


def test_a_recipe_of_ours_never_runs_without_the_plugin(
    repository: Path, stub_files: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"]
    command += ["--config-dir", str(repository / "recipes"), "--config-name", "tiny_pdm", *stub_files]
    command += [f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    environment.pop("VERL_PLATFORM", None)  # the CPU platform is the plugin's
    done = subprocess.run(
        command,
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "verl did not load the plugin (VERL_USE_EXTERNAL_PLUGINS=none)" in done.stderr
    assert "nothing was started" in done.stderr
