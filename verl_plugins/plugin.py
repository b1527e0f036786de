"""What verl loads through the entry point `verl.plugins`: registers everything, once, in each process of a run.

verl imports this module at the end of `import verl`, in the driver and in every worker. Most of what we register lives
in modules of verl that take seconds to import and that most of those processes never use, so each registration runs
when verl itself imports the registry it belongs to (`wrapt.when_imported`). `doctor` and the trainer force them all.

verl drops an exception raised here and logs it at DEBUG. It is therefore kept in `STATUS`, and every recipe of ours
asks `STATUS` before anything starts (`verl_plugins.checks.RecipeGuard`).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from types import ModuleType

import wrapt

from verl_plugins import __version__, launch
from verl_plugins.registrations import DEFERRED, STATUS, Registration, Status, registrations


def _run(item: Registration) -> None:
    if item.kind in STATUS.done:
        return
    module, function = item.register.split(":")
    try:
        loaded = importlib.import_module(module)
        if not hasattr(loaded, function) and getattr(loaded.__spec__, "_initializing", False):
            DEFERRED[module] = functools.partial(_run, item)
            return
        getattr(loaded, function)()
    except Exception:
        STATUS.failed[item.kind] = traceback.format_exc()
        raise
    STATUS.failed.pop(item.kind, None)
    STATUS.done[item.kind] = item.names


def _on_import(item: Registration, _module: ModuleType) -> None:
    _run(item)


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
            recipe = launch.translate(sys.argv)
            if recipe is not None:
                launch.add_recipes_to_hydra(recipe)
                # A torch built for CUDA looks the same on a laptop as on the head node of a cluster.
                if launch.wants_cpu(recipe, sys.argv):
                    os.environ.setdefault("VERL_PLATFORM", "cpu")
        except launch.RecipeError as error:
            raise SystemExit(f"verl_plugins: {error}") from None
    for item in registrations():
        if item.kind == "platform":  # verl asks for the platform while it is still being imported
            _run(item)
            importlib.import_module("verl_plugins.platforms.cpu").activate()
        else:
            wrapt.when_imported(item.waits_for)(functools.partial(_on_import, item))
    if driver:
        waiting = ", ".join(item.kind for item in registrations() if item.kind != "platform")
        print(f"verl_plugins {__version__}: platform cpu registered; ready for {waiting}", file=sys.stderr)


_activate()
