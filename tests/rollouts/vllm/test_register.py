from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_plugins.rollouts import vllm


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    monkeypatch.setitem(_ROLLOUT_REGISTRY, ("vllm", "async"), "verl.workers.rollout.vllm_rollout.ServerAdapter")


def test_registering_twice_is_registering_once() -> None:
    vllm.register()
    vllm.register()
    assert RolloutReplicaRegistry._registry["vllm"] is vllm.load_replica
    assert _ROLLOUT_REGISTRY[("vllm", "async")] == vllm.ADAPTER


def test_another_plugins_replica_is_not_replaced() -> None:
    RolloutReplicaRegistry.register("vllm", lambda: object)
    with pytest.raises(ValueError, match=r"registered by .*test_register; two plugins cannot both replace it"):
        vllm.register()


def test_another_plugins_adapter_is_not_replaced() -> None:
    _ROLLOUT_REGISTRY[("vllm", "async")] = "other.Adapter"
    with pytest.raises(ValueError, match=r"other\.Adapter; two plugins"):
        vllm.register()


def test_registration_does_not_import_vllm() -> None:
    program = (
        "import sys, verl.workers.rollout.replica\n"
        "from verl_plugins.rollouts import vllm\n"
        "vllm.register()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'vllm'], 'vLLM was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_verl_resolves_our_classes() -> None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    vllm.register()
    assert get_rollout_replica_class("vllm").__name__ == "TopKvLLMReplica"
    assert get_rollout_class("vllm").__name__ == "WatchedServerAdapter"
