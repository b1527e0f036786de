"""Faults inside a run's own processes: Python imports this module in each of them when its folder is on PYTHONPATH.
VERL_PLUGINS_FAULT says which fault."""

from __future__ import annotations

import os

import wrapt

FAULT = os.environ.get("VERL_PLUGINS_FAULT", "")


def _fail_second_sync(module) -> None:
    original, calls = module.HFCPUServer.load_weights, []

    async def load_weights(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("injected: the second weight synchronisation fails")
        return await original(self, *args, **kwargs)

    module.HFCPUServer.load_weights = load_weights


def _fail_reward(module) -> None:
    def compute_score(*args, **kwargs):
        raise RuntimeError("injected: the reward function fails")

    module.compute_score = compute_score


if FAULT == "weight_sync":
    wrapt.when_imported("verl_plugins.rollouts.hf_cpu.server")(_fail_second_sync)
if FAULT == "reward":
    wrapt.when_imported("reward")(_fail_reward)
