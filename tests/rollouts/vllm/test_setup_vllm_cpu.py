from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
HERE = ("Linux", "x86_64", ("glibc", "2.36"), (3, 11), "flags : sse4_2 avx avx2 fma")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_vllm_cpu", REPOSITORY / "tools" / "setup_vllm_cpu.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, "Darwin", "Linux on x86_64"),
        (1, "aarch64", "Linux on x86_64"),
        (2, ("glibc", "2.28"), "glibc 2.31 or newer"),
        (2, ("", ""), "glibc 2.31 or newer"),
        (3, (3, 13), "use 3.11 or 3.12"),
        (4, "flags : sse4_2 avx", "no AVX2"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why(tool: ModuleType, position: int, value: object, reason: str) -> None:
    assert tool.machine_problem(*HERE) == ""
    machine = list(HERE)
    machine[position] = value  # type: ignore[call-overload]
    assert reason in tool.machine_problem(*machine)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        (("2.13.0+cpu", "5.10.4", None), ""),
        (("2.13.0", "5.10.9", None), ""),
        ((None, "5.10.4", None), "torch is absent"),
        (("2.11.0", "5.10.4", None), "torch 2.11.0"),
        (("2.13.0", "5.11.0", None), "transformers 5.11.0"),
        (("2.13.0", "5.9.0", None), "transformers 5.9.0"),
        (("2.13.0", "5.10.4", "0.24.0"), "vllm 0.24.0 is installed"),
    ],
)
def test_an_environment_that_does_not_suit_is_told_why(tool: ModuleType, versions: tuple, reason: str) -> None:
    problem = tool.environment_problem(*versions)
    assert reason in problem and bool(reason) == bool(problem)


def test_every_requirement_is_pinned_and_torch_is_not_among_them(tool: ModuleType) -> None:
    pins = tool.parse_pins(tool.REQUIREMENTS.read_text())
    assert pins["vllm-cpu"] == "0.30.0" and len(pins) > 60
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "transformers", "verl"} & set(pins)


def test_pins_agree_with_the_environment_below(tool: ModuleType) -> None:
    below = tool.parse_pins(
        "\n".join(
            line
            for line in (REPOSITORY / "requirements" / "cpu.lock").read_text().splitlines()
            if "==" in line and not line.startswith((" ", "#", "-"))
        ).replace(" \\", "")
    )
    pins = tool.parse_pins(tool.REQUIREMENTS.read_text())
    assert {name: (below[name], pins[name]) for name in below.keys() & pins.keys() if below[name] != pins[name]} == {}


def test_only_what_is_missing_is_installed(tool: ModuleType) -> None:
    pytest_version = tool.installed_version("pytest")
    pins = {"pytest": pytest_version, "a-distribution-nobody-has": "1.0"}
    assert tool.missing_pins(pins) == ["a-distribution-nobody-has==1.0"]
    assert tool.missing_pins({"pytest": "0.0"}) == ["pytest==0.0"]
