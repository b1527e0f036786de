"""The CPU platform: who is chosen where, and verl's own code on top of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from verl.plugin.platform import PlatformRegistry, platform_manager
from verl.utils.device import get_nccl_backend
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.flops_counter import get_device_flops
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.profiler.performance import _get_current_mem_info

from verl_plugins.platforms import cpu

cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch):
    """Give each test verl's own platforms plus ours, no platform decided, and a clean environment."""
    own = {name: PlatformRegistry.get(name) for name in ("nvidia", "huawei", "amd")}
    monkeypatch.setattr(PlatformRegistry, "_platforms", {name: found for name, found in own.items() if found})
    monkeypatch.setattr(platform_manager, "_current_platform", None)
    for variable in (cpu.PLATFORM_VARIABLE, "OMP_NUM_THREADS", "TQ_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    cpu.register()


def accelerator(*, available: bool | Exception) -> type[cpu.PlatformCPU]:
    """A vendor's platform as a plugin would bring it."""

    class Vendor(cpu.PlatformCPU):
        device_name = "vendor"

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            if isinstance(available, Exception):
                raise available
            return available

    return Vendor


@cpu_build
def test_verl_chooses_the_cpu_where_there_is_nothing_else():
    assert platform_manager.get_platform().device_name == "cpu"
    assert cpu.chosen()


@cpu_build
def test_activation_sets_the_environment_and_leaves_what_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert cpu.activate()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TQ_NUM_THREADS"]) == ("4", "1")
    assert platform_manager._current_platform is None  # a platform registered later must still be able to win


@pytest.mark.parametrize("build", ["cuda", "hip", "xpu"])
def test_nothing_changes_where_torch_is_built_for_an_accelerator(monkeypatch: pytest.MonkeyPatch, build: str):
    monkeypatch.setattr(torch.version, build, "12.8", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.2" if build == "hip" else None, raising=False)
    assert not cpu.activate()
    assert "TQ_NUM_THREADS" not in os.environ
    assert platform_manager._detect_platform_name() != "cpu"


@cpu_build
def test_a_platform_registered_after_ours_wins():
    PlatformRegistry.register(platform="vendor")(accelerator(available=True))
    assert not cpu.chosen()
    assert platform_manager.get_platform().device_name == "vendor"


@cpu_build
@pytest.mark.parametrize("available", [False, RuntimeError("driver too old")])
def test_a_platform_that_is_not_there_does_not(available: bool | Exception):
    PlatformRegistry.register(platform="vendor")(accelerator(available=available))
    assert platform_manager.get_platform().device_name == "cpu"


@pytest.mark.parametrize(("asked", "expected"), [("cpu", True), (" CPU ", True), ("nvidia", False)])
def test_the_environment_variable_decides(monkeypatch: pytest.MonkeyPatch, asked: str, expected: bool):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv(cpu.PLATFORM_VARIABLE, asked)
    assert cpu.chosen() is expected
    assert (platform_manager._detect_platform_name() == "cpu") is expected


def test_registering_twice_is_quiet(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    cpu.register()
    assert not caplog.records


@cpu_build
def test_verl_reads_no_device_memory_and_knows_the_speed():
    assert _get_current_mem_info() == ("0.00", "0.00", "0.00", "0.00")
    assert 0 < get_device_flops() < float("inf")
    aggressive_empty_cache()


def test_device_module_answers_what_torch_cpu_lacks():
    device = cpu.PlatformCPU.device_module
    assert device == torch.cpu and device != torch.cuda and hash(device) is not None
    assert device.current_device() == "cpu" and device.device_count() >= 1
    assert not device.is_available()
    assert 50e6 < device.max_memory_allocated() < 1e12  # bytes: this process has torch loaded
    device.empty_cache(), device.ipc_collect(), device.synchronize(), device.set_device(0)


def test_restoring_the_generator_reproduces_the_draw():
    state = torch.get_rng_state()
    first = torch.rand(3)
    cpu.PlatformCPU.device_module.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


@cpu_build
def test_verl_builds_its_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, value in {**rank, "DIST_INIT_METHOD": f"file://{tmp_path}/rendezvous"}.items():
        monkeypatch.setenv(variable, value)
    initialize_global_process_group_ray()
    try:
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert (torch.distributed.get_backend(), total.item()) == ("gloo", 1.0)
        initialize_global_process_group_ray()  # every engine of a worker asks again
    finally:
        torch.distributed.destroy_process_group()


@cpu_build
def test_a_process_that_is_no_rank_makes_no_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    assert get_nccl_backend() == "gloo"
    assert not torch.distributed.is_initialized()


def test_vllm_gets_its_environment_and_keeps_the_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    variables = cpu.PlatformCPU().rollout_env_vars()
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
