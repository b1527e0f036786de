"""A `cpu` platform for verl 0.9.1, which ships platforms for NVIDIA, AMD and Huawei only.

Registering it changes nothing on a machine with an accelerator: verl probes its own platforms first, and this one
declines wherever another is available or torch was built for one. A CUDA build of torch without a GPU keeps verl's own
answer (`nvidia`), because the head node of a GPU cluster looks just like that; there, ask for the CPU by
VERL_PLATFORM=cpu.

Each method that is more than "nothing to do here" names the line of verl that needs it.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME: Final = "cpu"
PLATFORM_VARIABLE: Final = "VERL_PLATFORM"
_GROUP_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_GROUP_TIMEOUT = timedelta(minutes=30)

logger = logging.getLogger(__name__)

# Two OpenMP threads on two shared cores wait milliseconds for each other in every small operation, and TransferQueue
# raises the thread count of torch around each put and get unless told (transfer_queue reads TQ_NUM_THREADS).
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "1"}


def register() -> None:
    """Put the platform into verl's registry, behind all that are there."""
    if PlatformRegistry.get(NAME) is not PlatformCPU:
        PlatformRegistry.register(platform=NAME)(PlatformCPU)


def chosen() -> bool:
    """Return whether verl runs on this platform, without making verl decide now.

    verl decides once, at its first question; a plugin that asks too early would shut out the platforms of plugins that
    load after it.
    """
    asked = os.environ.get(PLATFORM_VARIABLE, "").strip().lower()
    return asked == NAME if asked else PlatformCPU().is_platform_available()


def activate() -> bool:
    """Set what a CPU run needs in the environment, if it is a CPU run. Ray's workers inherit it.

    Values that are set already stay.

    Returns:
        whether this is a CPU run.
    """
    if not chosen():
        return False
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    return True


class CPUDevice(ModuleType):
    """`torch.cpu`, with the questions verl asks of a device module and `torch.cpu` lacks.

    Equal to `torch.cpu`, which verl tests for before it reads device memory (utils/profiler/performance.py:45) and
    before it looks up the speed of a device (utils/flops_counter.py:77).
    """

    def __init__(self) -> None:
        super().__init__("verl_plugins.platforms.cpu.device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is torch.cpu

    __hash__ = ModuleType.__hash__

    def is_available(self) -> bool:
        """Return False: verl asks whether there is accelerator memory to manage (utils/memory_utils.py:80-135)."""
        return False

    def get_device_name(self, *_: object) -> str:
        """Return the name verl's table of speeds knows (utils/flops_counter.py:80)."""
        return "CPU"

    def empty_cache(self) -> None:
        """Do nothing (workers/engine_workers.py:769, utils/fsdp_utils.py)."""

    def ipc_collect(self) -> None:
        """Do nothing (workers/rollout/vllm_rollout/bucketed_weight_transfer.py:220)."""

    def max_memory_allocated(self, *_: object) -> int:
        """Return the peak resident memory of this process in bytes (workers/engine_workers.py:219)."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    max_memory_reserved = max_memory_allocated  # workers/engine_workers.py:220

    def set_rng_state(self, state: Tensor, *_: object) -> None:
        """Restore the state of torch's generator (utils/checkpoint/checkpoint_manager.py:219)."""
        torch.set_rng_state(state)


_DEVICE: Final = CPUDevice()


class PlatformCPU(PlatformBase):
    """verl's questions about its hardware, answered for a machine without an accelerator."""

    device_name = NAME
    vendor_name = NAME
    device_module = _DEVICE

    def is_available(self) -> bool:
        """Return True: every machine has one."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return whether the CPU is all there is.

        verl takes the first platform that says yes (plugin/platform/platform_manager.py:100); one registered after
        ours would never be asked, so we ask it.
        """
        if any(getattr(torch.version, build, None) for build in ("cuda", "hip", "xpu")):
            return False
        return not any(_is_there(name) for name in PlatformRegistry.registered_names() if name != NAME)

    def current_device(self) -> Any:
        """Return "cpu": verl passes it to `.to()` and `torch.device()`, where its usual 0 means cuda:0."""
        return NAME

    def device_count(self) -> int:
        """Return one device."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: the CPU is never behind."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: `expandable_segments` is CUDA's (utils/device.py:143)."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return "gloo", and make the process group if this process is a rank without one.

        verl builds f"cpu:gloo,{device}:{backend}" (utils/distributed.py:89), which torch refuses for the device cpu
        as a duplicate. It asks for this name first and then skips a group that exists (:90), so the group is made here.
        """
        distributed = torch.distributed
        if not distributed.is_initialized() and os.environ.keys() >= _GROUP_VARIABLES:
            distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=_GROUP_TIMEOUT,
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return CUDA's variable: verl reads one whatever the platform (workers/rollout/vllm_rollout)."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Mark nothing."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return "GPU", one of the two resources verl counts (single_controller/ray/base.py:230).

        `ray_kwargs.ray_init.num_gpus` is therefore set in a CPU recipe, and nominal.
        """
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return the variable that belongs to the resource above."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False, so that verl moves weights through shared memory (vllm_rollout.py, use_shm)."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """Return what vLLM's CPU build needs in its process (vllm_async_server.py, launch_servers).

        Dynamo would spend 20 seconds compiling C++ for the sampler at the first request.
        """
        defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_TARGET_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1"}
        return {variable: os.environ.get(variable, value) for variable, value in defaults.items()}

    def cudart(self) -> None:
        """Return nothing."""


def _is_there(name: str) -> bool:
    platform = PlatformRegistry.get(name)
    try:
        return platform is not None and platform().is_platform_available(use_smi_check=True)
    except Exception as error:  # another vendor's probe: verl too takes a failure for "not there"
        logger.debug("platform %s cannot be probed: %s", name, error)
        return False
