"""What `verl-plugins doctor` finds out: versions, registrations, and what is missing for which recipe."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_plugins import environment, launch

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(kw_only=True)
class Report:
    """All findings; `broken` says whether a recipe of ours would not do what it says."""

    packages: tuple[environment.Found, ...]
    entry_point: list[str]  # why verl would not load the plugin; empty if it does
    verl: str | None  # why this verl must not be trusted; None if it may
    done: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # kind of registration -> traceback
    absent: dict[str, str] = field(default_factory=dict)  # kind -> why verl itself cannot use that registry
    recipes: dict[str, list[str]] = field(default_factory=dict)  # name -> what is missing; empty list: ready

    @property
    def broken(self) -> bool:
        """Whether a registration failed, verl is unsupported, or verl would not load the plugin."""
        return bool(self.failed or self.verl or self.entry_point)


def examine() -> Report:
    """Look at everything. Imports verl and every registry of it (about ten seconds)."""
    report = Report(
        packages=environment.find_all(),
        entry_point=list(environment.entry_point_problems()),
        verl=environment.verl_problem(),
    )
    if any(item.verdict == "missing" and item.requirement.package == "verl" for item in report.packages):
        return report
    try:
        _choose_platform()
        plugin = importlib.import_module("verl_plugins.plugin")
    except Exception:
        report.failed["plugin"] = traceback.format_exc()
        return report
    status = plugin.force()
    report.done, report.failed, report.absent = dict(status.done), dict(status.failed), dict(status.absent)
    for name in launch.recipe_names():
        report.recipes[name] = list(_missing(name, report))
    return report


def needs(config: DictConfig, packages: tuple[environment.Found, ...]) -> Iterator[str]:
    """Yield the packages a composed recipe asks for that are not there, or not in a supported version."""
    by_name = {item.requirement.package: item for item in packages}
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    asked = [item.requirement.package for item in packages if item.requirement.needed_by == "every recipe"]
    asked += ["vLLM"] if rollout.name == "vllm" else []
    if actor.strategy == "megatron":
        asked += ["megatron-core"]
        asked += ["transformer-engine"] if actor.megatron.override_transformer_config.get("fp8") else []
    for name in asked:
        item = by_name[name]
        if item.verdict == "missing":
            yield f"{name} is not installed (supported: {item.requirement.supported})"
        elif item.verdict == "unsupported":
            yield f"{name} {item.version} is not supported (supported: {item.requirement.supported})"


def _choose_platform() -> None:
    """With a torch built for CUDA and no device, verl would take this for the head node of a cluster."""
    torch = importlib.import_module("torch")
    if not torch.accelerator.is_available():
        os.environ.setdefault("VERL_PLATFORM", "cpu")


def _missing(name: str, report: Report) -> Iterator[str]:
    from verl_plugins import checks
    from verl_plugins.compose import ComposeError, compose

    try:
        config = compose(launch.find_recipe(name))
    except (ComposeError, launch.RecipeError) as error:
        yield str(error)
        return
    yield from needs(config, report.packages)
    yield from checks.problems(config)
