"""What verl loads through the entry point `verl.plugins`: registers everything, once, in each process of a run.

verl imports this module at the end of `import verl`, in the driver and in every worker. Most of what we register lives
in modules of verl that take seconds to import and that most of those processes never use, so each registration runs
when verl itself imports the registry it belongs to (`wrapt.when_imported`). `doctor` and the trainer force them all.

verl drops an exception raised here and logs it at DEBUG. It is therefore kept in `STATUS`, and every recipe of ours
asks `STATUS` before anything starts (`verl_plugins.checks.RecipeGuard`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import wrapt

from verl_plugins import __version__, launch


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One registry of verl, what we put there, and the module of verl that holds it."""

    kind: str
    names: tuple[str, ...]
    waits_for: str
    register: str  # "module:function" of ours


@dataclass
class Status:
    """What has happened so far in this process."""

    done: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Return why the plugin must not be trusted, or None."""
        if not self.failed:
            return None
        return "; ".join(f"{kind}: {why.strip().splitlines()[-1]}" for kind, why in self.failed.items())


STATUS = Status()


def registrations() -> tuple[Registration, ...]:
    """Return everything this package registers in verl."""
    from verl_plugins.losses.trust_region import PRESETS

    return (
        Registration(
            kind="platform",
            names=("cpu",),
            waits_for="verl.plugin.platform",
            register="verl_plugins.platforms.cpu:register",
        ),
        Registration(
            kind="policy loss",
            names=tuple(PRESETS),
            waits_for="verl.trainer.ppo.core_algos",
            register="verl_plugins.losses.policy:register",
        ),
        Registration(
            kind="rollout hf_cpu",
            names=("hf_cpu",),
            waits_for="verl.workers.rollout.replica",
            register="verl_plugins.rollouts.hf_cpu.replica:register",
        ),
        Registration(
            kind="rollout vllm",
            names=("vllm",),
            waits_for="verl.workers.rollout.replica",
            register="verl_plugins.rollouts.vllm:register",
        ),
        Registration(
            kind="engine fsdp",
            names=("fsdp", "fsdp2"),
            waits_for="verl.workers.engine.fsdp.transformer_impl",
            register="verl_plugins.topk.engines:register_fsdp",
        ),
        Registration(
            kind="engine megatron",
            names=("megatron",),
            waits_for="verl.workers.engine.megatron.transformer_impl",
            register="verl_plugins.topk.engines_megatron:register_megatron",
        ),
        Registration(
            kind="trainer",
            names=("verl_plugins",),
            waits_for="verl.trainer.ppo.v1.trainer_sync",
            register="verl_plugins.trainers.sync:register",
        ),
    )


def check_signature(function: Callable[..., object], keywords: tuple[str, ...], what: str) -> None:
    """Refuse a function that verl would fail to call, naming what is missing.

    Raises:
        TypeError: verl passes a keyword that the function does not take.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in keywords if name not in parameters]
    if missing and not takes_any:
        raise TypeError(f"{what}: verl calls it with {missing}, which {function.__qualname__} does not take")


def _run(item: Registration) -> None:
    if item.kind in STATUS.done:
        return
    module, function = item.register.split(":")
    try:
        getattr(importlib.import_module(module), function)()
    except Exception:
        STATUS.failed[item.kind] = traceback.format_exc()
        raise
    STATUS.failed.pop(item.kind, None)
    STATUS.done[item.kind] = item.names


def force(kind: str | None = None) -> Status:
    """Import what the registrations wait for, so that all of them run now; failures are collected, not raised.

    A registry whose module cannot be imported (Megatron is not installed, say) is listed as absent: verl cannot use it
    either.
    """
    for item in registrations():
        if kind is not None and item.kind != kind:
            continue
        try:
            importlib.import_module(item.waits_for)
        except ImportError as error:
            if item.kind not in STATUS.failed:
                STATUS.absent[item.kind] = str(error)
        except Exception:
            STATUS.failed.setdefault(item.kind, traceback.format_exc())
    return STATUS


def _activate() -> None:
    driver = launch.is_trainer_program(sys.orig_argv)
    if driver:
        try:
            if launch.translate(sys.argv) is not None:
                launch.add_recipes_to_hydra()
        except launch.RecipeError as error:
            raise SystemExit(f"verl_plugins: {error}") from None
    for item in registrations():
        if item.kind == "platform":  # verl asks for the platform while it is still being imported
            _run(item)
        else:
            wrapt.when_imported(item.waits_for)(lambda _module, item=item: _run(item))
    if driver:
        waiting = ", ".join(item.kind for item in registrations() if item.kind != "platform")
        print(f"verl_plugins {__version__}: platform cpu registered; ready for {waiting}", file=sys.stderr)


_activate()
