"""Composes a recipe as verl's own command line does and compares it with verl's defaults; starts nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_plugins.launch import search_folders
from verl_plugins.losses.trust_region import nearest

VERL_CONFIG_MODULE = "verl.trainer.config"
VERL_CONFIG_NAME = "ppo_trainer"
ABSENT = "(absent)"


class ComposeError(ValueError):
    """The recipe or an override cannot be composed; the message is Hydra's, with a hint where we have one."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key whose value differs from verl's default; `stated` is False where it only follows another key."""

    key: str
    old: Any
    new: Any
    stated: bool


def compose(recipe: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the configuration that `python -m verl.trainer.main_ppo --config RECIPE OVERRIDES` would run with.

    Raises:
        ComposeError: Hydra refuses the recipe or an override.
    """
    folders = search_folders(recipe)
    try:
        return _compose(recipe.stem, list(overrides), folders)
    except (HydraException, OmegaConfBaseException) as error:
        raise ComposeError(f"{recipe.name}: {_explain(error, recipe, overrides, folders)}") from error


def verl_defaults(config: DictConfig) -> DictConfig:
    """Return verl's own configuration for the engine that `config` uses."""
    engine = config.get("model_engine")
    return _compose(VERL_CONFIG_NAME, [f"model_engine={engine}"] if engine else [], [])


def changes(config: DictConfig, defaults: DictConfig) -> list[Change]:
    """Return every leaf of `config` that differs from `defaults`, resolved, sorted by key.

    Raises:
        ComposeError: an interpolation of the recipe cannot be resolved.
    """
    try:
        new, old = dict(_leaves(config, resolve=True)), dict(_leaves(defaults, resolve=True))
    except OmegaConfBaseException as error:
        raise ComposeError(f"an interpolation cannot be resolved: {error}") from error
    raw_new, raw_old = dict(_leaves(config, resolve=False)), dict(_leaves(defaults, resolve=False))
    return [
        Change(
            key=key,
            old=old.get(key, ABSENT),
            new=new.get(key, ABSENT),
            stated=raw_new.get(key, ABSENT) != raw_old.get(key, ABSENT),
        )
        for key in sorted({*new, *old})
        if new.get(key, ABSENT) != old.get(key, ABSENT)
    ]


def key_names(config: DictConfig) -> list[str]:
    """Return the dotted name of every leaf and section, for hints."""
    leaves = [key for key, _ in _leaves(config, resolve=False)]
    parts = [key.split(".") for key in leaves]
    return sorted({".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)})


def _compose(name: str, overrides: list[str], folders: Sequence[Path]) -> DictConfig:
    # What hydra.main does. Hydra's public compose API finds a primary configuration in one folder only.
    search_path = create_config_search_path(f"pkg://{VERL_CONFIG_MODULE}")
    for folder in folders:
        search_path.prepend("recipe", f"file://{folder}", SearchPathQuery(provider="schema"))
    with _fresh_hydra():
        Hydra.create_main_hydra2(task_name=name, config_search_path=search_path)
        composed: DictConfig = hydra_compose(config_name=name, overrides=overrides)
        return composed


@contextlib.contextmanager
def _fresh_hydra() -> Iterator[None]:
    """Hydra keeps one global state; leave none behind."""
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def _explain(error: Exception, recipe: Path, overrides: Sequence[str], folders: Sequence[Path]) -> str:
    causes = [str(part).strip() for part in (error, error.__cause__) if part is not None and str(part).strip()]
    text = "\n".join(dict.fromkeys(causes))
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if key and key in text and "=" in override:
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                hint = nearest(key, key_names(_compose(recipe.stem, [], folders)))
                return f"override {override}:{hint} Hydra says: {text}"
    return text


def _leaves(node: Any, *, resolve: bool, prefix: str = "") -> Iterator[tuple[str, Any]]:
    content: Any = OmegaConf.to_container(node, resolve=resolve) if isinstance(node, DictConfig | ListConfig) else node
    if not isinstance(content, Mapping) or not content:
        yield prefix, content
        return
    for key, value in content.items():
        yield from _leaves(value, resolve=resolve, prefix=f"{prefix}.{key}" if prefix else str(key))
